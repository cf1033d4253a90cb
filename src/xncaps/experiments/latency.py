"""How long the heads of the experiments take: packed, from pooled features to scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from xncaps.bench.timing import Task, best_times
from xncaps.deploy import pack
from xncaps.errors import RunError
from xncaps.experiments.rows import FACTS, Row, duration, facts
from xncaps.models import create_model
from xncaps.results import append_rows, read_numbered
from xncaps.text import Table
from xncaps.training import Config

NAME = "latency.csv"
BATCHES = (1, 32)


@dataclass(frozen=True)
class Latency:
    """The microseconds a sample takes in the packed head of a variant, on one thread."""

    experiment: str
    variant: str
    batch: int
    microseconds: float


COLUMNS = (*FACTS, *(field.name for field in fields(Latency)))


def measure_heads(
    rows: Sequence[Row], seconds: float, tell: Callable[[str], None]
) -> list[Latency]:
    """Time the heads of every experiment, for ten classes, those of one experiment in turns.

    Args:
        rows: of the experiments.
        seconds: how long each comparison is timed.
        tell: told what is being timed.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = []
        for experiment in dict.fromkeys(row.experiment for row in rows if row.accuracy is not None):
            configs = {r.variant: r.config for r in rows if r.experiment == experiment}
            for batch in BATCHES:
                tell(f"{experiment}, batch {batch}")
                tasks = {variant: _task(config, batch) for variant, config in configs.items()}
                for variant, taken in best_times(tasks, seconds).items():
                    found.append(Latency(experiment, variant, batch, 1e6 * taken / batch))
    finally:
        torch.set_num_threads(threads)
    return found


def _task(config: Config, batch: int) -> Task:
    torch.manual_seed(0)
    network = create_model(config.model, config.head, attach=config.attach, **config.options)
    head = pack(network.eval().head)
    features = torch.randn(batch, network.head.in_features)
    return Task(lambda: head(features), torch.inference_mode)


def latency_table(latencies: Sequence[Latency]) -> Table:
    """The figures as a table: a line for each variant."""
    cells: dict[tuple[str, str], dict[int, float]] = {}
    for each in latencies:
        cells.setdefault((each.experiment, each.variant), {})[each.batch] = each.microseconds
    return Table(
        "latency",
        "Packed heads, from pooled features to scores: microseconds an image, one thread",
        ("experiment", "variant", *(f"batch {batch}" for batch in BATCHES)),
        [(*key, *(values.get(batch) for batch in BATCHES)) for key, values in cells.items()],
    )


def append_latencies(folder: Path, latencies: Sequence[Latency]) -> None:
    """Add the figures to the folder's file."""
    known = {**facts(), "threads": 1}
    folder.mkdir(parents=True, exist_ok=True)
    append_rows(folder / NAME, COLUMNS, ({**known, **vars(each)} for each in latencies))


def read_latencies(folder: Path) -> dict[tuple[str, str, int], float]:
    """The newest figure of each experiment, variant and batch."""
    path = folder / NAME
    found: dict[tuple[str, str, int], float] = {}
    for number, row in (read_numbered(path) if path.exists() else {}).items():
        try:
            key = row["experiment"], row["variant"], int(row["batch"])
            found[key] = duration(row["microseconds"])
        except (KeyError, ValueError) as error:
            what = f"line {number} is not what bench heads writes ({error})."
            raise RunError(f"{path}: {what}") from None
    return found
