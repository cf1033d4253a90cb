"""XNOR matrix product and convolution against float and int8 ones.

Ours binarizes and packs its activations within the time; int8 quantizes its within.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional as F

from xncaps.bench import ort
from xncaps.bench.inference import Tell, add_ort
from xncaps.bench.machine import Rates
from xncaps.bench.plan import Plan
from xncaps.bench.rows import Comparison, Row
from xncaps.deploy import pack
from xncaps.xnor import XnorConv2d, XnorLinear

INT8 = {"ORT int8 dynamic": True, "ORT int8 static": False}
"""The ways to int8, and whether activations are quantized by their own range."""


def measure(plan: Plan, rates: Rates | None, tell: Tell) -> Iterator[Row]:
    """Compare the products of every number of rows, and the convolution of the plan."""
    for count in plan.gemm_rows:
        tell(f"xnor: {plan.gemm}x{plan.gemm}, {count} rows")
        yield from compare_linear(plan.gemm, count).rows(plan.seconds)
    if plan.conv is not None:
        tell(f"xnor: 3x3 convolution, {plan.conv[0]} channels")
        yield from compare_conv(*plan.conv).rows(plan.seconds)


def compare_linear(size: int, count: int) -> Comparison:
    """So many rows times a square matrix."""
    comparison = Comparison("xnor", f"{size}x{size}", "XnorLinear", count, "packed")
    layer, x = XnorLinear(size, size, bias=False), torch.randn(count, size)
    weight, packed = layer.weight.detach(), pack(layer)
    comparison.add("packed", lambda: packed(x), torch.inference_mode)
    comparison.add("torch fp32", lambda: F.linear(x, weight), torch.inference_mode)
    add_ort(comparison, "ORT fp32", partial(ort.matmul, weight, x))
    for what, dynamic in INT8.items():
        add_ort(comparison, what, partial(ort.matmul_int8, weight, x, dynamic=dynamic))
    return comparison


def compare_conv(channels: int, side: int) -> Comparison:
    """A 3x3 convolution that keeps the size of one image."""
    name = f"3x3 {channels} at {side}x{side}"
    comparison = Comparison("xnor", name, "XnorConv2d", 1, "packed")
    layer = XnorConv2d(channels, channels, 3, padding=1, bias=False)
    x = torch.randn(1, channels, side, side)
    weight, packed = layer.weight.detach(), pack(layer)
    comparison.add("packed", lambda: packed(x), torch.inference_mode)
    comparison.add("torch fp32", lambda: F.conv2d(x, weight, padding=1), torch.inference_mode)
    add_ort(comparison, "ORT fp32", partial(ort.conv, weight, x))
    for what, dynamic in INT8.items():
        add_ort(comparison, what, partial(ort.conv_int8, weight, x, dynamic=dynamic))
    return comparison
