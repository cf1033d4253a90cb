"""The goals for the kernels: what is aimed for, what is the least, and what a run has reached.

Each goal is judged by the worst figure that it covers, at the head shapes of the paper; figures are
compared as they are shown, to one decimal. A peer that comes in several forms (torch.compile of two
programs, two float products, two ways to int8, two tiled ports) counts by its fastest. A run that
has measured only a part of what a goal covers can show that it is missed, not that it is met.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xncaps.bench.rows import Row

HEAD_SHAPES = ("mb", "rn")
CALLS = 6
"""Head shapes times batch sizes of a full run."""
COMPILE = ("compile layer", "compile bmm")
TILED = ("tiled", "tiled own signs")
FP32 = ("torch fp32", "ORT fp32")
INT8 = ("ORT int8 dynamic", "ORT int8 static")

Figures = Callable[[Sequence[Row]], tuple[list[float], int]]
"""Of the rows of a run: the figures that a goal is judged by, and how many rows they come from."""


@dataclass(frozen=True)
class Goal:
    """Something to be reached.

    Args:
        what: it is.
        floor: the least that is required.
        goal: what is aimed for.
        rows: how many rows it covers in a full run.
        figures: finds them.
        unit: of all of them.
        at_most: small figures are the good ones.
    """

    what: str
    floor: float
    goal: float
    rows: int
    figures: Figures
    unit: str = "x"
    at_most: bool = False

    def judge(self, rows: Sequence[Row]) -> "Verdict":
        """What these rows say about it."""
        found, count = self.figures(rows)
        reached = (min(found), max(found)) if found else None
        return Verdict(self, reached, is_whole=count >= self.rows)

    def reaches(self, value: float, mark: float) -> bool:
        """Whether a figure is as good as a mark."""
        if self.at_most:
            return (round(value, 1) if value >= 1 else value) <= mark
        return round(value, 1) >= mark

    def show(self, value: float) -> str:
        """A figure with its unit."""
        return f"{value:.1f}{self.unit}" if value >= 1 else f"{value:.2g}{self.unit}"


@dataclass(frozen=True)
class Verdict:
    """A goal, the smallest and largest figure that a run has for it, and whether these are all."""

    goal: Goal
    reached: tuple[float, float] | None
    is_whole: bool

    @property
    def worst(self) -> float | None:
        if self.reached is None:
            return None
        return self.reached[1 if self.goal.at_most else 0]

    @property
    def floor_met(self) -> bool | None:
        return self.meets(self.goal.floor)

    @property
    def goal_met(self) -> bool | None:
        return self.meets(self.goal.goal)

    def meets(self, mark: float) -> bool | None:
        """Whether all figures are as good as a mark; None where that cannot be said."""
        if self.worst is None:
            return None
        reaches = self.goal.reaches(self.worst, mark)
        return None if reaches and not self.is_whole else reaches

    def cells(self) -> list[object]:
        """As a row of a table."""
        goal = self.goal
        if self.reached is None:
            reached = "not measured"
        else:
            shown = [goal.show(value) for value in self.reached]
            reached = shown[0] if shown[0] == shown[1] else " to ".join(shown)
            reached += "" if self.is_whole else " (a part)"
        marks = [goal.show(goal.floor), goal.show(goal.goal)]
        return [goal.what, *marks, reached, self.floor_met, self.goal_met]

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "what": self.goal.what,
            "floor": self.goal.floor,
            "goal": self.goal.goal,
            "unit": self.goal.unit.strip(),
            "worst": self.worst,
            "range": self.reached,
            "is_whole": self.is_whole,
            "floor_met": self.floor_met,
            "goal_met": self.goal_met,
        }


def ratios(
    group: str,
    layer: str,
    peers: Sequence[str],
    shapes: Sequence[str] | None = HEAD_SHAPES,
    batches: Sequence[int] | None = None,
) -> Figures:
    """How many times as fast as the fastest of these peers ours is, in each comparison."""

    def find(rows: Sequence[Row]) -> tuple[list[float], int]:
        best: dict[tuple[str, int], float] = {}
        count = 0
        for row in rows:
            if (
                (row.group, row.layer) == (group, layer)
                and row.what in peers
                and row.ratio is not None
                and (shapes is None or row.shape in shapes)
                and (batches is None or row.batch in batches)
            ):
                key = (row.shape, row.batch)
                best[key] = min(best.get(key, row.ratio), row.ratio)
                count += 1
        return list(best.values()), count

    return find


def step_megabytes(layer: str) -> Figures:
    """What a native training step takes."""

    def find(rows: Sequence[Row]) -> tuple[list[float], int]:
        found = [
            row.memory_bytes / 1e6
            for row in rows
            if (row.group, row.layer, row.what) == ("training", layer, "native")
            and row.memory_bytes is not None
        ]
        return found, len(found)

    return find


def weights_smaller(rows: Sequence[Row]) -> tuple[list[float], int]:
    """How many times as small XnODR's weights are, packed with float16 scales."""
    sizes = {
        (row.shape, row.what): row.memory_bytes
        for row in rows
        if (row.group, row.layer) == ("inference", "XnODR")
        and row.shape in HEAD_SHAPES
        and row.memory_bytes
    }
    found = [
        sizes[shape, "native"] / packed
        for (shape, what), packed in sizes.items()
        if what == "packed fp16" and (shape, "native") in sizes
    ]
    return found, len(found)


def half_differences(rows: Sequence[Row]) -> tuple[list[float], int]:
    """How far XnODR's outputs are off with float16 scales."""
    found = [
        row.difference
        for row in rows
        if (row.group, row.layer, row.what) == ("inference", "XnODR", "packed fp16")
        and row.shape in HEAD_SHAPES
        and row.difference is not None
    ]
    return found, len(found)


def call_us(what: str) -> Figures:
    """What a call takes that has nothing to compute."""

    def find(rows: Sequence[Row]) -> tuple[list[float], int]:
        found = [
            row.us_per_sample
            for row in rows
            if (row.group, row.what) == ("calls", what) and row.us_per_sample is not None
        ]
        return found, len(found)

    return find


def _against_fc(shape: str, batch: int, floor: float, goal: float) -> Goal:
    what = f"XnODR against the FC stack in ONNX Runtime, {shape}, batch {batch}"
    return Goal(what, floor, goal, 1, ratios("inference", "XnODR", ["FC ORT"], [shape], [batch]))


def _against_compile(layer: str, floor: float, goal: float) -> Goal:
    figures = ratios("inference", layer, COMPILE)
    return Goal(f"{layer} against torch.compile", floor, goal, 2 * CALLS, figures)


def _step(layer: str, floor: float) -> Goal:
    figures = ratios("training", layer, COMPILE)
    return Goal(f"{layer} training step against torch.compile", floor, 5, 2, figures)


def _memory(layer: str) -> Goal:
    what = f"{layer} training step, memory above the inputs"
    return Goal(what, 10, 10, 2, step_megabytes(layer), unit=" MB", at_most=True)


def _product(
    what: str, peers: Sequence[str], batches: Sequence[int], floor: float, goal: float
) -> Goal:
    rows = len(peers) * len(batches)
    return Goal(what, floor, goal, rows, ratios("xnor", "XnorLinear", peers, None, batches))


def _convolution(what: str, peers: Sequence[str], mark: float) -> Goal:
    what = f"3x3 XNOR convolution against the best {what}"
    return Goal(what, mark, mark, len(peers), ratios("xnor", "XnorConv2d", peers, None))


GOALS: tuple[Goal, ...] = (
    _against_fc("mb", 1, 8, 12),
    _against_fc("rn", 1, 18, 28),
    _against_fc("mb", 256, 2.4, 3.3),
    _against_fc("rn", 256, 4, 5.5),
    _against_compile("XnODR", 7.4, 12),
    _against_compile("CapsFC", 3.8, 6),
    _against_compile("XnIDR", 3.8, 6),
    Goal("XnODR against the tiled port", 150, 300, 2 * CALLS, ratios("inference", "XnODR", TILED)),
    Goal(  # the prototypes have one figure for this, which is that of their largest batch
        "XnODR against broadcast, batch 256",
        100,
        100,
        len(HEAD_SHAPES),
        ratios("inference", "XnODR", ["broadcast"], batches=[256]),
    ),
    _step("CapsFC", 3.3),
    _step("XnODR", 1.9),
    _step("XnIDR", 1.9),
    *(_memory(layer) for layer in ("CapsFC", "XnODR", "XnIDR")),
    _product("XNOR product against the best fp32, 1 row", FP32, [1], 47, 80),
    _product("XNOR product against the best fp32, 16 and 256 rows", FP32, [16, 256], 10.5, 13),
    _product("XNOR product against the best int8", INT8, [1, 16, 256], 5.2, 6),
    _convolution("fp32", FP32, 10.7),
    _convolution("int8", INT8, 5.3),
    Goal("XnODR weights, packed with fp16 scales, smaller", 10.7, 10.7, 2, weights_smaller),
    Goal("XnODR outputs off with fp16 scales", 5e-4, 5e-4, CALLS, half_differences, "", True),
    Goal("Call of a packed layer with nothing to compute", 2, 2, 1, call_us("packed"), " us", True),
    Goal("Call of the op with nothing to compute", 8, 8, 1, call_us("op"), " us", True),
)
