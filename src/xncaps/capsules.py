"""What a capsule is: a vector whose length, kept below 1, says how likely its entity is."""

import torch
from torch import Tensor

from xncaps.errors import check_axis, check_floating


def squash(s: Tensor, dim: int = -1) -> Tensor:
    """Shrink vectors to a length below 1, keeping their direction (the paper's Eq. 4).

    ``v = norm(s)^2 / (1 + norm(s)^2) * s / norm(s)``, computed as
    ``s * norm(s) / (1 + norm(s)^2)``: the same function without an epsilon. Value and gradient at
    the exact zero vector are 0. In floating point the length of a very long vector rounds to 1.

    Args:
        s: a floating-point tensor of any shape.
        dim: the axis that holds the vectors.

    Shape:
        s ``(...)`` -> v as s.

    >>> squash(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.5769, 0.7692],
            [0.0000, 0.0000]])
    """
    check_floating("squash", "s", s)
    check_axis("squash", s, dim)
    norm: Tensor = torch.linalg.vector_norm(s, dim=dim, keepdim=True)
    return s * (norm / (1 + norm * norm))


def capsule_length(v: Tensor, dim: int = -1) -> Tensor:
    """The lengths of capsules: the scores of a capsule head.

    Args:
        v: a floating-point tensor of any shape.
        dim: the axis that holds the vectors.

    Shape:
        v ``(..., dim_out)`` -> lengths ``(...)``. The gradient at the exact zero vector is 0.

    >>> capsule_length(torch.tensor([[0.3, 0.4], [0.0, 0.0]]))
    tensor([0.5000, 0.0000])
    """
    check_floating("capsule_length", "v", v)
    check_axis("capsule_length", v, dim)
    lengths: Tensor = torch.linalg.vector_norm(v, dim=dim)
    return lengths
