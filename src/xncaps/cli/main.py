"""The ``xncaps`` command: its sub-commands, and one clear line for whatever goes wrong."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated

import typer

from xncaps import __version__
from xncaps.errors import InputError, RunError
from xncaps.text import shown

COMMANDS = ("train", "evaluate", "predict", "export", "summary", "paper", "results", "bench")
"""Each is a module of this package, and in it what the command does."""
CTRL_C = 130
"""The status that typer makes of it."""


def make_app(commands: Sequence[str] = COMMANDS) -> typer.Typer:
    """The command with these sub-commands; the others are not imported."""
    app = typer.Typer(
        name="xncaps",
        help=(
            "Capsule heads with XNOR arithmetic for CNNs: train them, use them, count them.\n\n"
            "Example: xncaps train --recipe quick --out runs/first"
        ),
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback(invoke_without_command=True)(start)
    for name in commands:
        command = getattr(import_module(f"xncaps.cli.{name}"), name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command()(command)
    return app


def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"xncaps {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(args: list[str] | None = None) -> int:
    """Run the command; returns 0 when done, 1 when it failed, 2 for bad usage."""
    given = sys.argv[1:] if args is None else args
    named = given[:1] if given and given[0] in COMMANDS else COMMANDS
    return guarded(lambda: make_app(named)(given, prog_name="xncaps", standalone_mode=False))


def guarded(command: Callable[[], int | None]) -> int:
    """Run a command and return its status; whatever goes wrong is told in one line."""
    try:
        status = command() or 0
        return _say("stopped.", 1) if status == CTRL_C else status
    except InputError as error:
        return _say(str(error), 2)
    except RunError as error:
        return _say(str(error), 1)
    except typer.TyperException as error:
        line = error.format_message()
        stop = "" if line.endswith((".", "?", "!")) else "."
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "xncaps"
        return _say(f"{line}{stop} Try '{path} --help'.", error.exit_code)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        return _say("there is not enough memory for this. Try smaller sizes.", 1)
    except OSError as error:
        return _say(f"could not write or read: {error}.", 1)
    except (typer.Abort, KeyboardInterrupt):
        return _say("stopped.", 1)


def _say(line: str, status: int) -> int:
    rank = os.environ.get("RANK", "0")
    process = f" process {rank}:" if rank != "0" else ""
    typer.echo(shown(f"xncaps:{process} {' '.join(line.split())}"), err=True)
    return status


def run() -> None:
    """The entry point of the installed command."""
    sys.exit(main())
