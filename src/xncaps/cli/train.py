"""``xncaps train``: train a network, or go on training one."""

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from xncaps.cli.display import make_display
from xncaps.errors import InputError, message
from xncaps.losses import LOSSES
from xncaps.text import json_text
from xncaps.training import RECIPES, Config, check_extra, recipe
from xncaps.training.config import OPTIMIZERS, SCHEDULES
from xncaps.training.run import Folder, read_config
from xncaps.training.seeds import NAME, parse_seeds, read_plan, train_seeds
from xncaps.training.stopping import StopRequests

HEAD_OPTIONS = ("caps_in", "dim_in", "dim_out", "iterations", "binarizer", "width")


def train(
    context: typer.Context,
    recipe_name: Annotated[
        str | None, typer.Option("--recipe", help=f"Start from one of {', '.join(RECIPES)}.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="sample, mnist, cifar10, multimnist, folder:PATH or idx:PATH."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="convnet, mobilenetv2, resnet50, widenet, capsnet or xnornet."),
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="linear, fc, dr, xnodr, xnidr or xnboth.")
    ] = None,
    attach: Annotated[str | None, typer.Option(help="replace, append or features.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training images.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images in a step.")] = None,
    lr: Annotated[float | None, typer.Option(help="The highest learning rate.")] = None,
    loss: Annotated[str | None, typer.Option(help=f"{' or '.join(LOSSES)}.")] = None,
    optimizer: Annotated[str | None, typer.Option(help=f"{', '.join(OPTIMIZERS)}.")] = None,
    schedule: Annotated[str | None, typer.Option(help=f"{', '.join(SCHEDULES)}.")] = None,
    augment: Annotated[
        str | None, typer.Option(help="Such as shift=2,rotate=10,flip=true; or none.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, order and augmentation.")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Several runs, such as 0-4: mean and deviation.")
    ] = None,
    image_size: Annotated[int | None, typer.Option(help="Bring images to this side.")] = None,
    train_count: Annotated[int | None, typer.Option(help="Use so many training images.")] = None,
    caps_in: Annotated[int | None, typer.Option(help="Number of primary capsules.")] = None,
    dim_in: Annotated[int | None, typer.Option(help="Size of a primary capsule.")] = None,
    dim_out: Annotated[int | None, typer.Option(help="Size of an output capsule.")] = None,
    iterations: Annotated[int | None, typer.Option(help="Routing iterations.", max=1000)] = None,
    binarizer: Annotated[str | None, typer.Option(help="sign, midrange or approxsign.")] = None,
    width: Annotated[
        float | None, typer.Option(help="Width of convnet, widenet or xnornet.")
    ] = None,
    skip_unreadable: Annotated[
        bool | None, typer.Option("--skip-unreadable", help="Leave out images that are damaged.")
    ] = None,
    compile_it: Annotated[bool | None, typer.Option("--compile", help="Use torch.compile.")] = None,
    more: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting, such as ema=0.99 or routing_bias=true."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write; it must be new.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Look for data here first.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads to use.", min=1, max=1024)] = None,
    save_seconds: Annotated[
        float, typer.Option(help="Write a checkpoint at least so often.", min=0.0)
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON only.")] = False,
) -> None:
    """Train a network and write a folder with its weights, figures and a report.

    Example: xncaps train --data sample --model convnet --head xnidr --epochs 3 --out runs/first

    Go on after an interruption: xncaps train --resume runs/first
    """
    given = {name: value for name, value in context.params.items() if value is not None}
    changes = {name: given[name] for name in _SETTINGS if name in given}
    if "compile_it" in given:
        changes["compile"] = given["compile_it"]
    options = {name: given[name] for name in HEAD_OPTIONS if name in given}
    if augment is not None:
        changes["augment"] = _pairs("augment", augment.split(",") if augment != "none" else [])
    for name, value in _pairs("set", more or []).items():
        if name in changes or name in options:
            raise InputError(message("train", "set", "name what no other flag sets", repr(name)))
        (changes if name in _FIELDS else options)[name] = value
    if seed is not None and seeds is not None:
        raise InputError(message("train", "seeds", "stand alone", "both --seed and --seeds"))
    base: dict[str, Any] = {}
    asked = parse_seeds(seeds) if seeds is not None else None
    if resume is not None:
        if out is not None and out != resume:
            got = f"--out {out} and --resume {resume}"
            raise InputError(message("train", "out", "be the folder that goes on", got))
        out = resume
        if (resume / NAME).is_file():
            begun, planned = read_plan(resume)
            asked = planned if asked is None else asked
        else:
            begun = read_config(Folder(resume))
        base = begun.to_dict()
    if recipe_name is not None:
        base |= recipe(recipe_name, model)
    base["options"] = {**base.get("options", {}), **options}
    config = Config.from_dict({**base, **changes})
    if out is None:
        out = Path("runs") / _folder_name(config, asked)
    if threads is not None:
        torch.set_num_threads(threads)

    check_extra()
    from xncaps.training.processes import note_begun, was_begun
    from xncaps.training.train import how_to_go_on
    from xncaps.training.train import train as run_training

    first = os.environ.get("RANK", "0") == "0"
    folder = out
    keywords: dict[str, Any] = {
        "data_dir": data_dir,
        "display": None if as_json else make_display(),
        "save_seconds": save_seconds,
        "go_on": how_to_go_on(folder, data_dir),
    }
    if asked is None:
        result = run_training(config, folder, resume=resume is not None, **keywords)
        text, values = _text(result), result.values
    else:
        with StopRequests() as stops:

            def train_one(each: Config, where: Path, going_on: bool) -> float:
                note_begun(folder)
                result = run_training(each, where, resume=going_on, stops=stops, **keywords)
                return result.accuracy

            outcome = train_seeds(
                config,
                asked,
                folder,
                train_one,
                resume=resume is not None or was_begun(folder),
                writer=first,
                stops=stops,
                go_on=keywords["go_on"],
            )
        text, values = f"test accuracy {outcome}\n{folder / NAME}", outcome.to_dict()
    if first:
        typer.echo(json_text(values) if as_json else text)


def _text(result: Any) -> str:
    memory = result.values["peak_memory_bytes"] / 1e6
    return (
        f"test accuracy {result.accuracy:.2%}, peak memory {memory:,.0f} MB\n"
        f"report: {result.folder.report}"
    )


_FIELDS = [field.name for field in fields(Config)]
_SETTINGS = [name for name in _FIELDS if name not in ("options", "augment", "compile")]


def _pairs(what: str, texts: list[str]) -> dict[str, Any]:
    """The settings in texts such as ``ema=0.99``: values are JSON, or plain words."""
    pairs: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.strip().partition("=")
        if not equals or not name:
            raise InputError(message("train", what, "look like name=value", repr(text)))
        try:
            pairs[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            pairs[name.replace("-", "_")] = value
    return pairs


def _folder_name(config: Config, seeds: list[int] | None) -> str:
    data = config.data.partition(":")[0]
    which = f"{len(seeds)}-seeds" if seeds else f"seed-{config.seed}"
    return "-".join(filter(None, [data, config.model, config.head, which]))
