"""A whole network, end to end: images a second with each head, as it is and packed."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from xncaps.bench.inference import Tell, without_kernels
from xncaps.bench.machine import Rates
from xncaps.bench.plan import Plan
from xncaps.bench.rows import Comparison, Row
from xncaps.deploy import pack
from xncaps.models import create_model


def measure(plan: Plan, rates: Rates | None, tell: Tell) -> Iterator[Row]:
    """Compare all heads of the plan in one interleaved run for each batch size."""
    for batch in plan.network_batches:
        tell(f"network: {plan.network[0]}, {len(plan.heads)} heads, batch {batch}")
        yield from compare(plan, batch)


def compare(plan: Plan, batch: int) -> list[Row]:
    """Time the network with each head; ratios are those of eager to packed with the same head."""
    name, size = plan.network
    comparison = Comparison("network", f"{name} {size}px", "", batch, "")
    for head in plan.heads:
        model = create_model(name, head, num_classes=10, in_channels=3, image_size=size).eval()
        packed, images = pack(model), torch.randn(batch, 3, size, size)
        comparison.add(f"packed {head}", partial(packed, images), torch.inference_mode)
        comparison.add(f"eager {head}", partial(model, images), without_kernels)
    # So many networks share the time.
    rows = comparison.rows(plan.seconds * len(plan.heads))
    times = {row.what: row.us_per_sample for row in rows}
    named = []
    for row in rows:
        what, head = row.what.split(" ", 1)
        ours = times[f"packed {head}"]
        ratio = row.us_per_sample / ours if row.us_per_sample and ours else None
        named.append(replace(row, layer=head, what=what, ratio=ratio))
    return named
