"""Products of signs in plain PyTorch: the readable reference that kernels are measured by."""

import torch
from torch import Tensor
from torch.nn import functional as F

from xncaps.binarizers import BINARIZERS, mean_scale

Pair = tuple[int, int]


def project(
    x: Tensor, weight: Tensor, binarizer: str | None, scale: Tensor | None, detach_scale: bool
) -> Tensor:
    """The predictions of a capsule layer, in floats or from signs (Algorithm 1).

    ``u_ij = x_i W_ij``; with a binarizer ``(sign(x_i) sign(W_ij)) * mean(abs(x_i)) *
    mean(abs(W_ij))``, where a learned scale stands in place of both means.

    Shape:
        x ``(batch, caps_in, dim_in)``, weight ``(caps_in, caps_out, dim_in, dim_out)``, scale
        ``(caps_in, caps_out, 1, dim_out)`` -> ``(batch, caps_in, caps_out, dim_out)``.
    """
    if binarizer is None:
        return torch.einsum("bid,ijde->bije", x, weight)
    signs = BINARIZERS[binarizer]
    dots = torch.einsum("bid,ijde->bije", signs(x, -1), signs(weight, 2))
    if scale is not None:
        return dots * scale.squeeze(2)
    x_scale = mean_scale(x, -1, detach_scale).unsqueeze(-1)  # (b, i, 1, 1)
    w_scale = mean_scale(weight, 2, detach_scale).squeeze(2)  # (i, j, e)
    return dots * x_scale * w_scale


def xnor_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    binarizer: str,
    detach_scale: bool,
) -> Tensor:
    """``y = (sign(x) sign(W)^T) * mean(abs(x)) * mean(abs(W)) + bias``; see :class:`XnorLinear`.

    Shape:
        x ``(..., in_features)``, weight ``(out_features, in_features)`` -> ``(..., out_features)``.
    """
    signs = BINARIZERS[binarizer]
    y = F.linear(signs(x, -1), signs(weight, 1))
    if scale is not None:
        y = y * scale
    else:
        w_scale = mean_scale(weight, 1, detach_scale).squeeze(1)
        y = y * mean_scale(x, -1, detach_scale) * w_scale
    return y if bias is None else y + bias


def xnor_conv2d(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    binarizer: str,
    detach_scale: bool,
) -> Tensor:
    """``(sign(x) * sign(W)) . A . mean(abs(W)) + bias``; see :class:`XnorConv2d`.

    Shape:
        x ``(batch, in_channels, height, width)``, weight ``(out_channels, in_channels, kernel
        height, kernel width)`` -> ``(batch, out_channels, height', width')``.
    """
    signs = BINARIZERS[binarizer]
    rows, columns = padding
    padded = F.pad(signs(x, 1), (columns, columns, rows, rows), value=-1.0)
    y = F.conv2d(padded, signs(weight, (1, 2, 3)), None, stride, 0, dilation)
    if scale is not None:
        y = y * scale.view(-1, 1, 1)
    else:
        means = mean_scale(x, 1, detach_scale)  # M: (batch, 1, height, width)
        kernel = weight.shape[2:]
        k = means.new_full((1, 1, *kernel), 1 / kernel.numel())
        windows = F.conv2d(means, k, None, stride, padding, dilation)  # A
        y = y * (windows * mean_scale(weight, (1, 2, 3), detach_scale).view(-1, 1, 1))
    return y if bias is None else y + bias.view(-1, 1, 1)
