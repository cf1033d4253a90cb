"""Timing several things fairly: in turns, so that a busy machine is as busy for each of them."""

import time
from collections.abc import Callable, Mapping


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
