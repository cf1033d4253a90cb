"""What a training run is made of: everything that decides its result, and nothing else."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from xncaps.data import Augment
from xncaps.errors import (
    InputError,
    InputTypeError,
    brief,
    check_choice,
    check_options,
    check_size,
    message,
)
from xncaps.heads import HEADS
from xncaps.losses import LOSSES
from xncaps.models import ATTACH, MODELS

OPTIMIZERS = ("adam", "adamw", "sgd")
SCHEDULES = ("triangular2", "onecycle", "constant")
PRECISIONS = ("32", "bf16")
MOST_SIDE = 4096
NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "lr": ("above 0 and up to 1e6", lambda value: 0 < value <= 1e6),
    "min_lr": ("of at least 0", lambda value: value >= 0),
    "warmup": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "weight_decay": ("of at least 0", lambda value: value >= 0),
    "momentum": ("from 0 to below 1", lambda value: 0 <= value < 1),
    "clip": ("above 0", lambda value: value > 0),
    "ema": ("from 0 to below 1", lambda value: 0 <= value < 1),
    "smoothing": ("from 0 to below 1", lambda value: 0 <= value < 1),
}


@dataclass(frozen=True)
class Config:
    """The configuration of a run. Two runs with the same one, the same data and threads are equal.

    Args:
        data: as in :func:`xncaps.data.load_data`.
        train_count: use only so many training images.
        validation: training images held out; 5,000 or a tenth of a smaller set if not given.
        skip_unreadable: leave out image files that cannot be read.
        image_size: the side images are brought to; the data's own if not given.
        model, head, attach: as in :func:`xncaps.create_model`.
        options: of the head, and ``width``: as in :func:`xncaps.create_model`.
        epochs: passes over the training images.
        batch_size: images in a step, over all processes.
        seed: of weights, order and augmentation.
        loss: ``margin``, or ``cross_entropy`` (capsule lengths times a learned factor).
        smoothing: the share of a training target that is spread over all classes.
        optimizer: ``adam``, ``adamw`` or ``sgd``.
        lr: the highest learning rate.
        min_lr: the lowest of ``triangular2``.
        schedule: ``triangular2``, ``onecycle`` or ``constant``.
        step_size: steps of half a cycle of ``triangular2``.
        warmup: the share of ``onecycle`` that rises.
        weight_decay: of weights with two or more axes.
        momentum: of ``sgd`` (Nesterov's).
        clip: the largest norm of all gradients together.
        ema: average the weights with this decay, and judge and keep the average; 0 does not.
        augment: what may happen to a training image, see :class:`xncaps.data.Augment`.
        precision: ``32``, or ``bf16`` for autocast; slow on processors without instructions for it.
        channels_last: keep images and convolutions in that memory format.
        compile: run the network through ``torch.compile``.

    >>> Config(head="xnodr", epochs=3).to_dict()["head"]
    'xnodr'
    """

    data: str = "sample"
    train_count: int | None = None
    validation: int | None = None
    skip_unreadable: bool = False
    image_size: int | None = None
    model: str = "convnet"
    head: str | None = None
    attach: str = "replace"
    options: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 10
    batch_size: int = 128
    seed: int = 0
    loss: str = "margin"
    smoothing: float = 0.0
    optimizer: str = "adam"
    lr: float = 3e-3
    min_lr: float = 1e-9
    schedule: str = "onecycle"
    step_size: int = 6000
    warmup: float = 0.3
    weight_decay: float = 0.0
    momentum: float = 0.9
    clip: float | None = None
    ema: float = 0.0
    augment: Augment = field(default_factory=Augment)
    precision: str = "32"
    channels_last: bool = True
    compile: bool = False

    def __post_init__(self) -> None:
        where = "Config"
        if not isinstance(self.data, str) or not self.data:
            raise InputTypeError(message(where, "data", "be a name", brief(self.data)))
        check_choice(where, "model", self.model, MODELS)
        if self.head is not None:
            check_choice(where, "head", self.head, HEADS)
        check_choice(where, "attach", self.attach, ATTACH)
        check_choice(where, "loss", self.loss, LOSSES)
        check_choice(where, "optimizer", self.optimizer, OPTIMIZERS)
        check_choice(where, "schedule", self.schedule, SCHEDULES)
        check_choice(where, "precision", self.precision, PRECISIONS)
        for name, least in (("epochs", 1), ("batch_size", 1), ("step_size", 1), ("seed", 0)):
            check_size(where, name, getattr(self, name), least)
        for name, least in (("train_count", 2), ("validation", 0), ("image_size", 1)):
            if getattr(self, name) is not None:
                check_size(where, name, getattr(self, name), least)
        if self.image_size is not None and self.image_size > MOST_SIDE:
            requirement = f"be at most {MOST_SIDE} px"
            raise InputError(message(where, "image_size", requirement, self.image_size))
        for name in ("skip_unreadable", "channels_last", "compile"):
            if not isinstance(getattr(self, name), bool):
                got = brief(getattr(self, name))
                raise InputTypeError(message(where, name, "be true or false", got))
        for name, (requirement, holds) in NUMBERS.items():
            value = getattr(self, name)
            if name == "clip" and value is None:
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or not holds(value):
                got = brief(value)
                raise InputError(message(where, name, f"be a number {requirement}", got))
        if self.min_lr > self.lr:
            raise InputError(message(where, "min_lr", f"be at most lr, {self.lr}", self.min_lr))
        if not isinstance(self.options, Mapping):
            got = brief(self.options)
            raise InputTypeError(message(where, "options", "be a mapping", got))
        if isinstance(self.augment, Mapping):
            check_options(where, "augment", [f.name for f in fields(Augment)], self.augment)
            object.__setattr__(self, "augment", Augment(**self.augment))
        if not isinstance(self.augment, Augment):
            got = brief(self.augment)
            raise InputTypeError(message(where, "augment", "be an Augment or a mapping", got))

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        values = asdict(self)
        values["options"] = {name: _plain(value) for name, value in self.options.items()}
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Config":
        """A configuration of plain values; one it does not know is refused."""
        if not isinstance(values, Mapping):
            raise InputTypeError(message("Config", "values", "be a mapping", brief(values)))
        check_options("Config", "a run", [f.name for f in fields(cls)], values)
        return cls(**values)

    def to_json(self) -> str:
        """As indented JSON."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two configurations, a line each: ``epochs: 3 -> 5``."""
    lines = []
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += [f"{name}.{line}" for line in differences(before, after)]
        elif before != after:
            lines.append(f"{name}: {before} -> {after}")
    return lines
