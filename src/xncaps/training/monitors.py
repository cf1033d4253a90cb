"""What people ask of a binary or a capsule network while it learns."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from xncaps.binarizers import BINARIZERS
from xncaps.heads import CapsuleHead
from xncaps.layers import CapsuleLinear
from xncaps.networks import Classifier
from xncaps.xnor import XnorConv2d, XnorLinear

IMAGES = 256
"""How many validation images the coupling entropy is taken over."""


@torch.no_grad()
def weight_signs(network: nn.Module) -> dict[str, Tensor]:
    """For every layer whose weights are binarized: where the sign is +1."""
    return {name: BINARIZERS[how](weight, axes) > 0 for name, weight, how, axes in _binary(network)}


def _binary(network: nn.Module) -> Iterator[tuple[str, Tensor, str, int | tuple[int, ...]]]:
    for name, module in network.named_modules():
        if isinstance(module, CapsuleLinear) and module.binarizer is not None:
            yield name, module.weight, module.binarizer, 2
        elif isinstance(module, XnorLinear):
            yield name, module.weight, module.binarizer, 1
        elif isinstance(module, XnorConv2d):
            yield name, module.weight, module.binarizer, (1, 2, 3)


def flip_ratios(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, float]:
    """The share of signs in each layer that are not what they were.

    >>> signs = torch.tensor([True, False, True, True])
    >>> flip_ratios({"layer": signs}, {"layer": ~signs & signs.logical_not()})
    {'layer': 1.0}
    """
    return {name: (before[name] != after[name]).double().mean().item() for name in after}


@torch.no_grad()
def coupling_entropy(network: Classifier, images: Tensor) -> float | None:
    """How evenly capsules spread over the classes: 1 evenly, 0 each on one; None without capsules.

    The mean over images and capsules of ``-sum_j c_ij log c_ij / log J``, c the couplings of the
    last iteration.
    """
    if not isinstance(network.head, CapsuleHead) or network.num_classes < 2 or len(images) == 0:
        return None
    was_training = network.training
    network.eval()  # or BatchNorm would learn from these images
    try:
        _, couplings = network(images, return_couplings=True)
    finally:
        network.train(was_training)
    entropy = torch.special.entr(couplings).sum(dim=2).mean().item()
    return float(entropy) / math.log(network.num_classes)
