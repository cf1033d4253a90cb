"""Put a head on somebody else's network, in place of its classifier."""

from collections import OrderedDict
from functools import partial
from typing import Any

from torch import nn

from xncaps.errors import (
    InputError,
    InputTypeError,
    check_choice,
    check_options,
    check_size,
    message,
)
from xncaps.heads import HEAD_OPTIONS, HEADS

NAMES = ("classifier", "fc", "head", "heads")
"""Where torchvision, timm and most others keep their classifier, in the order they are tried."""


def attach_head(
    model: nn.Module,
    head: str,
    num_classes: int,
    *,
    name: str | None = None,
    in_features: int | None = None,
    **options: Any,
) -> nn.Module:
    """Replace the classifier of any network by a head, in place, and return the network.

    The classifier is the module called ``name``; if that is not given, what timm's
    ``get_classifier()`` names, or the child called ``classifier``, ``fc``, ``head`` or ``heads``.
    Of a classifier made of several layers, those before the first linear layer or convolution
    (flatten, dropout, a norm) stay and the rest is replaced. A network that averages several
    classifiers, such as a distilled one, gets a head for each. A head takes over the device, dtype
    and mode of what it replaces. Auxiliary classifiers, as GoogLeNet has them, are left alone.

    The network gets two attributes: ``num_classes``, and ``scores``: ``lengths`` or ``logits``.
    timm's ``reset_classifier`` puts a classifier of timm in place of the head, and takes ``scores``
    away with it.

    Args:
        model: a network whose classifier takes pooled features or feature maps.
        head: linear, fc, dr, xnodr, xnidr or xnboth.
        num_classes: number of classes.
        name: the classifier's name in the network, dotted as in ``named_modules()``.
        in_features: size of the features; read off the classifier if not given.
        options: of the head: ``caps_in``, ``dim_in``, ``dim_out``, ``iterations``, ...

    >>> body = [nn.Conv2d(1, 64, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    >>> model = attach_head(nn.Sequential(*body, nn.Linear(64, 10)), "xnidr", 10, name="3")
    >>> model.scores
    'lengths'
    """
    where = "attach_head"
    if not isinstance(model, nn.Module):
        raise InputTypeError(message(where, "model", "be an nn.Module", type(model).__name__))
    check_choice(where, "head", head, HEADS)
    check_size(where, "num_classes", num_classes)
    check_options(where, f"the {head} head", HEAD_OPTIONS[head], options)
    replacements: dict[nn.Module, nn.Module] = {}
    for each in _classifier_names(model) if name is None else [_given_name(model, name)]:
        classifier = model.get_submodule(each)
        path = _first_layer(classifier)
        layer = classifier.get_submodule(path)
        size = _features_of(model, each, layer) if in_features is None else in_features
        new = HEADS[head](check_size(where, "in_features", size), num_classes, **options)
        tensor = next(layer.parameters(), next(model.parameters(), None))
        if tensor is not None:
            new.to(device=tensor.device, dtype=tensor.dtype)
        new.train(layer.training)
        replacements[classifier] = _cut(classifier, path.split("."), new) if path else new

    for each, module in list(model.named_modules(remove_duplicate=False)):
        if module in replacements:
            model.set_submodule(each, replacements[module])
    _tell(model, "num_classes", num_classes)
    _tell(model, "scores", new.scores)
    if hasattr(type(model), "reset_classifier"):
        _tell(model, "reset_classifier", partial(_reset_classifier, model))
    return model


def _given_name(model: nn.Module, name: str) -> str:
    names = [known for known, _ in model.named_modules() if known]
    if name not in names:
        children = ", ".join(known for known, _ in model.named_children()) or "none"
        hint = f"Its children are: {children}."
        requirement = f"be a module of {type(model).__name__}"
        raise InputError(message("attach_head", "name", requirement, repr(name), hint))
    return name


def _classifier_names(model: nn.Module) -> list[str]:
    known = {module: name for name, module in model.named_modules() if name}
    names = [known[module] for module in _named_by_timm(model) if module in known]
    if not names:
        names = [name for name in NAMES if isinstance(getattr(model, name, None), nn.Module)][:1]
    if not names:
        children = ", ".join(name for name, _ in model.named_children()) or "none"
        requirement = f"have a get_classifier() or a child named {', '.join(NAMES)}"
        got = f"{type(model).__name__} with children {children}"
        hint = "Name its classifier with name=..."
        raise InputError(message("attach_head", "model", requirement, got, hint))
    return [f"{name}.fc" if _is_timm_head(model.get_submodule(name)) else name for name in names]


def _named_by_timm(model: nn.Module) -> list[nn.Module]:
    """What ``get_classifier()`` gives, as a list; an empty one where there is no such method."""
    try:
        found = model.get_classifier()  # type: ignore[operator]
    except AttributeError:  # also of models that look for a layer of a classifier they lack
        return []
    several = found if isinstance(found, tuple) else (found,)
    flat = (each if isinstance(each, nn.ModuleList) else [each] for each in several)
    return [module for modules in flat for module in modules if isinstance(module, nn.Module)]


def _is_timm_head(module: nn.Module) -> bool:
    """Whether it is a ClassifierHead of timm, which pools, and can put another ``fc`` in itself."""
    has_fc = isinstance(getattr(module, "fc", None), nn.Module)
    return has_fc and callable(getattr(module, "reset", None))


def _first_layer(classifier: nn.Module) -> str:
    """Of a sequence of layers: the path of its first linear layer or convolution; else ``""``."""
    if isinstance(classifier, nn.Sequential):
        for name, layer in classifier.named_children():
            if _in_features(layer) is not None:
                return name
            if path := _first_layer(layer):
                return f"{name}.{path}"
    return ""


def _cut(classifier: nn.Module, path: list[str], new: nn.Module) -> nn.Module:
    """The layers before the one at ``path``, then ``new`` in its place; modes as they were."""
    kept: OrderedDict[str, nn.Module] = OrderedDict()
    for name, layer in classifier.named_children():
        if name == path[0]:
            kept[name] = _cut(layer, path[1:], new) if path[1:] else new
            break
        kept[name] = layer
    if len(kept) == 1:
        return kept[path[0]]
    sequence = nn.Sequential(kept)
    sequence.training = classifier.training
    return sequence


def _in_features(module: nn.Module) -> int | None:
    for attribute in ("in_features", "in_channels"):
        size = getattr(module, attribute, None)
        if isinstance(size, int) and size > 0:
            return size
    return None


def _features_of(model: nn.Module, name: str, classifier: nn.Module) -> int:
    """Size of the features that a classifier takes: its own, or that of its first layer."""
    sizes = (_in_features(module) for module in classifier.modules())
    size = next((size for size in sizes if size is not None), None)
    for attribute in ("head_hidden_size", "num_features"):  # of a timm model with num_classes=0
        size = size or getattr(model, attribute, None)
    if size is None:
        requirement = "be a linear layer, a convolution, or have one"
        hint = "Give the size of its features with in_features=..."
        got = type(classifier).__name__
        raise InputError(message("attach_head", f"classifier {name!r}", requirement, got, hint))
    return int(size)


def _tell(model: nn.Module, attribute: str, value: object) -> None:
    """Set an attribute, but for one that the model works out from its head by itself."""
    if not isinstance(getattr(type(model), attribute, None), property):
        setattr(model, attribute, value)


def _reset_classifier(model: Any, *args: Any, **options: Any) -> None:
    """timm's ``reset_classifier``, after which the model is again as timm made it.

    It stands on the instance as a partial of the model, which copies follow.
    """
    type(model).reset_classifier(model, *args, **options)
    for attribute in ("scores", "reset_classifier"):
        model.__dict__.pop(attribute, None)
