"""Put a head on somebody else's network, in place of its classifier."""

from collections import OrderedDict
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
    (flatten, dropout, a norm) stay and the rest is replaced. The head takes over the device, dtype
    and mode of what it replaces. Auxiliary classifiers, as GoogLeNet has them, are left alone.

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
    name = _classifier_name(model) if name is None else _given_name(model, name)
    classifier = model.get_submodule(name)
    path = _first_layer(classifier)
    layer = classifier.get_submodule(path)
    if in_features is None:
        in_features = _features_of(model, name, layer)

    new = HEADS[head](check_size(where, "in_features", in_features), num_classes, **options)
    tensor = next(layer.parameters(), next(model.parameters(), None))
    if tensor is not None:
        new.to(device=tensor.device, dtype=tensor.dtype)
    new.train(layer.training)
    replacement = _cut(classifier, path.split("."), new) if path else new
    for each, module in list(model.named_modules(remove_duplicate=False)):
        if module is classifier:
            model.set_submodule(each, replacement)
    _tell(model, "num_classes", num_classes)
    _tell(model, "scores", new.scores)
    return model


def _given_name(model: nn.Module, name: str) -> str:
    names = [known for known, _ in model.named_modules() if known]
    if name not in names:
        children = ", ".join(known for known, _ in model.named_children()) or "none"
        hint = f"Its children are: {children}."
        requirement = f"be a module of {type(model).__name__}"
        raise InputError(message("attach_head", "name", requirement, repr(name), hint))
    return name


def _classifier_name(model: nn.Module) -> str:
    get_classifier = getattr(model, "get_classifier", None)
    if callable(get_classifier):
        classifier = get_classifier()
        if not isinstance(classifier, nn.Module):
            hint = "Name the one to replace with name=..."
            got = type(classifier).__name__
            requirement = "return one module"
            raise InputError(
                message("attach_head", "get_classifier()", requirement, f"a {got}", hint)
            )
        for name, module in model.named_modules():
            if module is classifier and name:
                return str(name)
    for name in NAMES:
        if isinstance(getattr(model, name, None), nn.Module):
            return name
    children = ", ".join(name for name, _ in model.named_children()) or "none"
    requirement = f"have a get_classifier() or a child named {', '.join(NAMES)}"
    got = f"{type(model).__name__} with children {children}"
    hint = "Name its classifier with name=..."
    raise InputError(message("attach_head", "model", requirement, got, hint))


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
    size = _in_features(classifier)
    if size is None and isinstance(classifier, nn.Identity):  # a timm model with num_classes=0
        for attribute in ("head_hidden_size", "num_features"):
            size = size or getattr(model, attribute, None)
    if size is None:
        requirement = "be a linear layer, a convolution, or a Sequential that has one"
        hint = "Give the size of its features with in_features=..."
        got = type(classifier).__name__
        raise InputError(message("attach_head", f"classifier {name!r}", requirement, got, hint))
    return int(size)


def _tell(model: nn.Module, attribute: str, value: object) -> None:
    """Set an attribute, but for one that the model works out from its head by itself."""
    if not isinstance(getattr(type(model), attribute, None), property):
        setattr(model, attribute, value)
