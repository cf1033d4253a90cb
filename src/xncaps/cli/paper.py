"""``xncaps paper``: every table of the paper beside ours."""

import json
from pathlib import Path
from typing import Annotated

import typer

from xncaps.experiments import read_accuracy
from xncaps.paper import MEASURED, TABLES, paper_tables


def paper(
    table: Annotated[
        str | None, typer.Option(help=f"Only this table: {', '.join(TABLES)}.")
    ] = None,
    results: Annotated[
        Path, typer.Option(help="The folder with the rows of our experiments.")
    ] = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print every table of the paper, its figures beside ours.

    Example: xncaps paper --table params
    """
    measured = table is None or table in MEASURED
    tables = paper_tables(table, read_accuracy(results) if measured else ())
    if as_json:
        typer.echo(json.dumps([each.as_dict() for each in tables], indent=2, ensure_ascii=False))
    else:
        typer.echo("\n\n".join(str(each) for each in tables))
