"""``xncaps bench``: stopwatches."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from xncaps.cli.display import clock
from xncaps.errors import InputError, message
from xncaps.text import json_text
from xncaps.training import Config, check_extra, recipe

RESULTS = Path("results")

bench = typer.Typer(rich_markup_mode=None)

Recipe = Annotated[
    str, typer.Option("--recipe", help="The run to measure, by the name of its recipe.")
]
Data = Annotated[str | None, typer.Option(help="Other data than the recipe's.")]
Model = Annotated[str | None, typer.Option(help="Another network.")]
Head = Annotated[str | None, typer.Option(help="Another head.")]
Batch = Annotated[int | None, typer.Option(help="Images in a batch.")]
DataDir = Annotated[Path | None, typer.Option(help="Look for data here first.")]
Seconds = Annotated[float, typer.Option(help="How long to measure.", min=0.0)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@bench.callback(invoke_without_command=True)
def bench_kernels(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="A part of it, in a minute.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="A group: inference, training, xnor, primary, network or calls. Repeatable."
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="How long each comparison is timed.", min=0.0, max=3600.0)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The folder whose bench.csv gets the figures; if not given, results/, and none "
            "with --quick.",
            file_okay=False,
        ),
    ] = None,
    no_save: Annotated[bool, typer.Option("--no-save", help="Write no file.")] = False,
    as_json: Json = False,
) -> None:
    """Measure how fast things are on this machine.

    Without a command: the native and packed layers against the ways in which others compute the
    same, on one thread, with the goals beside what is reached. It takes some ten minutes.

    Example: xncaps bench --quick
    """
    given = (quick, only, seconds is not None, out, no_save, as_json)
    if context.invoked_subcommand is not None:
        if any(given):
            got = f"some before {context.invoked_subcommand!r}"
            raise InputError(message("bench", "options", "follow the command", got))
        return
    if out and no_save:
        got = "both --out and --no-save"
        raise InputError(message("bench", "out", "stand alone", got))
    if out is None and not quick and not no_save:
        out = RESULTS
    from xncaps.bench.suite import run_bench

    plan = "quick" if quick else "full"
    start = time.monotonic()
    if sys.stderr.isatty():
        # Drawn seldom: the thread that draws would be measured as well.
        with Console(stderr=True).status("measuring", refresh_per_second=1) as status:
            report = run_bench(plan, only or (), seconds, out, status.update)
    else:

        def tell(line: str) -> None:
            typer.echo(f"{clock(time.monotonic() - start)}  {line}", err=True)

        report = run_bench(plan, only or (), seconds, out, tell)
    _print(report, as_json)


@bench.command("input")
def bench_input(
    recipe_name: Recipe = "quick",
    data: Data = None,
    model: Model = None,
    head: Head = None,
    batch_size: Batch = None,
    data_dir: DataDir = None,
    seconds: Seconds = 10.0,
    as_json: Json = False,
) -> None:
    """Compare our input pipeline with a DataLoader and per-image transforms, on one thread.

    Example: xncaps bench input --recipe quick-cifar10
    """
    check_extra()
    from xncaps.bench.input import bench_input as measure

    config = _config(recipe_name, data=data, model=model, head=head, batch_size=batch_size)
    _print(measure(config, _load(config, data_dir), seconds), as_json)


@bench.command("train")
def bench_train(
    recipe_name: Recipe = "quick",
    data: Data = None,
    model: Model = None,
    head: Head = None,
    batch_size: Batch = None,
    data_dir: DataDir = None,
    threads: Annotated[int | None, typer.Option(help="Threads to use.", min=1, max=1024)] = None,
    seconds: Seconds = 10.0,
    as_json: Json = False,
) -> None:
    """Measure images a second in training, and where the time goes.

    Example: xncaps bench train --model mobilenetv2 --head xnodr
    """
    check_extra()
    from xncaps.bench.train import bench_train as measure

    if threads is not None:
        torch.set_num_threads(threads)
    config = _config(recipe_name, data=data, model=model, head=head, batch_size=batch_size)
    _print(measure(config, _load(config, data_dir), seconds), as_json)


@bench.command("model")
def bench_model(
    model: Annotated[
        Path, typer.Argument(help="A run's folder, a packed file or an ONNX file.", metavar="MODEL")
    ],
    batch_size: Annotated[int, typer.Option(help="Images in a batch.", min=1, max=65536)] = 64,
    threads: Annotated[int, typer.Option(help="Threads to use.", min=1, max=1024)] = 1,
    data_dir: DataDir = None,
    seconds: Seconds = 10.0,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder whose model.csv gets the figures.", file_okay=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare a trained network in PyTorch, packed, and in ONNX Runtime in float32 and int8.

    Example: xncaps bench model runs/first
    """
    from xncaps.bench.model import append_model_bench
    from xncaps.bench.model import bench_model as measure

    def say(line: str) -> None:
        typer.echo(line, err=True)

    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # before the work
    outcome = measure(
        model, seconds=seconds, batch=batch_size, threads=threads, data_dir=data_dir, say=say
    )
    if out is not None:
        append_model_bench(out / "model.csv", outcome)
    _print(outcome, as_json)


@bench.command("heads")
def bench_heads(
    seconds: Seconds = 2.0,
    folder: Annotated[
        Path,
        typer.Option(
            "--results", help="The folder with the experiments' rows; its latency.csv gets ours."
        ),
    ] = RESULTS,
    as_json: Json = False,
) -> None:
    """Time the packed heads of the experiments in results/, on one thread.

    Example: xncaps bench heads
    """
    from xncaps.experiments import known_rows
    from xncaps.experiments.latency import append_latencies, latency_table, measure_heads

    def tell(line: str) -> None:
        typer.echo(line, err=True)

    rows = known_rows(folder)
    append_latencies(folder, [])  # can it be written?
    latencies = measure_heads(rows, seconds, tell)
    append_latencies(folder, latencies)
    table = latency_table(latencies)
    typer.echo(json_text(table.as_dict()) if as_json else str(table))


@bench.command("agreement")
def bench_agreement(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    data: Annotated[str | None, typer.Option(help="Other data that show the same classes.")] = None,
    data_dir: DataDir = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder whose agreement.csv gets the rows.", file_okay=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare the scores and answers of networks, packed and in ONNX Runtime, on test images.

    Example: xncaps bench agreement runs/first --data mnist
    """
    from xncaps.bench.agreement import compare_forms

    def say(line: str) -> None:
        typer.echo(line, err=True)

    _print(compare_forms(runs, data, data_dir=data_dir, out=out, say=say), as_json)


def _config(name: str, **changes: Any) -> Config:
    given = {key: value for key, value in changes.items() if value is not None}
    return Config.from_dict({**recipe(name, given.get("model")), **given})


def _load(config: Config, data_dir: Path | None) -> Any:
    from xncaps.data import load_data

    return load_data(config.data, data_dir=data_dir, train_count=config.train_count)


def _print(outcome: Any, as_json: bool) -> None:
    typer.echo(json_text(outcome.to_dict()) if as_json else str(outcome))
