"""The command that every file in ``recipes/`` is."""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from xncaps.cli.display import make_display
from xncaps.cli.main import guarded
from xncaps.errors import RunError
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
            typer.Option("--again", help="Train again what has a row, and compare; write none."),
        ] = False,
        results: Annotated[Path, typer.Option(help="The folder of the rows.")] = Path("results"),
        runs: Annotated[Path, typer.Option(help="The folder of the runs.")] = Path("runs"),
        data_dir: Annotated[Path | None, typer.Option(help="Look for data here first.")] = None,
        threads: Annotated[int, typer.Option(help="Threads to use.", min=1, max=1024)] = 1,
    ) -> None:
        check_extra()
        from xncaps.experiments.campaign import find_row, has_row, repeat, run_experiment, told

        torch.set_num_threads(threads)
        chosen = experiment.chosen(only, parse_seeds(seeds) if seeds is not None else None)
        if plan:
            lines = []
            for each in chosen:
                row = find_row(results, each)
                has_row(results, each)
                lines.append([each.variant, each.seed, told(row) if row else None])
            typer.echo(text_table(["variant", "seed", "row"], lines))
            return
        display = make_display()
        if again:
            same = [repeat(each, results, data_dir, display) for each in chosen]
            if not all(same):
                raise RunError("not every row came out again.")
            return
        outcome = run_experiment(
            experiment,
            chosen,
            results,
            runs,
            data_dir=data_dir,
            display=display,
            go_on=shlex.join([Path(sys.executable).name, *sys.argv]),
        )
        display.say(str(outcome))
        if outcome.failed:
            raise RunError(f"failed: {'; '.join(outcome.failed)}.")

    return command
