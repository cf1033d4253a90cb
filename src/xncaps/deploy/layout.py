"""How packed weights lie in memory: signs in bits, and capsules (or outputs) as lanes.

The same as ``csrc/layout.h``, which has the words; kernels read these arrays as they are.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from xncaps.kernels.library import BLOCK


def bytes_for(bits: int) -> int:
    """Bytes that so many bits fill."""
    return math.ceil(bits / 8)


def pack_bits(signs: Tensor) -> Tensor:
    """The signs along the last axis as bits: element ``8 n + k`` is bit k of byte n, 1 is +1.

    Unused bits of the last byte are 0.

    Shape:
        ``(..., n)`` -> ``(..., ceil(n / 8))``, uint8.

    >>> pack_bits(torch.tensor([1.0, -1, 1, -1, -1, -1, -1, -1, 1]))
    tensor([5, 1], dtype=torch.uint8)
    """
    if signs.is_meta:  # torch would load its compiler, and there are no numbers
        return signs.new_empty((*signs.shape[:-1], bytes_for(signs.shape[-1])), dtype=torch.uint8)
    bits = F.pad((signs > 0).to(torch.uint8), (0, -signs.shape[-1] % 8))
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (torch.unflatten(bits, -1, (-1, 8)) << places).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, n: int) -> Tensor:
    """The n signs, +1.0 and -1.0, along the last axis of what :func:`pack_bits` gave.

    Shape:
        ``(..., ceil(n / 8))`` -> ``(..., n)``, float32.

    >>> unpack_bits(torch.tensor([5], dtype=torch.uint8), 4)
    tensor([ 1., -1.,  1., -1.])
    """
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed.unsqueeze(-1) >> places) & 1
    return bits.flatten(-2)[..., :n].to(torch.float32) * 2 - 1


def to_lanes(x: Tensor) -> Tensor:
    """Lay an array out with its first axis as lanes: blocks of 32 lanes, each with all rows.

    The rows are the other axes in order. The last block is as narrow as what is left, so that
    nothing is padded.

    Shape:
        ``(count, ...)`` -> ``(count * rows,)``.

    >>> to_lanes(torch.tensor([[1, 2], [3, 4], [5, 6]]))
    tensor([1, 3, 5, 2, 4, 6])
    """
    if x.is_meta:
        return x.new_empty(x.numel())
    blocks = torch.split(x.reshape(x.shape[0], -1), BLOCK)
    return torch.cat([block.t().reshape(-1) for block in blocks])


def from_lanes(laned: Tensor, shape: Sequence[int]) -> Tensor:
    """The array of this shape that :func:`to_lanes` laid out.

    Shape:
        ``(count * rows,)`` -> ``shape``, which is ``(count, ...)``.

    >>> from_lanes(torch.tensor([1, 3, 5, 2, 4, 6]), (3, 2))
    tensor([[1, 2],
            [3, 4],
            [5, 6]])
    """
    rows = math.prod(shape[1:])
    blocks = [block.view(rows, -1).t() for block in torch.split(laned, BLOCK * rows)]
    return torch.cat(blocks).reshape(tuple(shape))
