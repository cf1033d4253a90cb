"""Ctrl-C and its like: finish the step, save, and go."""

import signal
from types import FrameType
from typing import Any, Self

from xncaps.errors import RunError


class StoppedError(RunError):
    """The run was asked to stop, and has been saved."""


class StopRequests:
    """Notes that the process was asked to end; asked twice, it ends at once.

    Signals can be caught in a program's main thread only; elsewhere nothing is caught.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread
                break
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
