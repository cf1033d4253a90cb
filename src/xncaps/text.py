"""Tables as plain text, for terminals and logs."""

from collections.abc import Sequence


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
