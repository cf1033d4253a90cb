"""Batch normalisation in inference: two numbers a channel, or none where a layer takes it in."""

from collections import Counter
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xncaps.backbones.base import SameConv2d
from xncaps.errors import InputError, message

NORMS: dict[type[nn.Module], int] = {nn.BatchNorm1d: 2, nn.BatchNorm2d: 4}
"""The norms that are replaced, and the axes of the output of a layer that takes them in."""

FOLDABLE: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    SameConv2d: nn.BatchNorm2d,
}
"""Layers that can take in the norm behind them; a subclass may do more with its weight."""

Norm = nn.BatchNorm1d | nn.BatchNorm2d


class Affine(nn.Module):
    """What batch normalisation is in inference: ``y = x * weight + bias``, for each channel.

    ``weight = gamma / sqrt(var + eps)``, ``bias = beta - mean * weight``. The numbers and the
    operation are those of PyTorch's kernel, so that no sign behind it changes.

    Args:
        norm: the batch normalisation whose running statistics are used.

    Shape:
        ``(batch, channels, ...)`` -> the same.

    >>> Affine(nn.BatchNorm1d(3, eps=0.0))(torch.ones(1, 3))
    tensor([[1., 1., 1.]])
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        mean, var = _statistics(norm)
        self.num_features = norm.num_features
        zeros, ones = torch.zeros_like(mean), torch.ones_like(mean)
        with torch.no_grad():
            # PyTorch's own sums: of mean 0 and input 1, then of the mean and input 0.
            weight = F.batch_norm(ones[None], zeros, var, norm.weight, None, eps=norm.eps)
            bias = F.batch_norm(zeros[None], mean, var, norm.weight, norm.bias, eps=norm.eps)
        self.register_buffer("weight", weight[0].clone())
        self.register_buffer("bias", bias[0].clone())

    @property
    def params(self) -> int:
        """Numbers it holds."""
        return 2 * self.num_features

    @staticmethod
    def size_of(norm: Norm) -> int:
        """Bytes that a norm takes as such a module."""
        return 8 * norm.num_features

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1,) + (1,) * (x.dim() - 2)
        return torch.addcmul(self.bias.view(shape), x, self.weight.view(shape))

    def extra_repr(self) -> str:
        return str(self.num_features)


class Folded(nn.Module):
    """Stands where batch normalisation was that the layer before it has taken in.

    It passes on what it gets, if that has the axes for which the two are the same.

    Args:
        norm: the batch normalisation.

    Shape:
        ``(batch, features)`` or ``(batch, channels, height, width)`` -> the same.

    >>> Folded(nn.BatchNorm2d(3))(torch.ones(1, 3, 2, 2)).shape
    torch.Size([1, 3, 2, 2])
    """

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.num_features = norm.num_features
        self.axes = NORMS[type(norm)]

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != self.axes:
            got = f"shape {tuple(x.shape)}"
            hint = "Leave a norm of sequences out of the Sequential of its linear layer."
            hint = hint if self.axes == 2 else ""
            raise InputError(message("Folded", "x", f"have {self.axes} axes", got, hint))
        return x

    def extra_repr(self) -> str:
        return str(self.num_features)


def fold(layer: nn.Linear | nn.Conv2d, norm: Norm) -> None:
    """Let a layer take in the norm behind it, in place.

    ``W' = W * a`` for each output channel and ``b' = (b - mean) * a + beta``, where
    ``a = gamma / sqrt(var + eps)``, worked out in float64.
    """
    if layer.weight.is_meta:  # torch would load its compiler, and there are no numbers
        empty = layer.weight.new_empty(len(layer.weight))
        layer.bias = nn.Parameter(empty, requires_grad=False)
        return
    with torch.no_grad():
        mean, var = (each.double() for each in _statistics(norm))
        factor = (var + norm.eps).rsqrt()
        if norm.weight is not None:
            factor *= norm.weight
        bias = -mean if layer.bias is None else layer.bias - mean
        bias = bias * factor
        if norm.bias is not None:
            bias += norm.bias
        shape = (-1,) + (1,) * (layer.weight.dim() - 1)
        layer.weight.copy_(layer.weight * factor.view(shape))
        layer.bias = nn.Parameter(bias.to(layer.weight.dtype), requires_grad=False)


def find_norms(model: nn.Module) -> list[Norm]:
    """The batch normalisations that are an affine map in inference, and that nothing looks into."""
    return [
        module
        for module in model.modules()
        if isinstance(module, Norm)
        and type(module) in NORMS
        and module.running_mean is not None
        and module.running_var is not None
        and not is_hooked(module)
    ]


def find_folds(model: nn.Module) -> dict[Norm, nn.Linear | nn.Conv2d]:
    """The norms that the layer before them can take in, with those layers.

    Both stand in a row in a Sequential, and nowhere else; no hook sees what is between them; and
    the weights of the layer are its own.
    """
    norms = set(find_norms(model))
    holders = Counter(child for module in model.modules() for child in module._modules.values())
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    found: dict[Norm, nn.Linear | nn.Conv2d] = {}
    for sequence in model.modules():
        if not isinstance(sequence, nn.Sequential):
            continue
        if type(sequence).forward is not nn.Sequential.forward:
            continue
        for layer, norm in pairwise(sequence):
            if (
                isinstance(layer, nn.Linear | nn.Conv2d)
                and isinstance(norm, Norm)
                and norm in norms
                and FOLDABLE.get(type(layer)) is type(norm)
                and len(layer.weight) == norm.num_features
                and holders[layer] == holders[norm] == 1
                and all(owners[id(parameter)] == 1 for parameter in layer.parameters())
                and not is_hooked(layer)
            ):
                found[norm] = layer
    return found


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody's hook runs with the module."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _statistics(norm: Norm) -> tuple[Tensor, Tensor]:
    if norm.running_mean is None or norm.running_var is None:
        raise InputError(message("pack", "a norm", "have running statistics", norm))
    return norm.running_mean, norm.running_var
