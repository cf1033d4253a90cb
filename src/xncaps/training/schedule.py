"""Learning rates as functions of the step."""

import math
from collections.abc import Callable

from xncaps.errors import look_up
from xncaps.training.config import Config

Schedule = Callable[[int], float]


def triangular2(step: int, low: float, high: float, step_size: int) -> float:
    """Cyclic learning rate that rises and falls in ``2 step_size`` steps, half as high each time.

    With ``c = floor(1 + step / (2 step_size))`` and ``x = abs(step / step_size - 2 c + 1)``:
    ``low + (high - low) max(0, 1 - x) / 2^(c - 1)`` (L. N. Smith, 2017).

    >>> [round(triangular2(step, 0.0, 1.0, 2), 3) for step in range(9)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.25, 0.5, 0.25, 0.0]
    """
    cycle = math.floor(1 + step / (2 * step_size))
    x = abs(step / step_size - 2 * cycle + 1)
    return low + (high - low) * max(0.0, 1 - x) / 2.0 ** (cycle - 1)


def onecycle(step: int, high: float, steps: int, warmup: float) -> float:
    """One cosine up from ``high / 25`` and one down to ``high / 250000`` (torch's OneCycleLR).

    >>> [round(onecycle(step, 1.0, 5, 0.4), 4) for step in range(5)]
    [0.04, 1.0, 0.75, 0.25, 0.0]
    """
    if steps == 1:
        return high
    first, last = high / 25, high / 250_000
    top = warmup * steps - 1
    if step <= top:
        return _cosine(first, high, step / top if top > 0 else 1.0)
    return _cosine(high, last, (step - top) / (steps - 1 - top))


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))


def make_schedule(config: Config, steps: int) -> Schedule:
    """The learning rate at each of the ``steps`` steps of a run."""
    schedules: dict[str, Schedule] = {
        "triangular2": lambda step: triangular2(step, config.min_lr, config.lr, config.step_size),
        "onecycle": lambda step: onecycle(step, config.lr, steps, config.warmup),
        "constant": lambda step: config.lr,
    }
    return look_up("train", "schedule", config.schedule, schedules)
