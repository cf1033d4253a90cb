"""Trained networks of every form behind one face: a run's folder, a packed file, an ONNX file."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xncaps.deploy.card import DATA, Card
from xncaps.deploy.packed_file import read_packed
from xncaps.errors import InputError, InputTypeError, RunError, message
from xncaps.networks import Classifier

BATCH = 256


class Model(ABC):
    """A trained network, its card, and where both come from.

    Args:
        card: what it is.
        path: the folder or file.
        kind: ``run``, ``packed`` or ``onnx``.
    """

    def __init__(self, card: Card, path: Path, kind: str) -> None:
        self.card = card
        self.path = path
        self.kind = kind

    def scores(self, images: Tensor) -> Tensor:
        """The scores of uint8 images, batch by batch. May be called by several threads at once.

        Shape:
            ``(n, channels, height, width)`` -> ``(n, classes)``.
        """
        parts = [self.run(self.card.preprocess(part)) for part in torch.split(images, BATCH)]
        classes = len(self.card.facts.classes)
        return torch.cat(parts) if parts else torch.zeros(0, classes)

    @abstractmethod
    def run(self, pixels: Tensor) -> Tensor:
        """The scores of a batch of what ``card.preprocess`` gives."""


class TorchModel(Model):
    """A network in PyTorch: a run's, or a packed one."""

    def __init__(self, card: Card, path: Path, kind: str, network: Classifier) -> None:
        super().__init__(card, path, kind)
        self.network = network.eval()

    @torch.inference_mode()
    def run(self, pixels: Tensor) -> Tensor:
        scores: Tensor = self.network(pixels)
        return scores.float()


def open_model(
    path: str | os.PathLike[str], say: Callable[[str], None] | None = None, threads: int = 0
) -> Model:
    """A trained network, whatever it is kept in.

    Args:
        path: a run's folder, a packed file or an ONNX file.
        say: told what is noteworthy, such as that a run has not ended.
        threads: that ONNX Runtime uses; as many as PyTorch if 0.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputTypeError(message("open", "MODEL", "be a path", type(path).__name__))
    path = Path(path)
    if path.is_dir():
        return _open_run(path, say)
    if not path.is_file():
        got = f"{str(path)!r}, which is {'no file' if path.exists() else 'not there'}"
        requirement = "be the folder of a run, a packed file or an ONNX file"
        raise InputError(message("open", "MODEL", requirement, got))
    if _is_onnx(path):
        from xncaps.deploy.onnx_model import open_onnx

        return open_onnx(path, threads or torch.get_num_threads())
    card, network = read_packed(path)
    return TorchModel(card, path, "packed", network)


def _is_onnx(path: Path) -> bool:
    """By its first bytes; of a file that shows neither form, by its name."""
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}.") from None
    if start[8:] == b"{":  # safetensors: the length of a JSON object, then the object
        return False
    if path.suffix.lower() in (".onnx", ".safetensors"):
        return path.suffix.lower() == ".onnx"
    return start[:1] == b"\x08"  # ONNX: the field with the version of its format


def _open_run(path: Path, say: Callable[[str], None] | None) -> TorchModel:
    from xncaps.training.run import load_run  # what is packed does without

    run = load_run(path, say)
    return TorchModel(card_of(run), path, "run", run.network)


def card_of(run: Any) -> Card:
    """The card of a run's network."""
    config, network = run.config, run.network
    return Card(
        network={
            "backbone": config.model,
            "head": config.head,
            "num_classes": network.num_classes,
            "in_channels": network.in_channels,
            "image_size": network.image_size,
            "attach": config.attach,
            "options": config.to_dict()["options"],
        },
        facts=run.facts,
        scores=network.scores,
        loss=config.loss,
        data={"name": config.data, **{name: getattr(config, name) for name in DATA[1:]}},
    )
