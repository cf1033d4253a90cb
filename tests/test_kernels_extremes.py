"""Where all signs differ, or none: counts at their largest must not run over, in any kernel."""

import math

import pytest
import torch

from kernel_cases import KERNELS, assert_close, make, reference
from xncaps import XnIDR, XnODR, XnorConv2d, XnorLinear, kernels

each_kernel = pytest.mark.parametrize("kernel", KERNELS)
each_side = pytest.mark.parametrize("side", [1.0, -1.0], ids=["none", "all"])


def one_sided(layer, side):
    """The layer with weights of one sign, and learned scales of 1."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.fill_(1.0 if "scale" in name else side)
    return layer


# A byte counts 31 bytes of bits, and 16 bits count 8,191.
@each_kernel
@each_side
@pytest.mark.parametrize("size", [247, 248, 249, 255, 256, 257, 320, 4096, 65_528, 65_537, 70_001])
def test_linear_layers_count_to_their_size(kernel, side, size):
    layer = one_sided(XnorLinear(size, 33, bias=False, scale="learned"), side)
    with torch.no_grad(), kernels.use(kernel):
        y = layer(torch.ones(5, size))
    assert torch.equal(y, torch.full((5, 33), side * size))


@each_kernel
@each_side
@pytest.mark.parametrize("channels", [31, 256, 512])
def test_convolutions_count_to_their_size(kernel, side, channels):
    layer = XnorConv2d(channels, 5, 3, bias=False, scale="learned")
    with torch.no_grad(), kernels.use(kernel):
        y = one_sided(layer, side)(torch.ones(2, channels, 5, 4))
    assert torch.equal(y, torch.full((2, 5, 3, 2), side * 9 * channels))


# Signed bytes hold the dot products of 120 signs.
@each_kernel
@each_side
@pytest.mark.parametrize("dim", [119, 120, 121, 127, 128, 129, 240, 241, 1000])
def test_projections_count_to_their_size(kernel, side, dim):
    layer = one_sided(XnODR(3, dim, 1, 2, 1, scale="learned"), side)
    with torch.no_grad():
        layer.scale.fill_(1 / dim)
        with kernels.use(kernel):
            v = layer(torch.ones(2, 3, dim))
    # Every prediction is the side itself: s = (3, 3), times the side.
    wanted = side * 3 * 18**0.5 / 19
    torch.testing.assert_close(v, torch.full((2, 1, 2), wanted))


@each_kernel
@pytest.mark.parametrize("dim", [119, 120, 121, 127, 128, 129, 240, 241, 1000])
def test_agreements_count_to_their_size(kernel, dim):
    """Predictions of one output capsule all agree with it, of the other none does but its own."""
    layer = one_sided(XnIDR(3, 1, 2, dim, 2, scale="learned"), 1.0)
    with torch.no_grad():
        layer.routing.agreement.scale.fill_(1 / dim)
        layer.weight[0, 1] = -1.0  # against the other two
        with kernels.use(kernel):
            _, couplings = layer(torch.ones(1, 3, 1), return_couplings=True)
    # Logits are 1 where a prediction has the sign of v, -1 where it has not; v is positive.
    wanted = torch.tensor([[1.0, -1.0], [1.0, 1.0], [1.0, 1.0]]).softmax(-1)
    torch.testing.assert_close(couplings[0], wanted)


# Capsules of eight numbers are read in a way of their own, 32 at once; the last five are not.
@each_kernel
@pytest.mark.parametrize("binarizer", ["sign", "midrange", "approxsign"])
@pytest.mark.parametrize("scale", ["mean", "learned"])
@pytest.mark.parametrize("least", [-1.0, 0.0, -0.0, -1e-40, -math.inf, math.nan])
def test_all_signs_of_eight_numbers(kernel, binarizer, scale, least):
    torch.manual_seed(0)
    positive = torch.arange(261)[:, None] >> torch.arange(8) & 1
    x = torch.where(positive == 1, torch.rand(2, 261, 8) + 0.1, torch.tensor(least))
    layer = make(binarizer, None, 261, 8, 3, 2, scale=scale)
    with torch.no_grad(), kernels.use(kernel):
        assert_close(layer(x), reference(layer, x))
    for i in (1, 33, 165, 259):  # alone, lest others hide it
        alone = torch.zeros_like(x)
        alone[:, i] = x[:, i]
        with torch.no_grad(), kernels.use(kernel):
            assert_close(layer(alone), reference(layer, alone))
