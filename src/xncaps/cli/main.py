"""The ``xncaps`` command: its sub-commands, and one clear line for whatever goes wrong."""

import sys
from typing import Annotated

import typer

from xncaps import __version__
from xncaps.cli.paper import paper
from xncaps.cli.summary import summary
from xncaps.errors import InputError

app = typer.Typer(
    name="xncaps",
    help=(
        "Capsule heads with XNOR arithmetic for CNNs: the paper's layers, counts and tables.\n\n"
        "Example: xncaps paper --table params"
    ),
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(paper)
app.command()(summary)


@app.callback(invoke_without_command=True)
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
    try:
        return app(args, prog_name="xncaps", standalone_mode=False) or 0
    except InputError as error:
        return _say(str(error), 2)
    except typer.TyperException as error:
        line = error.format_message()
        stop = "" if line.endswith((".", "?", "!")) else "."
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "xncaps"
        return _say(f"{line}{stop} Try '{command} --help'.", error.exit_code)
    except OSError as error:
        return _say(f"could not write or read: {error}.", 1)
    except typer.Abort:
        return _say("stopped.", 1)


def _say(line: str, status: int) -> int:
    typer.echo(f"xncaps: {' '.join(line.split())}", err=True)
    return status


def run() -> None:
    """The entry point of the installed command."""
    sys.exit(main())
