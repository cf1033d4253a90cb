"""What all ops share: the library they belong to, codes of names, and checks of arguments."""

from typing import Any

import torch
from torch import Tensor

from xncaps.errors import InputError, InputTypeError, check_tensor, message
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


def check(where: str, what: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    """Refuse a tensor that the native code cannot read: of another dtype, device or shape."""
    check_tensor(where, what, tensor)
    sizes = tensor.shape
    if sizes == shape and tensor.dtype is torch.float32 and tensor.is_cpu:
        return
    if tensor.dtype is not torch.float32:
        raise InputTypeError(message(where, what, "be float32", tensor.dtype))
    if not tensor.is_cpu:
        raise InputTypeError(message(where, what, "be on the CPU", tensor.device))
    if len(sizes) != len(shape) or any(
        want is not None and got != want for got, want in zip(sizes, shape, strict=True)
    ):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise InputError(message(where, what, f"have shape ({wanted})", tuple(sizes)))


def check_one_device(where: str, *tensors: Tensor | None) -> None:
    """Refuse tensors on several devices, which a fake kernel would take."""
    devices = {str(tensor.device) for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        requirement = "be on one device"
        raise InputTypeError(message(where, "tensors", requirement, ", ".join(sorted(devices))))


def check_code(where: str, what: str, code: int, least: int = 0) -> None:
    """Refuse a code that names no binarizer."""
    if code < least or code not in NAMES:
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
        raise RuntimeError(
            "xncaps: this op needs the native kernels, which are not built or disabled."
        )
    return module
