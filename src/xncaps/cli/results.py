"""``xncaps results``: what the experiments say."""

import json
from pathlib import Path
from typing import Annotated

import typer

from xncaps.errors import InputError, RunError, message
from xncaps.experiments import known_rows
from xncaps.experiments.tables import fill_in, table_of, tables_of
from xncaps.system import write_whole
from xncaps.training import check_extra


def results(
    table: Annotated[
        str | None,
        typer.Option(help="Only this one: an experiment's name, tuning, claims or computing."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print for a document.")] = False,
    update: Annotated[
        list[Path] | None,
        typer.Option(help="Make the tables in this document anew. Repeatable.", dir_okay=False),
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Draw the pictures into this folder.", file_okay=False)
    ] = None,
    folder: Annotated[Path, typer.Option("--results", help="The folder of the rows.")] = Path(
        "results"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the tables of the experiments, made of the rows that their runs left.

    Example: xncaps results --table mnist
    """
    if (update or plots) and (table is not None or markdown or as_json):
        got = "also something to print"
        raise InputError(message("results", "update and plots", "stand alone", got))
    rows = known_rows(folder)
    for path in update or []:
        before = _read(path)
        after = fill_in(before, tables_of(rows))
        if after != before:
            write_whole(path, after.encode())
        typer.echo(f"{path}: {'written' if after != before else 'nothing has changed'}")
    if plots is not None:
        check_extra()
        from xncaps.experiments.latency import read_latencies
        from xncaps.experiments.plots import draw_all

        plots.mkdir(parents=True, exist_ok=True)
        for name, picture in draw_all(rows, read_latencies(folder)).items():
            write_whole(plots / name, picture)
            typer.echo(f"{plots / name}")
    if update or plots:
        return
    tables = list(tables_of(rows).values()) if table is None else [table_of(rows, table)]
    if as_json:
        typer.echo(json.dumps([each.as_dict() for each in tables], indent=2, ensure_ascii=False))
    elif markdown:
        typer.echo("\n\n".join(each.to_markdown() for each in tables))
    else:
        typer.echo("\n\n".join(str(each) for each in tables))


def _read(path: Path) -> str:
    """The text of a document, with the line ends that it has."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise RunError(f"{path}: cannot be read as UTF-8 ({error}).") from None
