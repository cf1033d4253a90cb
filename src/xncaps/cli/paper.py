"""``xncaps paper``: every table of the paper beside ours."""

import json
from typing import Annotated

import typer


def paper(
    table: Annotated[
        str | None, typer.Option(help="Only this table, such as params, flops or speed-up.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print every table of the paper, its figures beside ours.

    Example: xncaps paper --table params
    """
    from xncaps.paper import paper_tables

    tables = paper_tables(table)
    if as_json:
        typer.echo(json.dumps([each.as_dict() for each in tables], indent=2, ensure_ascii=False))
    else:
        typer.echo("\n\n".join(str(each) for each in tables))
