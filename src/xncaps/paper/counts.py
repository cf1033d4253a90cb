"""The paper's networks, built for real and counted, and its formulas for their heads."""

import warnings
from functools import cache

import torch

from xncaps.counting import Summary, summary
from xncaps.models import create_model
from xncaps.paper import formulas, published
from xncaps.paper.formulas import Sizes

IMAGE_SIZES = {"MNIST": 224, "CIFAR-10": 224, "MultiMNIST": 108}
"""Side of the images that the published FLOPs belong to (MNIST and CIFAR-10 were enlarged)."""

FC_NETWORKS = {"resnet50": "ResNet-50", "mobilenetv2": "MobileNetV2"}
"""The paper's names of the backbones with their fully connected layers."""

NETWORKS: dict[str, tuple[str, str]] = {
    "ResNet-50": ("resnet50", "fc"),
    "ResNet_DR": ("resnet50", "dr"),
    "ResNet_XnODR": ("resnet50", "xnodr"),
    "ResNet_XnIDR": ("resnet50", "xnidr"),
    "MobileNetV2": ("mobilenetv2", "fc"),
    "MobileNetV2_DR": ("mobilenetv2", "dr"),
    "MobileNetV2_XnODR": ("mobilenetv2", "xnodr"),
    "MobileNetV2_XnIDR": ("mobilenetv2", "xnidr"),
}
"""The paper's names, as our backbone and head."""

SIZES = {"resnet50": Sizes(N=256), "mobilenetv2": Sizes(N=128)}


@cache
def count(network: str, attach: str, size: int) -> Summary:
    """The counts of a real model, built without memory for its weights."""
    backbone, head = NETWORKS[network]
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*attach='append'")  # nothing is trained here
        model = create_model(backbone, head, 10, 3, size, attach)
    return summary(model, (3, size, size))


def part(counts: Summary, prefix: str, column: str) -> int:
    """Add up one column of the layers whose name starts with ``prefix``."""
    return sum(getattr(row, column) for row in counts.rows if row.name.startswith(prefix))


def head_flops_of(network: str) -> tuple[int, str]:
    """The head's FLOPs by the paper's formulas, and the formula."""
    backbone, head = NETWORKS[network]
    sizes = SIZES[backbone]
    if head == "fc":
        features = {"resnet50": 2048, "mobilenetv2": 1280}[backbone]
        return formulas.fc_flops([features, *published.FC_STRUCTURE[network]]), "2 x MACs, no bias"
    flops, how = {
        "dr": (formulas.dr_flops, "5335 N (a fit)"),
        "xnodr": (formulas.xnodr_flops, "DR - NJD(2d-1) + binarization + 2NJD + NJD/64"),
        "xnidr": (formulas.xnidr_flops, "DR + binarization + 2NJD + 2NJD/64"),
    }[head]
    return round(flops(sizes)), how


@cache
def backbone_flops(backbone: str, size: int) -> dict[str, int]:
    """MACs of a whole backbone, and what the published totals add to MobileNetV2's."""
    rows = {row.name: row for row in count(FC_NETWORKS[backbone], "replace", size).rows}
    macs = sum(row.macs for name, row in rows.items() if name.startswith("backbone."))
    if backbone == "resnet50":
        return {"MACs": macs, "stem again": 0, "residual adds": 0, "pool": 0}
    stem = next(row for name, row in rows.items() if name.startswith("backbone.trunk.stem"))
    with torch.device("meta"):
        model = create_model(backbone, "fc", image_size=size)
    adds = [name for name, module in model.named_modules() if getattr(module, "adds_input", False)]
    top = [row for name, row in rows.items() if name.startswith("backbone.top")][-1]
    return {
        "MACs": macs,
        "stem again": stem.macs,
        "residual adds": sum(elements(rows[f"{name}.project.1"].output) for name in adds),
        "pool": elements(top.output),
    }


def elements(shape: tuple[int, ...]) -> int:
    """How many numbers a tensor of this shape holds."""
    return torch.Size(shape).numel()
