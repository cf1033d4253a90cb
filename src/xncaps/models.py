"""``create_model``: a head on a backbone, or a whole network, by name."""

import warnings
from typing import Any

from xncaps.backbones import BACKBONES, Backbone
from xncaps.errors import (
    InputError,
    InputTypeError,
    brief,
    check_choice,
    check_options,
    check_size,
    check_width,
    message,
)
from xncaps.heads import CAPSULE_HEADS, DIM_IN, HEAD_OPTIONS, HEADS
from xncaps.networks import CapsNet, Classifier, XnorNet, check_image_size

ATTACH = ("replace", "append", "features")

NETWORKS: dict[str, type[CapsNet] | type[XnorNet]] = {"capsnet": CapsNet, "xnornet": XnorNet}
MODELS: tuple[str, ...] = (*BACKBONES, *NETWORKS)
WIDTHS = ("convnet", "widenet", "xnornet")
"""Those that come in any width."""


def create_model(
    backbone: str,
    head: str | None = None,
    num_classes: int = 10,
    in_channels: int | None = None,
    image_size: int | None = None,
    attach: str = "replace",
    **options: Any,
) -> Classifier:
    """Build a network by name.

    ``attach`` says where a capsule head sits (``linear`` and ``fc`` always take the pooled features
    of the whole backbone):

    - ``replace``: the head stands in place of the backbone's last convolution, as the paper's text
      has it;
    - ``append``: the last convolutions are kept, frozen, and primary capsules with batch
      normalisation follow them, as the authors' released code has it;
    - ``features``: the head takes the pooled features of the whole backbone.

    Args:
        backbone: convnet, mobilenetv2, resnet50 or widenet; or a whole network, capsnet or xnornet.
        head: linear, fc, dr, xnodr, xnidr or xnboth. If not given: xnidr on a backbone, dr in
            capsnet, linear in xnornet.
        num_classes: number of classes.
        in_channels: channels of the images; if not given, 3 (convnet and capsnet: 1).
        image_size: side of the images in pixels; if not given, 224 (convnet and capsnet: 28,
            widenet and xnornet: 32).
        attach: replace, append or features.
        options: of the head (``caps_in``, ``dim_in``, ``dim_out``, ``iterations``, ``binarizer``,
            ..., or ``hidden`` of an fc head), ``width`` of convnet, widenet and xnornet, and
            ``mirror`` of all backbones: see :class:`xncaps.networks.Classifier`.

    Shape of the model:
        ``(batch, in_channels, height, width)`` -> ``(batch, num_classes)``.

    >>> model = create_model("convnet", head="xnidr", num_classes=10)
    >>> model(torch.randn(2, 1, 28, 28)).shape, model.scores
    (torch.Size([2, 10]), 'lengths')
    """
    where = "create_model"
    check_choice(where, "backbone", backbone, MODELS)
    if head is not None:
        check_choice(where, "head", head, HEADS)
    check_choice(where, "attach", attach, ATTACH)
    check_size(where, "num_classes", num_classes)
    network: Any = {**BACKBONES, **NETWORKS}[backbone]
    in_channels = network.default_channels if in_channels is None else in_channels
    image_size = network.default_size if image_size is None else image_size
    check_size(where, "in_channels", in_channels)
    check_image_size(where, image_size, network.least_size, f"for {backbone}")
    if "width" in options:
        if backbone not in WIDTHS:
            requirement = f"go with {', '.join(WIDTHS[:-1])} or {WIDTHS[-1]}"
            raise InputError(message(where, "width", requirement, backbone))
        check_width(where, options["width"])
    if backbone in NETWORKS:
        return _whole_network(backbone, head, num_classes, in_channels, image_size, attach, options)

    head = head or "xnidr"
    mirror = options.pop("mirror", False)
    if not isinstance(mirror, bool):
        raise InputTypeError(message(where, "mirror", "be true or false", brief(mirror)))
    width = {"width": options.pop("width")} if "width" in options else {}
    base: Backbone = network(in_channels, image_size, **width)
    placed: dict[str, Any] = {}
    if head == "fc":
        options = {"hidden": base.hidden, **options}
    elif head in CAPSULE_HEADS:
        options = {"caps_in": base.caps_in, "dim_in": DIM_IN, **options}
    check_options(where, f"the {head} head", HEAD_OPTIONS[head], options)
    if head in CAPSULE_HEADS:
        placed = _place_capsules(backbone, base, attach, options["caps_in"], options["dim_in"])
    built = HEADS[head](base.features, num_classes, **placed, **options)
    return Classifier(base, built, in_channels, image_size, mirror)


def _place_capsules(
    name: str, base: Backbone, attach: str, caps_in: int, dim_in: int
) -> dict[str, Any]:
    """Ready the backbone for a capsule head; returns the head's ``primary`` and ``norm``."""
    check_size("create_model", "caps_in", caps_in)
    check_size("create_model", "dim_in", dim_in)
    if attach == "features":
        return {}
    if attach == "replace":
        primary = base.replacing_caps(caps_in, dim_in)
        base.drop_top()
        return {"primary": primary}
    base.freeze_top()
    warnings.warn(
        f"{name} with attach='append' freezes its last block, whose weights are random until"
        " pretrained ones are loaded.",
        stacklevel=3,
    )
    return {"primary": base.appended_caps(caps_in, dim_in), "norm": True}


def _whole_network(
    network: str,
    head: str | None,
    num_classes: int,
    in_channels: int,
    image_size: int,
    attach: str,
    options: dict[str, Any],
) -> Classifier:
    where = "create_model"
    if attach != "replace":
        hint = "A whole network has one place for its head."
        raise InputError(message(where, "attach", f"be replace with {network}", attach, hint))
    if network == "capsnet":
        return CapsNet(num_classes, in_channels, image_size, head or "dr", **options)
    if head not in (None, "linear"):
        hint = "Its last layer is a float linear one."
        raise InputError(message(where, "head", f"be linear with {network}", head, hint))
    known = ("width", "binarizer", "scale", "detach_scale")
    check_options(where, network, known, options)
    return XnorNet(num_classes, in_channels, image_size, **options)
