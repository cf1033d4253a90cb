"""What a call costs that has nothing to compute: layers of one capsule with one number."""

from collections.abc import Iterator

import torch

from xncaps import kernels
from xncaps.bench.inference import NOT_BUILT, Tell
from xncaps.bench.machine import Rates
from xncaps.bench.plan import Plan
from xncaps.bench.rows import Comparison, Row
from xncaps.deploy import pack
from xncaps.kernels.library import CODES
from xncaps.layers import XnODR


def measure(plan: Plan, rates: Rates | None, tell: Tell) -> Iterator[Row]:
    """Compare the ways to call a layer with the smallest operation of torch."""
    tell("calls")
    comparison = Comparison("calls", "1x1", "XnODR", 1, "torch.add")
    layer, x = XnODR(1, 1, 1, 1).eval(), torch.randn(1, 1, 1)
    packed, weight = pack(layer), layer.weight.detach()
    options = (layer.routing.iterations, CODES["sign"], CODES[None])
    comparison.add("torch.add", lambda: torch.add(x, x), torch.inference_mode)
    comparison.add("packed", lambda: packed(x), torch.inference_mode)
    if kernels.native() is None:
        comparison.skip("op", NOT_BUILT)
    else:
        op = torch.ops.xncaps.capsules.default
        comparison.add(
            "op", lambda: op(x, weight, None, None, None, *options), torch.inference_mode
        )
    comparison.add("layer", lambda: layer(x), torch.inference_mode)
    comparison.add("layer, recorded", lambda: layer(x))
    yield from comparison.rows(plan.seconds)
