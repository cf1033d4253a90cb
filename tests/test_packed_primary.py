"""Primary capsules of packed networks: those of the network, in fewer steps."""

import pytest
import torch
from torch import nn

import xncaps
from kernel_cases import assert_close
from xncaps import PrimaryCaps, kernels
from xncaps.deploy.packed_primary import PackedPrimaryCaps
from xncaps.errors import InputError


def capsules(caps: int, dim: int, *, project: bool = True) -> PrimaryCaps:
    torch.manual_seed(caps * 100 + dim)
    return PrimaryCaps(12 if project else caps * dim, caps, dim, project=project).eval()


@pytest.mark.parametrize("project", [True, False])
@pytest.mark.parametrize("maps", [(), (1, 1), (2, 3)])
@pytest.mark.parametrize("batch", [1, 4])
def test_packed_ones_give_what_the_layer_gives(project, maps, batch):
    layer = capsules(5, 8, project=project)
    packed = xncaps.pack(layer)
    assert type(packed) is PackedPrimaryCaps
    x = torch.randn(batch, layer.in_features, *maps)
    assert_close(packed(x), layer(x))
    scattered = torch.randn(batch, layer.in_features, *maps, 2)[..., 0]
    assert_close(packed(scattered), layer(scattered))


def test_what_is_not_plain_goes_the_layer_s_own_way():
    layer = capsules(5, 8)
    packed = xncaps.pack(layer)
    x = torch.randn(2, 12, requires_grad=True)
    packed(x).sum().backward()
    expected = torch.autograd.grad(layer(x).sum(), x)[0]
    assert_close(x.grad, expected)
    assert packed(torch.randn(0, 12)).shape == (0, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert packed(x.detach()).dtype == layer(x.detach()).dtype
    mapped = torch.vmap(packed)(torch.randn(3, 2, 12))
    assert mapped.shape == (3, 2, 5, 8)
    with kernels.disabled():
        assert torch.equal(packed(x.detach()), layer(x.detach()))
    assert_close(torch.compile(packed, fullgraph=True, backend="eager")(x), layer(x))


@pytest.mark.parametrize(
    "x", [torch.randn(2, 13), torch.randn(2, 12, 3), torch.randn(2, 12, 0, 3), torch.randn(12)]
)
def test_wrong_shapes_are_refused_in_the_layer_s_words(x):
    layer = capsules(5, 8)
    with pytest.raises(InputError) as expected:
        layer(x)
    with pytest.raises(InputError) as found:
        xncaps.pack(layer)(x)
    assert str(found.value).partition(":")[2] == str(expected.value).partition(":")[2]


def test_layers_that_do_more_are_left_alone():
    class Louder(PrimaryCaps):
        def forward(self, features):
            return 2 * super().forward(features)

    assert type(xncaps.pack(Louder(12, 5, 8))) is Louder
    hooked = capsules(5, 8)
    hooked.register_forward_hook(lambda *_: None)
    assert type(xncaps.pack(hooked)) is PrimaryCaps


def test_a_hook_on_the_projection_is_called():
    layer = capsules(5, 8)
    seen = []
    layer.projection.register_forward_hook(lambda *_: seen.append(1))
    assert type(xncaps.pack(nn.Sequential(layer))[0]) is PackedPrimaryCaps
    packed = xncaps.pack(layer)
    packed(torch.randn(1, 12))
    assert seen == [1]


def test_a_projection_that_is_changed_later_is_seen():
    packed = xncaps.pack(capsules(5, 8))
    x = torch.randn(1, 12)
    before = packed(x)
    packed.projection.weight.mul_(-1)
    packed.projection.bias.mul_(-1)
    assert_close(packed(x), -before)
    packed.projection.forward = lambda features: torch.zeros(len(features), 40)
    assert torch.equal(packed(x), torch.zeros(1, 5, 8))
    del packed.projection.forward
    packed.projection = nn.Sequential(nn.Linear(12, 40))
    packed.projection.weight = packed.projection[0].weight  # what the layer looks at
    assert_close(packed(x), xncaps.squash(packed.projection[0](x).view(1, 5, 8)))
    packed.double()
    assert packed(x.double()).dtype == torch.float64
