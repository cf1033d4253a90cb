"""A run on the disk: its folder, what lies in it, and the network it holds."""

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from xncaps.data import Preprocess, Splits
from xncaps.errors import InputError, RunError, message
from xncaps.images import ground_of
from xncaps.models import create_model
from xncaps.networks import Classifier
from xncaps.training.checkpoint import parse_checkpoint, read_checkpoint
from xncaps.training.config import Config


class Folder:
    """The folder of a run, and where everything lies in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.data = path / "data.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.weights = path / "model.safetensors"
        self.result = path / "result.json"
        self.report = path / "report.html"
        self.pictures = path / "pictures"
        self.tensorboard = path / "tensorboard"
        self.lock = path / ".lock"


@dataclass(frozen=True)
class Facts:
    """What a run knows of its data.

    Args:
        name: of the data set.
        classes: their names.
        shape: channels, height and width of an image.
        pairs: whether an image shows two classes.
        mean, std: of each channel over the training images.
        ground: what grey images are drawn on: dark, light or mixed.
        counts: images to learn from, for validation, and to test on.
        fingerprint: of the images and labels of each part.
    """

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    pairs: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    ground: str
    counts: tuple[int, int, int]
    fingerprint: dict[str, str]

    def __post_init__(self) -> None:
        channels = len(self.mean)
        numbers = [*self.mean, *self.std]
        right = (
            all(isinstance(text, str) for text in (self.name, self.ground, *self.classes))
            and isinstance(self.pairs, bool)
            and isinstance(self.fingerprint, dict)
            and all(isinstance(size, int) and 0 < size < 2**15 for size in self.shape)
            and (len(self.shape), len(self.std), len(self.counts)) == (3, channels, 3)
            and self.shape[0] == channels
            and len(self.classes) > 0
            and all(isinstance(value, float) and math.isfinite(value) for value in numbers)
            and min(self.std) >= 0
        )
        if not right:
            raise TypeError("values of the wrong kind")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Facts":
        """Of plain values, as JSON has them."""
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**plain)

    def to_json(self) -> str:
        """As indented JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def preprocess(self, config: Config) -> Preprocess:
        """What makes network input of this data's images."""
        return Preprocess(self.mean, self.std, self.image_size(config))

    def image_size(self, config: Config) -> int:
        """The side of the images a network is built for."""
        return config.image_size or max(self.shape[1:])


@dataclass(frozen=True)
class Run:
    """A trained network and all that is needed to use it."""

    folder: Folder
    config: Config
    facts: Facts
    network: Classifier

    @property
    def preprocess(self) -> Preprocess:
        return self.facts.preprocess(self.config)


def facts_of(data: Splits) -> Facts:
    """What a run notes of its data."""
    mean, std = data.train.moments()
    gray = data.train.shape[0] == 1
    return Facts(
        name=data.name,
        classes=data.train.classes,
        shape=data.train.shape,
        pairs=data.train.pairs,
        mean=mean,
        std=std,
        ground=ground_of(data.train.images[:1000]) if gray else "mixed",
        counts=(len(data.train), len(data.validation), len(data.test)),
        fingerprint={
            part: getattr(data, part).fingerprint() for part in ("train", "validation", "test")
        },
    )


def build_network(config: Config, facts: Facts) -> Classifier:
    """The network of a run, with new weights."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*attach='append'")  # the run says so itself
        return create_model(
            config.model,
            config.head,
            len(facts.classes),
            facts.shape[0],
            facts.image_size(config),
            config.attach,
            **config.options,
        )


def read_config(folder: Folder) -> Config:
    """The configuration a run was started with."""
    if not folder.path.exists():
        raise InputError(message("run", "RUN", "be the folder of a run", repr(str(folder.path))))
    if not folder.config.is_file():
        got = f"{str(folder.path)!r}, which has no {folder.config.name}"
        raise InputError(message("run", "RUN", "be the folder of a run", got))
    try:
        return Config.from_dict(read_json(folder.config))
    except InputError as error:
        raise RunError(f"{folder.config}: {error}") from None


def read_facts(folder: Folder) -> Facts:
    """What a run noted of its data."""
    try:
        return Facts.from_dict(read_json(folder.data))
    except (TypeError, ValueError) as error:
        raise RunError(f"{folder.data}: not what a run writes ({error}).") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path}: not JSON ({error}).") from None
    if not isinstance(values, dict):
        raise RunError(f"{path}: must hold a JSON object; got {type(values).__name__}.")
    return values


def load_run(path: str | os.PathLike[str], say: Callable[[str], None] | None = None) -> Run:
    """The network of a run, in evaluation mode: its final one, or the newest checkpoint's.

    Args:
        path: the run's folder.
        say: told if the run has not ended.
    """
    folder = Folder(Path(path))
    config = read_config(folder)
    facts = read_facts(folder)
    try:
        network = build_network(config, facts)
    except InputError as error:
        raise RunError(f"{folder.config} and {folder.data.name}: {error}") from None
    if folder.weights.is_file():
        source, tensors = folder.weights, _read_weights(folder.weights)
    else:
        pair = read_checkpoint(folder.checkpoints, say)
        if pair is None:
            raise RunError(f"{folder.path}: has no weights yet. Train it first.")
        checkpoint = parse_checkpoint(*pair)
        step = int(checkpoint.state["step"])
        prefix = "average." if config.ema else "objective.network."
        source = folder.checkpoints
        tensors = {
            name.removeprefix(prefix): tensor
            for name, tensor in checkpoint.tensors.items()
            if name.startswith(prefix)
        }
        if say:
            say(f"this run has not ended; its network after step {step} is used")
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        detail = " ".join(str(error).split())
        raise RunError(f"{source}: weights of another network ({detail[:200]}).") from None
    return Run(folder, config, facts, network.eval())


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        return load_tensors(path.read_bytes())
    except (OSError, SafetensorError, ValueError) as error:
        raise RunError(f"{path}: cannot be read as safetensors ({error}).") from None
