"""What all ops share: the library they belong to, codes of names, and checks of arguments."""

from typing import Any

import torch
from torch import Tensor

from xncaps.errors import InputError, InputTypeError, message
from xncaps.kernels import selection

CODES = {None: 0, "sign": 1, "midrange": 2, "approxsign": 3}
"""What kernel.h calls the binarizers."""
NAMES = {code: name for name, code in CODES.items()}
BLOCK = 32
"""Lanes of a block (layout.h)."""

library = torch.library.Library("xncaps", "DEF")  # type: ignore[no-untyped-call]


def padded(caps_in: int) -> int:
    """So many lanes hold caps_in capsules."""
    return (caps_in + BLOCK - 1) // BLOCK * BLOCK


def check(where: str, **tensors: tuple[Tensor | None, tuple[int | None, ...]]) -> None:
    """Refuse tensors that the native code cannot read: other dtype, device or shape."""
    for what, (tensor, shape) in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype != torch.float32:
            raise InputTypeError(message(where, what, "be float32", tensor.dtype))
        if tensor.device.type not in ("cpu", "meta"):
            raise InputTypeError(message(where, what, "be on the CPU", tensor.device))
        sizes = tuple(tensor.shape)
        if len(sizes) != len(shape) or any(
            want is not None and got != want for got, want in zip(sizes, shape, strict=True)
        ):
            wanted = tuple("any" if want is None else want for want in shape)
            raise InputError(message(where, what, f"have shape {wanted}", sizes))


def check_codes(where: str, least: int, **codes: int) -> None:
    """Refuse a code that names no binarizer."""
    for what, code in codes.items():
        if code not in NAMES or code < least:
            choices = ", ".join(str(c) for c in NAMES if c >= least)
            raise InputError(message(where, what, f"be one of {choices}", code))


def pointer(tensor: Tensor | None) -> int:
    """The address of a tensor's data; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def plain(tensor: Tensor | None) -> Tensor | None:
    """The same tensor, or a contiguous copy of it."""
    return None if tensor is None else tensor.contiguous()


def native() -> Any:
    """The extension module; an op cannot do without it."""
    module = selection.native()
    if module is None:
        raise RuntimeError("xncaps: this op needs the native kernels, which are not there.")
    return module
