"""``xncaps export``: a run's network as a packed file or an ONNX file."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xncaps.data import Dataset
from xncaps.deploy.card import Card
from xncaps.deploy.evaluate import chosen_data
from xncaps.deploy.model import TorchModel, card_of
from xncaps.deploy.packed_file import read_packed, write_packed
from xncaps.errors import InputError, RunError, message
from xncaps.evaluation import evaluate_scores, main_metric
from xncaps.training.run import Folder, load_run

CHECKED, CALIBRATED = 64, 256
"""Images that an ONNX file is compared on, and that the ranges of int8 are measured on."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class PackedExport:
    """A packed file that was written, in bytes.

    Args:
        path: the file.
        size: all of it.
        header: of it, what is not the network's numbers.
        float32: the parameters as float32 numbers.
    """

    path: str
    size: int
    header: int
    float32: int

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {"format": "packed", **asdict(self)}

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.size:,} bytes, {self.header:,} of them its header\n"
            f"parameters as float32: {self.float32:,} bytes, "
            f"{self.float32 / (self.size - self.header):.2f} times as many"
        )


@dataclass(frozen=True)
class OnnxExport:
    """An ONNX file that was written and compared, and perhaps one in int8.

    Args:
        path: the file.
        size: its bytes.
        opset: the version of its operators.
        normalised: whether it takes pixels from 0 to 255.
        difference: how far ONNX Runtime and PyTorch are apart.
        largest: of the differences.
        int8: the other file, its bytes, and the accuracy of both on so many images.
    """

    path: str
    size: int
    opset: int
    normalised: bool
    difference: str
    largest: float
    int8: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {"format": "onnx", **asdict(self)}

    def __str__(self) -> str:
        takes = "pixels from 0 to 255" if self.normalised else "normalised images"
        lines = [
            f"{self.path}: {self.size:,} bytes, opset {self.opset}, takes {takes}",
            f"ONNX Runtime against PyTorch: {self.difference}.",
        ]
        if self.int8 is not None:
            lines += [
                f"{self.int8['path']}: {self.int8['size']:,} bytes, the backbone in int8",
                f"accuracy on {self.int8['count']:,} test images: {self.int8['before']:.2%} in "
                f"float32, {self.int8['after']:.2%} in int8",
            ]
        return "\n".join(lines)


def export_packed(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    dtype: str = "float32",
    say: Say | None = None,
) -> PackedExport:
    """Write the network of a run as a packed file.

    Args:
        run: the run's folder.
        out: the file.
        dtype: ``float32`` or ``float16``, of the numbers that are not bits.
        say: told if the run has not ended.
    """
    model, path = _open(run, out, say)
    packed = write_packed(path, model.network, model.card.portable(), dtype)
    read_packed(path)
    # As in a file: halved where that was asked for.
    per_number = {"float32": 4, "float16": 2}[dtype]
    numbers = sum(
        tensor.numel() * (per_number if tensor.is_floating_point() else tensor.itemsize)
        for tensor in packed.state_dict().values()
    )
    size = path.stat().st_size
    return PackedExport(
        str(path), size, size - numbers, 4 * sum(p.numel() for p in model.network.parameters())
    )


def export_onnx_files(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    normalise: bool = False,
    int8: bool = False,
    opset: int | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    say: Say | None = None,
) -> OnnxExport:
    """Write the network of a run as an ONNX file, and compare the two.

    Args:
        run: the run's folder.
        out: the file.
        normalise: whether the file is to take pixels from 0 to 255.
        int8: whether to write a second file, ``<name>.int8.onnx``, whose backbone computes in int8.
        opset: the version of the operators.
        data_dir: a folder to look for the run's data in first.
        say: told what is noteworthy.
    """
    from xncaps.deploy.onnx_export import OPSET, export_onnx

    model, path = _open(run, out, say)
    card = model.card.portable()
    data: tuple[Dataset, Dataset] | None = None
    if int8:  # before anything is written
        _check_out(int8_path(path), Folder(model.path))
        train, test = (chosen_data(model, split=s, data_dir=data_dir) for s in ("train", "test"))
        data = train, test
    images = real_images(model, data_dir, say)
    opset = OPSET if opset is None else opset
    difference = export_onnx(
        model.network, card, path, images=images, normalise=normalise, opset=opset
    )
    outcome = OnnxExport(
        str(path), path.stat().st_size, opset, normalise, str(difference), difference.largest
    )
    return outcome if data is None else replace(outcome, int8=_int8(path, card, *data))


def _open(
    run: str | os.PathLike[str], out: str | os.PathLike[str], say: Say | None
) -> tuple[TorchModel, Path]:
    loaded = load_run(run, say)
    path = Path(out)
    _check_out(path, loaded.folder)
    for name, tensor in loaded.network.state_dict().items():
        if not tensor.isfinite().all():
            raise RunError(f"{run}: holds numbers that are not finite, in {name!r}: train it anew.")
    return TorchModel(card_of(loaded), loaded.folder.path, "run", loaded.network), path


def _check_out(path: Path, folder: Folder) -> None:
    """Refuse a place where no file can go, or where the run keeps one of its own."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "none"
        raise InputError(message("export", "out", "be a file", f"{path}, which is {kind}"))
    if not path.parent.is_dir():
        raise InputError(message("export", "out", "lie in a folder that is there", str(path)))
    place = path.resolve()
    own = [each.resolve() for each in vars(folder).values() if each != folder.path]
    if any(place == each or each in place.parents for each in own):
        requirement = "be another file than the run's own"
        raise InputError(message("export", "out", requirement, str(path)))


def int8_path(path: Path) -> Path:
    """Where the int8 file goes that belongs to an ONNX file."""
    return path.with_name(f"{path.name.removesuffix('.onnx')}.int8.onnx")


def real_images(
    model: TorchModel, data_dir: str | os.PathLike[str] | None, say: Say | None
) -> Tensor:
    """Test images of the run's data; if those cannot be had, noise."""
    try:
        return chosen_data(model, data_dir=data_dir).images[:CHECKED]
    except (InputError, RunError, OSError) as error:
        if say is not None:
            say(f"compared on noise, because the run's data cannot be read: {error}")
        noise = torch.Generator().manual_seed(0)
        shape = (CHECKED, *model.card.facts.shape)
        return torch.randint(0, 256, shape, generator=noise, dtype=torch.uint8)


def _int8(path: Path, card: Card, train: Dataset, test: Dataset) -> dict[str, Any]:
    """Write the int8 file; its bytes, and the accuracy of both files on the run's test images."""
    from xncaps.deploy.onnx_int8 import quantise
    from xncaps.deploy.onnx_model import open_onnx

    other, step = int8_path(path), max(len(train) // CALIBRATED, 1)
    quantise(path, other, train.images[::step][:CALIBRATED], card)
    metric = main_metric(card.facts.pairs)
    found = {}
    for name, file in (("before", path), ("after", other)):
        scores = open_onnx(file, torch.get_num_threads()).scores(test.images)
        found[name] = evaluate_scores(scores, test.labels, test.classes).metrics[metric]
    return {"path": str(other), "size": other.stat().st_size, "count": len(test), **found}
