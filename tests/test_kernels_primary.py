"""The native functions for primary capsules: squash, and a projection before it."""

import pytest
import torch
from torch import nn

import oracles
import xncaps
from kernel_cases import KERNELS, assert_close, threads
from xncaps import kernels


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
    with kernels.use("reference"):
        check_what_is_taken(kernels.native().primary)


def check_what_is_taken(primary):
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
