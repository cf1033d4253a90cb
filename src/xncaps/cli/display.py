"""How a run shows itself: a live line on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from xncaps.training.display import Display, Moment

PLAIN_SECONDS = 20.0


def make_display() -> Display:
    """The display that fits where standard output goes."""
    return LiveDisplay() if sys.stdout.isatty() else PlainDisplay()


def clock(seconds: float) -> str:
    """Seconds as people write them.

    >>> clock(75), clock(3700)
    ('1:15', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def epoch_line(row: dict[str, Any], epochs: int | None) -> str:
    """The figures of an epoch, in a line."""
    of = f"/{epochs}" if epochs else ""
    held = row["validation_accuracy"]
    validation = f"  validation {held:.2%}" if held is not None else ""
    return (
        f"epoch {row['epoch']}{of}  loss {row['loss']:.4f}  accuracy {row['accuracy']:.2%}"
        f"{validation}  {row['images_per_second']:,.0f} images/s  {clock(row['seconds'])}"
    )


class PlainDisplay(Display):
    """Lines for logs and pipes: one an epoch, and one now and then in long epochs."""

    def __init__(self) -> None:
        self.epochs: int | None = None
        self.told = time.monotonic()

    def begin(self, lines: list[str]) -> None:
        for line in lines:
            typer.echo(line)

    def step(self, moment: Moment) -> None:
        self.epochs = moment.epochs
        if time.monotonic() - self.told > PLAIN_SECONDS:
            self.told = time.monotonic()
            typer.echo(
                f"epoch {moment.epoch}/{moment.epochs}  step {moment.step}/{moment.steps}  "
                f"loss {moment.loss:.4f}  accuracy {moment.accuracy:.2%}  "
                f"{moment.images_per_second:,.0f} images/s  {clock(moment.seconds_left)} left"
            )

    def epoch(self, row: dict[str, Any]) -> None:
        self.told = time.monotonic()
        typer.echo(epoch_line(row, self.epochs))

    def say(self, line: str) -> None:
        typer.echo(line)

    def progress(self, name: str, done: int, total: int | None) -> None:
        if time.monotonic() - self.told > PLAIN_SECONDS or done == total:
            self.told = time.monotonic()
            of = f" of {total / 1e6:.1f}" if total else ""
            typer.echo(f"downloading {name}: {done / 1e6:.1f}{of} MB")


class LiveDisplay(Display):
    """A line that moves: where the run is, how fast, how good, how long still."""

    def __init__(self) -> None:
        self.console = Console()
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}"),
            console=self.console,
            transient=True,
        )
        self.tasks: dict[str, TaskID] = {}
        self.epochs: int | None = None

    def _show(self, name: str, done: float, total: float | None, **fields: str) -> None:
        if name not in self.tasks:
            self.bars.start()
            self.tasks[name] = self.bars.add_task(name, figures="")
        self.bars.update(self.tasks[name], completed=done, total=total, **fields)  # type: ignore[arg-type]

    def begin(self, lines: list[str]) -> None:
        for line in lines:
            self.say(line)

    def step(self, moment: Moment) -> None:
        self.epochs = moment.epochs
        figures = (
            f"step {moment.step}/{moment.steps}  loss {moment.loss:.4f}  "
            f"accuracy {moment.accuracy:.2%}  {moment.images_per_second:,.0f} images/s  "
            f"{clock(moment.seconds_left)} left"
        )
        self._show("training", moment.step, moment.steps, figures=figures)
        description = f"epoch {moment.epoch}/{moment.epochs}"
        self.bars.update(self.tasks["training"], description=description)

    def epoch(self, row: dict[str, Any]) -> None:
        self.say(epoch_line(row, self.epochs))

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False)

    def progress(self, name: str, done: int, total: int | None) -> None:
        of = f"/{total / 1e6:.1f}" if total else ""
        self._show(name, done, total, figures=f"{done / 1e6:.1f}{of} MB")

    def end(self) -> None:
        self.bars.stop()
        for task in self.tasks.values():
            self.bars.remove_task(task)
        self.tasks.clear()
