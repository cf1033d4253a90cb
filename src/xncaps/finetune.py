"""Fine-tune a network with a head of ours: freeze the rest of it, or let it learn more slowly.

The head is found by its type, in any network that ``attach_head`` or ``create_model`` made, also in
a copy of it. The backbone is everything else: layers that ``attach_head`` kept before the head
belong to it.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from xncaps.errors import InputError, InputTypeError, brief, message
from xncaps.heads import CapsuleHead, FCHead, LinearHead

FROZEN = "_xncaps_frozen"
"""The attribute in which a module keeps the names of its parameters that were frozen here."""


def freeze_backbone(model: nn.Module) -> nn.Module:
    """Let nothing but the head of a network learn, in place, and return the network.

    The parameters of the backbone need no gradients any more. Its batch normalisations stay in
    evaluation mode whatever ``model.train()`` says, so their running statistics stay as they are,
    and are what is used. Dropout still obeys ``model.train()``.

    Args:
        model: a network with a head of ours.

    >>> from xncaps.models import create_model
    >>> model = freeze_backbone(create_model("convnet", "xnidr")).train()
    >>> sorted({name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad})
    ['head']
    >>> any(m.training for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    False
    """
    for module in _backbone("freeze_backbone", model):
        own = dict(module.named_parameters(recurse=False))
        names = [name for name, parameter in own.items() if parameter.requires_grad]
        for name in names:
            own[name].requires_grad_(False)
        if names:
            setattr(module, FROZEN, (*getattr(module, FROZEN, ()), *names))
        if _has_statistics(module):
            module.train = partial(_stay_in_eval, module)  # type: ignore[method-assign]
            module.eval()
    return model


def unfreeze_backbone(part: nn.Module) -> nn.Module:
    """Undo :func:`freeze_backbone`, for the network or any part of it, and return that.

    What did not learn before it was frozen does not learn now.

    Args:
        part: the network, or one of its modules, such as ``model.layer4``.

    >>> from xncaps.models import create_model
    >>> model = freeze_backbone(create_model("convnet", "xnidr"))
    >>> all(p.requires_grad for p in unfreeze_backbone(model).parameters())
    True
    """
    if not isinstance(part, nn.Module):
        got = type(part).__name__
        raise InputTypeError(message("unfreeze_backbone", "part", "be an nn.Module", got))
    for module in part.modules():
        for name in module.__dict__.pop(FROZEN, ()):
            module.get_parameter(name).requires_grad_(True)
        stays = module.__dict__.get("train")
        if isinstance(stays, partial) and stays.func is _stay_in_eval:
            del module.train
            module.train(part.training)
    return part


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    backbone_lr: float | None = None,
    weight_decay: float | None = None,
) -> list[dict[str, Any]]:
    """The parameters of head and backbone apart, each with its rate, for any optimizer of PyTorch.

    A group has the optimizer's keys ``params``, ``lr`` and, if given, ``weight_decay``, and a
    ``name``: ``head`` or ``backbone``, with `` without decay`` behind it for biases, norms and what
    timm's ``no_weight_decay()`` lists. Frozen parameters are among them: an optimizer passes over
    what has no gradient, and they learn once they are unfrozen.

    Args:
        model: a network with a head of ours.
        lr: learning rate of the head.
        backbone_lr: learning rate of the backbone; a tenth of the head's if not given.
        weight_decay: of weights with two or more axes; the optimizer's own for all if not given.

    >>> from xncaps.models import create_model
    >>> model = create_model("convnet", "xnidr")
    >>> groups = parameter_groups(model, lr=1e-3, backbone_lr=1e-4)
    >>> [(group["name"], group["lr"]) for group in torch.optim.AdamW(groups).param_groups]
    [('head', 0.001), ('backbone', 0.0001)]
    """
    where = "parameter_groups"
    lr = _check_rate(where, "lr", lr)
    backbone_lr = lr / 10 if backbone_lr is None else _check_rate(where, "backbone_lr", backbone_lr)
    if weight_decay is not None:
        weight_decay = _check_rate(where, "weight_decay", weight_decay)
    backbone = set(_backbone(where, model))
    spared = _without_decay(model)
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        in_backbone = model.get_submodule(name.rpartition(".")[0]) in backbone
        group = {"lr": backbone_lr if in_backbone else lr}
        title = "backbone" if in_backbone else "head"
        if weight_decay is not None:
            decays = parameter.dim() >= 2 and name not in spared
            group["weight_decay"] = weight_decay if decays else 0.0
            title += "" if decays else " without decay"
        groups.setdefault(title, {"params": [], **group, "name": title})["params"].append(parameter)
    return sorted(groups.values(), key=lambda group: str(group["name"]).startswith("backbone"))


def _backbone(where: str, model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a network that are not in its head."""
    if not isinstance(model, nn.Module):
        raise InputTypeError(message(where, "model", "be an nn.Module", type(model).__name__))
    heads = [m for m in model.modules() if isinstance(m, LinearHead | FCHead | CapsuleHead)]
    if not heads:
        got = f"{type(model).__name__} without one"
        hint = "Put one on it with attach_head."
        raise InputError(message(where, "model", "have a head of xncaps", got, hint))
    inside = {module for head in heads for module in head.modules()}
    return (module for module in model.modules() if module not in inside)


def _has_statistics(module: nn.Module) -> bool:
    """Whether it is some batch normalisation: PyTorch's, or another's with the same buffer."""
    return getattr(module, "running_var", None) is not None


def _stay_in_eval(module: nn.Module, mode: bool = True) -> nn.Module:
    """Stands for ``module.train`` on a frozen norm; a partial of it, so that copies follow."""
    return nn.Module.train(module, False)


def _without_decay(model: nn.Module) -> set[str]:
    names = getattr(model, "no_weight_decay", None)
    return set(names()) if callable(names) else set()


def _check_rate(where: str, what: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value)
    raise InputError(message(where, what, "be a finite number of at least 0", brief(value)))
