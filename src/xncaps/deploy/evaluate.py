"""How good a trained network is on a data set, whatever the network is kept in."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from xncaps.data import Dataset, Facts, facts_of, load_data
from xncaps.deploy.model import Model
from xncaps.errors import InputError, check_choice, message
from xncaps.evaluation import Evaluation, evaluate_scores
from xncaps.losses import LOSSES

SPLITS = ("test", "validation", "train")
GRAY = (0.299, 0.587, 0.114)
"""How much red, green and blue weigh in the grey of a colour (ITU-R 601)."""


def evaluate_model(
    model: Model,
    data: str | None = None,
    split: str = "test",
    *,
    data_dir: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> Evaluation:
    """Judge a network on the data it was made for, or on others that show the same classes.

    Args:
        model: the network.
        data: as in :func:`xncaps.data.load_data`; the network's own if not given.
        split: ``test``, ``validation`` or ``train``.
        data_dir: a folder to look for data in first.
        say: told if the data are not what the network was trained on.
        options: further options of :func:`xncaps.data.load_data`.
    """
    chosen = chosen_data(model, data, split, data_dir=data_dir, say=say, **options)
    card = model.card
    scores = model.scores(chosen.images)
    # The learned factor of cross-entropy on lengths belongs to training: the network goes without.
    has_loss = card.loss == "margin" or card.scores == "logits"
    loss = LOSSES[card.loss](scores, chosen.labels, card.scores).item() if has_loss else None
    return evaluate_scores(scores, chosen.labels, chosen.classes, loss)


def chosen_data(
    model: Model,
    data: str | None = None,
    split: str = "test",
    *,
    data_dir: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> Dataset:
    """The data that :func:`evaluate_model` judges by, as the network takes them."""
    where = "evaluate"
    check_choice(where, "split", split, SPLITS)
    card = model.card
    own = {name: value for name, value in card.data.items() if name != "name"}
    name = data if data is not None else card.data.get("name")
    if name is None:
        hint = "Name data with --data."
        got = f"none, and {model.path} names none of its own"
        raise InputError(message(where, "data", "be named", got, hint))
    is_own = name == card.data.get("name")
    options = {"image_size": card.image_size, **(own if is_own else {}), **options}
    splits = load_data(name, data_dir=data_dir, say=say, **options)
    if is_own and say and facts_of(splits).fingerprint != card.facts.fingerprint:
        say(f"{splits.name}: no longer the data that this network was trained and tested on")
    chosen = adapt({part: getattr(splits, part) for part in SPLITS}[split], card.facts)
    if not len(chosen):
        raise InputError(message(where, "split", "hold images", f"{split}, which is empty"))
    return chosen


def adapt(data: Dataset, facts: Facts) -> Dataset:
    """The data as a network takes them: its channels, its classes in its order."""
    if data.pairs != facts.pairs:
        words = ("one class", "two classes")
        requirement = f"show {words[facts.pairs]} an image, as those of the training did"
        raise InputError(message("evaluate", "data", requirement, words[data.pairs]))
    strange = [name for name in data.classes if name not in facts.classes]
    if strange:
        known = ", ".join(facts.classes[:12]) + (", ..." if len(facts.classes) > 12 else "")
        requirement = f"have the network's classes ({known})"
        raise InputError(message("evaluate", "data", requirement, repr(strange[0])))
    images, labels = to_channels(data.images, facts.shape[0]), data.labels
    if data.classes != facts.classes:
        place = torch.tensor([facts.classes.index(name) for name in data.classes])
        if data.pairs:
            wider = labels.new_zeros(len(labels), len(facts.classes))
            wider[:, place] = labels
            labels = wider
        else:
            labels = place[labels]
    return replace(data, images=images, labels=labels, classes=facts.classes)


def to_channels(images: Tensor, channels: int) -> Tensor:
    """Grey images as colour ones, or colour as grey."""
    if images.shape[1] == channels:
        return images
    if images.shape[1] == 1:
        return images.expand(-1, channels, -1, -1)
    weights = torch.tensor(GRAY).view(-1, 1, 1)
    parts = [
        (part.float() * weights).sum(dim=1, keepdim=True).round().byte()
        for part in torch.split(images, 4096)
    ]
    return torch.cat(parts)
