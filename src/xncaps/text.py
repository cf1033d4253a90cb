"""Tables as plain text, for terminals and logs; and JSON that every reader takes."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any


def json_text(values: Any) -> str:
    """Values as indented JSON in plain ASCII; what is no finite number becomes null.

    >>> json_text([1.5, float("nan")])
    '[\\n  1.5,\\n  null\\n]'
    """
    return json.dumps(_finite(values), indent=2, allow_nan=False)


def shown(text: str) -> str:
    """A text as a terminal can show it on one line.

    >>> shown("a\\nb")
    'a\\\\nb'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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

    def to_markdown(self) -> str:
        """The table for a document, without its title and notes."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(map(format_cell, line))} |" for line in lines)

    def __str__(self) -> str:
        parts = [f"{self.title} [{self.name}]", text_table(self.columns, self.rows)]
        if self.notes:
            parts.append(fill(self.notes, 100))
        return "\n\n".join(parts)


def text_table(
    headings: Sequence[str], rows: Sequence[Sequence[object]], *, total: bool = False
) -> str:
    """Columns in line: numbers to the right with thousands separated, everything else to the left.

    Args:
        headings: one for each column.
        rows: the cells; None shows as ``-``, a shape as ``16x28x28``, a boolean as yes or no.
        total: draw a line above the last row.

    >>> print(text_table(["layer", "params"], [["fc", 1290], ["total", 1290]], total=True))
    layer  params
    -------------
    fc      1,290
    -------------
    total   1,290
    """
    cells = [[format_cell(value) for value in row] for row in rows]
    columns = list(zip(headings, *cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [
        any(_is_number(row[i]) for row in rows)
        and all(_is_number(row[i]) or row[i] is None for row in rows)
        for i in range(len(headings))
    ]
    lines = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in [list(headings), *cells]
    ]
    rule = "-" * max(map(len, lines))
    if total:
        lines.insert(-1, rule)
    return "\n".join([lines[0], rule, *lines[1:]])


def format_cell(value: object) -> str:
    """One value as a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
