"""A table of published figures beside ours, and when the two agree."""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from xncaps.text import text_table


@dataclass
class Table:
    """One table: ``columns`` names the cells of each row, ``notes`` say what a reader must know.

    Prints as text.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[object, ...]]
    notes: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The table for JSON: each row by the names of its columns."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"name": self.name, "title": self.title, "rows": rows, "notes": self.notes}

    def __str__(self) -> str:
        parts = [f"{self.title} [{self.name}]", text_table(self.columns, self.rows)]
        if self.notes:
            parts.append(fill(self.notes, 100))
        return "\n\n".join(parts)


def parse(figure: str) -> tuple[float, float]:
    """A published figure as a number, and the size of its last digit.

    >>> parse("3.05M"), parse("41K"), parse("75.52%")
    ((3050000.0, 10000.0), (41000.0, 1000.0), (75.52, 0.01))
    """
    scale = {"K": 1e3, "M": 1e6, "B": 1e9}.get(figure[-1], 1.0)
    digits = figure.rstrip("KMB%")
    decimals = len(digits.partition(".")[2])
    return float(digits) * scale, scale / 10**decimals


def matches(figure: str, ours: float) -> bool:
    """Whether our number, rounded to the digits of the published one, is the published one.

    >>> matches("3.05M", 3045258), matches("23.85M", 23862320)
    (True, False)
    """
    value, step = parse(figure)
    return round(value / step) == round(ours / step)
