"""Binarization (Appendix A): a tensor becomes signs and a scale, ``x ~ signs * scale``.

A binarizer is a function ``(x, dim) -> signs``: +1 or -1 everywhere, with a gradient that stands in
for the true one (which is zero almost everywhere). ``sign(0)`` is -1 and so is the sign of a NaN,
whose scale is NaN, so it is never hidden. To add a binarizer, write such a function and name it in
``BINARIZERS``.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from xncaps.errors import InputError, check_axis, check_floating, look_up, message

Dim = int | tuple[int, ...]
Binarizer = Callable[[Tensor, Dim], Tensor]


def _binary(x: Tensor, threshold: Tensor | float, surrogate: Tensor) -> Tensor:
    """+1 where x > threshold, else -1, with the gradient of ``surrogate``."""
    signs = (x > threshold).to(x.dtype) * 2 - 1
    if not torch.is_grad_enabled():
        return signs
    surrogate = surrogate.nan_to_num()  # so that a NaN has a sign as well
    return signs + (surrogate - surrogate.detach())  # + 0, exactly


def sign(x: Tensor, dim: Dim = -1) -> Tensor:
    """Binarize at zero, as XNOR-Net does.

    Forward: +1 where x > 0, else -1.
    Gradient (straight through a hard tanh): 1 where abs(x) <= 1, else 0.

    Args:
        x: any shape.
        dim: not used; every binarizer takes it.

    Shape:
        ``(...)`` -> the same.

    >>> sign(torch.tensor([-2.0, -0.0, 0.0, 0.5]))
    tensor([-1., -1., -1.,  1.])
    """
    return _binary(x, 0.0, x.clamp(-1, 1))


def midrange(x: Tensor, dim: Dim = -1) -> Tensor:
    """Binarize at the middle of the range, as the text of Appendix A does (Eqs. 17, 18).

    Forward: +1 where x > (max + min) / 2 over ``dim``, else -1, so a constant vector is all -1.
    Gradient: as :func:`sign`'s, 1 where abs(x) <= 1, else 0; none through max and min.

    Args:
        x: any shape.
        dim: the axis or axes over which max and min are taken.

    Shape:
        ``(...)`` -> the same.

    >>> midrange(torch.tensor([1.0, 2.0, 9.0]))
    tensor([-1., -1.,  1.])
    """
    frozen = x.detach()
    threshold = (frozen.amax(dim, keepdim=True) + frozen.amin(dim, keepdim=True)) / 2
    return _binary(x, threshold, x.clamp(-1, 1))


def approxsign(x: Tensor, dim: Dim = -1) -> Tensor:
    """Binarize at zero with Bi-Real-Net's ApproxSign gradient.

    Forward: +1 where x > 0, else -1.
    Gradient (of a piecewise quadratic): 2 - 2 abs(x) where abs(x) < 1, else 0.

    Args:
        x: any shape.
        dim: not used; every binarizer takes it.

    Shape:
        ``(...)`` -> the same.

    >>> x = torch.tensor([-2.0, -0.25, 0.5], requires_grad=True)
    >>> approxsign(x).sum().backward()
    >>> x.grad
    tensor([0.0000, 1.5000, 1.0000])
    """
    inside = x.clamp(-1, 1)
    return _binary(x, 0.0, inside * (2 - inside.abs()))


BINARIZERS: dict[str, Binarizer] = {"sign": sign, "midrange": midrange, "approxsign": approxsign}

SCALES = ("mean", "learned")
"""What multiplies the signs: mean absolute values, or parameters in their place (XNOR-Net++)."""


def mean_scale(x: Tensor, dim: Dim, detach: bool = True) -> Tensor:
    """The scale of Eq. 19: mean of abs(x) over ``dim``, the axis kept; a constant if detached."""
    return (x.detach() if detach else x).abs().mean(dim, keepdim=True)


def binarize(
    x: Tensor, dim: Dim = -1, how: str = "sign", *, detach_scale: bool = True
) -> tuple[Tensor, Tensor]:
    """Split a tensor into signs and a scale, ``x ~ signs * scale`` (Appendix A).

    ``scale = mean(abs(x))`` over ``dim`` (Eq. 19). The signs carry the gradient of the binarizer
    named by ``how``; the scale carries none unless ``detach_scale`` is false.

    Args:
        x: a floating-point tensor of any shape.
        dim: the axis or axes that share one scale.
        how: a name in ``BINARIZERS``: sign, midrange or approxsign.
        detach_scale: treat the scale as a constant in the backward pass.

    Shape:
        x ``(...)`` -> signs as x; scale as x with size 1 along ``dim``.

    >>> signs, scale = binarize(torch.tensor([[0.5, -1.0, 0.0, 2.5]]))
    >>> signs, scale
    (tensor([[ 1., -1., -1.,  1.]]), tensor([[1.]]))
    """
    check_floating("binarize", "x", x)
    binarizer = look_up("binarize", "how", how, BINARIZERS)
    axes = dim if isinstance(dim, tuple) else (dim,)
    for axis in axes:
        check_axis("binarize", x, axis)
        if x.shape[axis] == 0:
            requirement = f"have at least one element along axis {axis}"
            raise InputError(message("binarize", "x", requirement, tuple(x.shape)))
    if len({axis % x.dim() for axis in axes}) != max(1, len(axes)):
        raise InputError(message("binarize", "dim", "be an axis or several different ones", dim))
    return binarizer(x, dim), mean_scale(x, dim, detach_scale)
