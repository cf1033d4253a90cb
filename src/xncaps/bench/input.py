"""How fast images reach the network: our batches against a DataLoader with per-image transforms.

The other pipeline is the usual one: a Dataset that holds each image as a PIL image and, in
``__getitem__``, turns, shifts, scales, mirrors and crops it with PIL, makes a float tensor of it
and normalises it; a DataLoader shuffles, collects and stacks. Both do the same things to the same
images, on one thread, in turns.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, count, repeat
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from xncaps.bench.timing import interleave
from xncaps.bench.train import Stages
from xncaps.data import Augment, Batches, Dataset, Preprocess, Splits, facts_of
from xncaps.errors import InputError, message
from xncaps.system import cpu_name
from xncaps.text import text_table
from xncaps.training.config import Config

GOAL, MOST_SHARE = 10.0, 0.05
TURN, STEPS = 8, 10
"""Batches of a pipeline's turn, and training steps."""
MOST_IMAGES = 5000
"""So many are kept as PIL images."""


class PerImage(TorchDataset[tuple[Tensor, int]]):
    """Images one by one, each transformed by PIL when it is asked for."""

    def __init__(self, data: Dataset, augment: Augment, preprocess: Preprocess) -> None:
        arrays = data.images.permute(0, 2, 3, 1).numpy()
        self.images = [
            Image.fromarray(array.squeeze(2) if array.shape[2] == 1 else array) for array in arrays
        ]
        self.labels = data.labels
        if augment.bend:
            raise InputError(
                message("bench input", "bend", "be 0: PIL has no such transform", augment.bend)
            )
        self.augment = augment
        self.mean = torch.tensor(preprocess.mean).view(-1, 1, 1)
        self.std = torch.tensor(preprocess.std).view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        image = self.transform(self.images[index])
        array = np.array(image)
        tensor = torch.from_numpy(array if array.ndim == 3 else array[:, :, None])
        pixels = tensor.permute(2, 0, 1).float().div(255)
        pixels = (pixels - self.mean) / self.std
        if self.augment.cutout:
            side = self.augment.cutout
            top, left = (int(torch.randint(size, ())) - side // 2 for size in pixels.shape[1:])
            pixels[:, max(top, 0) : top + side, max(left, 0) : left + side] = 0
        return pixels, self.labels[index]

    def transform(self, image: Image.Image) -> Image.Image:
        """What may happen to an image, by PIL."""
        augment = self.augment
        if augment.flip and torch.rand(()) < 0.5:
            image = ImageOps.mirror(image)
        if augment.crop:
            padded = ImageOps.expand(image, augment.crop)
            left, top = torch.randint(2 * augment.crop + 1, (2,)).tolist()
            image = padded.crop((left, top, left + image.width, top + image.height))
        if augment.moves:
            angle, scale, across, down = (2 * torch.rand(4) - 1).tolist()
            angle = math.radians(angle * augment.rotate)
            factor = 1 / (1 + scale * augment.scale)
            cos, sin = factor * math.cos(angle), factor * math.sin(angle)
            x, y = image.width / 2, image.height / 2
            left = x - cos * x + sin * y + across * augment.shift
            top = y - sin * x - cos * y + down * augment.shift
            matrix = (cos, -sin, left, sin, cos, top)
            image = image.transform(
                image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR
            )
        return image


@dataclass(frozen=True)
class InputBench:
    """What came out of it.

    Args:
        data: the data set.
        augment: what happened to the images.
        batch_size: images in a batch.
        ours, theirs: images a second, in the best turn of each.
        median_ratio: how many times as fast ours are, by the median turn of each.
        step_seconds: a training step of the network.
        batch_seconds: what its batch takes of it.
        network: its name.
    """

    data: str
    augment: str
    batch_size: int
    ours: float
    theirs: float
    median_ratio: float
    step_seconds: float
    batch_seconds: float
    network: str

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @property
    def share(self) -> float:
        """The part of a step's time that its batch takes."""
        return self.batch_seconds / self.step_seconds

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "data": self.data,
            "augment": self.augment,
            "batch_size": self.batch_size,
            "images_per_second": self.ours,
            "dataloader_images_per_second": self.theirs,
            "ratio": self.ratio,
            "median_ratio": self.median_ratio,
            "goal_ratio": GOAL,
            "network": self.network,
            "step_seconds": self.step_seconds,
            "share_of_step": self.share,
            "goal_share_of_step": MOST_SHARE,
            "threads": 1,
            "cpu": cpu_name(),
            "torch": torch.__version__,
        }

    def __str__(self) -> str:
        rows: list[list[object]] = [
            ["our batches", round(self.ours), f"{self.batch_size / self.ours * 1000:.2f}"],
            ["DataLoader", round(self.theirs), f"{self.batch_size / self.theirs * 1000:.2f}"],
        ]
        table = text_table(["pipeline", "images/s", "ms a batch"], rows)
        return (
            f"{self.data}, batches of {self.batch_size}, augmentation: {self.augment}; "
            f"one thread, {cpu_name()}; best of the turns of each\n\n{table}\n\n"
            f"{self.ratio:.1f} times as fast, {self.median_ratio:.1f} by the median turn of each "
            f"(goal: {GOAL:g})\n"
            f"{self.share:.1%} of the {1000 * self.step_seconds:.1f} ms of a training step of "
            f"{self.network} (goal: under {MOST_SHARE:.0%})"
        )


def bench_input(config: Config, data: Splits, seconds: float) -> InputBench:
    """Time both pipelines in turns, then training steps, all on one thread."""
    preprocess = facts_of(data).preprocess(config.image_size)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        batches = Batches(data.train, config.batch_size, preprocess, config.augment)
        part = data.train.take(torch.arange(min(len(data.train), MOST_IMAGES)))
        loader = DataLoader(
            PerImage(part, config.augment, preprocess), batches.batch_size, shuffle=True
        )
        steps, others = count(), chain.from_iterable(repeat(loader))
        tasks: dict[str, Callable[[], object]] = {
            "ours": lambda: [batches(next(steps)) for _ in range(TURN)],
            "theirs": lambda: [next(others) for _ in range(TURN)],
        }
        times = interleave(tasks, seconds)
        stages = Stages(config, data)
        # In a step the batch is made where the network has just used all of the cache.
        parts = [stages.step() for _ in range(STEPS + 1)][1:]
    finally:
        torch.set_num_threads(threads)
    return InputBench(
        data=data.name,
        augment=", ".join(f"{k} {v:g}" for k, v in vars(config.augment).items() if v) or "none",
        batch_size=batches.batch_size,
        ours=TURN * batches.batch_size / min(times["ours"]),
        theirs=TURN * batches.batch_size / min(times["theirs"]),
        median_ratio=median(times["theirs"]) / median(times["ours"]),
        step_seconds=median(sum(part.values()) for part in parts),
        batch_seconds=median(part["data"] for part in parts),
        network=f"{config.model} {config.head or ''}".strip(),
    )
