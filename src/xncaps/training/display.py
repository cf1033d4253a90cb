"""What a run tells while it goes on. The base says nothing; the command line shows it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Moment:
    """Where a run is after a step: loss and accuracy are means over the epoch so far."""

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    accuracy: float
    lr: float
    images_per_second: float
    seconds_left: float


class Display:
    """Listens to a run; this one does nothing."""

    def begin(self, lines: list[str]) -> None:
        """The run begins, or goes on; ``lines`` say what it is."""

    def step(self, moment: Moment) -> None:
        """A step has been taken."""

    def epoch(self, row: dict[str, Any]) -> None:
        """An epoch has ended; ``row`` is its line of metrics."""

    def say(self, line: str) -> None:
        """Something worth telling."""

    def progress(self, name: str, done: int, total: int | None) -> None:
        """A download goes on."""

    def end(self) -> None:
        """Nothing more will come."""
