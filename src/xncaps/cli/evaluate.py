"""``xncaps evaluate``: how good a trained network is."""

from pathlib import Path
from typing import Annotated

import typer

from xncaps.cli.display import make_display
from xncaps.text import json_text, shown, text_table


def evaluate(
    model: Annotated[
        Path, typer.Argument(help="A run's folder, a packed file or an ONNX file.", metavar="MODEL")
    ],
    data: Annotated[str | None, typer.Option(help="Other data that show the same classes.")] = None,
    split: Annotated[str, typer.Option(help="test, validation or train.")] = "test",
    data_dir: Annotated[Path | None, typer.Option(help="Look for data here first.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print all metrics of a trained network, and the figures of each class.

    Example: xncaps evaluate runs/first --data mnist
    """
    from xncaps.deploy.evaluate import evaluate_model
    from xncaps.deploy.model import open_model

    def say(line: str) -> None:
        typer.echo(line, err=True)

    opened = open_model(model, say)
    display = make_display()
    try:
        outcome = evaluate_model(
            opened,
            data,
            split,
            data_dir=data_dir,
            say=say,
            progress=None if as_json else display.progress,
        )
    finally:
        display.end()
    name = data or opened.card.data["name"]
    if as_json:
        source = {"model": str(model), "kind": opened.kind, "data": name, "split": split}
        typer.echo(json_text({**source, **outcome.to_dict()}))
        return
    names = {"top1": "accuracy", "paper_top2": "the paper's top-2"}
    typer.echo(f"{outcome.count:,} {split} images of {name}")
    if outcome.loss is not None:
        typer.echo(f"loss {outcome.loss:.4f}")
    for metric, value in outcome.metrics.items():
        typer.echo(f"{names.get(metric, metric.replace('_', ' '))} {value:.2%}")
    rows = [
        [
            shown(row["class"]),
            row["count"],
            *(None if row[key] is None else f"{row[key]:.2%}" for key in ("recall", "precision")),
        ]
        for row in outcome.per_class
    ]
    typer.echo("\n" + text_table(["class", "images", "recognised", "right when seen"], rows))
