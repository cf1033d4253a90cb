"""``xncaps summary``: what a network holds and does."""

import warnings
from typing import Annotated, Any

import torch
import typer

from xncaps.counting import summary as count
from xncaps.errors import InputError, message
from xncaps.models import create_model


def summary(
    model: Annotated[
        str, typer.Option(help="convnet, mobilenetv2, resnet50, widenet, capsnet or xnornet.")
    ] = "convnet",
    head: Annotated[
        str | None, typer.Option(help="linear, fc, dr, xnodr, xnidr or xnboth.")
    ] = None,
    num_classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    in_channels: Annotated[int | None, typer.Option(help="Channels of the images.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Side of the images in pixels.")] = None,
    attach: Annotated[str, typer.Option(help="replace, append or features.")] = "replace",
    caps_in: Annotated[int | None, typer.Option(help="Number of primary capsules.")] = None,
    dim_in: Annotated[int | None, typer.Option(help="Size of a primary capsule.")] = None,
    dim_out: Annotated[int | None, typer.Option(help="Size of an output capsule.")] = None,
    iterations: Annotated[int | None, typer.Option(help="Routing iterations.", max=1000)] = None,
    width: Annotated[
        float | None, typer.Option(help="Width of convnet, widenet or xnornet.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
) -> None:
    """Count a network's parameters, MACs, binary operations and bytes, layer by layer.

    Example: xncaps summary --model mobilenetv2 --head xnodr
    """
    if as_json and as_csv:
        got = "both --json and --csv"
        raise InputError(message("summary", "output", "be JSON or CSV", got))
    given: dict[str, Any] = {
        "caps_in": caps_in,
        "dim_in": dim_in,
        "dim_out": dim_out,
        "iterations": iterations,
        "width": width,
    }
    options = {name: value for name, value in given.items() if value is not None}
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*attach='append'")  # nothing is trained
            network = create_model(
                model, head, num_classes, in_channels, image_size, attach, **options
            )
        counts = count(network, (network.in_channels, network.image_size, network.image_size))
    except (RuntimeError, OverflowError) as error:  # such as sizes whose product overflows
        got = str(error).splitlines()[0].rstrip(".")
        raise InputError(message("summary", "network", "be one torch can build", got)) from None
    text = counts.to_json() if as_json else counts.to_csv() if as_csv else str(counts)
    typer.echo(text.rstrip("\n"))
