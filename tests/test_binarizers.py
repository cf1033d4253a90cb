"""Binarizers: a table of signs and gradients, scales, axes, dtypes and refusals."""

import itertools
import math

import pytest
import torch

import oracles
from xncaps.binarizers import BINARIZERS, binarize, mean_scale
from xncaps.errors import InputError, InputTypeError

INF, NAN = math.inf, math.nan

TABLE = {
    "sign": (
        "sign",
        [-2.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.0],
        [-1, -1, -1, -1, -1, 1, 1, 1],
        [0, 1, 1, 1, 1, 1, 1, 0],
    ),
    "sign just beyond one": ("sign", [1.0000002, -1.0000002], [1, -1], [0, 0]),
    "sign subnormal": ("sign", [1.4e-45, -1.4e-45], [1, -1], [1, 1]),
    "sign infinite": ("sign", [INF, -INF, 1.0], [1, -1, 1], [0, 0, 1]),
    "sign nan": ("sign", [NAN, 0.5], [-1, 1], [0, 1]),
    "sign constant": ("sign", [0.3, 0.3, 0.3], [1, 1, 1], [1, 1, 1]),
    "midrange": ("midrange", [1.0, 2.0, 9.0], [-1, -1, 1], [1, 0, 0]),
    "midrange negative": ("midrange", [-4.0, -3.0, -1.0], [-1, -1, 1], [0, 0, 1]),
    "midrange on the middle": ("midrange", [-0.5, 0.25, 1.0], [-1, -1, 1], [1, 1, 1]),
    "midrange above zero is not +1": ("midrange", [0.1, 0.2, 0.9], [-1, -1, 1], [1, 1, 1]),
    "midrange signed zeros": ("midrange", [-0.0, 0.0], [-1, -1], [1, 1]),
    "midrange constant": ("midrange", [3.0, 3.0, 3.0], [-1, -1, -1], [0, 0, 0]),
    "midrange constant negative": ("midrange", [-0.5, -0.5], [-1, -1], [1, 1]),
    "midrange subnormal": ("midrange", [1.4e-45, 0.0, -1.4e-45], [1, -1, -1], [1, 1, 1]),
    "midrange infinite": ("midrange", [INF, 0.0, 1.0], [-1, -1, -1], [0, 1, 1]),
    "midrange nan": ("midrange", [NAN, 0.5, -0.5], [-1, -1, -1], [0, 1, 1]),
    "approxsign": (
        "approxsign",
        [-2.0, -1.0, -0.75, -0.25, -0.0, 0.0, 0.25, 0.5, 1.0, 3.0],
        [-1, -1, -1, -1, -1, -1, 1, 1, 1, 1],
        [0, 0, 0.5, 1.5, 2, 2, 1.5, 1, 0, 0],
    ),
    "approxsign subnormal": ("approxsign", [1.4e-45, -1.4e-45], [1, -1], [2, 2]),
    "approxsign infinite": ("approxsign", [INF, -INF], [1, -1], [0, 0]),
    "approxsign constant": ("approxsign", [-0.5, -0.5], [-1, -1], [1, 1]),
}


@pytest.mark.parametrize(("how", "inputs", "signs", "grads"), TABLE.values(), ids=TABLE.keys())
def test_signs_and_gradients_are_those_of_the_table(how, inputs, signs, grads):
    x = torch.tensor(inputs, requires_grad=True)
    got, _ = binarize(x, how=how)
    got.sum().backward()
    assert got.tolist() == signs
    assert x.grad.tolist() == grads


def test_every_binarizer_has_rows_in_the_table():
    assert {row[0] for row in TABLE.values()} == set(BINARIZERS)


@pytest.mark.parametrize("how", BINARIZERS)
def test_the_incoming_gradient_is_multiplied_elementwise(how):
    values, weights = [-0.75, 0.25, 0.5, 4.0], [3.0, -5.0, 7.0, 11.0]
    x = torch.tensor(values, requires_grad=True)
    (binarize(x, how=how)[0] * torch.tensor(weights)).sum().backward()
    expected = [w * oracles.slope(v, how) for v, w in zip(values, weights, strict=True)]
    assert x.grad.tolist() == expected


@pytest.mark.parametrize("how", BINARIZERS)
def test_a_nan_has_sign_minus_one_and_a_nan_scale(how):
    signs, scale = binarize(torch.tensor([[NAN, 1.0], [2.0, -4.0]]), how=how)
    assert signs[0, 0] == -1
    assert signs[1].tolist() == [1, -1]
    assert math.isnan(scale[0, 0])
    assert scale[1, 0] == 3


@pytest.mark.parametrize("how", BINARIZERS)
def test_the_smallest_float64_is_positive(how):
    signs, _ = binarize(torch.tensor([5e-324, -5e-324], dtype=torch.float64), how=how)
    assert signs.tolist() == [1, -1]


@pytest.mark.parametrize("how", BINARIZERS)
@pytest.mark.parametrize(
    ("inputs", "scale"), [([0.5, -1.0, 0.0, 2.5], 1.0), ([0.0, -0.0], 0.0), ([-INF, 1.0], INF)]
)
def test_the_scale_is_the_mean_absolute_value(how, inputs, scale):
    assert binarize(torch.tensor(inputs), how=how)[1].tolist() == [scale]


@pytest.mark.parametrize("how", BINARIZERS)
def test_a_detached_scale_has_no_gradient(how):
    x = torch.randn(3, 4, requires_grad=True)
    assert not binarize(x, how=how)[1].requires_grad
    assert not mean_scale(x, -1).requires_grad


@pytest.mark.parametrize("how", BINARIZERS)
@pytest.mark.parametrize("detach", [True, False])
def test_the_gradient_through_signs_and_scale_has_its_closed_form(how, detach):
    values, weights = [-0.75, 0.25, 0.5, 4.0], [3.0, -5.0, 7.0, 11.0]
    x = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    signs, scale = binarize(x, how=how, detach_scale=detach)
    (signs * scale * torch.tensor(weights)).sum().backward()
    through_scale = 0.0 if detach else oracles.dot(oracles.signs(values, how), weights) / 4
    expected = [
        w * oracles.scale(values) * oracles.slope(v, how) + math.copysign(1, v) * through_scale
        for v, w in zip(values, weights, strict=True)
    ]
    torch.testing.assert_close(x.grad, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("how", BINARIZERS)
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3, (1,), (1, 2), (0, 2), (-1, 0), (0, 1, 2)])
def test_axes_share_one_threshold_and_one_scale(how, dim):
    x = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    signs, scale = binarize(x, dim=dim, how=how)
    axes = {axis % 3 for axis in ((dim,) if isinstance(dim, int) else dim)}
    groups = {}
    for index in itertools.product(range(2), range(3), range(4)):
        key = tuple(0 if axis in axes else index[axis] for axis in range(3))
        groups.setdefault(key, []).append(index)
    assert scale.shape == tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
    for key, members in groups.items():
        values = [x[index].item() for index in members]
        assert [signs[index].item() for index in members] == oracles.signs(values, how)
        assert scale[key].item() == pytest.approx(oracles.scale(values), rel=1e-14)


@pytest.mark.parametrize("how", BINARIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_dtype_is_kept_forward_and_backward(how, dtype):
    x = torch.randn(3, 5, requires_grad=True).to(dtype)
    x.retain_grad()
    signs, scale = binarize(x, how=how)
    signs.sum().backward()
    assert (signs.dtype, scale.dtype, x.grad.dtype) == (dtype, dtype, dtype)


@pytest.mark.parametrize("how", BINARIZERS)
def test_vmap_equals_a_loop_over_rows(how):
    x = torch.randn(6, 5)
    signs, scale = torch.func.vmap(lambda row: binarize(row, how=how))(x)
    rows = [binarize(row, how=how) for row in x]
    assert torch.equal(signs, torch.stack([row[0] for row in rows]))
    assert torch.equal(scale, torch.stack([row[1] for row in rows]))


@pytest.mark.parametrize("how", BINARIZERS)
def test_vmap_of_the_gradient_equals_the_stand_in_slope(how):
    x, weights = 2 * torch.randn(6, 5), torch.randn(5)
    grads = torch.func.vmap(
        torch.func.grad(lambda row: (binarize(row, how=how)[0] * weights).sum())
    )(x)
    slopes = torch.tensor([[oracles.slope(value, how) for value in row] for row in x.tolist()])
    torch.testing.assert_close(grads, slopes * weights)


def test_the_input_is_left_alone():
    x = torch.tensor([0.0, -0.5, 2.0])
    binarize(x, how="midrange")
    assert x.tolist() == [0.0, -0.5, 2.0]


REFUSED = {
    "no axes": (
        lambda: binarize(torch.ones(2, 3), dim=()),
        InputError,
        "binarize: dim must be an axis or several different ones; got ().",
    ),
    "one axis twice": (
        lambda: binarize(torch.ones(2, 3), dim=(1, -1)),
        InputError,
        "binarize: dim must be an axis or several different ones; got (1, -1).",
    ),
    "no number": (
        lambda: binarize(torch.ones(2, 3), dim=None),
        InputTypeError,
        "binarize: dim must be an axis; got None.",
    ),
    "misspelt name": (
        lambda: binarize(torch.ones(2), how="midrang"),
        InputError,
        "binarize: how must be one of sign, midrange, approxsign; got 'midrang'. "
        "Did you mean 'midrange'?",
    ),
    "unknown name": (
        lambda: binarize(torch.ones(2), how="zebra"),
        InputError,
        "binarize: how must be one of sign, midrange, approxsign; got 'zebra'.",
    ),
    "no name": (
        lambda: binarize(torch.ones(2), how=None),
        InputError,
        "binarize: how must be one of sign, midrange, approxsign; got None.",
    ),
    "int tensor": (
        lambda: binarize(torch.ones(2, dtype=torch.int64)),
        InputTypeError,
        "binarize: x must be a floating-point tensor; got torch.int64. "
        "Convert it first, for example with .float().",
    ),
    "bool tensor": (
        lambda: binarize(torch.ones(2, dtype=torch.bool)),
        InputTypeError,
        "binarize: x must be a floating-point tensor; got torch.bool. "
        "Convert it first, for example with .float().",
    ),
    "list": (
        lambda: binarize([1.0]),
        InputTypeError,
        "binarize: x must be a tensor; got list.",
    ),
    "axis too high": (
        lambda: binarize(torch.ones(2, 3), dim=2),
        InputError,
        "binarize: dim must be an axis of (2, 3); got 2.",
    ),
    "axis too low": (
        lambda: binarize(torch.ones(2, 3), dim=(0, -3)),
        InputError,
        "binarize: dim must be an axis of (2, 3); got -3.",
    ),
    "scalar": (
        lambda: binarize(torch.tensor(1.0)),
        InputError,
        "binarize: dim must be an axis of (); got -1.",
    ),
    "empty axis": (
        lambda: binarize(torch.ones(2, 0)),
        InputError,
        "binarize: x must have at least one element along axis -1; got (2, 0).",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_told_what_is_wrong(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
