"""A training step of a capsule layer, forward and backward: its time and its memory.

Memory is what a step takes at most above what is there before it (inputs, weights): the peak of
all that PyTorch's profiler sees allocated and freed, and the peak of the native kernels' own
scratch, which it does not see. The gradients of inputs and weights are part of it.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from xncaps import kernels
from xncaps.bench.baselines import LAYERS, tiled, tiled_bytes
from xncaps.bench.inference import MOST_BYTES, NOT_BUILT, TOO_BIG, Tell
from xncaps.bench.machine import Rates, Shape
from xncaps.bench.plan import Plan
from xncaps.bench.rows import Comparison, Row
from xncaps.capsules import squash

Context = Callable[[], AbstractContextManager[object]]


def measure(plan: Plan, rates: Rates | None, tell: Tell) -> Iterator[Row]:
    """Compare the steps of every layer at every shape of the plan."""
    for name in plan.train_shapes:
        for layer in plan.train_layers:
            tell(f"training: {name} {layer}, batch {plan.train_batch}")
            yield from compare(plan, name, plan.shapes[name], layer)


def compare(plan: Plan, name: str, shape: Shape, layer: str) -> list[Row]:
    """Time the layer as it is and the peers of the plan."""
    batch = plan.train_batch
    module = LAYERS[layer](shape.caps_in, shape.dim_in, shape.caps_out, shape.dim_out)
    x = squash(torch.randn(batch, shape.caps_in, shape.dim_in)).requires_grad_()
    gradient = torch.randn(batch, shape.caps_out, shape.dim_out)
    comparison = Comparison("training", name, layer, batch, "native")

    def add(what: str, forward: Callable[[Tensor], Tensor], around: Context = nullcontext) -> None:
        def step() -> None:
            x.grad = module.weight.grad = None
            forward(x).backward(gradient)  # type: ignore[no-untyped-call]

        try:
            with around():
                step()
                x.grad = module.weight.grad = None
                memory = step_bytes(step)
        except RuntimeError as error:
            if not what.startswith("compile"):
                raise
            comparison.skip(what, f"does not compile ({type(error).__name__})")
        else:
            comparison.add(what, step, around, memory_bytes=memory)

    if kernels.native() is None:
        comparison.skip("native", NOT_BUILT)
    else:
        add("native", module)
    for peer in plan.train_peers:
        if peer == "layer eager":
            add(peer, module, kernels.disabled)
        elif peer == "compile layer":
            torch.compiler.reset()
            add(peer, torch.compile(module, dynamic=False), kernels.disabled)
        elif 2 * _tiled(shape, batch) > MOST_BYTES:  # the gradient of the tiled weights as well
            comparison.skip(peer, TOO_BIG)
        else:
            add(peer, lambda x: tiled(x, module.weight, layer))
    return comparison.rows(plan.seconds)


def step_bytes(step: Callable[[], object]) -> int:
    """The most that a step holds at a time of what it allocates itself."""
    native = kernels.native()
    before = 0
    if native is not None:
        native.reset_scratch_peak()
        before = int(native.scratch_bytes())  # other threads may keep some
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    scratch = 0 if native is None else int(native.scratch_bytes()) - before
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return peak_bytes(events) + scratch


def peak_bytes(events: Iterable[dict[str, Any]]) -> int:
    """The highest sum of allocations and frees, in the order of their times, in a trace.

    >>> sizes = enumerate([4, 8, -4, 2])
    >>> peak_bytes({"name": "[memory]", "ts": t, "args": {"Bytes": n}} for t, n in sizes)
    12
    """
    allocations = sorted(
        (event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"
    )
    now = most = 0
    for _, size in allocations:
        now += size
        most = max(most, now)
    return most


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the lines to itself that the profiler's C++ code writes to standard error."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _tiled(shape: Shape, batch: int) -> int:
    return tiled_bytes(batch, shape.caps_in, shape.caps_out, shape.dim_in, shape.dim_out)
