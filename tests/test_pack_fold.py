"""Batch normalisation in a packed copy: folded where that is exact, else two numbers a channel."""

import pytest
import torch
from torch import nn

import xncaps
from checks import refused
from pack_cases import assert_close, bytes_of, shaken_norm
from xncaps.backbones.base import SameConv2d
from xncaps.deploy import Affine, Folded
from xncaps.errors import InputError

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


def kinds(model):
    return [type(module).__name__ for module in model]


def packed_as(model, *size, within=1e-5):
    """The packed copy, if it gives what the model gives and holds what the summary says."""
    for module in model.modules():
        if isinstance(module, NORMS):
            shaken_norm(module)
    x = torch.randn(4, *size)
    packed = xncaps.pack(model)
    with torch.no_grad():
        assert_close(packed(x), model.eval()(x), within)
    assert xncaps.summary(model, size).packed_bytes == bytes_of(packed)
    return packed


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(3)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda **bias: nn.Conv2d(6, 8, 3, 2, padding=1, **bias),
        lambda **bias: nn.Conv2d(6, 8, 3, padding=2, padding_mode="reflect", **bias),
        lambda **bias: nn.Conv2d(6, 8, 3, groups=2, dilation=2, **bias),
        lambda **bias: nn.Conv2d(6, 6, 3, groups=6, **bias),
        lambda **bias: SameConv2d(6, 8, 3, 2, **bias),
    ],
)
def test_convolutions_take_the_norm_in(make, bias, affine):
    conv = make(bias=bias)
    model = nn.Sequential(conv, nn.BatchNorm2d(conv.out_channels, affine=affine), nn.ReLU())
    packed = packed_as(model, 6, 9, 7)
    assert kinds(packed) == [type(conv).__name__, "Folded", "ReLU"]
    assert bytes_of(packed) == 4 * (conv.weight.numel() + conv.out_channels)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_take_the_norm_in(bias):
    packed = packed_as(nn.Sequential(nn.Linear(5, 7, bias), nn.BatchNorm1d(7)), 5)
    assert kinds(packed) == ["Linear", "Folded"]
    assert bytes_of(packed) == 4 * (5 * 7 + 7)


def test_rare_statistics():
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7, eps=1e-3))
    norm = shaken_norm(model[1])
    with torch.no_grad():
        norm.running_var[0], norm.running_var[1], norm.running_mean[2] = 0, 1e6, 100
        norm.weight[3], norm.weight[4] = 0, -2
    x = torch.randn(4, 5)
    wanted = model.eval()(x).detach()
    assert_close(xncaps.pack(model)(x), wanted, 2e-5)


def test_elsewhere_a_norm_is_affine():
    for model, size in (
        (nn.Sequential(nn.BatchNorm2d(6), nn.Conv2d(6, 4, 3, padding=1)), (6, 5, 5)),
        (nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.BatchNorm1d(7)), (5,)),
        (nn.Sequential(nn.ConvTranspose2d(6, 7, 3), nn.BatchNorm2d(7)), (6, 5, 5)),
        (nn.Sequential(nn.Sequential(nn.Linear(5, 7)), nn.BatchNorm1d(7)), (5,)),
        (nn.Sequential(xncaps.XnorLinear(5, 7), nn.BatchNorm1d(7)), (5,)),
        (nn.Sequential(nn.Conv1d(6, 7, 3), nn.BatchNorm1d(7)), (6, 5)),
    ):
        names = [type(m).__name__ for m in packed_as(model, *size).modules()]
        assert "Affine" in names
        assert "Folded" not in names
    twice = packed_as(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.BatchNorm1d(7)), 5)
    assert kinds(twice) == ["Linear", "Folded", "Affine"]


@pytest.mark.parametrize("affine", [True, False])
def test_an_affine_map_is_the_norm_bit_for_bit(affine):
    for norm, shape in (
        (nn.BatchNorm1d(7, affine=affine), (64, 7)),
        (nn.BatchNorm1d(7, affine=affine), (8, 7, 9)),
        (nn.BatchNorm2d(7, affine=affine), (8, 7, 9, 5)),
        (nn.BatchNorm2d(7, eps=1e-3, affine=affine), (8, 7, 1, 1)),
    ):
        x = 3 * torch.randn(shape)
        assert_close(Affine(shaken_norm(norm))(x), norm.eval()(x).detach(), 1e-6)
        signs, wanted = Affine(norm)(x) > 0, norm(x) > 0
        assert torch.equal(signs, wanted)


def test_capsule_norms():
    model = xncaps.CapsuleHead(12, 4, layer=xncaps.XnODR, caps_in=9, norm=True)
    packed = packed_as(model, 12)
    assert isinstance(packed.primary_norm.norm, Affine)
    assert refused(InputError, packed.primary_norm, torch.zeros(2, 9, 3)) == (
        "CapsuleNorm: capsules must have shape (batch, caps, dim=8); got (2, 9, 3)."
    )


class Standardized(nn.Conv2d):
    """A convolution that does more with its weight than multiply by it."""

    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


class Backwards(nn.Sequential):
    def forward(self, x):
        for module in reversed(self):
            x = module(x)
        return x


class UsesBoth(nn.Module):
    """The layer in a Sequential is called from outside of it as well."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
        self.first = self.layers[0]

    def forward(self, x):
        return self.layers(x) + self.first(x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x):
        return self.layers(x)


def hooked():
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
    model[0].register_forward_hook(lambda module, args, out: 2 * out)
    return model


def shared():
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.BatchNorm1d(5), nn.ReLU(), layer, nn.BatchNorm1d(5))


def shared_norm():
    norm = nn.BatchNorm1d(5)
    return nn.Sequential(nn.Linear(5, 5), norm, nn.ReLU(), norm)


def parametrized():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))
    return nn.Sequential(layer, nn.BatchNorm1d(5))


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: nn.Sequential(Standardized(3, 4, 3), nn.BatchNorm2d(4)), (3, 6, 6)),
        (lambda: Backwards(nn.Linear(5, 5), nn.BatchNorm1d(5)), (5,)),
        (UsesBoth, (5,)),
        (Tied, (5,)),
        (hooked, (5,)),
        (shared, (5,)),
        (shared_norm, (5,)),
        (parametrized, (5,)),
    ],
)
def test_a_layer_with_other_uses_is_left_alone(make, size):
    packed = packed_as(make(), *size)
    assert not any(isinstance(module, Folded) for module in packed.modules())
    assert any(isinstance(module, Affine) for module in packed.modules())


def test_a_shared_sequence_is_folded_once():
    block = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh())
    packed = packed_as(nn.Sequential(block, block), 5)
    assert packed[0] is packed[1]
    assert kinds(packed[0]) == ["Linear", "Folded", "Tanh"]


def test_norms_without_statistics_or_with_hooks_stay():
    untracked = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))
    assert kinds(packed_as(untracked, 3, 6, 6)) == ["Conv2d", "BatchNorm2d"]
    watched = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
    watched[1].register_forward_pre_hook(lambda module, args: None)
    assert kinds(packed_as(watched, 5)) == ["Linear", "BatchNorm1d"]


def test_what_folding_would_change_is_refused():
    """Behind a linear layer on sequences the norm runs over another axis."""
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)).eval()
    x = torch.randn(2, 7, 5)
    assert model(x).shape == (2, 7, 7)
    assert refused(InputError, xncaps.pack(model), x) == (
        "Folded: x must have 2 axes; got shape (2, 7, 7). Leave a norm of sequences out of the"
        " Sequential of its linear layer."
    )


def test_how_they_print():
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.BatchNorm1d(7))
    lines = str(xncaps.pack(model)).splitlines()
    assert lines[2:4] == ["  (1): Folded(7)", "  (2): Affine(7)"]
