"""Rows of experiments, made up."""

from typing import Any

from xncaps.experiments import Planned, Row
from xncaps.experiments.rows import COLUMNS
from xncaps.training import Config


def a_row(**changes: Any) -> Row:
    run = Planned("mine", "dr", Config(head="dr"))
    values: dict[str, Any] = dict.fromkeys(COLUMNS, "x") | {
        "accuracy": 0.5,
        "per_digit": None,
        "top2": None,
        "validation": 0.25,
        "curve": (0.125, 0.25),
        "params": 7,
        "head_params": 3,
        "minutes": 1.5,
        "cpu_minutes": 1.25,
        "threads": 1,
        "config": run.config,
        **dict(zip(("experiment", "variant", "seed"), run.key, strict=True)),
    }
    return Row(**{**values, **changes})
