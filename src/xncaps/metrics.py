"""Accuracies: top-1, and three ways to count images that show two digits (MultiMNIST).

Every metric is a function ``(scores, target) -> hits``, one number between 0 and 1 for each sample:
their mean is the accuracy, and their sum adds up exactly over batches and machines.
"""

from collections.abc import Callable

from torch import Tensor

from xncaps.errors import InputError, check_floating, check_shape, check_tensor, message
from xncaps.losses import check_target_device, multi_hot


def top1(scores: Tensor, target: Tensor) -> Tensor:
    """1 where the highest score is the target class (or one of the target classes).

    Args:
        scores: one for each class.
        target: class numbers, or a row of 0 and 1 for each sample.

    Shape:
        scores ``(batch, classes)``, target ``(batch,)`` or ``(batch, classes)`` -> ``(batch,)``.

    >>> top1(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor([1., 0.])
    """
    check_floating("top1", "scores", scores)
    check_shape("top1", "scores", scores, batch=None, classes=None)
    present = multi_hot("top1", target, scores)
    return present.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1).float()


def exact_pair(scores: Tensor, target: Tensor) -> Tensor:
    """1 where the two highest scores are exactly the two target classes (Sabour et al.).

    Args:
        scores: one for each class.
        target: 1 for the two classes in the image, 0 for the others.

    Shape:
        scores and target ``(batch, classes)``, two ones in each target row -> ``(batch,)``.

    >>> exact_pair(torch.tensor([[0.1, 0.9, 0.8]]), torch.tensor([[0, 1, 1]]))
    tensor([1.])
    """
    return (_pair_hits("exact_pair", scores, target).sum(dim=1) == 2).float()


def per_digit(scores: Tensor, target: Tensor) -> Tensor:
    """The share of the two target classes that is among the two highest scores: 0, 0.5 or 1.

    Args:
        scores: one for each class.
        target: 1 for the two classes in the image, 0 for the others.

    Shape:
        scores and target ``(batch, classes)``, two ones in each target row -> ``(batch,)``.

    >>> per_digit(torch.tensor([[0.7, 0.9, 0.8]]), torch.tensor([[1, 1, 0]]))
    tensor([0.5000])
    """
    return _pair_hits("per_digit", scores, target).sum(dim=1) / 2


def paper_top2(scores: Tensor, target: Tensor) -> Tensor:
    """1 where the lower of the two target classes is among the two highest scores.

    This is what Keras' top-k accuracy makes of two-hot labels, and so what the paper reports for
    MultiMNIST: the higher class is never looked at. It is never below :func:`exact_pair`.

    Args:
        scores: one for each class.
        target: 1 for the two classes in the image, 0 for the others.

    Shape:
        scores and target ``(batch, classes)``, two ones in each target row -> ``(batch,)``.

    >>> paper_top2(torch.tensor([[0.7, 0.9, 0.8]]), torch.tensor([[0, 1, 1]]))
    tensor([1.])
    >>> paper_top2(torch.tensor([[0.7, 0.9, 0.8]]), torch.tensor([[1, 1, 0]]))
    tensor([0.])
    """
    return _pair_hits("paper_top2", scores, target)[:, 0]


METRICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "top1": top1,
    "exact_pair": exact_pair,
    "per_digit": per_digit,
    "paper_top2": paper_top2,
}


def _pair_hits(where: str, scores: Tensor, target: Tensor) -> Tensor:
    """For the lower and the higher target class: 1 where it is among the two highest scores."""
    check_floating(where, "scores", scores)
    check_shape(where, "scores", scores, batch=None, classes=None)
    if scores.shape[1] < 2:
        raise InputError(message(where, "scores", "have at least 2 classes", scores.shape[1]))
    check_tensor(where, "target", target)
    check_shape(where, "target", target, batch=scores.shape[0], classes=scores.shape[1])
    check_target_device(where, target, scores)
    ones = (target == 1).sum(dim=1)
    wrong = (ones != 2).nonzero()
    if len(wrong) > 0:
        row = int(wrong[0])
        hint = f"Row {row} is the first that does not."
        requirement = "mark exactly two classes in every row"
        raise InputError(message(where, "target", requirement, int(ones[row]), hint))
    pairs = (target == 1).nonzero()[:, 1].view(-1, 2)  # lower class first
    best = scores.topk(2, dim=1).indices
    return (pairs.unsqueeze(2) == best.unsqueeze(1)).any(dim=2).float()
