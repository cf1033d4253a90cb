"""Count what a network holds and does, float and binary apart.

``summary`` runs the network once on an empty image and adds up what ``costs.FORMULAS`` says of
every operation it met.
"""

import csv
import io
import json
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from xncaps.costs import FORMULAS, Work, layer_formula
from xncaps.deploy import Affine
from xncaps.deploy.pack import packed_sizes
from xncaps.deploy.packed import Packed
from xncaps.errors import InputError, InputTypeError, brief, check_size, message
from xncaps.text import text_table


@dataclass
class Row:
    """One layer of a summary; the last row of a table holds the totals.

    Attributes:
        name: the layer's name in the network.
        type: its class.
        output: shape of what it gives for one image; empty if it was not called.
        params: numbers it holds itself; a tensor shared by two layers counts once.
        trainable_params: those of them that learn.
        macs: multiply-accumulates on floats.
        binary_ops: multiply-accumulates on single bits.
        bytes: the parameters as float32, and the buffers of what packing leaves alone.
        packed_bytes: what it holds in the packed copy (``pack``): binary weights in bits, batch
            normalisation folded.
        routing_bytes: peak memory of the routing loop, float32; of a network the largest.
    """

    name: str
    type: str = ""
    output: tuple[int, ...] = ()
    params: int = 0
    trainable_params: int = 0
    macs: int = 0
    binary_ops: int = 0
    bytes: int = 0
    packed_bytes: int = 0
    routing_bytes: int = 0


COLUMNS = tuple(column.name for column in fields(Row))
NUMBERS = COLUMNS[3:]
HEADINGS = {
    "name": "layer",
    "trainable_params": "trainable",
    "macs": "MACs",
    "binary_ops": "binary ops",
    "packed_bytes": "packed bytes",
    "routing_bytes": "routing bytes",
}


@dataclass
class Summary:
    """The rows of :func:`summary`, and their totals as attributes. Prints as a table.

    Attributes:
        rows: one for each layer that holds parameters or does counted work.
        uncounted: layers with weights that ran and did nothing that has a formula.
    """

    rows: list[Row] = field(default_factory=list)
    uncounted: list[str] = field(default_factory=list)

    @property
    def total(self) -> Row:
        sums = {name: sum(getattr(row, name) for row in self.rows) for name in NUMBERS}
        sums["routing_bytes"] = max((row.routing_bytes for row in self.rows), default=0)
        return Row(name="total", **sums)

    @property
    def params(self) -> int:
        return self.total.params

    @property
    def trainable_params(self) -> int:
        return self.total.trainable_params

    @property
    def macs(self) -> int:
        return self.total.macs

    @property
    def binary_ops(self) -> int:
        return self.total.binary_ops

    @property
    def bytes(self) -> int:
        return self.total.bytes

    @property
    def packed_bytes(self) -> int:
        return self.total.packed_bytes

    @property
    def routing_bytes(self) -> int:
        return self.total.routing_bytes

    def to_json(self) -> str:
        """The rows and totals as JSON."""
        total = {name: getattr(self.total, name) for name in NUMBERS}
        rows = [asdict(row) for row in self.rows]
        return json.dumps({**total, "uncounted": self.uncounted, "rows": rows}, indent=2)

    def to_csv(self) -> str:
        """The rows as CSV, the totals in the last one."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in [*self.rows, self.total]:
            shape = "x".join(map(str, row.output))
            writer.writerow([row.name, row.type, shape, *(getattr(row, n) for n in NUMBERS)])
        return text.getvalue()

    def __str__(self) -> str:
        head = [HEADINGS.get(name, name) for name in COLUMNS]
        body = [[getattr(row, name) for name in COLUMNS] for row in [*self.rows, self.total]]
        table = text_table(head, body, total=True)
        if self.uncounted:
            table += f"\n\nNo work is counted in: {', '.join(self.uncounted)}."
        return table


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds the work of every operation to the innermost module that is running."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running: list[nn.Module] = []
        self.work: dict[nn.Module, list[Work]] = defaultdict(list)
        self.outputs: dict[nn.Module, Any] = {}

    def enter(self, module: nn.Module, args: Any) -> None:
        self.running.append(module)

    def leave(self, module: nn.Module, args: Any, out: Any) -> None:
        self.running.pop()
        self.outputs[module] = out
        formula = layer_formula(module)
        if formula is not None:
            self.work[module].append(formula(module, out))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        counted_whole = any(layer_formula(module) is not None for module in self.running)
        if self.running and func in FORMULAS and not counted_whole:
            self.work[self.running[-1]].append(FORMULAS[func](args, out))
        return out


def summary(model: nn.Module, input_size: tuple[int, ...]) -> Summary:
    """Count a network for one input, per layer and in total, float and binary work apart.

    The network runs once on zeros, in eval mode and without gradients, on its own device (a network
    on the ``meta`` device costs nothing). What ``costs.FORMULAS`` names counts, in any module;
    batch normalisation, activations, pooling and the making of signs and scales do not. Layers with
    weights and no counted work are listed in ``uncounted``.

    Args:
        model: the network.
        input_size: shape of one input without the batch axis, such as ``(1, 28, 28)``.

    Returns:
        A :class:`Summary` with ``params``, ``trainable_params``, ``macs``, ``binary_ops``,
        ``bytes``, ``packed_bytes``, ``routing_bytes`` and ``rows``.

    >>> print(summary(nn.Sequential(nn.Linear(4, 2)), (4,)).macs)
    8
    """
    where = "summary"
    if not isinstance(model, nn.Module):
        raise InputTypeError(message(where, "model", "be an nn.Module", type(model).__name__))
    if not isinstance(input_size, tuple | list) or not input_size:
        requirement = "be the sizes of one input, such as (1, 28, 28)"
        raise InputError(message(where, "input_size", requirement, brief(input_size)))
    size = tuple(check_size(where, "input_size", n) for n in input_size)
    counter = _run(model, size)

    rows: list[Row] = []
    uncounted: list[str] = []
    seen: set[Tensor] = set()
    sizes = packed_sizes(model)
    for name, module in model.named_modules():
        counted_whole = layer_formula(module) is not None
        own = [p for p in module.parameters(recurse=counted_whole) if p not in seen]
        seen.update(own)
        parts = [module, *(module.modules() if counted_whole else ())]
        held = [sizes.pop(part, (0, 0)) for part in parts]  # of shared parts once
        packed = sum(size for _, size in held)
        work = counter.work.get(module, [])
        if not own and not work and not packed:
            continue
        params = sum(p.numel() for p in own)
        if isinstance(module, Packed | Affine):
            params = module.params
        if not work and module in counter.outputs and any(p.dim() > 1 for p in own):
            uncounted.append(f"{name or 'the network itself'} ({type(module).__name__})")
        out = counter.outputs.get(module)
        out = out[0] if isinstance(out, tuple) and out else out
        rows.append(
            Row(
                name=name or type(model).__name__,
                type=type(module).__name__,
                output=tuple(out.shape[1:]) if isinstance(out, Tensor) else (),
                params=params,
                trainable_params=sum(p.numel() for p in own if p.requires_grad),
                macs=sum(w.macs for w in work),
                binary_ops=sum(w.binary_ops for w in work),
                bytes=sum(size for size, _ in held),
                packed_bytes=packed,
                routing_bytes=max((w.routing_bytes for w in work), default=0),
            )
        )
    return Summary(rows, uncounted)


def _run(model: nn.Module, size: tuple[int, ...]) -> _Counter:
    counter = _Counter()
    parameter = next(model.parameters(), torch.empty(0))
    fused = torch.backends.mha.get_fastpath_enabled()
    modes = {module: module.training for module in model.modules()}
    with ExitStack() as stack:
        for module in modes:
            stack.callback(module.register_forward_pre_hook(counter.enter).remove)
            stack.callback(module.register_forward_hook(counter.leave).remove)
        try:
            model.eval()
            # Fused attention would hide its matrix products.
            stack.callback(torch.backends.mha.set_fastpath_enabled, fused)
            torch.backends.mha.set_fastpath_enabled(False)
            with torch.no_grad(), counter:
                model(torch.zeros(1, *size, device=parameter.device, dtype=parameter.dtype))
        finally:
            for module, mode in modes.items():
                module.training = mode
    return counter
