"""The paper recounted: its formulas, its figures, and every table of it beside ours."""

from collections.abc import Sequence

from xncaps.errors import look_up
from xncaps.experiments import Row
from xncaps.paper.measured import MEASURED
from xncaps.paper.tables import COUNTED
from xncaps.text import Table

__all__ = ["MEASURED", "TABLES", "paper_tables"]

TABLES = (*MEASURED, *COUNTED)


def paper_tables(name: str | None = None, rows: Sequence[Row] = ()) -> list[Table]:
    """All tables, or the one that is named.

    Args:
        name: of a table.
        rows: of our experiments, for the tables that are measured.

    >>> print(paper_tables("fc-structure")[0].rows[1])
    ('MobileNetV2', '512, 256, 128, 10', '512, 256, 128, 10', True)
    """
    if name is not None:
        look_up("paper", "table", name, {**MEASURED, **COUNTED})
    chosen = TABLES if name is None else (name,)
    return [MEASURED[each](rows) if each in MEASURED else COUNTED[each]() for each in chosen]
