"""A trained network at work: on a data set, and on single images."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xncaps.data import Dataset, load_data
from xncaps.errors import InputError, RunError, check_choice, message
from xncaps.images import SUFFIXES, fit, match_ground, read_image, to_pixels
from xncaps.training.evaluation import Evaluation, answers, evaluate_scores, scores_of
from xncaps.training.objective import Objective
from xncaps.training.run import Facts, Run, facts_of

SPLITS = ("test", "validation", "train")
GRAY = (0.299, 0.587, 0.114)
"""How much red, green and blue weigh in the grey of a colour (ITU-R 601)."""


def evaluate_run(
    run: Run,
    data: str | None = None,
    split: str = "test",
    *,
    data_dir: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> Evaluation:
    """Judge a run's network on its own data, or on others that show the same classes.

    Args:
        run: the run.
        data: as in :func:`xncaps.data.load_data`; the run's own if not given.
        split: ``test``, ``validation`` or ``train``.
        data_dir: a folder to look for data in first.
        say: told if the data are not what the run was trained on.
        options: further options of :func:`xncaps.data.load_data`.
    """
    check_choice("evaluate", "split", split, SPLITS)
    config = run.config
    own = data is None or data == config.data
    if own:
        options = {
            "image_size": config.image_size,
            "train_count": config.train_count,
            "validation": config.validation,
            "skip_unreadable": config.skip_unreadable,
            **options,
        }
    options = {"image_size": run.facts.image_size(config), **options}
    splits = load_data(data or config.data, data_dir=data_dir, say=say, **options)
    if own and say and facts_of(splits).fingerprint != run.facts.fingerprint:
        say(f"{splits.name}: no longer the data that this run was trained and tested on")
    chosen = adapt({name: getattr(splits, name) for name in SPLITS}[split], run.facts)
    if not len(chosen):
        raise InputError(message("evaluate", "split", "hold images", f"{split}, which is empty"))
    scores = scores_of(run.network, chosen.images, run.preprocess)
    objective = Objective(run.network, config.loss)
    # The learned factor of cross-entropy on lengths belongs to training: the network goes without.
    loss = None if objective.factor is not None else objective.of_scores(scores, chosen.labels)
    return evaluate_scores(
        scores, chosen.labels, chosen.classes, None if loss is None else loss.item()
    )


def adapt(data: Dataset, facts: Facts) -> Dataset:
    """The data as the run's network takes them: its channels, its classes in its order."""
    if data.pairs != facts.pairs:
        words = ("one class", "two classes")
        requirement = f"show {words[facts.pairs]} an image, as the run's do"
        raise InputError(message("evaluate", "data", requirement, words[data.pairs]))
    strange = [name for name in data.classes if name not in facts.classes]
    if strange:
        known = ", ".join(facts.classes[:12]) + (", ..." if len(facts.classes) > 12 else "")
        requirement = f"have the run's classes ({known})"
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


@dataclass(frozen=True)
class Prediction:
    """What a network sees in an image.

    Args:
        path: the image's file.
        classes: what it sees: one class, or two where the network was trained on pairs.
        scores: of every class, the highest first: capsule lengths, or probabilities.
        inverted: whether the image was turned into its negative first.
    """

    path: Path
    classes: tuple[str, ...]
    scores: dict[str, float]
    inverted: bool

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "image": str(self.path),
            "classes": list(self.classes),
            "scores": self.scores,
            "inverted": self.inverted,
        }


def predict_image(run: Run, path: Path, *, invert: bool | None = None) -> Prediction:
    """What the network of a run sees in an image file of any size and mode.

    Args:
        run: the run.
        path: the image's file.
        invert: whether to take its negative; if not given, a grey network takes that of an image
            whose ground is light where its training images' was dark, and the other way round.
    """
    channels, height, width = run.facts.shape
    pixels = to_pixels(read_image(path), channels)
    inverted = bool(invert)
    if inverted:
        pixels = 255 - pixels
    elif invert is None:
        pixels, inverted = match_ground(pixels, run.facts.ground)
    image = fit(pixels, max(height, width)).unsqueeze(0)
    scores = scores_of(run.network, image, run.preprocess)
    seen = answers(scores, run.facts.pairs)[0].tolist()
    values = (scores if run.network.scores == "lengths" else scores.softmax(dim=1))[0]
    order = values.argsort(descending=True, stable=True).tolist()
    names = run.facts.classes
    return Prediction(
        path,
        tuple(names[i] for i in seen),
        {names[i]: values[i].item() for i in order},
        inverted,
    )


def image_files(paths: Sequence[Path]) -> Iterator[Path]:
    """The paths, and for folders the image files in them."""
    for path in paths:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
            if not found:
                raise RunError(f"{path}: holds no image ({', '.join(SUFFIXES)}).")
            yield from found
        else:
            yield path
