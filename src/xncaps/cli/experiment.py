"""The command that every file in ``recipes/`` is."""

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from xncaps.cli.display import make_display
from xncaps.cli.main import guarded
from xncaps.errors import InputError, RunError, message
from xncaps.experiments import Experiment
from xncaps.text import text_table
from xncaps.training import check_extra
from xncaps.training.seeds import parse_seeds


def run(experiment: Experiment, claim: str | None) -> None:
    """Be the command of an experiment; ``claim`` is what its help says."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(help=claim)(_command(experiment))
    sys.exit(guarded(lambda: app(prog_name=Path(sys.argv[0]).name, standalone_mode=False)))


def _command(experiment: Experiment) -> Callable[..., None]:
    def command(
        only: Annotated[
            list[str] | None,
            typer.Option(help=f"One of {', '.join(experiment.variants)}. Repeatable."),
        ] = None,
        seeds: Annotated[str | None, typer.Option(help="Only these, such as 0-2.")] = None,
        plan: Annotated[bool, typer.Option("--plan", help="Print the runs, train none.")] = False,
        again: Annotated[
            bool,
            typer.Option(
                "--again",
                help="Train again what has a row, and compare; nothing is written. Ends with 1 if "
                "another figure comes out, with 0 if the row is of another machine.",
            ),
        ] = False,
        results: Annotated[Path, typer.Option(help="The folder of the rows.")] = Path("results"),
        runs: Annotated[
            Path,
            typer.Option(help="The folder of the runs; processes at work together must share it."),
        ] = Path("runs"),
        data_dir: Annotated[Path | None, typer.Option(help="Look for data here first.")] = None,
        threads: Annotated[
            int | None,
            typer.Option(
                help="Threads of a run, which change its last digits; if not given, "
                f"{experiment.threads}, and with --again those of the row.",
                min=1,
                max=1024,
            ),
        ] = None,
    ) -> None:
        check_extra()
        from xncaps.experiments.campaign import find_row, repeat, run_experiment, told

        where = experiment.name
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            hint = "Several processes share an experiment when each is started by itself."
            raise InputError(message(where, "the command", "not run under torchrun", "it", hint))
        if plan and again:
            raise InputError(message(where, "plan", "stand alone", "both --plan and --again"))
        experiment.check()
        chosen = experiment.chosen(only, parse_seeds(seeds) if seeds is not None else None)
        if plan:
            found = [(each, find_row(results, each, experiment.tuning)) for each in chosen]
            lines = [[run.variant, run.seed, told(row) if row else None] for run, row in found]
            typer.echo(text_table(["variant", "seed", "row"], lines))
            return
        keywords: dict[str, Any] = {
            "data_dir": data_dir,
            "display": make_display(),
            "go_on": shlex.join([Path(sys.executable).name, *sys.argv]),
        }
        if again:
            if not repeat(experiment, chosen, results, threads=threads, **keywords):
                raise RunError("not every row came out again.")
            return
        torch.set_num_threads(threads or experiment.threads)
        outcome = run_experiment(experiment, chosen, results, runs, **keywords)
        typer.echo(str(outcome))
        if outcome.failed:
            raise RunError(f"failed: {'; '.join(map(str, outcome.failed))}.")

    return command
