"""What a run of ``xncaps bench`` shows: tables of ratios, and the goals beside what it reached."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xncaps.bench.goals import GOALS
from xncaps.bench.machine import Rates
from xncaps.bench.rows import Row
from xncaps.text import text_table

TITLES = {
    "inference": "Inference: a capsule layer, without PrimaryCaps",
    "training": "Training step, forward and backward: memory is what it allocates above its inputs",
    "xnor": "XNOR product and convolution, packing of the activations included",
    "primary": "Inference: a whole head, with PrimaryCaps and lengths",
    "network": "The whole network",
    "calls": "A call that has nothing to compute: one capsule with one number",
}


@dataclass(frozen=True)
class Report:
    """All figures of a run.

    Args:
        facts: of the machine and the versions.
        rates: what the machine can do at best; None where that was not measured.
        rows: the figures.
        seconds: how long it took.
    """

    facts: dict[str, Any]
    rates: Rates | None
    rows: tuple[Row, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "facts": self.facts,
            "rates": None if self.rates is None else self.rates.to_dict(),
            "seconds": self.seconds,
            "rows": [row.to_dict() for row in self.rows],
            "goals": [goal.judge(self.rows).to_dict() for goal in GOALS],
        }

    def __str__(self) -> str:
        facts = self.facts
        runtime = facts["onnxruntime"] or "none"
        head = (
            f"{facts['cpu']}, 1 thread, kernel {facts['kernel']}; torch {facts['torch']}, "
            f"ONNX Runtime {runtime}, Python {facts['python']}, xncaps {facts['xncaps']}\n"
            "fastest call of each, all of a line timed in turns; 5.0x: 5 times as long as ours"
        )
        parts = [head if self.rates is None else f"{head}\n{self.rates}"]
        for group, title in TITLES.items():
            rows = [row for row in self.rows if row.group == group]
            if rows:
                parts.append(f"{title}\n\n{TABLES[group](rows)}{notes(rows)}")
        parts.append(f"Goals\n\n{goal_table(self.rows)}")
        parts.append(f"took {self.seconds:.0f} s")
        return "\n\n".join(parts)


def ratio_table(rows: Sequence[Row]) -> str:
    """A line for each comparison: our time, its share of the bound, and the peers' ratios."""
    ours = rows[0].what
    peers = list(dict.fromkeys(row.what for row in rows if row.what != ours))
    bounded = any(row.share is not None for row in rows)
    lines = []
    for (shape, layer, batch), group in by_comparison(rows).items():
        first = group[ours]
        line: list[object] = [shape, layer, batch, microseconds(first)]
        if bounded:
            line.append("" if first.share is None else f"{first.share:.0%}")
        line += [ratio(group[peer]) if peer in group else "" for peer in peers]
        lines.append(line)
    bound = ["of bound"] if bounded else []
    headings = ["shape", "layer", "batch", f"{ours} us/sample", *bound, *peers]
    return text_table(headings, lines)


def step_table(rows: Sequence[Row]) -> str:
    """A line for each way to take a step."""
    lines = [
        [
            *(row.shape, row.layer, row.batch, row.what),
            None if row.us_per_sample is None else row.us_per_sample * row.batch / 1000,
            ratio(row),
            None if row.memory_bytes is None else f"{row.memory_bytes / 1e6:,.1f}",
        ]
        for row in rows
    ]
    return text_table(["shape", "layer", "batch", "what", "ms a step", "ratio", "MB"], lines)


def network_table(rows: Sequence[Row]) -> str:
    """A line for each head: images a second."""
    lines: list[list[object]] = []
    for (shape, head, batch), group in by_comparison(rows).items():
        eager, packed = (1e6 / (group[what].us_per_sample or 1e6) for what in ("eager", "packed"))
        lines.append([shape, head, batch, eager, packed, f"{packed / eager:.2f}x"])
    headings = ["network", "head", "batch", "eager images/s", "packed images/s", "faster"]
    return text_table(headings, lines)


def call_table(rows: Sequence[Row]) -> str:
    """A line for each way to call."""
    lines = [[row.what, microseconds(row), ratio(row)] for row in rows]
    return text_table(["what", "us a call", f"times {rows[0].what}"], lines)


TABLES = {
    "inference": ratio_table,
    "training": step_table,
    "xnor": ratio_table,
    "primary": ratio_table,
    "network": network_table,
    "calls": call_table,
}


def goal_table(rows: Sequence[Row]) -> str:
    """Every goal, its floor, and what these rows reach."""
    headings = ["", "floor", "goal", "reached", "floor met", "goal met"]
    return text_table(headings, [goal.judge(rows).cells() for goal in GOALS])


def goal_markdown(runs: Sequence[tuple[Mapping[str, str], Sequence[Row]]]) -> str:
    """The same for the README, a column for each run; what none has measured is left out."""
    kernels = [facts["kernel"] for facts, _ in runs]
    names = [
        kernel if kernels.count(kernel) == 1 else f"{kernel} ({kernels[: k + 1].count(kernel)})"
        for k, kernel in enumerate(kernels)
    ]
    headings = ["", "floor", "goal", *names]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for goal in GOALS:
        verdicts = [goal.judge(rows) for _, rows in runs]
        if any(verdict.reached is not None for verdict in verdicts):
            cells = [verdict.cells() for verdict in verdicts]
            reached = [f"**{cell[3]}**" if cell[4] is False else f"{cell[3]}" for cell in cells]
            lines.append(f"| {goal.what} | {cells[0][1]} | {cells[0][2]} | {' | '.join(reached)} |")
    runs_of = zip(names, runs, strict=True)
    lines += ["", "; ".join(f"{n}: {f['cpu']}, {f['date'][:10]}" for n, (f, _) in runs_of)]
    return "\n".join(lines)


def by_comparison(rows: Iterable[Row]) -> dict[tuple[str, str, int], dict[str, Row]]:
    """The rows of each comparison, by what they are of."""
    found: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row.shape, row.layer, row.batch), {})[row.what] = row
    return found


def microseconds(row: Row) -> str:
    """A time, or why there is none."""
    return short(row.note) if row.us_per_sample is None else f"{row.us_per_sample:,.2f}"


def ratio(row: Row) -> str:
    """A ratio, or why there is none; a time where there is nothing to divide it by."""
    if row.us_per_sample is None:
        return short(row.note)
    if row.ratio is None:
        return f"{row.us_per_sample:,.2f} us"
    return f"{row.ratio:,.1f}x" if row.ratio >= 1 else f"{row.ratio:.2g}x"


def short(note: str) -> str:
    """A note as a cell shows it, its explanation left to the lines below the table."""
    return note.partition(" (")[0]


def notes(rows: Iterable[Row]) -> str:
    """The explanations, once each."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if short(row.note) != row.note and row.what not in found.setdefault(row.note, []):
            found[row.note].append(row.what)
    return "".join(f"\n{', '.join(whats)}: {note}" for note, whats in found.items())
