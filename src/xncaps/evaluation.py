"""How good a network is on a data set: all metrics, and class by class."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xncaps.data import Preprocess
from xncaps.metrics import METRICS

BATCH = 256
PAIR_METRICS = ("exact_pair", "per_digit", "paper_top2")


def main_metric(pairs: bool) -> str:
    """The metric that stands for accuracy."""
    return "exact_pair" if pairs else "top1"


def metric_names(pairs: bool) -> tuple[str, ...]:
    """The metrics that make sense for images of one class, or of two."""
    return PAIR_METRICS if pairs else ("top1",)


@torch.no_grad()
def scores_of(
    network: nn.Module,
    images: Tensor,
    preprocess: Preprocess,
    device: torch.device | None = None,
    *,
    channels_last: bool = False,
) -> Tensor:
    """The network's scores of uint8 images, batch by batch, in evaluation mode.

    Shape:
        ``(n, channels, height, width)`` -> ``(n, classes)``, float32 on the CPU.
    """
    was_training = network.training
    network.eval()
    try:
        parts = []
        for batch in torch.split(images, BATCH):
            pixels = preprocess(batch)
            if channels_last:
                pixels = pixels.to(memory_format=torch.channels_last)
            parts.append(network(pixels.to(device)).float().cpu())
    finally:
        network.train(was_training)
    return torch.cat(parts) if parts else torch.zeros(0, 0)


@dataclass(frozen=True)
class Evaluation:
    """What came out: figures over all images, by class, and who was taken for whom.

    Args:
        count: number of images.
        loss: mean loss, if one was asked for.
        metrics: each metric's mean.
        per_class: for each class its images, the share of them that was recognised, and the share
            of right ones among what was taken for it.
        confusion: rows are the classes shown, columns the classes seen.
    """

    count: int
    loss: float | None
    metrics: dict[str, float]
    per_class: list[dict[str, Any]]
    confusion: list[list[int]]

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        loss = {} if self.loss is None else {"loss": self.loss}
        return {
            "count": self.count,
            **loss,
            **self.metrics,
            "per_class": self.per_class,
            "confusion": self.confusion,
        }


def evaluate_scores(
    scores: Tensor, labels: Tensor, classes: tuple[str, ...], loss: float | None = None
) -> Evaluation:
    """Judge scores.

    Where images show two classes, the two highest scores are the answer; a class that was missed
    counts as taken for the one that was wrongly seen (with both missed, the lower for the lower).
    """
    pairs = labels.dim() == 2
    names = metric_names(pairs)
    # Sums of 0, 1/2 and 1 in float64 are exact.
    metrics = {
        name: METRICS[name](scores, labels).double().sum().item() / max(len(scores), 1)
        for name in names
    }
    confusion = _confusion(scores, labels, len(classes))
    shown, seen, right = confusion.sum(1), confusion.sum(0), confusion.diagonal()
    per_class = [
        {
            "class": name,
            "count": int(shown[i]),
            "recall": right[i].item() / int(shown[i]) if shown[i] else None,
            "precision": right[i].item() / int(seen[i]) if seen[i] else None,
        }
        for i, name in enumerate(classes)
    ]
    return Evaluation(len(scores), loss, metrics, per_class, confusion.tolist())


def answers(scores: Tensor, pairs: bool) -> Tensor:
    """The classes a network sees: ``(n, 1)``, or ``(n, 2)`` in ascending order for pairs."""
    return scores.topk(2 if pairs else 1, dim=1).indices.sort(dim=1).values


def _confusion(scores: Tensor, labels: Tensor, classes: int) -> Tensor:
    if labels.dim() == 1:
        cells = labels * classes + answers(scores, pairs=False).squeeze(1)
        return cells.bincount(minlength=classes**2).view(classes, classes)
    shown = labels.bool()
    seen = torch.zeros_like(shown).scatter_(1, answers(scores, pairs=True), True)
    confusion = torch.diag((shown & seen).sum(0))
    missed, wrong = shown & ~seen, seen & ~shown
    for one, other in zip(_lowest_and_highest(missed), _lowest_and_highest(wrong), strict=True):
        cells = one * classes + other
        confusion += cells.bincount(minlength=classes**2).view(classes, classes)
    return confusion


def _lowest_and_highest(marks: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest marked class of rows that have one, and the highest of rows that have two."""
    numbers, marked = marks.byte(), marks.sum(dim=1)
    highest = marks.shape[1] - 1 - numbers.flip(1).argmax(dim=1)
    return numbers.argmax(dim=1)[marked >= 1], highest[marked == 2]
