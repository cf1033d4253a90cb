"""A network with its loss: what is trained, and what is judged."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from xncaps.errors import look_up
from xncaps.losses import LOSSES, multi_hot
from xncaps.networks import Classifier
from xncaps.training.config import Config

FIRST_FACTOR = 10.0
"""Lengths lie between 0 and 1: as logits, unscaled, they give the right one of ten classes a
probability of 0.23 at most."""


class Objective(nn.Module):
    """A network and its loss.

    ``margin`` takes lengths as they are and logits through a sigmoid. ``cross_entropy`` takes
    logits as they are and lengths times a learned factor; an image of two classes has half of each
    as its target.

    Args:
        network: gives scores of images.
        loss: ``margin`` or ``cross_entropy``.
        smoothing: the share of a target that is spread evenly over all classes, in training.

    Shape:
        images ``(batch, channels, height, width)``, labels ``(batch,)`` or ``(batch, classes)`` ->
        a scalar and the scores ``(batch, classes)``.
    """

    def __init__(self, network: Classifier, loss: str, smoothing: float = 0.0) -> None:
        super().__init__()
        self.network = network
        self.loss = loss
        self.smoothing = smoothing
        learned = loss == "cross_entropy" and network.scores == "lengths"
        self.factor = nn.Parameter(torch.tensor(FIRST_FACTOR)) if learned else None

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        scores: Tensor = self.network(images)
        if self.smoothing:
            target = multi_hot("Objective", labels, scores.float())
            evenly = target.mean(dim=1, keepdim=True)
            return self.of_scores(scores, target.lerp(evenly, self.smoothing)), scores
        return self.of_scores(scores, labels), scores

    def of_scores(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of these scores, without smoothing."""
        if self.factor is not None:
            return LOSSES[self.loss](scores.float() * self.factor, labels, "logits")
        return LOSSES[self.loss](scores.float(), labels, self.network.scores)


def make_optimizer(config: Config, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The optimizer of a run; weight decay pulls at weights with two or more axes."""
    trained = [p for p in parameters if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    make: dict[str, Callable[[], Optimizer]] = {
        "adam": lambda: Adam(groups, lr=config.lr),
        "adamw": lambda: AdamW(groups, lr=config.lr),
        "sgd": lambda: SGD(
            groups, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0
        ),
    }
    return look_up("train", "optimizer", config.optimizer, make)()


class Average:
    """An exponential moving average of a network's weights and statistics, as a network.

    ``average += (1 - d) (weights - average)``, with ``d = min(decay, (1 + step) / (10 + step))``.

    Args:
        network: whose weights to follow.
        copy: a network of the same kind, which becomes the average.
        decay: how much of the old average stays.
    """

    def __init__(self, network: Classifier, copy: Classifier, decay: float) -> None:
        self.network = copy
        copy.requires_grad_(False).eval()
        self.decay = decay
        self.copy_from(network)

    @torch.no_grad()
    def copy_from(self, network: nn.Module) -> None:
        """Start over from these weights."""
        for mine, theirs in self._pairs(network):
            mine.copy_(theirs)

    @torch.no_grad()
    def update(self, network: nn.Module, step: int) -> None:
        """Follow the weights after a step."""
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        for mine, theirs in self._pairs(network):
            if mine.is_floating_point():
                mine.lerp_(theirs, weight)
            else:
                mine.copy_(theirs)

    def _pairs(self, network: nn.Module) -> list[tuple[Tensor, Tensor]]:
        mine, theirs = self.network.state_dict(), network.state_dict()
        return [(mine[name], theirs[name]) for name in mine]
