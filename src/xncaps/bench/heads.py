"""Whole heads, with what stands before the capsule layer: PrimaryCaps and the lengths included.

At ``mb`` PrimaryCaps is a linear layer from 320 features to 128 capsules of 8, at ``rn`` it only
cuts 2048 features into 256 capsules; both squash. Features are pooled before.
"""

from collections.abc import Iterator

import torch

from xncaps.bench import ort
from xncaps.bench.baselines import LAYERS, fc_stack
from xncaps.bench.inference import Tell, add_ort, without_kernels
from xncaps.bench.machine import Rates, Shape
from xncaps.bench.plan import Plan
from xncaps.bench.rows import Comparison, Row
from xncaps.capsules import squash
from xncaps.deploy import pack
from xncaps.heads import CapsuleHead
from xncaps.primary import PrimaryCaps


def measure(plan: Plan, rates: Rates | None, tell: Tell) -> Iterator[Row]:
    """Compare the heads of every layer at every shape and batch of the plan."""
    for name, features in plan.primary.items():
        for layer in plan.layers:
            for batch in plan.batches:
                tell(f"primary: {name} {layer}, batch {batch}")
                comparison = compare(name, plan.shapes[name], features, layer, batch)
                yield from comparison.rows(plan.seconds)


def compare(name: str, shape: Shape, features: int, layer: str, batch: int) -> Comparison:
    """A packed head, its capsule layer alone, the head in eager PyTorch, and the FC stack."""
    comparison = Comparison("primary", name, layer, batch, "packed head")
    project = features != shape.caps_in * shape.dim_in
    head = CapsuleHead(
        features,
        shape.caps_out,
        layer=LAYERS[layer],
        caps_in=shape.caps_in,
        dim_in=shape.dim_in,
        dim_out=shape.dim_out,
        primary=PrimaryCaps(features, shape.caps_in, shape.dim_in, project=project),
    ).eval()
    packed, alone, stack = pack(head), pack(head.capsules), fc_stack(name, shape.caps_out).eval()
    pooled = torch.randn(batch, features)
    capsules = squash(torch.randn(batch, shape.caps_in, shape.dim_in))
    wide = torch.randn(batch, stack.in_features)
    comparison.add("packed head", lambda: packed(pooled), torch.inference_mode)
    comparison.add("packed layer", lambda: alone(capsules), torch.inference_mode)
    comparison.add("head eager", lambda: head(pooled), without_kernels)
    comparison.add("FC eager", lambda: stack(wide), torch.inference_mode)
    add_ort(comparison, "FC ORT", lambda: ort.fc_stack(stack.layers, wide))
    return comparison
