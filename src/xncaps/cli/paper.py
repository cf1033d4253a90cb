"""``xncaps paper``: every table of the paper beside ours."""

import json
from typing import Annotated

import typer

from xncaps.paper import TABLES, paper_tables


def paper(
    table: Annotated[
        str | None, typer.Option(help=f"Only this table: {', '.join(TABLES)}.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print every table of the paper, its figures beside ours.

    Example: xncaps paper --table params
    """
    tables = paper_tables(table)
    if as_json:
        typer.echo(json.dumps([each.as_dict() for each in tables], indent=2, ensure_ascii=False))
    else:
        typer.echo("\n\n".join(str(each) for each in tables))
