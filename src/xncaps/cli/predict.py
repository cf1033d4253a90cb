"""``xncaps predict``: what a trained network sees in image files."""

from pathlib import Path
from typing import Annotated

import typer

from xncaps.errors import RunError
from xncaps.text import json_text, shown


def predict(
    model: Annotated[
        Path, typer.Argument(help="A run's folder, a packed file or an ONNX file.", metavar="MODEL")
    ],
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
    from xncaps.deploy.model import open_model
    from xncaps.deploy.predictor import Prediction, Predictor, image_files

    def line(prediction: Prediction) -> str:
        scores = list(prediction.scores.items())[: max(top, len(prediction.classes))]
        values = "  ".join(f"{name} {value:.3f}" for name, value in scores)
        note = "  (negative taken)" if prediction.inverted else ""
        return shown(f"{prediction.path}: {' and '.join(prediction.classes)}   {values}{note}")

    opened = open_model(model, lambda text: typer.echo(text, err=True))
    predictor = Predictor(opened, invert=invert)
    found: list[Prediction] = []
    problems = 0

    def tell(error: RunError) -> None:
        nonlocal problems
        problems += 1
        typer.echo(f"xncaps: {' '.join(str(error).split())}", err=True)

    for path in image_files(images, tell):
        try:
            found.append(predictor(path))
        except RunError as error:
            tell(error)
            continue
        if not as_json:
            typer.echo(line(found[-1]))
    if as_json:
        kind = "lengths" if opened.card.scores == "lengths" else "probabilities"
        values = {"scores": kind, "predictions": [each.to_dict() for each in found]}
        typer.echo(json_text(values))
    if problems:
        raise typer.Exit(1)
