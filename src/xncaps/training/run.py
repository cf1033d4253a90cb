"""A run on the disk: its folder, what lies in it, and the network it holds."""

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from xncaps.data import Facts, Preprocess
from xncaps.errors import InputError, RunError, message
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
class Run:
    """A trained network and all that is needed to use it."""

    folder: Folder
    config: Config
    facts: Facts
    network: Classifier

    @property
    def preprocess(self) -> Preprocess:
        return self.facts.preprocess(self.config.image_size)


def build_network(config: Config, facts: Facts) -> Classifier:
    """The network of a run, with new weights."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*attach='append'")  # the run says so itself
        return create_model(
            config.model,
            config.head,
            len(facts.classes),
            facts.shape[0],
            facts.side(config.image_size),
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
