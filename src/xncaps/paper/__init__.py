"""The paper's tables beside ours."""

from xncaps.paper.table import Table
from xncaps.paper.tables import TABLES, paper_tables

__all__ = ["TABLES", "Table", "paper_tables"]
