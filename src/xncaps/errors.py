"""The errors a user can cause, and the few checks that raise them.

Every message has one form: ``<Where>: <what> must <requirement>; got <value>. <hint>``.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from operator import index
from typing import SupportsIndex, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

MOST = 2**31 - 1
"""The largest size of anything: no tensor of this library has a longer axis."""
MOST_WIDTH = 10_000


class InputError(ValueError):
    """A value, a shape or a name that the library cannot work with."""


class InputTypeError(InputError, TypeError):
    """A value of the wrong type, dtype or device."""


class RunError(RuntimeError):
    """Work that cannot go on for a reason outside the program: a damaged file, a NaN."""


def message(where: str, what: str, requirement: str, got: object, hint: str = "") -> str:
    """Put the parts of an error message into the one form they all have."""
    return f"{where}: {what} must {requirement}; got {got}.{' ' + hint if hint else ''}"


def brief(value: object) -> str:
    """A value in an error message: on one line, and not long."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_size(where: str, what: str, value: object, least: int = 1) -> int:
    """Return ``value`` if it is a whole number (numpy's too) of at least ``least``."""
    size = None if isinstance(value, bool | Tensor) else _whole(value)
    if size is None:
        raise InputTypeError(message(where, what, "be a whole number", brief(value)))
    if size < least:
        raise InputError(message(where, what, f"be at least {least}", size))
    if size > MOST:
        raise InputError(message(where, what, f"be at most {MOST}", size))
    return size


def _whole(value: object) -> int | None:
    try:
        return index(value) if isinstance(value, SupportsIndex) else None
    except TypeError:  # a numpy array of several numbers
        return None


def check_axis(where: str, x: Tensor, axis: object) -> None:
    """Refuse anything but an axis of ``x``."""
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise InputTypeError(message(where, "dim", "be an axis", brief(axis)))
    if not -x.dim() <= axis < x.dim():
        raise InputError(message(where, "dim", f"be an axis of {tuple(x.shape)}", axis))


def check_width(where: str, width: object) -> float:
    """Return a factor for the channels of a network, if it is a number above 0."""
    if isinstance(width, int | float) and not isinstance(width, bool) and 0 < width <= MOST_WIDTH:
        return width
    requirement = f"be a number above 0, {MOST_WIDTH:,} at most"
    raise InputError(message(where, "width", requirement, brief(width)))


def check_choice(where: str, what: str, name: object, choices: Iterable[str]) -> str:
    """Return ``name`` if it is one of ``choices``; a misspelt one is told the likely meaning."""
    names = list(choices)
    if isinstance(name, str) and name in names:
        return name
    close = get_close_matches(name, names, n=1) if isinstance(name, str) else []
    hint = f"Did you mean {close[0]!r}?" if close else ""
    raise InputError(message(where, what, f"be one of {', '.join(names)}", brief(name), hint))


def look_up(where: str, what: str, name: object, table: Mapping[str, T]) -> T:
    """Return ``table[name]``; a name that is not there is told the choices."""
    return table[check_choice(where, what, name, table)]


def check_tensor(where: str, what: str, x: object) -> None:
    """Refuse anything but a tensor."""
    if not isinstance(x, Tensor):
        raise InputTypeError(message(where, what, "be a tensor", type(x).__name__))


def check_floating(where: str, what: str, x: Tensor) -> None:
    """Refuse anything but a dense floating-point tensor."""
    check_tensor(where, what, x)
    if x.layout is not torch.strided or x.is_nested:
        layout = "a nested one" if x.is_nested else x.layout
        hint = "Convert it first, for example with .to_dense()."
        raise InputTypeError(message(where, what, "be a dense tensor", layout, hint))
    if not x.is_floating_point():
        hint = "Convert it first, for example with .float()."
        raise InputTypeError(message(where, what, "be a floating-point tensor", x.dtype, hint))


def check_options(where: str, owner: str, known: Iterable[str], options: Iterable[str]) -> None:
    """Refuse an option that is not among the known ones of its owner."""
    names = list(known)
    for option in options:
        if option not in names:
            requirement = f"be one {owner} takes ({', '.join(names) or 'it takes none'})"
            raise InputTypeError(message(where, "option", requirement, repr(option)))


def check_like(where: str, what: str, x: Tensor, weight: Tensor) -> None:
    """Refuse a tensor on another device or, outside autocast, of another dtype than the weight."""
    if x.device != weight.device:
        hint = "Move one of them with .to(device)."
        requirement = f"be on the layer's device {weight.device}"
        raise InputTypeError(message(where, what, requirement, x.device, hint))
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        hint = "Convert one of them with .to(dtype), or use torch.autocast."
        requirement = f"have the layer's dtype {weight.dtype}"
        raise InputTypeError(message(where, what, requirement, x.dtype, hint))


def check_shape(where: str, what: str, x: Tensor, **axes: int | None) -> None:
    """Refuse a tensor whose shape is not the named one; ``None`` stands for any size.

    The axes are written the way the docstrings write them: ``(batch, caps_in=128, dim_in=8)``.
    """
    sizes = list(axes.values())
    fits = x.dim() == len(sizes) and all(
        size is None or size == got for size, got in zip(sizes, x.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(
            name if size is None else f"{name}={size}" for name, size in axes.items()
        )
        raise InputError(message(where, what, f"have shape ({wanted})", tuple(x.shape)))
