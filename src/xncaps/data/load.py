"""``load_data``: a data set by name, in its three parts."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from xncaps.data.cifar10 import load_cifar10
from xncaps.data.dataset import Dataset, Splits, hold_out, validation_size
from xncaps.data.files import Progress
from xncaps.data.folder import load_folder
from xncaps.data.idx import DIGITS, load_idx, load_mnist
from xncaps.data.multimnist import (
    EACH,
    SHA256,
    check_digest,
    compose,
    compose_authors,
    compose_from,
)
from xncaps.data.sample import load_sample
from xncaps.errors import InputError, check_choice, check_size, message


@dataclass(frozen=True)
class Request:
    """What is asked of a data set."""

    path: str = ""
    data_dir: str | os.PathLike[str] | None = None
    image_size: int | None = None
    train_count: int | None = None
    validation: int | None = None
    skip_unreadable: bool = False
    progress: Progress | None = None
    say: Callable[[str], None] | None = None


def load_data(
    name: str,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    image_size: int | None = None,
    train_count: int | None = None,
    validation: int | None = None,
    skip_unreadable: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> Splits:
    """Load a data set and hold a part of its training images out for validation.

    - ``sample``: 5,000 MNIST digits that come with the package.
    - ``mnist``, ``cifar10``: looked for in ``data_dir``, ``$XNCAPS_DATA`` and the cache, else
      downloaded.
    - ``multimnist``: two digits an image, made from MNIST; ``multimnist-authors``: the paper's
      released generator, in which test digits leak into training.
    - ``folder:PATH``: a sub-folder of image files for each class.
    - ``idx:PATH``: a folder of files in MNIST's format.

    Splits are the same for every run: nothing here depends on a run's seed.

    Args:
        name: one of the above.
        data_dir: a folder to look in first.
        image_size: the side that ``folder:`` images are brought to.
        train_count: use only this many training images, validation included; of MultiMNIST, make
            this many.
        validation: how many of the training images to hold out; 5,000 or a tenth of a smaller set
            if not given.
        skip_unreadable: leave out image files that cannot be read.
        progress: told how a download goes.
        say: told what is left out.

    >>> load_data("sample").test.classes
    ('0', '1', '2', '3', '4', '5', '6', '7', '8', '9')
    """
    where = "load_data"
    kind, path = (*name.split(":", 1), "")[:2] if isinstance(name, str) else (name, "")
    names = [*(k for k in DATASETS if k not in WITH_PATH), *(f"{k}:PATH" for k in WITH_PATH)]
    if kind in WITH_PATH and not path:
        raise InputError(message(where, "data", f"name a folder, as {kind}:PATH", repr(name)))
    if kind not in WITH_PATH:
        check_choice(where, "data", name, names)
    if train_count is not None:
        check_size(where, "train_count", train_count, least=2)
    if validation is not None:
        check_size(where, "validation", validation, least=0)
    if image_size is not None:
        check_size(where, "image_size", image_size)
    request = Request(
        path, data_dir, image_size, train_count, validation, skip_unreadable, progress, say
    )
    train, held, test = DATASETS[kind](request)
    return Splits(name, train, held, test)


Parts = tuple[Dataset, Dataset, Dataset]


def _divide(train: Dataset, test: Dataset, request: Request) -> Parts:
    """Train, validation and test, by classes."""
    if request.train_count is not None:
        _, kept = hold_out(train.labels, _most(request.train_count, train), seed=1)
        train = train.take(kept)
    count = _held(len(train), request)
    if request.validation is None:  # every class keeps an image to learn from
        count = min(count, int((train.labels.bincount() - 1).clamp(min=0).sum()))
    rest, held = hold_out(train.labels, count, seed=0)
    return train.take(rest), train.take(held), test


def _most(count: int, train: Dataset) -> int:
    if count > len(train):
        requirement = f"be at most the {len(train):,} training images there are"
        raise InputError(message("load_data", "train_count", requirement, count))
    return count


def _held(count: int, request: Request) -> int:
    held = validation_size(count) if request.validation is None else request.validation
    if held >= count:
        requirement = f"be below the {count:,} training images there are"
        raise InputError(message("load_data", "validation", requirement, held))
    return held


def _sample(request: Request) -> Parts:
    train, test = (Dataset(*load_sample(split), DIGITS) for split in ("train", "test"))
    return _divide(train, test, request)


def _mnist(request: Request) -> Parts:
    return _divide(*_digits(request), request)


def _digits(request: Request) -> tuple[Dataset, Dataset]:
    train = load_mnist("train", request.data_dir, request.progress)
    return train, load_mnist("test", request.data_dir, request.progress)


def _cifar10(request: Request) -> Parts:
    train = load_cifar10("train", request.data_dir, request.progress)
    return _divide(train, load_cifar10("test", request.data_dir, request.progress), request)


def _multimnist(request: Request) -> Parts:
    """Validation images show digits that no training image shows, so these are set apart first."""
    train, test = _digits(request)
    count = request.train_count or EACH * len(train)
    held = _held(count, request)
    apart = min(max(-(-held // EACH), 2), len(train) // 2) if held else 0
    rest, chosen = hold_out(train.labels, apart, seed=0)
    learnt, tested = compose_from(train, rest, count - held), compose(test)
    checked = compose_from(train, chosen, held) if held else learnt.take(chosen)
    if request.train_count is None and request.validation is None:
        for part, split in ((learnt, "learnt"), (checked, "checked"), (tested, "test")):
            check_digest(part, SHA256[split])
    return learnt, checked, tested


def _multimnist_authors(request: Request) -> Parts:
    if request.say:
        request.say("multimnist-authors: LEAKY: test images show digits that training images show")
    train, test = compose_authors(*_digits(request))
    if request.train_count is not None:
        train = train.take(torch.arange(_most(request.train_count, train)))
    held = _held(len(train), request)
    order = torch.arange(len(train))
    return train.take(order[held:]), train.take(order[:held]), test


def _folder(request: Request) -> Parts:
    train, test = load_folder(
        request.path,
        request.image_size,
        skip_unreadable=request.skip_unreadable,
        say=request.say,
    )
    return _divide(train, test, request)


def _idx(request: Request) -> Parts:
    return _divide(*load_idx(request.path), request)


DATASETS: dict[str, Callable[[Request], Parts]] = {
    "sample": _sample,
    "mnist": _mnist,
    "cifar10": _cifar10,
    "multimnist": _multimnist,
    "multimnist-authors": _multimnist_authors,
    "folder": _folder,
    "idx": _idx,
}
WITH_PATH = ("folder", "idx")
