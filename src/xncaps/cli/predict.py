"""``xncaps predict``: what a trained network sees in image files."""

import json
from pathlib import Path
from typing import Annotated

import typer

from xncaps.errors import RunError
from xncaps.training import load_run
from xncaps.training.apply import Prediction, image_files, predict_image


def predict(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")],
    top: Annotated[int, typer.Option(help="How many classes to show.", min=1)] = 3,
    invert: Annotated[
        bool | None,
        typer.Option(
            "--invert/--no-invert",
            help="Take the negative of the images; by default where their ground asks for it.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the class of each image, and the capsule lengths (or probabilities) behind it.

    Example: xncaps predict runs/first digit.png
    """
    loaded = load_run(run, lambda line: typer.echo(line, err=True))
    found, problems = [], 0
    for path in image_files(images):
        try:
            prediction = predict_image(loaded, path, invert=invert)
        except RunError as error:
            typer.echo(f"xncaps: {error}", err=True)
            problems += 1
            continue
        found.append(prediction)
        if not as_json:
            typer.echo(_line(prediction, top))
    if as_json:
        kind = "lengths" if loaded.network.scores == "lengths" else "probabilities"
        values = {"scores": kind, "predictions": [each.to_dict() for each in found]}
        typer.echo(json.dumps(values, indent=2, ensure_ascii=False))
    if problems:
        raise typer.Exit(1)


def _line(prediction: Prediction, top: int) -> str:
    scores = list(prediction.scores.items())[: max(top, len(prediction.classes))]
    shown = "  ".join(f"{name} {value:.3f}" for name, value in scores)
    note = "  (negative taken)" if prediction.inverted else ""
    return f"{prediction.path}: {' and '.join(prediction.classes)}   {shown}{note}"
