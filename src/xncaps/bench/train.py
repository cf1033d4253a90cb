"""How fast a network learns, and where the time goes."""

import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from xncaps.data import Batches, Splits, facts_of
from xncaps.system import cpu_name, peak_memory
from xncaps.text import text_table
from xncaps.training.config import Config
from xncaps.training.processes import start_fabric
from xncaps.training.state import State

STAGES = ("data", "backbone", "head", "optimizer")


class Stages:
    """A training step in its parts, each with a stopwatch.

    The graph is cut between backbone and head, which changes no result: the head's backward pass
    gives the gradient that the backbone's starts from.

    Args:
        config: of the run.
        data: to train on.
    """

    def __init__(self, config: Config, data: Splits) -> None:
        facts = facts_of(data)
        self.config = config
        self.batches = Batches(
            data.train, config.batch_size, facts.preprocess(config.image_size), config.augment
        )
        self.state = State(config, facts, start_fabric(config.precision), data.train)
        self.state.model.train()

    def step(self) -> dict[str, float]:
        """Take one step; returns the seconds of each stage."""
        state, network = self.state, self.state.objective.network
        marks = [time.perf_counter()]
        images, labels = self.batches(state.step)
        if self.config.channels_last:
            images = images.to(memory_format=torch.channels_last)
        marks.append(time.perf_counter())
        features = network.backbone(images)
        marks.append(time.perf_counter())
        cut = features.detach().requires_grad_()
        loss = state.objective.of_scores(network.head(cut), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        marks.append(time.perf_counter())
        features.backward(cut.grad)
        marks.append(time.perf_counter())
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step += 1
        if state.average:
            state.average.update(network, state.step)
        marks.append(time.perf_counter())
        data, forward, head, backward, optimizer = (
            after - before for before, after in pairwise(marks)
        )
        return {"data": data, "backbone": forward + backward, "head": head, "optimizer": optimizer}


@dataclass(frozen=True)
class TrainBench:
    """What came out of it: median seconds of each stage of a step."""

    what: str
    batch_size: int
    steps: int
    seconds: dict[str, float]
    peak_memory_bytes: int
    threads: int

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "what": self.what,
            "batch_size": self.batch_size,
            "steps": self.steps,
            "images_per_second": self.batch_size / self.total,
            "seconds": self.seconds,
            "shares": {name: value / self.total for name, value in self.seconds.items()},
            "peak_memory_bytes": self.peak_memory_bytes,
            "threads": self.threads,
            "cpu": cpu_name(),
            "torch": torch.__version__,
        }

    def __str__(self) -> str:
        rows = [
            [name, f"{1000 * value:.2f}", f"{value / self.total:.1%}"]
            for name, value in [*self.seconds.items(), ("step", self.total)]
        ]
        return (
            f"{self.what}: {self.batch_size / self.total:,.0f} images/s "
            f"(batch {self.batch_size}, {self.threads} threads, {cpu_name()}; "
            f"median of {self.steps} steps; peak memory {self.peak_memory_bytes / 1e6:,.0f} MB)\n\n"
            + text_table(["stage", "ms", "share"], rows, total=True)
        )


def bench_train(config: Config, data: Splits, seconds: float) -> TrainBench:
    """Take steps for about so many seconds, at least three after one that is not counted."""
    stages = Stages(config, data)
    stages.step()
    times: list[dict[str, float]] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        times.append(stages.step())
    head = f" {config.head}" if config.head else ""
    return TrainBench(
        what=f"{config.model}{head} on {data.name}",
        batch_size=stages.batches.batch_size,
        steps=len(times),
        seconds={name: median(each[name] for each in times) for name in STAGES},
        peak_memory_bytes=peak_memory(),
        threads=torch.get_num_threads(),
    )
