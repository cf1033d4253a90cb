"""What the tests of the stopwatch share."""

import csv
from pathlib import Path

from xncaps.bench.rows import FACTS


def facts(**changes: object) -> dict[str, object]:
    return {**dict.fromkeys(FACTS, ""), "cpu": 'A "fast", one', "threads": 1, **changes}


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
