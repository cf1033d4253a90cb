"""The loss of capsule networks, and losses by name."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from xncaps.errors import (
    InputError,
    InputTypeError,
    check_floating,
    check_shape,
    check_tensor,
    message,
)


def margin_loss(
    lengths: Tensor,
    target: Tensor,
    *,
    m_plus: float = 0.9,
    m_minus: float = 0.1,
    down_weight: float = 0.5,
) -> Tensor:
    """Margin loss on capsule lengths, summed over the classes and averaged over the batch.

    ``T_k max(0, m_plus - length_k)^2 + down_weight (1 - T_k) max(0, length_k - m_minus)^2``.
    Logits go through a sigmoid first: ``margin_loss(logits.sigmoid(), target)``.

    Args:
        lengths: one score for each class.
        target: class numbers, or a row of 0 and 1 for each sample (several classes at once).
        m_plus: present classes are pushed above it.
        m_minus: absent classes are pushed below it.
        down_weight: weight of the absent classes.

    Shape:
        lengths ``(batch, classes)``, target ``(batch,)`` or ``(batch, classes)`` -> a scalar.

    >>> margin_loss(torch.tensor([[0.9, 0.1, 0.3]]), torch.tensor([0]))
    tensor(0.0200)
    """
    check_floating("margin_loss", "lengths", lengths)
    check_shape("margin_loss", "lengths", lengths, batch=None, classes=None)
    present = multi_hot("margin_loss", target, lengths)
    absent = 1 - present
    missing = present * F.relu(m_plus - lengths).square()
    excess = absent * F.relu(lengths - m_minus).square()
    return (missing + down_weight * excess).sum(dim=1).mean()


def _margin_of_scores(scores: Tensor, labels: Tensor, kind: str) -> Tensor:
    return margin_loss(scores if kind == "lengths" else scores.sigmoid(), labels)


def _cross_entropy(scores: Tensor, labels: Tensor, kind: str) -> Tensor:
    if labels.dim() == 2:  # an image of two classes has half of each as its target
        return F.cross_entropy(scores, labels.float() / labels.sum(dim=1, keepdim=True))
    return F.cross_entropy(scores, labels)


LOSSES: dict[str, Callable[[Tensor, Tensor, str], Tensor]] = {
    "margin": _margin_of_scores,
    "cross_entropy": _cross_entropy,
}
"""Losses of scores ``(batch, classes)`` with labels, class numbers or rows of 0 and 1. The third
argument says what the scores are: ``lengths`` of capsules, or ``logits``."""


def check_target_device(where: str, target: Tensor, scores: Tensor) -> None:
    """Refuse a target on another device than the scores."""
    if target.device != scores.device:
        requirement = f"be on the scores' device {scores.device}"
        hint = "Move one of them with .to(device)."
        raise InputTypeError(message(where, "target", requirement, target.device, hint))


def multi_hot(where: str, target: Tensor, scores: Tensor) -> Tensor:
    """The target as rows of 0 and 1, shaped and typed like the scores."""
    batch, classes = scores.shape
    if classes == 0:
        raise InputError(message(where, "scores", "have at least one class", tuple(scores.shape)))
    check_tensor(where, "target", target)
    check_target_device(where, target, scores)
    # Reading values would stall a GPU, break a graph and stop vmap.
    readable = (
        target.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(target)
    )
    if target.shape == scores.shape:
        outside = (target < 0) | (target > 1) if readable else None
        if outside is not None and outside.any():
            value = target[outside][0].item()
            raise InputError(message(where, "target", "hold values from 0 to 1", value))
        return target.to(scores.dtype)
    if target.shape != (batch,):
        requirement = f"have shape (batch={batch},) or (batch={batch}, classes={classes})"
        raise InputError(message(where, "target", requirement, tuple(target.shape)))
    if target.is_floating_point() or target.dtype == torch.bool:
        hint = "Convert class numbers with .long()."
        requirement = "hold whole numbers when it has shape (batch,)"
        raise InputTypeError(message(where, "target", requirement, target.dtype, hint))
    if readable and batch > 0:
        low, high = int(target.min()), int(target.max())
        if low < 0 or high >= classes:
            got = low if low < 0 else high
            raise InputError(message(where, "target", f"hold classes 0 to {classes - 1}", got))
    numbers = torch.arange(classes, device=target.device)
    return (target.unsqueeze(1) == numbers).to(scores.dtype)
