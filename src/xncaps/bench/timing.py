"""Timing several things fairly: in turns, so that a busy machine is as busy for each of them."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

TURN_SECONDS = 1e-3
"""A turn of a short task is a loop of so long: the clock and the turn's own cost vanish in it."""
SLOW_SECONDS = 1.0
"""A task that takes longer runs once more after its warm-up, not three times."""


def interleave(tasks: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Run the tasks in turns for about so many seconds; returns the times each took.

    Every task runs at least three times, after one that is not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for task in tasks.values():
        task()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < 3:
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            times[name].append(time.perf_counter() - start)
    return times


@dataclass
class Task:
    """A call to be timed in loops.

    Args:
        call: what is timed.
        around: makes the context of a turn, entered outside the clock.
    """

    call: Callable[[], object]
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    loops: int = field(default=1, init=False)
    spent: float = field(default=0.0, init=False)
    best: float = field(default=float("inf"), init=False)
    turns: int = field(default=0, init=False)

    def warm_up(self) -> None:
        """Call it until it runs as it always will, and learn how many calls make a turn."""
        self.turn()  # compiles, allocates
        self.turn()
        if self.best < TURN_SECONDS:
            self.loops = max(1, round(TURN_SECONDS / self.best))
        self.spent, self.turns = 0.0, 0
        if self.best < SLOW_SECONDS:  # of a slow one the second call counts, too
            self.best = float("inf")

    def turn(self) -> None:
        """One turn: a loop of calls, by the clock."""
        with self.around():
            start = time.perf_counter()
            for _ in range(self.loops):
                self.call()
            taken = time.perf_counter() - start
        self.spent += taken
        self.turns += 1
        self.best = min(self.best, taken / self.loops)

    @property
    def done(self) -> bool:
        return self.turns >= (1 if self.best > SLOW_SECONDS else 3)


def best_times(tasks: Mapping[str, Task], seconds: float) -> dict[str, float]:
    """Seconds of the fastest call of each task, all timed in one interleaved run.

    The next turn is always that of the task which has used the least time so far, so that each
    gets as much time as any other and every part of the run is shared by all. Warm-up comes first
    and is not counted; then the run takes about so many seconds, or as long as three turns of each
    take (one of a task slower than a second).
    """
    for task in tasks.values():
        task.warm_up()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        min(tasks.values(), key=lambda task: task.spent).turn()
    while waiting := [task for task in tasks.values() if not task.done]:
        min(waiting, key=lambda task: task.spent).turn()
    return {name: task.best for name, task in tasks.items()}
