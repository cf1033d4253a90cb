"""The capsule layers in inference against everything else that computes the same, or stands there.

The layer alone is timed, on capsules as they come: PrimaryCaps is not in these figures (see
``heads.py``). The FC stack is what the whole head replaces.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from xncaps import kernels
from xncaps.bench import ort
from xncaps.bench.baselines import FC_STACKS, LAYERS, Bmm, broadcast, fc_stack, tiled, tiled_bytes
from xncaps.bench.machine import Rates, Shape, capsule_work
from xncaps.bench.plan import Plan
from xncaps.bench.rows import Comparison, Row
from xncaps.binarizers import sign
from xncaps.capsules import squash
from xncaps.deploy import pack
from xncaps.heads import FCHead
from xncaps.layers import CapsuleLinear

MOST_BYTES = 1 << 30
"""What a peer may take; one that needs more is left out."""
TOO_BIG, NOT_BUILT = "too big", "not built"

Tell = Callable[[str], None]


@contextmanager
def without_kernels() -> Iterator[None]:
    """Inference on the layers' own PyTorch code."""
    with torch.inference_mode(), kernels.disabled():
        yield


def measure(plan: Plan, rates: Rates | None, tell: Tell) -> Iterator[Row]:
    """Compare every layer at every shape and batch of the plan."""
    for name, shape in plan.shapes.items():
        for layer in plan.layers:
            for batch in plan.batches:
                tell(f"inference: {name} {layer}, batch {batch}")
                yield from Inference(name, shape, layer, batch, rates).compare(plan)


class Inference:
    """One comparison: a layer of a shape at a batch size."""

    def __init__(
        self, name: str, shape: Shape, layer: str, batch: int, rates: Rates | None
    ) -> None:
        self.name, self.shape, self.layer, self.batch, self.rates = name, shape, layer, batch, rates
        self.module: CapsuleLinear = LAYERS[layer](
            shape.caps_in, shape.dim_in, shape.caps_out, shape.dim_out
        ).eval()
        self.x = squash(torch.randn(batch, shape.caps_in, shape.dim_in))
        self.comparison = Comparison("inference", name, layer, batch, "packed")

    def compare(self, plan: Plan) -> list[Row]:
        """Time the packed layer and the peers of the plan."""
        self.packed("packed", "float32")
        for peer in plan.peers:
            if PEERS[peer] is not Inference.compile or self.name in plan.compile_shapes:
                PEERS[peer](self, peer)
        return self.comparison.rows(plan.seconds)

    def packed(self, what: str, scales: str) -> None:
        """As ``xncaps.pack`` gives it; with its bytes, its distance from the layer, its bound."""
        packed = pack(self.module, scales=scales)
        difference = None
        if not self.large(self.predictions):
            with without_kernels():
                wanted = self.module(self.x)
            with torch.inference_mode():
                difference = float((packed(self.x) - wanted).abs().max())
        bound = None
        if self.rates is not None:
            flops, size = capsule_work(self.layer, self.shape, self.batch)
            bound = 1e6 * self.rates.bound(flops, size) / self.batch
        self.comparison.add(
            what,
            lambda: packed(self.x),
            torch.inference_mode,
            memory_bytes=held(packed),
            difference=difference,
            bound_us=bound,
        )

    def half(self, what: str) -> None:
        if self.module.binarizer is not None:  # no other layer has scales
            self.packed(what, "float16")

    def native(self, what: str) -> None:
        size = held(self.module)
        if kernels.native() is None:
            self.comparison.skip(what, NOT_BUILT, memory_bytes=size)
        else:
            self.comparison.add(
                what, lambda: self.module(self.x), torch.inference_mode, memory_bytes=size
            )

    def tiled(self, what: str) -> None:
        shape = self.shape
        size = tiled_bytes(self.batch, shape.caps_in, shape.caps_out, shape.dim_in, shape.dim_out)
        weight = self.module.weight.detach()
        if what == "tiled":
            self.plain(what, lambda: tiled(self.x, weight, self.layer), size)
        elif self.layer != "CapsFC":  # which has no signs
            self.plain(what, lambda: tiled(self.x, weight, self.layer, sign=sign), size)

    def broadcast(self, what: str) -> None:
        weight = self.module.weight.detach()
        size = 4 * self.batch * self.shape.weights
        self.plain(what, lambda: broadcast(self.x, weight, self.layer), size)

    def eager(self, what: str) -> None:
        if self.large(self.predictions):
            self.comparison.skip(what, TOO_BIG)
        else:
            self.comparison.add(what, lambda: self.module(self.x), without_kernels)

    def bmm(self, what: str) -> None:
        module = Bmm(self.module.weight, self.layer)
        self.plain(what, lambda: module(self.x), self.predictions)

    def compile(self, what: str) -> None:
        module = Bmm(self.module.weight, self.layer) if what.endswith("bmm") else self.module
        if self.large(self.predictions):
            self.comparison.skip(what, TOO_BIG)
        else:
            add_compiled(self.comparison, what, module, self.x)

    def fc_eager(self, what: str) -> None:
        if self.name in FC_STACKS:
            stack, features = self.stack()
            self.comparison.add(what, lambda: stack(features), torch.inference_mode)

    def fc_ort(self, what: str) -> None:
        if self.name in FC_STACKS:
            stack, features = self.stack()
            add_ort(self.comparison, what, lambda: ort.fc_stack(stack.layers, features))

    def stack(self) -> tuple[FCHead, Tensor]:
        stack = fc_stack(self.name, self.shape.caps_out).eval()
        return stack, torch.randn(self.batch, stack.in_features)

    def plain(self, what: str, call: Callable[[], object], size: int) -> None:
        """Add a peer that takes so many bytes, if that is not too much."""
        if self.large(size):
            self.comparison.skip(what, TOO_BIG)
        else:
            self.comparison.add(what, call, torch.inference_mode)

    @property
    def predictions(self) -> int:
        """Bytes of u and of a product with it: what eager code holds."""
        shape = self.shape
        return 2 * 4 * self.batch * shape.caps_in * shape.caps_out * shape.dim_out

    @staticmethod
    def large(size: int) -> bool:
        return size > MOST_BYTES


PEERS: dict[str, Callable[[Inference, str], None]] = {
    "native": Inference.native,
    "packed fp16": Inference.half,
    "tiled": Inference.tiled,
    "tiled own signs": Inference.tiled,
    "broadcast": Inference.broadcast,
    "layer eager": Inference.eager,
    "bmm eager": Inference.bmm,
    "compile layer": Inference.compile,
    "compile bmm": Inference.compile,
    "FC eager": Inference.fc_eager,
    "FC ORT": Inference.fc_ort,
}
"""What packed layers are timed against, by name.

native: the layer as it is; packed fp16: with float16 scales; tiled, broadcast, bmm eager: see
``baselines.py``; tiled own signs: with the signs that our own layers make; layer eager: the layer
without the kernels; compile: torch.compile of the two.
"""


def add_compiled(comparison: Comparison, what: str, module: nn.Module, x: Tensor) -> None:
    """Compile a module for this very shape, outside the clock, and add it."""
    torch.compiler.reset()
    compiled = torch.compile(module, dynamic=False)
    try:
        with without_kernels():
            compiled(x)
    except RuntimeError as error:  # above all where there is no C++ compiler
        comparison.skip(what, f"does not compile ({type(error).__name__})")
        return
    comparison.add(what, lambda: compiled(x), without_kernels)


def add_ort(comparison: Comparison, what: str, build: Callable[[], ort.Call]) -> None:
    """Build a graph for ONNX Runtime and add it, if that is installed."""
    if note := ort.missing():
        comparison.skip(what, note)
    else:
        comparison.add(what, build())


def held(module: nn.Module) -> int:
    """Bytes of a module's numbers."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
