"""Primary capsules of packed networks: those of the network, in fewer steps."""

import pytest
import torch
from torch import nn

import oracles
import xncaps
from kernel_cases import KERNELS, assert_close, threads
from xncaps import PrimaryCaps, kernels
from xncaps.deploy.packed_primary import PackedPrimaryCaps
from xncaps.errors import InputError


def capsules(caps: int, dim: int, *, project: bool = True) -> PrimaryCaps:
    torch.manual_seed(caps * 100 + dim)
    return PrimaryCaps(12 if project else caps * dim, caps, dim, project=project).eval()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dim", [1, 3, 7, 8, 9, 15, 16, 17, 33])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_the_native_squash_is_that_of_the_formula(kernel, dim, rows):
    s = torch.randn(rows, 3 * dim, generator=torch.Generator().manual_seed(dim))
    with kernels.use(kernel):
        got = kernels.native().squash(s, 3, dim)
    assert got.shape == (rows, 3, dim)
    vectors = s.double().reshape(-1, dim).tolist()
    expected = [oracles.squash(vector) for vector in vectors]
    assert_close(got.reshape(-1, dim), torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dim", [3, 8, 16, 20])
def test_unusual_numbers_give_what_pytorch_gives(kernel, dim):
    unusual = [0.0, -0.0, 1e-42, 1e-30, 1e18, 1e25, float("inf"), -float("inf"), float("nan")]
    s = torch.randn(len(unusual), dim)
    s[:, dim // 2] = torch.tensor(unusual)
    s[0] = 0
    with kernels.use(kernel):
        got = kernels.native().squash(s.reshape(1, -1), len(unusual), dim)
    assert_close(got[0], xncaps.squash(s))
    assert torch.equal(got[0, 0], torch.zeros(dim))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_any_number_of_threads(kernel, count):
    s = torch.randn(7, 40)
    with kernels.use(kernel), threads(count):
        got = kernels.native().squash(s, 5, 8)
    assert_close(got, xncaps.squash(s.reshape(7, 5, 8)))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("features", [1, 7, 8, 9, 16, 31, 33, 64])
@pytest.mark.parametrize(("caps", "dim"), [(1, 1), (3, 5), (4, 8), (2, 17)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_native_projection_is_that_of_loops(kernel, features, caps, dim, bias):
    torch.manual_seed(features)
    layer = nn.Linear(features, caps * dim, bias=bias).requires_grad_(False)
    x = torch.randn(1, features)
    with kernels.use(kernel):
        got = kernels.native().primary(x, layer.weight, layer.bias, caps, dim)
    if kernel == "portable":
        assert got is None
        return
    shift = layer.bias.tolist() if bias else [0.0] * (caps * dim)
    rows, features_of = layer.weight.tolist(), x[0].tolist()
    s = [oracles.dot(row, features_of) + more for row, more in zip(rows, shift, strict=True)]
    expected = [oracles.squash(s[k * dim : (k + 1) * dim]) for k in range(caps)]
    assert got.shape == (1, caps, dim)
    assert_close(got[0], torch.tensor(expected))


def test_the_native_projection_takes_nothing_else():
    primary = kernels.native().primary
    x, weight, bias = torch.randn(1, 4), torch.randn(6, 4), torch.randn(6)
    assert primary(x, weight, bias, 3, 2) is not None
    others = [
        (torch.randn(2, 4), weight, bias),
        (torch.randn(1, 5), weight, bias),
        (torch.randn(4), weight, bias),
        (x.double(), weight, bias),
        (x, weight.double(), bias),
        (x, weight.t().contiguous().t(), bias),
        (x, weight[:5], bias),
        (x, weight, bias[:5]),
        (x, weight, bias.double()),
        (x, weight, torch.randn(12)[::2]),
        (x, weight.clone().requires_grad_(), bias),
        (x, weight, bias.clone().requires_grad_()),
        (x.clone().requires_grad_(), weight, bias),
        (None, weight, bias),
        (x, None, bias),
    ]
    for other in others:
        assert primary(*other, 3, 2) is None
    with kernels.disabled():
        assert primary(x, weight, bias, 3, 2) is None


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
