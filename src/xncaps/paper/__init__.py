"""The paper's tables beside ours."""

from xncaps.paper.tables import TABLES, paper_tables

__all__ = ["TABLES", "paper_tables"]
