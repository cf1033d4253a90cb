"""The closed forms behind the paper's figures, with what they count and what they leave out.

N = caps_in, J = caps_out, d = dim_in, D = dim_out, as everywhere in the paper's tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Sizes:
    """The sizes of a capsule layer; the paper's are d=8, D=16, J=10 and N=128 or 256."""

    N: int
    J: int = 10
    d: int = 8
    D: int = 16
    iterations: int = 3


def fc_flops(sizes: Sequence[int]) -> int:
    """FLOPs of fully connected layers as the paper has them: 2 x MACs, biases left out.

    >>> fc_flops([1280, 512, 256, 128, 10])
    1640960
    """
    return 2 * sum(a * b for a, b in pairwise(sizes))


def dr_flops(s: Sizes) -> int:
    """FLOPs of dynamic routing: 5335 N fits both published values; no op-by-op count gives it.

    >>> dr_flops(Sizes(N=128))
    682880
    """
    return 5335 * s.N


def xnodr_binarization(s: Sizes) -> int:
    """9 N J d (D + 1): nine operations for each element of I (tiled over J) and of W."""
    return 9 * s.N * s.J * s.d * (s.D + 1)


def xnidr_binarization(s: Sizes) -> int:
    """18 N D (J + 1): it counts v as N x D; v is J x D."""
    return 18 * s.N * s.D * (s.J + 1)


def xnodr_bops(s: Sizes) -> int:
    """N J D: one for each element of u, where each takes d bits."""
    return s.N * s.J * s.D


def xnidr_bops(s: Sizes) -> int:
    """2 N J D: one for each element of u in both agreements."""
    return 2 * s.N * s.J * s.D


def xnodr_flops(s: Sizes) -> float:
    """DR - N J D (2d - 1) + binarization + 2 N J D + N J D / 64.

    >>> xnodr_flops(Sizes(N=128))
    1983680.0
    """
    predictions = s.N * s.J * s.D
    without_projection = dr_flops(s) - predictions * (2 * s.d - 1)
    return without_projection + xnodr_binarization(s) + 2 * predictions + xnodr_bops(s) / 64


def xnidr_flops(s: Sizes) -> float:
    """DR + binarization + 2 N J D + 2 N J D / 64.

    >>> xnidr_flops(Sizes(N=128))
    1129984.0
    """
    return dr_flops(s) + xnidr_binarization(s) + 2 * s.N * s.J * s.D + xnidr_bops(s) / 64


def xnodr_speed_up(s: Sizes) -> float:
    """Eqs. 9 and 10: N J D d D over its 64th part plus J (Eq. 11 prints + d instead).

    >>> round(xnodr_speed_up(Sizes(N=128)), 2)
    63.98
    """
    plain = s.N * s.J * s.D * s.d * s.D
    return plain / (plain / 64 + s.J)


def xnidr_speed_up(s: Sizes) -> float:
    """Eq. 16: N J D^2 over its 64th part plus D.

    >>> round(xnidr_speed_up(Sizes(N=128)), 2)
    63.8
    """
    plain = s.N * s.J * s.D**2
    return plain / (plain / 64 + s.D)


def xnodr_true_speed_up(s: Sizes) -> float:
    """What the projection's operations give: N J d D MACs (one D, not two) over as many bits in
    64-bit words plus the two scales of each prediction, 2 N J D multiplications."""
    plain = s.N * s.J * s.d * s.D
    return plain / (plain / 64 + 2 * s.N * s.J * s.D)


def xnidr_true_speed_up(s: Sizes) -> float:
    """What the operations of one agreement give: N J D MACs (one D, not two) over as many bits in
    64-bit words plus the two scales of each agreement, 2 N J multiplications."""
    plain = s.N * s.J * s.D
    return plain / (plain / 64 + 2 * s.N * s.J)
