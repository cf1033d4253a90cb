"""Primary capsules: how features become capsules, and what they refuse."""

import pytest
import torch
from torch.nn import functional as F

import oracles
from layer_cases import F64, capsules
from xncaps import PrimaryCaps, squash
from xncaps.errors import InputError, InputTypeError
from xncaps.primary import CapsuleNorm, ConvPrimaryCaps


def test_pooling_first_equals_a_1x1_convolution_then_pooling():
    primary = PrimaryCaps(10, 6, 4).double()
    maps = capsules(3, 10, 5, 7)
    kernel = primary.projection.weight.view(24, 10, 1, 1)
    convolved = F.conv2d(maps, kernel, primary.projection.bias)
    expected = squash(F.adaptive_avg_pool2d(convolved, 1).view(3, 6, 4))
    torch.testing.assert_close(primary(maps), expected)
    torch.testing.assert_close(primary(maps.mean((2, 3))), expected)


def test_primary_capsules_without_projection_cut_the_features():
    primary = PrimaryCaps(24, 6, 4, project=False)
    assert list(primary.parameters()) == []
    features = capsules(3, 24)
    rows = [[row[4 * i : 4 * i + 4] for i in range(6)] for row in features.tolist()]
    expected = [[oracles.squash(capsule) for capsule in row] for row in rows]
    torch.testing.assert_close(primary(features), torch.tensor(expected, dtype=F64))
    assert primary.extra_repr() == "caps=6, dim=4"


def test_conv_primary_capsules_are_cut_by_type_then_place():
    primary = ConvPrimaryCaps(2, 3, 4, kernel_size=3, stride=2).double()
    maps = capsules(2, 2, 7, 9)
    convolved = F.conv2d(maps, primary.conv.weight, primary.conv.bias, stride=2)  # 3 x 4 places
    v = primary(maps)
    assert v.shape == (2, 3 * 12, 4)
    for sample in range(2):
        for kind in range(3):
            for row in range(3):
                for column in range(4):
                    s = convolved[sample, 4 * kind : 4 * kind + 4, row, column].tolist()
                    got = v[sample, 12 * kind + 4 * row + column]
                    torch.testing.assert_close(got, torch.tensor(oracles.squash(s), dtype=F64))


def test_capsule_norm_normalises_each_coordinate_then_relus():
    norm = CapsuleNorm(3).double()
    x = capsules(4, 5, 3)
    mean = x.mean((0, 1))
    variance = (x - mean).square().mean((0, 1))
    expected = ((x - mean) / (variance + 1e-3).sqrt()).clamp(min=0)
    torch.testing.assert_close(norm(x), expected)
    torch.testing.assert_close(norm.norm.running_mean, 0.1 * mean)
    unbiased = variance * 20 / 19
    torch.testing.assert_close(norm.norm.running_var, 0.9 + 0.1 * unbiased)
    norm.eval()
    one = x[:1]
    stored = (one - 0.1 * mean) / (0.9 + 0.1 * unbiased + 1e-3).sqrt()
    torch.testing.assert_close(norm(one), stored.clamp(min=0))


INT = "Convert it first, for example with .float()."

REFUSED = {
    "primary features": (
        lambda: PrimaryCaps(10, 6, 4)(torch.ones(2, 11)),
        InputError,
        "PrimaryCaps: features must have shape (batch, features=10); got (2, 11).",
    ),
    "primary maps": (
        lambda: PrimaryCaps(10, 6, 4)(torch.ones(2, 11, 3, 3)),
        InputError,
        "PrimaryCaps: features must have shape (batch, features=10, height, width); "
        "got (2, 11, 3, 3).",
    ),
    "primary int": (
        lambda: PrimaryCaps(10, 6, 4)(torch.ones(2, 10, dtype=torch.uint8)),
        InputTypeError,
        f"PrimaryCaps: features must be a floating-point tensor; got torch.uint8. {INT}",
    ),
    "primary float64": (
        lambda: PrimaryCaps(10, 6, 4)(torch.ones(2, 10, dtype=F64)),
        InputTypeError,
        "PrimaryCaps: features must have the layer's dtype torch.float32; got torch.float64. "
        "Convert one of them with .to(dtype), or use torch.autocast.",
    ),
    "primary without projection": (
        lambda: PrimaryCaps(10, 6, 4, project=False),
        InputError,
        "PrimaryCaps: in_features must be caps * dim = 24 without a projection; got 10.",
    ),
    "primary size": (
        lambda: PrimaryCaps(10, 0, 4),
        InputError,
        "PrimaryCaps: caps must be at least 1; got 0.",
    ),
    "conv primary shape": (
        lambda: ConvPrimaryCaps(2, 3, 4, kernel_size=3)(torch.ones(2, 3, 7, 7)),
        InputError,
        "ConvPrimaryCaps: maps must have shape (batch, channels=2, height, width); "
        "got (2, 3, 7, 7).",
    ),
    "conv primary float64": (
        lambda: ConvPrimaryCaps(2, 3, 4, kernel_size=3)(torch.ones(2, 2, 7, 7, dtype=F64)),
        InputTypeError,
        "ConvPrimaryCaps: maps must have the layer's dtype torch.float32; got torch.float64. "
        "Convert one of them with .to(dtype), or use torch.autocast.",
    ),
    "conv primary size": (
        lambda: ConvPrimaryCaps(2, 0, 4, kernel_size=3),
        InputError,
        "ConvPrimaryCaps: types must be at least 1; got 0.",
    ),
    "conv primary kernel": (
        lambda: ConvPrimaryCaps(2, 3, 4, kernel_size=0),
        InputError,
        "ConvPrimaryCaps: kernel_size must be at least 1; got 0.",
    ),
    "norm shape": (
        lambda: CapsuleNorm(3)(torch.ones(2, 5, 4)),
        InputError,
        "CapsuleNorm: capsules must have shape (batch, caps, dim=3); got (2, 5, 4).",
    ),
    "norm size": (
        lambda: CapsuleNorm(0),
        InputError,
        "CapsuleNorm: dim must be at least 1; got 0.",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_told_what_is_wrong(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
