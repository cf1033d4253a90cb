"""The card of a network: what it is, what it takes and what it gives, as plain values."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from xncaps.data import Facts, Preprocess
from xncaps.errors import InputError, brief, check_choice, check_size, message
from xncaps.heads import HEADS
from xncaps.losses import LOSSES
from xncaps.models import MODELS, create_model
from xncaps.networks import Classifier

NETWORK = ("backbone", "head", "num_classes", "in_channels", "image_size", "attach")
DATA = ("name", "image_size", "train_count", "validation", "skip_unreadable")
MOST_SIDE, MOST_ITERATIONS, MOST_NUMBERS = 1024, 1000, 64
"""Of a card in a file: pixels along a side, routing iterations, numbers in a list of options. What
somebody else has written must not cost more time or memory than networks do."""


@dataclass(frozen=True)
class Card:
    """All that is needed to use a network, but for its weights.

    Args:
        network: the arguments of :func:`xncaps.create_model`; those of the head in ``options``.
        facts: of the data it was trained on.
        scores: what it gives: ``lengths`` of capsules, or ``logits``.
        loss: what it was trained with.
        data: the data it is judged on where no others are named, as :func:`load_data` takes them;
            empty if only the one who trained it has them.
        normalised: whether it takes care of mean and deviation itself, and so takes pixels from 0
            to 255.
    """

    network: dict[str, Any]
    facts: Facts
    scores: str
    loss: str
    data: dict[str, Any]
    normalised: bool = False

    def __post_init__(self) -> None:
        where = "card"
        for what, values in (("network", self.network), ("data", self.data)):
            if not isinstance(values, Mapping):
                raise InputError(message(where, what, "be an object", brief(values)))
        missing = [name for name in (*NETWORK, "options") if name not in self.network]
        strange = sorted({*self.network} - {*NETWORK, "options"} | {*self.data} - {*DATA})
        if missing or strange:
            got = f"{'no ' if missing else ''}{(missing or strange)[0]!r}"
            raise InputError(message(where, "network", "have what create_model takes", got))
        check_choice(where, "scores", self.scores, ("lengths", "logits"))
        check_choice(where, "loss", self.loss, LOSSES)
        if not isinstance(self.normalised, bool):
            raise InputError(message(where, "normalised", "be true or false", self.normalised))
        check_choice(where, "backbone", self.network["backbone"], MODELS)
        if self.network["head"] is not None:
            check_choice(where, "head", self.network["head"], HEADS)
        check_size(where, "image_size", self.network["image_size"])
        if self.facts.shape[0] not in (1, 3):
            channels = self.facts.shape[0]
            raise InputError(message(where, "images", "have 1 channel or 3", channels))
        sizes = self.network["num_classes"], self.network["in_channels"]
        if sizes != (len(self.facts.classes), self.facts.shape[0]):
            requirement = "have the classes and channels of its data"
            raise InputError(message(where, "network", requirement, sizes))
        options = self.network["options"]
        if not isinstance(options, Mapping) or not all(map(_is_option, options.values())):
            requirement = "be numbers, words, or short lists of numbers"
            raise InputError(message(where, "options", requirement, brief(options)))

    @property
    def name(self) -> str:
        """What the network is called: ``convnet, xnodr``."""
        return ", ".join(filter(None, (self.network["backbone"], self.network["head"])))

    @property
    def image_size(self) -> int:
        """The side of the images that the network takes."""
        return int(self.network["image_size"])

    @property
    def preprocess(self) -> Preprocess:
        """What makes network input of uint8 images."""
        if self.normalised:
            channels = len(self.facts.mean)
            return Preprocess((0.0,) * channels, (1 / 255,) * channels, self.image_size)
        return self.facts.preprocess(self.image_size)

    def check_portable(self) -> None:
        """Refuse what must not stand in files: names that hide, and what would cost too much."""
        for name in self.facts.classes:
            if not name.isprintable():
                requirement = "have names that can be shown"
                raise InputError(message("card", "classes", requirement, ascii(name)))
        where, side = "card", max(self.image_size, *self.facts.shape[1:])
        if side > MOST_SIDE:
            raise InputError(message(where, "images", f"be at most {MOST_SIDE} px wide", side))
        iterations = self.network["options"].get("iterations", 1)
        if not isinstance(iterations, int) or iterations > MOST_ITERATIONS:
            requirement = f"be at most {MOST_ITERATIONS}"
            raise InputError(message(where, "iterations", requirement, iterations))

    def portable(self) -> "Card":
        """As it goes into files: without the names of folders of the one who trained it."""
        self.check_portable()
        kind, has_path, _ = self.facts.name.partition(":")
        if not has_path:
            return self
        return replace(self, facts=replace(self.facts, name=kind), data={})

    def build(self) -> Classifier:
        """The network, with new weights."""
        values = {name: self.network[name] for name in NETWORK}
        return create_model(**values, **self.network["options"])

    def to_json(self) -> str:
        """As JSON, on one line."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Card":
        """Of JSON that nobody has checked; one line says what is wrong with it."""
        try:
            values = json.loads(text)
            card = cls(facts=Facts.from_dict(values.pop("facts")), **values)
            card.check_portable()
            return card
        except InputError:
            raise
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise InputError(message("card", "text", "hold what xncaps writes", error)) from None


def _is_option(value: object) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= MOST_NUMBERS and all(isinstance(number, int) for number in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)
