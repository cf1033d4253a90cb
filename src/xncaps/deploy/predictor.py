"""What a trained network sees in images: arrays, pictures or files."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from xncaps.deploy.model import Model, open_model
from xncaps.errors import InputError, InputTypeError, RunError, message
from xncaps.evaluation import answers
from xncaps.images import SUFFIXES, Pixels, fit, match_ground, read_image, to_pixels

SHAPES = "(height, width) or (height, width, 1, 3 or 4), or several of them along a first axis"


@dataclass(frozen=True)
class Prediction:
    """What a network sees in an image.

    Args:
        classes: what it sees: one class, or two where the network was trained on pairs.
        scores: of every class, the highest first: capsule lengths, or probabilities.
        inverted: whether the image was turned into its negative first.
        path: the image's file, if it came from one.
    """

    classes: tuple[str, ...]
    scores: dict[str, float]
    inverted: bool
    path: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "image": None if self.path is None else str(self.path),
            "classes": list(self.classes),
            "scores": self.scores,
            "inverted": self.inverted,
        }


class Predictor:
    """A trained network that takes images as they come. Threads may share one.

    Args:
        model: a run's folder, a packed file, an ONNX file, or an open :class:`Model`.
        invert: whether to take the negative of images; if not given, a grey network takes that of
            an image whose ground is light where its training images' was dark, and the other way
            round.

    ``Predictor("digits.safetensors")("digit.png").classes`` is ``("7",)``.
    """

    def __init__(
        self, model: str | os.PathLike[str] | Model, *, invert: bool | None = None
    ) -> None:
        self.model = model if isinstance(model, Model) else open_model(model)
        self.invert = invert

    @property
    def classes(self) -> tuple[str, ...]:
        """All that the network can see."""
        return self.model.card.facts.classes

    def __call__(self, images: Any) -> Any:
        """What is in an image, or a list for several.

        Args:
            images: one image, or a list, a tuple or an array of several. An image is the path of a
                file, a Pillow image, or an array or tensor of bytes, or of floats from 0 to 1:
                ``(height, width)`` or ``(height, width, channels)``; a tensor also with its
                channels first.

        Returns:
            A :class:`Prediction`, or a list of them.
        """
        several = _several(images)
        given = [images] if several is None else several
        read = [self._read(image) for image in given]
        found = self._predict(read) if read else []
        return found[0] if several is None else found

    def _read(self, image: Any) -> tuple[Tensor, bool, Path | None]:
        """The pixels as the network's training images were, whether negative, and the file."""
        facts = self.model.card.facts
        channels = facts.shape[0]
        path = Path(image) if isinstance(image, str | os.PathLike) else None
        if path is not None:
            image = read_image(path)
        elif not isinstance(image, Image.Image):
            image = _picture(image)
        pixels: Pixels = to_pixels(image, channels)
        inverted = bool(self.invert)
        if inverted:
            pixels = 255 - pixels
        elif self.invert is None:
            pixels, inverted = match_ground(pixels, facts.ground)
        return fit(pixels, max(facts.shape[1:])), inverted, path

    def _predict(self, read: Sequence[tuple[Tensor, bool, Path | None]]) -> list[Prediction]:
        facts = self.model.card.facts
        scores = self.model.scores(torch.stack([image for image, _, _ in read]))
        if not scores.isfinite().all():
            raise RunError(f"{self.model.path}: gives scores that are not finite numbers.")
        seen = answers(scores, facts.pairs).tolist()
        values = scores if self.model.card.scores == "lengths" else scores.softmax(dim=1)
        order = values.argsort(dim=1, descending=True, stable=True).tolist()
        return [
            Prediction(
                tuple(facts.classes[k] for k in seen[i]),
                {facts.classes[k]: values[i, k].item() for k in order[i]},
                inverted,
                path,
            )
            for i, (_, inverted, path) in enumerate(read)
        ]


def _several(images: Any) -> list[Any] | None:
    """The images of a list or a batch; None for one image."""
    if isinstance(images, list | tuple):
        return list(images)
    if isinstance(images, Tensor):
        images = _array(images)
    if not isinstance(images, np.ndarray):
        return None
    has_channels = images.ndim > 2 and images.shape[-1] in (1, 3, 4)
    return list(images) if images.ndim == 3 + has_channels else None


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A tensor as an array, its channels last."""
    try:
        tensor = tensor.detach().cpu()
        array: np.ndarray[Any, Any] = (
            tensor.float() if tensor.is_floating_point() else tensor
        ).numpy()
    except (RuntimeError, TypeError) as error:  # such as one without memory
        reason = str(error).splitlines()[0].rstrip(".")
        raise InputTypeError(message("Predictor", "image", "be a dense tensor", reason)) from None
    first = {3: 0, 4: 1}.get(array.ndim)
    if first is None or array.shape[first] not in (1, 3, 4) or array.shape[-1] in (1, 3, 4):
        return array
    return np.moveaxis(array, first, -1)


def _picture(array: Any) -> Image.Image:
    """An array or a tensor as a picture."""
    where = "Predictor"
    if isinstance(array, Tensor):
        array = _array(array)
    if not isinstance(array, np.ndarray):
        requirement = "be a path, a Pillow image, an array or a tensor"
        raise InputTypeError(message(where, "image", requirement, type(array).__name__))
    right = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4))
    if not right or 0 in array.shape:
        raise InputError(message(where, "image", f"have shape {SHAPES}", array.shape))
    if array.dtype.kind == "f":
        if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
            hint = "Give bytes from 0 to 255 otherwise."
            raise InputError(message(where, "image", "hold floats from 0 to 1", "others", hint))
        array = np.rint(array * 255).astype(np.uint8)
    elif array.dtype == np.bool_:
        array = array.astype(np.uint8) * 255
    elif array.dtype != np.uint8:
        requirement = "hold bytes (uint8), or floats from 0 to 1"
        raise InputTypeError(message(where, "image", requirement, array.dtype))
    return Image.fromarray(array.squeeze(2) if array.shape[2:] == (1,) else array)


def image_files(paths: Sequence[Path], tell: Callable[[RunError], None]) -> Iterator[Path]:
    """The paths, and for folders the image files in them; ``tell`` is told of empty ones."""
    for path in paths:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
            if not found:
                tell(RunError(f"{path}: holds no image ({', '.join(SUFFIXES)})."))
            yield from found
        else:
            yield path
