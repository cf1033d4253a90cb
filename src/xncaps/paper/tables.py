"""The tables of the paper that are counted, its figures beside ours."""

from collections.abc import Callable

import torch
from torch import nn

from xncaps.layers import XnIDR
from xncaps.models import create_model
from xncaps.paper import formulas, published
from xncaps.paper.counts import (
    FC_NETWORKS,
    IMAGE_SIZES,
    NETWORKS,
    SIZES,
    backbone_flops,
    count,
    elements,
    head_flops_of,
    part,
)
from xncaps.paper.figures import matches, parse
from xncaps.text import Table


def params() -> Table:
    """Trainable parameters, counted on real models."""
    rows: list[tuple[object, ...]] = []
    for network, figures in published.PARAMETERS.items():
        for data_set, figure in zip(published.DATA_SETS, figures, strict=True):
            rows.append((network, data_set, figure, *parameter_cells(network, figure)))
    return Table(
        "params",
        "Trainable parameters",
        ("network", "data set", "published", "ours", "matches", "executed", "as in the text"),
        rows,
        "ours: trainable parameters of the built model, 3 input channels, head attached as in "
        "the released code (attach='append'). executed: with the frozen weights that still "
        "run. as in the text: attach='replace'. No count gives 23.85M. The backbones are Keras': "
        "its ResNet-50 "
        "convolutions carry biases, PyTorch's do not.",
    )


def parameter_cells(network: str, figure: str) -> tuple[object, ...]:
    """Our count, whether it is the published one, the executed one, and the text's."""
    appended = count(network, "append", 224)
    ours = appended.trainable_params
    replaced = count(network, "replace", 224).params
    return ours, matches(figure, ours), appended.params, replaced


def head_flops() -> Table:
    """FLOPs of the heads by the paper's formulas."""
    rows: list[tuple[object, ...]] = []
    for network, figures in published.HEAD_FLOPS.items():
        for figure, line in zip(figures, _head_lines(network), strict=False):
            quantity, ours, *rest = line
            rows.append((network, quantity, figure, ours, matches(str(figure), ours), *rest))
    return Table(
        "head-flops",
        "FLOPs of the heads",
        ("network", "quantity", "published", "ours", "matches", "formula", "counted", "of what"),
        rows,
        "N = caps_in (128 on MobileNetV2, 256 on ResNet-50), J = caps_out = 10, d = dim_in = 8, "
        "D = dim_out = 16. DR is 5335 N, a fit to both published values. "
        "counted: on the built model (attach='append', 224 px), one image.",
    )


Line = tuple[str, float, str, int | None, str | None]


def _head_lines(network: str) -> list[Line]:
    """Of one head: each quantity, ours by the paper's formula, the formula, and what is counted."""
    backbone, head = NETWORKS[network]
    counts = count(network, "append", 224)
    total, how = head_flops_of(network)
    macs = part(counts, "head.", "macs")
    if head == "fc":
        return [("total", total, how, macs, "MACs")]
    s = SIZES[backbone]
    fc = head_flops_of(FC_NETWORKS[backbone])[0]
    if head == "xnodr":
        bops, bops_how = formulas.xnodr_bops(s), "NJD"
        binarization: Line = (
            *("binarization", formulas.xnodr_binarization(s), "9NJd(D+1)"),
            *(9 * s.N * s.d * (1 + s.J * s.D), "with I as N x d"),
        )
    else:
        bops, bops_how = formulas.xnidr_bops(s), "2NJD"
        binarization = (
            *("binarization", formulas.xnidr_binarization(s), "18ND(J+1)"),
            *(18 * s.D * s.J * (s.N + 1), "with v as J x D"),
        )
    return [
        ("total", total, how, macs, "MACs with PrimaryCaps"),
        binarization,
        ("XNOR BOPs", bops, bops_how, counts.binary_ops, "binary ops, bit by bit"),
        ("XNOR FLOPs", bops // 64, "BOPs / 64", None, None),
        ("ratio to FC (%)", 100 * total / fc, "total / FC total", None, None),
    ]


def speed_up() -> Table:
    """The Speed Up formula, beside a count of the operations it stands for."""
    rows: list[tuple[object, ...]] = []
    for network, figure in published.SPEED_UP.items():
        backbone, head = NETWORKS[network]
        s = SIZES[backbone]
        if head == "xnodr":
            ours, true = formulas.xnodr_speed_up(s), formulas.xnodr_true_speed_up(s)
            how = "NJdDD / (NJdDD/64 + J): Eq. 10"
            true_how = "NJdD / (NJdD/64 + 2NJD)"
        else:
            ours, true = formulas.xnidr_speed_up(s), formulas.xnidr_true_speed_up(s)
            how = "NJDD / (NJDD/64 + D): Eq. 16"
            true_how = "NJD / (NJD/64 + 2NJ)"
        rows.append((network, figure, ours, matches(figure, ours), how, true, true_how))
    return Table(
        "speed-up",
        "Speed Up of the xnorized projection (a formula, not a time)",
        ("network", "published", "ours", "matches", "formula", "true count", "its formula"),
        rows,
        "Eqs. 9 and 14 have one D too many. true count: one D, and the multiplications by the "
        "two scales counted. Eq. 11 prints + d where Eq. 10 has + J; only + J gives the "
        "published 63.98.",
    )


def backbone() -> Table:
    """MACs of the backbones, and what the published totals leave for them."""
    rows: list[tuple[object, ...]] = []
    for name, network in FC_NETWORKS.items():
        for data_set in ("MNIST", "MultiMNIST"):
            size = IMAGE_SIZES[data_set]
            parts = backbone_flops(name, size)
            index = published.DATA_SETS.index(data_set)
            total, _ = parse(published.FLOPS[network][index])
            left = round(total) - head_flops_of(network)[0]
            ours = sum(parts.values())
            rows.append((network, size, *parts.values(), ours, left, left - ours))
    return Table(
        "backbone",
        "Backbones, counted on the real models",
        (
            *("network", "px", "MACs", "stem again", "residual adds", "pool", "sum"),
            *("published - FC head", "remainder"),
        ),
        rows,
        "The published totals fit MobileNetV2's MACs with its stem counted twice, residual "
        "additions and pooling; what ResNet-50's remainder is, is not known. Backbones are "
        "counted in MACs and heads in 2 x MACs there.",
    )


def flops() -> Table:
    """Total FLOPs, with the remainder that nothing explains."""
    rows: list[tuple[object, ...]] = []
    for network, figures in published.FLOPS.items():
        for data_set, figure in zip(published.DATA_SETS, figures, strict=True):
            rows.append((network, data_set, figure, *flops_cells(network, data_set, figure)))
    return Table(
        "flops",
        "FLOPs of whole networks",
        (
            *("network", "data set", "published", "ours", "matches", "remainder"),
            *("true MACs", "true binary ops"),
        ),
        rows,
        "ours: the backbone's sum (table backbone) + the head by the paper's formula (table "
        "head-flops); PrimaryCaps are left out there. remainder: published - ours. true: "
        "counted on the built model, attach='append', with PrimaryCaps.",
    )


def flops_cells(network: str, data_set: str, figure: str) -> tuple[object, ...]:
    """Our sum, whether it is the published one, what is left of that, and the true counts."""
    size = IMAGE_SIZES[data_set]
    ours = sum(backbone_flops(NETWORKS[network][0], size).values()) + head_flops_of(network)[0]
    counts = count(network, "append", size)
    remainder = round(parse(figure)[0]) - ours
    return ours, matches(figure, ours), remainder, counts.macs, counts.binary_ops


def ablation_flops() -> Table:
    """The ablation's FLOPs of the heads alone."""
    rows: list[tuple[object, ...]] = []
    for network, figure in published.ABLATION_FLOPS.items():
        ours, how = head_flops_of(network)
        macs = part(count(network, "append", 224), "head.", "macs")
        rows.append((network, figure, ours, matches(figure, ours), how, macs))
    columns = ("network", "published", "ours", "matches", "formula", "MACs with PrimaryCaps")
    return Table("ablation-flops", "Ablation: FLOPs of FC and DR heads", columns, rows)


def fc_structure() -> Table:
    """The fully connected layers that the capsule layers replace."""
    rows: list[tuple[object, ...]] = []
    for network, widths in published.FC_STRUCTURE.items():
        with torch.device("meta"):
            model = create_model(NETWORKS[network][0], "fc")
        ours = tuple(m.out_features for m in model.head.modules() if isinstance(m, nn.Linear))
        rows.append((network, _listed(widths), _listed(ours), ours == widths))
    columns = ("network", "published", "ours", "matches")
    return Table("fc-structure", "Fully connected layers (Appendix C)", columns, rows)


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def shapes() -> Table:
    """The sizes of the layer's variables, at the MobileNetV2 sizes."""
    s = SIZES["mobilenetv2"]
    layer = XnIDR(s.N, s.d, s.J, s.D, device="meta")
    x = torch.empty(1, s.N, s.d, device="meta")
    u = layer.project(x)
    v, couplings = layer(x, return_couplings=True)
    named = {"bs": 1, "caps_in": s.N, "caps_out": s.J, "dim_in": s.d, "dim_out": s.D, "1": 1}
    ours = {"I_Prim": x, "I_Cap": x, "W_Cap": layer.weight, "I_Cap hat": u, "v": v, "b": couplings}
    rows: list[tuple[object, ...]] = []
    for variable, printed in published.SHAPES.items():
        numbers = elements(tuple(named[axis] for axis in printed.strip("[]").split(", ")))
        tensor = ours[variable]
        match = tensor.numel() == numbers
        rows.append((variable, printed, numbers, tuple(tensor.shape), tensor.numel(), match))
    return Table(
        "shapes",
        "Sizes of the variables (one image, N=128)",
        ("variable", "published", "numbers", "ours", "our numbers", "matches"),
        rows,
        "Nothing is tiled here: I_Cap is I_Prim itself.",
    )


COUNTED: dict[str, Callable[[], Table]] = {
    "params": params,
    "flops": flops,
    "backbone": backbone,
    "head-flops": head_flops,
    "speed-up": speed_up,
    "ablation-flops": ablation_flops,
    "fc-structure": fc_structure,
    "shapes": shapes,
}
