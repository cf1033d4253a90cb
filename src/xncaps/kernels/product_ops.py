"""Products of signs as ops: the linear layer and the convolution of XNOR-Net on bits.

Their gradients are the reference's, with the means of the scales as constants: training runs the
reference itself.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from xncaps import reference
from xncaps.errors import InputError, check_tensor, message
from xncaps.kernels.library import (
    CODES,
    NAMES,
    check,
    check_code,
    check_one_device,
    library,
    native,
    plain,
    pointer,
)

library.define(  # type: ignore[no-untyped-call]
    "xnor_linear(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, int binarizer) -> Tensor"
)
library.define(  # type: ignore[no-untyped-call]
    "xnor_conv2d(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, int[] stride, "
    "int[] padding, int[] dilation, int binarizer) -> Tensor"
)


def xnor_linear(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, binarizer: str
) -> Tensor:
    """:func:`xncaps.reference.xnor_linear` on bits."""
    y: Tensor = torch.ops.xncaps.xnor_linear(x, weight, scale, bias, CODES[binarizer])
    return y


def xnor_conv2d(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    binarizer: str,
) -> Tensor:
    """:func:`xncaps.reference.xnor_conv2d` on bits."""
    y: Tensor = torch.ops.xncaps.xnor_conv2d(
        x, weight, scale, bias, stride, padding, dilation, CODES[binarizer]
    )
    return y


def _check_outputs(
    where: str, outputs: int, scale: Tensor | None, bias: Tensor | None, binarizer: int
) -> None:
    for what, given in (("scale", scale), ("bias", bias)):
        if given is not None:
            check(where, what, given, (outputs,))
    check_code(where, "binarizer", binarizer, least=1)


def _linear(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, binarizer: int
) -> Tensor:
    where = "xnor_linear"
    check_tensor(where, "weight", weight)
    check_tensor(where, "x", x)
    if weight.dim() != 2 or 0 in weight.shape:
        requirement = "have shape (out_features, in_features), none of them 0"
        raise InputError(message(where, "weight", requirement, tuple(weight.shape)))
    outputs, inputs = weight.shape
    check(where, "weight", weight, weight.shape)
    check(where, "x", x, (*x.shape[:-1], inputs))
    _check_outputs(where, outputs, scale, bias, binarizer)
    y = x.new_empty(*x.shape[:-1], outputs)
    x, weight, scale, bias = x.contiguous(), weight.contiguous(), plain(scale), plain(bias)
    native().xnor_linear(
        y.numel() // outputs,
        inputs,
        outputs,
        binarizer,
        x.data_ptr(),
        weight.data_ptr(),
        pointer(scale),
        pointer(bias),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y


def _fake_linear(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, binarizer: int
) -> Tensor:
    check_one_device("xnor_linear", x, weight, scale, bias)
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _conv2d(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    binarizer: int,
) -> Tensor:
    where = "xnor_conv2d"
    check_tensor(where, "weight", weight)
    check_tensor(where, "x", x)
    if weight.dim() != 4 or 0 in weight.shape:
        requirement = "have shape (out_channels, in_channels, height, width), none of them 0"
        raise InputError(message(where, "weight", requirement, tuple(weight.shape)))
    outputs, channels, *kernel = weight.shape
    check(where, "weight", weight, weight.shape)
    check(where, "x", x, (None, channels, None, None))
    _check_outputs(where, outputs, scale, bias, binarizer)
    for what, pair, least in (
        ("stride", stride, 1),
        ("padding", padding, 0),
        ("dilation", dilation, 1),
    ):
        if len(pair) != 2 or min(pair) < least:
            requirement = f"be two numbers of at least {least}"
            raise InputError(message(where, what, requirement, list(pair)))
    if 0 in x.shape[2:]:
        requirement = "have a height and a width of at least 1"
        raise InputError(message(where, "x", requirement, tuple(x.shape)))
    y = _fake_conv2d(x, weight, scale, bias, stride, padding, dilation, binarizer)
    if min(y.shape[2:]) < 1:
        requirement = "be at least as large as the kernel, padding included"
        raise InputError(message(where, "x", requirement, tuple(x.shape)))
    x, weight, scale, bias = x.contiguous(), weight.contiguous(), plain(scale), plain(bias)
    native().xnor_conv2d(
        *x.shape,
        outputs,
        *kernel,
        *stride,
        *padding,
        *dilation,
        binarizer,
        x.data_ptr(),
        weight.data_ptr(),
        pointer(scale),
        pointer(bias),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y


def _fake_conv2d(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    binarizer: int,
) -> Tensor:
    check_one_device("xnor_conv2d", x, weight, scale, bias)
    sides = [
        (x.shape[2 + axis] + 2 * padding[axis] - dilation[axis] * (weight.shape[2 + axis] - 1) - 1)
        // stride[axis]
        + 1
        for axis in (0, 1)
    ]
    return x.new_empty(x.shape[0], weight.shape[0], *sides)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _gradients(ctx: Any, grad: Tensor, run: Callable[..., Tensor]) -> tuple[Tensor | None, ...]:
    """By the reference, computed again. ``run`` takes the inputs and gives its output."""
    twice = torch.is_grad_enabled()
    inputs, needed = ctx.saved_tensors, ctx.needs_input_grad[:4]
    with torch.enable_grad():
        if not twice:
            inputs = [
                None if x is None else x.detach().requires_grad_(need)
                for x, need in zip(inputs, needed, strict=True)
            ]
        wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
        found = iter(torch.autograd.grad(run(*inputs), wanted, grad, create_graph=twice))
    return tuple(next(found) if need else None for need in needed)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (binarizer,) = ctx.options
    run = partial(reference.xnor_linear, binarizer=NAMES[binarizer] or "", detach_scale=True)
    return (*_gradients(ctx, grad, run), None)


def _conv2d_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    stride, padding, dilation, binarizer = ctx.options
    run = partial(
        reference.xnor_conv2d,
        stride=stride,
        padding=padding,
        dilation=dilation,
        binarizer=NAMES[binarizer] or "",
        detach_scale=True,
    )
    return (*_gradients(ctx, grad, run), None, None, None, None)


library.impl("xnor_linear", _linear, "CPU")  # type: ignore[no-untyped-call]
library.impl("xnor_conv2d", _conv2d, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("xncaps::xnor_linear", _fake_linear, lib=library)
torch.library.register_fake("xncaps::xnor_conv2d", _fake_conv2d, lib=library)
torch.library.register_autograd(
    "xncaps::xnor_linear", _linear_backward, setup_context=_setup_context, lib=library
)
torch.library.register_autograd(
    "xncaps::xnor_conv2d", _conv2d_backward, setup_context=_setup_context, lib=library
)
