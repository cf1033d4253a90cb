"""pack: a small, quick copy of a network for inference; and what it will hold."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xncaps.deploy.fold import Affine, Folded, Norm, find_folds, find_norms, fold, is_hooked
from xncaps.deploy.packed import Packed, PackedCapsules
from xncaps.deploy.packed_primary import PackedPrimaryCaps
from xncaps.deploy.packed_xnor import PackedXnorConv2d, PackedXnorLinear
from xncaps.errors import InputError, InputTypeError, look_up, message
from xncaps.primary import PrimaryCaps

SCALE_TYPES = {"float32": torch.float32, "float16": torch.float16}
KINDS: tuple[type[Packed], ...] = (PackedCapsules, PackedXnorLinear, PackedXnorConv2d)


def pack(model: nn.Module, *, scales: str = "float32") -> nn.Module:
    """A copy of a network for inference on a CPU: binary weights in bits, fewer norms.

    - A capsule layer with dynamic routing becomes a :class:`PackedCapsules`, an XnorLinear a
      :class:`PackedXnorLinear`, an XnorConv2d a :class:`PackedXnorConv2d`: they hold the signs of
      their weights as bits, and call the native kernels where they can.
    - A PrimaryCaps becomes a :class:`PackedPrimaryCaps`, which takes fewer steps.
    - Batch normalisation goes into the linear layer or convolution that it follows in a Sequential,
      and becomes an :class:`Affine` map elsewhere.
    - All else is as it was. Layers with hooks, and subclasses with a ``forward`` of their own, are
      left alone.

    The copy is in evaluation mode and does not learn. Its outputs are those of the network in
    evaluation mode, within 1e-5 with float32 scales (of the largest, where that is above 1); but a
    value that sits on the threshold of a sign may fall on its other side. The network itself is
    left as it is.

    Call the copy as it is: in ``torch.compile`` and ``torch.export`` its layers go back to floats.

    Args:
        model: the network, of float32 numbers.
        scales: ``float32``, or ``float16``: half the bytes for the scales of the capsule layers,
            and outputs within 5e-4; with an xnor agreement, too, rounded predictions may fall on
            the other side of a threshold (both xnorized: 1% of samples are off by up to 3e-3).

    >>> from xncaps.models import create_model
    >>> model = create_model("convnet", head="xnodr")
    >>> fast = pack(model)
    >>> fast(torch.randn(2, 1, 28, 28)).shape, type(fast.head.capsules).__name__
    (torch.Size([2, 10]), 'PackedCapsules')
    """
    where = "pack"
    if not isinstance(model, nn.Module):
        raise InputTypeError(message(where, "model", "be an nn.Module", type(model).__name__))
    dtype = look_up(where, "scales", scales, SCALE_TYPES)
    _check_dtype(model)
    copy = deepcopy(model).eval().requires_grad_(False)
    # What has no numbers yet stays without.
    copy._apply(lambda tensor: tensor if tensor.is_meta else tensor.cpu())  # type: ignore[no-untyped-call]
    plan = make_plan(copy)
    new: dict[nn.Module, nn.Module] = {}
    for layer, kind in plan.packed.items():
        new[layer] = _pack_layer(layer, kind, dtype)
    for norm in plan.affine:
        new[norm] = Affine(norm)
    for primary in plan.primary:
        new[primary] = PackedPrimaryCaps(primary)
    return fold_and_replace(copy, plan, new).eval()


def fold_and_replace(model: nn.Module, plan: "Plan", new: dict[nn.Module, nn.Module]) -> nn.Module:
    """Fold the norms of a network, and put new modules in the place of old ones; returns it."""
    for norm, into in plan.folds.items():
        fold(into, norm)
        new[norm] = Folded(norm)
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child in new:
                module._modules[name] = new[child]
    return new.get(model, model)


@dataclass
class Plan:
    """What packing does to a network.

    Attributes:
        packed: layers whose weights are packed, and as what.
        folds: norms that the layer before them takes in, and those layers.
        affine: norms that become an affine map.
        primary: primary capsules, which keep their weights.
    """

    packed: dict[nn.Module, type[Packed]]
    folds: dict[Norm, nn.Linear | nn.Conv2d]
    affine: list[Norm]
    primary: list[PrimaryCaps]


def make_plan(model: nn.Module) -> Plan:
    """What packing does to a network; only its structure is looked at."""
    packed: dict[nn.Module, type[Packed]] = {}
    primary: list[PrimaryCaps] = []
    for module in model.modules():
        if isinstance(module, PrimaryCaps) and PackedPrimaryCaps.takes(module):
            primary += [] if is_hooked(module) else [module]
        kind = next((kind for kind in KINDS if kind.takes(module)), None)
        if kind is not None and not any(is_hooked(part) for part in module.modules()):
            packed[module] = kind
    folds = find_folds(model)
    affine = [norm for norm in find_norms(model) if norm not in folds]
    return Plan(packed, folds, affine, primary)


def packed_sizes(model: nn.Module) -> dict[nn.Module, tuple[int, int]]:
    """Bytes of every module of a network by itself, now and in its packed copy.

    Now: the parameters as float32, and the buffers of what packing leaves alone (so not those of
    batch normalisation). The first of several modules has what they share.

    >>> layer = nn.Linear(4, 2, bias=False)
    >>> packed_sizes(nn.Sequential(layer, nn.BatchNorm1d(2)))[layer]
    (32, 40)
    """
    plan = make_plan(model)
    affine: dict[nn.Module, Norm] = {norm: norm for norm in plan.affine}
    inside = {part for layer in plan.packed for part in layer.modules()} - set(plan.packed)
    without_bias = {layer for layer in plan.folds.values() if layer.bias is None}
    seen: set[Tensor] = set()
    kept: set[Tensor] = set()
    sizes: dict[nn.Module, tuple[int, int]] = {}
    for module in model.modules():
        parameters = [p for p in module.parameters(recurse=False) if p not in seen]
        seen.update(parameters)
        now = 4 * sum(parameter.numel() for parameter in parameters)
        if module in inside:
            sizes[module] = now, 0
        elif module in plan.packed:
            sizes[module] = now, plan.packed[module].size_of(module)
        elif module in plan.folds:
            sizes[module] = now, 0
        elif module in affine:
            sizes[module] = now, Affine.size_of(affine[module])
        else:
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            held = sum(_bytes_of(module, tensor) for tensor in tensors if tensor not in kept)
            kept.update(tensors)
            bias = 4 * len(module.weight) if module in without_bias else 0
            sizes[module] = held, held + bias
    return sizes


def _bytes_of(module: nn.Module, tensor: Tensor) -> int:
    if tensor.is_floating_point() and not isinstance(module, Packed):
        return 4 * tensor.numel()
    return tensor.nbytes


def _check_dtype(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Packed):
            continue  # its scales may be in float16
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point() and tensor.dtype != torch.float32:
                hint = "Convert it with .float()."
                requirement = "be of torch.float32"
                raise InputTypeError(message("pack", "model", requirement, tensor.dtype, hint))


def _pack_layer(layer: Any, kind: type[Any], dtype: torch.dtype) -> nn.Module:
    if kind is not PackedCapsules:
        packed: nn.Module = kind(layer)
        return packed
    capsules = PackedCapsules(layer, dtype)
    if dtype == torch.float16 and layer.binarizer is not None and not layer.weight.is_meta:
        lost = capsules.scales.isinf() & ~PackedCapsules(layer).scales.isinf()
        if lost.any():
            requirement = "be float32 for scales above 65504"
            raise InputError(message("pack", "scales", requirement, "'float16'"))
    return capsules
