"""The machine: what it is called, how fast it could be at best, and what that allows a layer.

The bound of a call is the longer of two times that nothing can beat on one thread::

    bound = max(flops / peak, bytes / rate)

``peak`` is what a loop of independent fused multiply-adds reaches, ``rate`` is how fast a buffer is
read that lies in the same level of the memory (L1, L2, L3 or DRAM) as the bytes of the call; both
are measured. The bytes are those that must move: weights, input and output, once. The flops are
those of :func:`capsule_work`.
"""

import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from xncaps import __version__, kernels
from xncaps.bench import ort
from xncaps.bench.baselines import ITERATIONS
from xncaps.system import commit, cpu_name

EXP_FLOPS = 16
"""Of a softmax term: multiply-adds for range (2) and polynomial (5), the sum, the quotient."""
BITS_A_LANE = 32
"""A binary multiply-add costs this part of a float one: a register holds so many times as many."""
CACHE_BYTES = {"L1": 32 << 10, "L2": 512 << 10, "L3": 16 << 20}
"""Taken where the system does not tell."""
RATE_SECONDS = 0.05


@dataclass(frozen=True)
class Shape:
    """Sizes of a capsule layer."""

    caps_in: int
    dim_in: int
    caps_out: int
    dim_out: int

    @property
    def weights(self) -> int:
        return self.caps_in * self.caps_out * self.dim_in * self.dim_out

    def __str__(self) -> str:
        return f"{self.caps_in}x{self.dim_in}->{self.caps_out}x{self.dim_out}"


@dataclass(frozen=True)
class Level:
    """A level of the memory: its size in bytes (None: all the rest), and bytes read a second."""

    name: str
    size: int | None
    rate: float


@dataclass(frozen=True)
class Rates:
    """What one thread can do at best: floating-point operations a second, and bytes a second.

    Args:
        flops: the measured peak.
        levels: of the memory, the smallest first; the last one holds anything.
    """

    flops: float
    levels: tuple[Level, ...]

    def bound(self, flops: float, size: float) -> float:
        """The seconds that so many operations on so many bytes take at least.

        >>> rates = Rates(1e9, (Level("L1", 1000, 1e9), Level("DRAM", None, 1e8)))
        >>> rates.bound(2000, 1000), rates.bound(2000, 1001)
        (2e-06, 1.001e-05)
        """
        level = next(each for each in self.levels if each.size is None or size <= each.size)
        return max(flops / self.flops, size / level.rate)

    def to_dict(self) -> dict[str, float]:
        """As plain values, for JSON."""
        rates = {f"{level.name}_bytes_per_second": level.rate for level in self.levels}
        return {"flops_per_second": self.flops, **rates}

    def __str__(self) -> str:
        parts = [f"{level.name} {level.rate / 1e9:,.0f} GB/s" for level in self.levels]
        return f"FMA peak {self.flops / 1e9:,.0f} GFLOP/s, {', '.join(parts)} (measured, 1 thread)"


def measure_rates() -> Rates | None:
    """Measure this machine; None where the native kernels are not built."""
    native = kernels.native()
    if native is None:
        return None
    sizes = cache_sizes()
    levels = [
        # Half of a level: the whole of it would be shared with code and other data.
        Level(name, size, native.read_rate(size // 2, RATE_SECONDS))
        for name, size in sizes.items()
    ]
    beyond = max(4 * sizes["L3"], 64 << 20)
    levels.append(Level("DRAM", None, native.read_rate(beyond, 2 * RATE_SECONDS)))
    return Rates(native.fma_rate(2 * RATE_SECONDS), tuple(levels))


def cache_sizes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> dict[str, int]:
    """Bytes of L1 (data), L2 and L3, as the system tells, else usual ones."""
    sizes = dict(CACHE_BYTES)
    for index in sorted(folder.glob("index*")):
        try:
            kind, level, size = (
                (index / name).read_text(encoding="utf-8").strip()
                for name in ("type", "level", "size")
            )
            if kind != "Instruction" and f"L{level}" in sizes:
                sizes[f"L{level}"] = int(size.removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    return sizes


def capsule_work(layer: str, shape: Shape, batch: int) -> tuple[float, float]:
    """The flops and bytes of a capsule layer's call.

    Of each prediction ``u_ije``: dim_in multiply-adds (binary ones in XnODR, and one for the
    scale), one for the weighted sum of each iteration, and one for each agreement, of which there
    is one less than iterations (binary in XnIDR, and one for the mean of abs(u)). Of each coupling
    but the first iteration's: a softmax term. A multiply-add is two flops. Weights are floats; in
    XnODR bits, and a float scale for each ``ije``.

    >>> capsule_work("CapsFC", Shape(1, 1, 1, 1), 1)
    (44.0, 12.0)
    """
    predictions = batch * shape.caps_in * shape.caps_out * shape.dim_out
    outside, inside = float(shape.dim_in), float(ITERATIONS - 1)
    weight_bytes = 4.0 * shape.weights
    if layer == "XnODR":
        outside = shape.dim_in / BITS_A_LANE + 1
        weight_bytes = shape.weights / 8 + 4 * shape.weights / shape.dim_in
    if layer == "XnIDR":
        inside = inside / BITS_A_LANE + 1
    terms = (ITERATIONS - 1) * predictions / shape.dim_out
    flops = 2 * predictions * (outside + ITERATIONS + inside) + EXP_FLOPS * terms
    moved = 4 * batch * (shape.caps_in * shape.dim_in + shape.caps_out * shape.dim_out)
    return flops, weight_bytes + moved


def facts() -> dict[str, Any]:
    """What a figure depends on, besides the code: when, where and with what it was measured."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "onnxruntime": ort.runtime_version(),
        "xncaps": __version__,
        "kernel": kernels.selected(),
    }
