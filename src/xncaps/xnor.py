"""XNOR-Net's own layers (Appendix B): a linear layer and a convolution on signs and scales."""

import torch
from torch import Tensor, nn

from xncaps import kernels, reference
from xncaps.binarizers import BINARIZERS, SCALES
from xncaps.errors import (
    InputError,
    check_choice,
    check_floating,
    check_like,
    check_shape,
    check_size,
    message,
)


class XnorLinear(nn.Module):
    """A linear layer on signs: ``y = (sign(x) sign(W)^T) * mean(abs(x)) * mean(abs(W)) + bias``.

    Signs and means run over in_features. Gradients pass the signs as the binarizer says, and the
    means only if ``detach_scale`` is false. With ``scale="learned"`` one parameter for each output
    stands in place of both means (XNOR-Net++).

    Args:
        in_features, out_features: sizes.
        bias: add a learned bias.
        binarizer: a name in ``BINARIZERS``.
        scale: ``mean`` or ``learned``.
        detach_scale: treat the means as constants in the backward pass.
        device, dtype: of the parameters.

    Shape:
        ``(..., in_features)`` -> ``(..., out_features)``.

    >>> XnorLinear(512, 10)(torch.randn(2, 512)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        binarizer: str = "sign",
        scale: str = "mean",
        detach_scale: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        self.in_features = check_size(where, "in_features", in_features)
        self.out_features = check_size(where, "out_features", out_features)
        check_choice(where, "binarizer", binarizer, BINARIZERS)
        check_choice(where, "scale", scale, SCALES)
        self.binarizer = binarizer
        self.detach_scale = detach_scale
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.scale = nn.Parameter(torch.empty(out_features)) if scale == "learned" else None
        self.reset_parameters()
        self.to(device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        _reset(self.weight, self.bias, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        where = type(self).__name__
        check_floating(where, "x", x)
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            requirement = f"have shape (..., in_features={self.in_features})"
            raise InputError(message(where, "x", requirement, tuple(x.shape)))
        check_like(where, "x", x, self.weight)
        if _is_inference(x, self.weight, self.scale, self.bias):
            return kernels.xnor_linear(x, self.weight, self.scale, self.bias, self.binarizer)
        return reference.xnor_linear(
            x, self.weight, self.scale, self.bias, self.binarizer, self.detach_scale
        )

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, "
            f"binarizer={self.binarizer!r}{'' if self.scale is None else ', scale=learned'}"
        )


class XnorConv2d(nn.Module):
    """A convolution on signs (Eq. 21): ``(sign(x) * sign(W)) . A . mean(abs(W)) + bias``.

    ``A = M * k`` holds the scale of every window: M is the mean of abs(x) over the channels and k
    the filter that averages a window. Outside the image signs are -1 and M is 0. The scale of W is
    one number for each filter. Gradients pass the signs as the binarizer says, and the scales only
    if ``detach_scale`` is false. With ``scale="learned"`` one parameter for each output channel
    stands in place of all scales (XNOR-Net++).

    Args:
        in_channels, out_channels: sizes.
        kernel_size, stride, padding, dilation: a number, or one each for height and width.
        bias: add a learned bias.
        binarizer: a name in ``BINARIZERS``.
        scale: ``mean`` or ``learned``.
        detach_scale: treat the scales as constants in the backward pass.
        device, dtype: of the parameters.

    Shape:
        ``(batch, in_channels, height, width)`` -> ``(batch, out_channels, height', width')``.

    >>> XnorConv2d(64, 128, 3, padding=1)(torch.randn(2, 64, 14, 14)).shape
    torch.Size([2, 128, 14, 14])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        bias: bool = True,
        *,
        binarizer: str = "sign",
        scale: str = "mean",
        detach_scale: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        self.in_channels = check_size(where, "in_channels", in_channels)
        self.out_channels = check_size(where, "out_channels", out_channels)
        self.kernel_size = _pair(where, "kernel_size", kernel_size)
        self.stride = _pair(where, "stride", stride)
        self.padding = _pair(where, "padding", padding, least=0)
        self.dilation = _pair(where, "dilation", dilation)
        check_choice(where, "binarizer", binarizer, BINARIZERS)
        check_choice(where, "scale", scale, SCALES)
        self.binarizer = binarizer
        self.detach_scale = detach_scale
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, *self.kernel_size))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.scale = nn.Parameter(torch.empty(out_channels)) if scale == "learned" else None
        self.reset_parameters()
        self.to(device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        _reset(self.weight, self.bias, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        where = type(self).__name__
        check_floating(where, "x", x)
        check_shape(
            where, "x", x, batch=None, in_channels=self.in_channels, height=None, width=None
        )
        check_like(where, "x", x, self.weight)
        self._check_window(x)
        places = self.stride, self.padding, self.dilation
        if _is_inference(x, self.weight, self.scale, self.bias):
            return kernels.xnor_conv2d(
                x, self.weight, self.scale, self.bias, *places, self.binarizer
            )
        return reference.xnor_conv2d(
            x, self.weight, self.scale, self.bias, *places, self.binarizer, self.detach_scale
        )

    def _check_window(self, x: Tensor) -> None:
        for axis, name in ((0, "height"), (1, "width")):
            if x.shape[2 + axis] < 1:
                where, requirement = type(self).__name__, f"have a {name} of at least 1"
                raise InputError(message(where, "x", requirement, tuple(x.shape)))
            window = self.dilation[axis] * (self.kernel_size[axis] - 1) + 1
            size = x.shape[2 + axis] + 2 * self.padding[axis]
            if size < window:
                requirement = f"have a padded {name} of at least the kernel's {window}"
                raise InputError(message(type(self).__name__, "x", requirement, size))

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, "
            f"bias={self.bias is not None}, "
            f"binarizer={self.binarizer!r}{'' if self.scale is None else ', scale=learned'}"
        )


def _is_inference(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether a kernel can do it, and no gradient is needed: training multiplies floats."""
    needs_gradient = torch.is_grad_enabled() and (
        x.requires_grad or any(p is not None and p.requires_grad for p in parameters)
    )
    return not needs_gradient and kernels.serves(x, *parameters)


def _pair(where: str, what: str, value: int | tuple[int, int], least: int = 1) -> tuple[int, int]:
    if isinstance(value, tuple) and len(value) == 2:
        return check_size(where, what, value[0], least), check_size(where, what, value[1], least)
    size = check_size(where, what, value, least)
    return size, size


def _reset(weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> None:
    """As nn.Linear and nn.Conv2d start; a learned scale starts as the mean abs of the weights."""
    nn.init.kaiming_uniform_(weight, a=5**0.5)
    if bias is not None:
        bound = weight[0].numel() ** -0.5
        nn.init.uniform_(bias, -bound, bound)
    if scale is not None:
        with torch.no_grad():
            scale.copy_(weight.flatten(1).abs().mean(1))
