"""``xncaps export``: a trained network as a file that is ready to ship."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from xncaps.errors import InputError, message
from xncaps.text import json_text


class Format(StrEnum):
    """What can be written."""

    packed = "packed"
    onnx = "onnx"


class Dtype(StrEnum):
    """The numbers of a packed file."""

    float32 = "float32"
    float16 = "float16"


NAMES = {Format.packed: "packed.safetensors", Format.onnx: "model.onnx"}


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    form: Annotated[Format, typer.Option("--format", help="What to write.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The file; if not given, packed.safetensors or model.onnx in RUN."),
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Of a packed file: the numbers that are not bits.")
    ] = Dtype.float32,
    normalise: Annotated[
        bool, typer.Option("--normalise", help="Of ONNX: take pixels from 0 to 255.")
    ] = False,
    int8: Annotated[
        bool, typer.Option("--int8", help="Of ONNX: write a second file, its backbone in int8.")
    ] = False,
    opset: Annotated[
        int | None, typer.Option(help="Of ONNX: the version of its operators.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Look for data here first.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a trained network as one file: packed for xncaps, or ONNX for everybody.

    Example: xncaps export runs/first --format packed --out digits.safetensors
    """
    of_packed, of_onnx = dtype != Dtype.float32, normalise or int8 or opset is not None
    if (form == Format.onnx and of_packed) or (form == Format.packed and of_onnx):
        got = f"one that --format {form} does not have"
        raise InputError(message("export", "option", "go with the format", got))
    from xncaps.deploy.export import export_onnx_files, export_packed

    def say(line: str) -> None:
        typer.echo(line, err=True)

    out = run / NAMES[form] if out is None else out
    outcome = (
        export_packed(run, out, dtype.value, say)
        if form == Format.packed
        else export_onnx_files(
            run, out, normalise=normalise, int8=int8, opset=opset, data_dir=data_dir, say=say
        )
    )
    typer.echo(json_text(outcome.to_dict()) if as_json else str(outcome))
