"""What operations and layers cost: one table from operation to formula."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xncaps.layers import CapsuleLinear
from xncaps.routing import XnorAgreement
from xncaps.xnor import XnorConv2d, XnorLinear

aten = torch.ops.aten


@dataclass
class Work:
    """What one operation or layer costs for the input it got.

    Attributes:
        macs: multiply-accumulates on floats.
        binary_ops: multiply-accumulates on single bits (one XNOR and its count, for each bit).
        routing_bytes: float32 tensors alive at once in the routing loop (forward, as written).
    """

    macs: int = 0
    binary_ops: int = 0
    routing_bytes: int = 0


def _convolution(args: Any, out: Tensor) -> Work:
    weight, transposed = args[1], args[6]
    # Each element of the output (of the input, if transposed) meets one filter.
    places = args[0].numel() if transposed else out.numel()
    return Work(macs=places * math.prod(weight.shape[1:]))


def _matrix_product(args: Any, out: Tensor) -> Work:
    return Work(macs=out.numel() * args[0].shape[-1])


def _added_matrix_product(args: Any, out: Tensor) -> Work:
    return Work(macs=out.numel() * args[1].shape[-1])


def _attention(args: Any, out: Any) -> Work:
    query, key, value = args[:3]  # (batch, heads, tokens, size)
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    return Work(macs=pairs * (query.shape[-1] + value.shape[-1]))


def _dot(args: Any, out: Tensor) -> Work:
    return Work(macs=args[0].numel())


def _rnn_layer(args: Any, out: Any) -> Work:
    steps, *weights = args[:3]  # (time, batch, size); input and hidden weights of all gates
    return Work(macs=steps.shape[0] * steps.shape[1] * sum(w.numel() for w in weights))


def _capsule_linear(layer: CapsuleLinear, out: Any) -> Work:
    v = out[0] if isinstance(out, tuple) else out
    batch, rounds = v.shape[0], layer.routing.iterations
    predictions = batch * layer.caps_in * layer.caps_out * layer.dim_out  # elements of u
    couplings = batch * layer.caps_in * layer.caps_out
    outputs = batch * layer.caps_out * layer.dim_out
    projection, sums, agreements = (
        predictions * layer.dim_in,
        predictions * rounds,
        predictions * (rounds - 1),
    )
    xnor_projection = layer.binarizer is not None
    xnor_agreement = isinstance(layer.routing.agreement, XnorAgreement)
    floats = predictions + 2 * couplings + 2 * outputs  # u; logits and couplings; s and v
    if xnor_agreement and rounds > 1:
        floats += predictions + couplings + outputs  # signs and scales of u, signs of v
    return Work(
        macs=sums + (0 if xnor_projection else projection) + (0 if xnor_agreement else agreements),
        binary_ops=(projection if xnor_projection else 0) + (agreements if xnor_agreement else 0),
        routing_bytes=4 * floats,
    )


def _xnor_linear(layer: XnorLinear, out: Tensor) -> Work:
    return Work(binary_ops=out.numel() * layer.in_features)


def _xnor_conv(layer: XnorConv2d, out: Tensor) -> Work:
    area = math.prod(layer.kernel_size)
    windows = out.numel() // layer.out_channels if layer.scale is None else 0  # the filter k
    return Work(macs=windows * area, binary_ops=out.numel() * layer.in_channels * area)


FORMULAS: dict[Any, Callable[..., Work]] = {
    aten.convolution.default: _convolution,
    aten.mm.default: _matrix_product,
    aten.bmm.default: _matrix_product,
    aten.mv.default: _matrix_product,
    aten.addmm.default: _added_matrix_product,
    aten.addmv.default: _added_matrix_product,
    aten.baddbmm.default: _added_matrix_product,
    aten.dot.default: _dot,
    aten.mkldnn_rnn_layer.default: _rnn_layer,
    aten._scaled_dot_product_flash_attention.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_efficient_attention.default: _attention,
    aten._scaled_dot_product_fused_attention_overrideable.default: _attention,
    CapsuleLinear: _capsule_linear,
    XnorLinear: _xnor_linear,
    XnorConv2d: _xnor_conv,
}


def layer_formula(module: nn.Module) -> Callable[..., Work] | None:
    """The formula of a layer that is counted as one operation, if it is such a layer."""
    return next((FORMULAS[kind] for kind in type(module).__mro__ if kind in FORMULAS), None)
