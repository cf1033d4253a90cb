"""Heads: one contract, the sizes the paper gives them, and what they refuse."""

import pytest
import torch
from torch import nn

import xncaps
from xncaps.errors import InputError, InputTypeError
from xncaps.heads import CAPSULE_HEADS, HEAD_OPTIONS, HEADS, CapsuleHead, FCHead, LinearHead

EXAMPLES = {
    "caps_in": 5,
    "dim_in": 3,
    "dim_out": 7,
    "iterations": 2,
    "routing": "dynamic",
    "routing_bias": True,
    "detach_routing": True,
    "binarizer": "midrange",
    "scale": "learned",
    "detach_scale": False,
    "hidden": (6, 4),
}


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_every_head_takes_maps_as_their_average() -> None:
    maps = torch.randn(4, 24, 5, 3)
    for name, make in HEADS.items():
        head = make(24, 6)
        assert torch.allclose(head(maps), head(maps.mean(dim=(2, 3))), atol=1e-6), name


def test_fc_head_is_appendix_c() -> None:
    layers = FCHead(1280, 10).layers
    sizes = [(m.in_features, m.out_features) for m in layers if isinstance(m, nn.Linear)]
    assert sizes == [(1280, 512), (512, 256), (256, 128), (128, 10)]
    kinds = [type(m).__name__ for m in layers]
    assert kinds == ["Linear", "ReLU", "Linear", "ReLU", "Linear", "ReLU", "Linear"]
    assert count(FCHead(2048, 10, hidden=(1024, 512))) == 2_628_106


def test_fc_head_without_hidden_layers_is_the_linear_head() -> None:
    assert count(FCHead(20, 3, hidden=())) == count(LinearHead(20, 3)) == 63


def test_capsule_head_counts() -> None:
    for name in CAPSULE_HEADS:
        assert count(HEADS[name](1280, 10)) == 1280 * 1024 + 1024 + 128 * 10 * 8 * 16, name


@pytest.mark.parametrize("name", HEADS)
def test_options_are_all_taken(name: str) -> None:
    options = {option: EXAMPLES[option] for option in HEAD_OPTIONS[name]}
    head = HEADS[name](12, 4, **options)
    assert head(torch.randn(2, 12)).shape == (2, 4)


def test_the_xnor_options_reach_the_layer() -> None:
    both = HEADS["xnboth"](12, 4, binarizer="midrange", scale="learned").capsules
    assert both.binarizer == both.routing.agreement.binarizer == "midrange"
    assert both.scale.shape == (128, 4, 1, 16)
    assert both.routing.agreement.scale.shape == (4,)
    odr, idr = HEADS["xnodr"](12, 4).capsules, HEADS["xnidr"](12, 4).capsules
    assert (odr.binarizer, type(odr.routing.agreement).__name__) == ("sign", "DotAgreement")
    assert (idr.binarizer, type(idr.routing.agreement).__name__) == (None, "XnorAgreement")


def test_norm_puts_batch_norm_and_relu_behind_both_capsules() -> None:
    head = HEADS["xnidr"](12, 4, norm=True)
    plain = HEADS["xnidr"](12, 4)
    assert count(head) == count(plain) + 2 * 8 + 2 * 16
    lengths = head(torch.randn(64, 12))
    assert lengths.max() > 1


def test_couplings_come_through_the_head() -> None:
    head = CapsuleHead(12, 4, layer=xncaps.XnIDR, caps_in=9)
    lengths, couplings = head(torch.randn(3, 12), return_couplings=True)
    assert lengths.shape == (3, 4)
    assert couplings.shape == (3, 9, 4)
    assert torch.allclose(couplings.sum(dim=2), torch.ones(3, 9))


@pytest.mark.parametrize(
    ("name", "features", "text"),
    [
        (
            "linear",
            torch.zeros(2, 7),
            "LinearHead: features must have shape (batch, features=12); got (2, 7).",
        ),
        (
            "fc",
            torch.zeros(2, 7, 4, 4),
            "FCHead: features must have shape (batch, features=12, height, width);"
            " got (2, 7, 4, 4).",
        ),
        (
            "xnodr",
            torch.zeros(2, 3, 12),
            "PrimaryCaps: features must have shape (batch, features=12); got (2, 3, 12).",
        ),
        (
            "xnidr",
            torch.zeros(2, 12, dtype=torch.long),
            "PrimaryCaps: features must be a floating-point tensor; got torch.int64."
            " Convert it first, for example with .float().",
        ),
        (
            "linear",
            torch.zeros(2, 12, dtype=torch.float64),
            "LinearHead: features must have the layer's dtype torch.float32; got torch.float64."
            " Convert one of them with .to(dtype), or use torch.autocast.",
        ),
        (
            "dr",
            torch.zeros(2, 12, device="meta"),
            "PrimaryCaps: features must be on the layer's device cpu; got meta."
            " Move one of them with .to(device).",
        ),
    ],
)
def test_bad_features(name: str, features: torch.Tensor, text: str) -> None:
    with pytest.raises(InputError) as caught:
        HEADS[name](12, 4)(features)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((12, 0), {}, "CapsuleHead: num_classes must be at least 1; got 0."),
        ((0, 4), {}, "CapsuleHead: in_features must be at least 1; got 0."),
        ((12, 4), {"dim_out": 0}, "CapsuleHead: dim_out must be at least 1; got 0."),
        ((12, 4), {"caps_in": 1.5}, "CapsuleHead: caps_in must be a whole number; got 1.5."),
        ((12, 4), {"iterations": 0}, "XnIDR: iterations must be at least 1; got 0."),
        (
            (12, 4),
            {"binarizer": "sing"},
            "XnIDR: binarizer must be one of sign, midrange, approxsign; got 'sing'."
            " Did you mean 'sign'?",
        ),
    ],
)
def test_bad_sizes(arguments: tuple[int, int], options: dict[str, object], text: str) -> None:
    with pytest.raises(InputError) as caught:
        HEADS["xnidr"](*arguments, **options)
    assert str(caught.value) == text


def test_type_errors_are_type_errors_too() -> None:
    with pytest.raises(TypeError):
        LinearHead("12", 4)
    assert issubclass(InputTypeError, ValueError)
