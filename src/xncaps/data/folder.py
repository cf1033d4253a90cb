"""A folder of image files, with a sub-folder for each class."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image

from xncaps.data.dataset import Dataset, hold_out
from xncaps.errors import InputError, RunError, check_size, message
from xncaps.images import SUFFIXES, fit, is_gray, read_image, to_pixels

COMMON_SIDE, USUAL_SIDE = 128, 64


def load_folder(
    folder: str | Path,
    image_size: int | None = None,
    *,
    skip_unreadable: bool = False,
    test_share: float = 0.2,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> tuple[Dataset, Dataset]:
    """The train and test parts of a folder of images.

    ``folder/train/<class>/`` and ``folder/test/<class>/`` if they are there; else a share of each
    class of ``folder/<class>/`` (or ``folder/train/<class>/``) is split off for the test.

    Args:
        folder: the folder.
        image_size: the side images are brought to. If not given, their own where they are all
            squares of one size up to 128, else 64.
        skip_unreadable: leave out images that cannot be read, telling ``say``; else they are an
            error.
        test_share: what is split off when there is no ``test`` folder.
        seed: of that split.
        say: told what is left out.
    """
    folder = Path(folder)
    if not os.path.isdir(folder):
        raise InputError(message("folder", "PATH", "be a folder", repr(str(folder))))
    if image_size is not None:
        check_size("load_folder", "image_size", image_size)
    parts = [folder / "train", folder / "test"]
    if not _folders(parts[0]):  # there is none, or it is a class of that name
        parts = [folder]
    elif not _folders(parts[1]):
        parts = parts[:1]
    classes = _classes(parts[0])
    paths = [[_files(part / name) for name in classes] for part in parts]
    for name, files in zip(classes, paths[0], strict=True):
        if not files:
            raise RunError(f"{parts[0] / name}: holds no image ({', '.join(SUFFIXES)}).")
    if len(parts) == 2:
        strange = set(_folders(parts[1])) - set(classes)
        if strange:
            raise RunError(f"{parts[1] / min(strange)}: a class that {parts[0]} does not have.")
        if not any(paths[1]):
            raise RunError(f"{parts[1]}: holds no image ({', '.join(SUFFIXES)}).")

    def unreadable(error: RunError) -> None:
        if not skip_unreadable:
            hint = "Mend or remove it, or pass --skip-unreadable to leave such images out."
            raise RunError(f"{error} {hint}") from None
        if say:
            say(f"left out: {error}")

    known = [path for part in paths for files in part for path in files]
    gray, side = _survey(known)
    channels = 1 if gray else 3
    loaded = [
        _load(part, files, classes, channels, image_size or side, unreadable)
        for part, files in zip(parts, paths, strict=True)
    ]
    whole = loaded[0]
    counts = whole.labels.bincount(minlength=len(classes))
    if len(loaded) == 2:
        if counts.min() < 1:
            raise RunError(f"{parts[0] / classes[int(counts.argmin())]}: holds no readable image.")
        return loaded[0], loaded[1]
    if counts.min() < 2:
        name = classes[int(counts.argmin())]
        raise RunError(
            f"{parts[0] / name}: holds {int(counts.min())} readable image; a class needs 2, one to "
            "learn from and one to test on."
        )
    count = max(round(len(whole) * test_share), len(classes))
    rest, held = hold_out(whole.labels, min(count, len(whole) - len(classes)), seed)
    return whole.take(rest), whole.take(held)


def _folders(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(
        path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )


def _classes(folder: Path) -> tuple[str, ...]:
    names = _folders(folder)
    if len(names) < 2:
        found = f"one, {names[0]!r}" if names else "none"
        raise RunError(
            f"{folder}: must have a sub-folder for each of two or more classes; got {found}."
        )
    return tuple(names)


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.is_file()
    )


def _survey(paths: list[Path]) -> tuple[bool, int]:
    """Whether no image has colour, and the side to bring them to, by their headers alone."""
    gray, sizes = True, set()
    for path in paths:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with Image.open(path) as image:
                    gray &= is_gray(image)
                    sizes.add(image.size)
        except Exception:  # named when it is decoded
            continue
    if len(sizes) == 1:
        width, height = sizes.pop()
        if width == height <= COMMON_SIDE:
            return gray, width
    return gray, USUAL_SIDE


def _load(
    folder: Path,
    paths: list[list[Path]],
    classes: tuple[str, ...],
    channels: int,
    size: int,
    unreadable: Callable[[RunError], None],
) -> Dataset:
    images, labels = [], []
    for number, files in enumerate(paths):
        for path in files:
            try:
                images.append(fit(to_pixels(read_image(path), channels), size))
            except RunError as error:
                unreadable(error)
            else:
                labels.append(number)
    if not images:
        raise RunError(f"{folder}: none of its images can be read.")
    return Dataset(torch.stack(images).contiguous(), torch.tensor(labels), classes)
