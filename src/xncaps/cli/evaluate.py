"""``xncaps evaluate``: how good a trained network is."""

import json
from pathlib import Path
from typing import Annotated

import typer

from xncaps.cli.display import make_display
from xncaps.text import text_table
from xncaps.training import load_run
from xncaps.training.apply import evaluate_run


def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    data: Annotated[str | None, typer.Option(help="Other data that show the same classes.")] = None,
    split: Annotated[str, typer.Option(help="test, validation or train.")] = "test",
    data_dir: Annotated[Path | None, typer.Option(help="Look for data here first.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print all metrics of a run's network, and the figures of each class.

    Example: xncaps evaluate runs/first --data mnist
    """

    def say(line: str) -> None:
        typer.echo(line, err=True)

    loaded = load_run(run, say)
    display = make_display()
    try:
        outcome = evaluate_run(
            loaded,
            data,
            split,
            data_dir=data_dir,
            say=say,
            progress=None if as_json else display.progress,
        )
    finally:
        display.end()
    if as_json:
        source = {"run": str(run), "data": data or loaded.config.data, "split": split}
        typer.echo(json.dumps({**source, **outcome.to_dict()}, indent=2))
        return
    names = {"top1": "accuracy", "paper_top2": "the paper's top-2"}
    typer.echo(f"{outcome.count:,} {split} images of {data or loaded.config.data}")
    if outcome.loss is not None:
        typer.echo(f"loss {outcome.loss:.4f}")
    for name, value in outcome.metrics.items():
        typer.echo(f"{names.get(name, name.replace('_', ' '))} {value:.2%}")
    rows = [
        [
            row["class"],
            row["count"],
            *(None if row[key] is None else f"{row[key]:.2%}" for key in ("recall", "precision")),
        ]
        for row in outcome.per_class
    ]
    typer.echo("\n" + text_table(["class", "images", "recognised", "right when seen"], rows))
