"""squash and capsule_length: values, gradients and the exact zero vector."""

import pytest
import torch

import oracles
from xncaps import capsule_length, squash
from xncaps.errors import InputTypeError


@pytest.mark.parametrize("size", [1, 2, 5, 16])
@pytest.mark.parametrize("factor", [1e-3, 0.1, 1.0, 10.0])
def test_squash_and_length_equal_the_oracle(size, factor):
    s = factor * torch.randn(7, size, dtype=torch.float64)
    expected = [oracles.squash(row) for row in s.tolist()]
    torch.testing.assert_close(squash(s), torch.tensor(expected, dtype=torch.float64))
    lengths = [oracles.length(row) for row in s.tolist()]
    torch.testing.assert_close(capsule_length(s), torch.tensor(lengths, dtype=torch.float64))


def test_squash_of_three_four_is_known():
    expected = torch.tensor([3.0, 4.0]) * 5 / 26
    torch.testing.assert_close(squash(torch.tensor([3.0, 4.0])), expected)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_dim_names_the_axis_of_the_vectors(dim):
    s = torch.randn(2, 3, 4, dtype=torch.float64)
    expected = squash(s.movedim(dim, -1)).movedim(-1, dim)
    torch.testing.assert_close(squash(s, dim=dim), expected)
    torch.testing.assert_close(capsule_length(s, dim=dim), s.square().sum(dim).sqrt())


@pytest.mark.parametrize("function", [squash, capsule_length])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_value_and_gradient_are_zero_at_the_zero_vector(function, dtype):
    s = torch.zeros(2, 4, dtype=dtype, requires_grad=True)
    value = function(s)
    value.sum().backward()
    assert value.dtype == dtype
    assert torch.equal(value, torch.zeros_like(value))
    assert torch.equal(s.grad, torch.zeros_like(s))


@pytest.mark.parametrize("function", [squash, capsule_length])
def test_a_zero_vector_does_not_disturb_its_neighbours(function):
    s = torch.tensor([[0.0, 0.0], [0.6, 0.8]], requires_grad=True)
    function(s).sum().backward()
    alone = s[1:].detach().clone().requires_grad_()
    function(alone).sum().backward()
    torch.testing.assert_close(s.grad, torch.cat([torch.zeros(1, 2), alone.grad]))


@pytest.mark.parametrize("function", [squash, capsule_length])
def test_gradients_are_the_true_ones_away_from_zero(function):
    s = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (s,))


@pytest.mark.parametrize("norm", [1e-3, 0.5, 1.0, 30.0, 1000.0])
def test_squashed_lengths_stay_below_one_and_keep_the_direction(norm):
    direction = torch.nn.functional.normalize(torch.randn(20, 8, dtype=torch.float64), dim=-1)
    v = squash(norm * direction)
    lengths = capsule_length(v)
    assert (lengths < 1).all()
    torch.testing.assert_close(v / lengths.unsqueeze(-1), direction)


def test_longer_vectors_stay_longer():
    lengths = squash(torch.linspace(0, 50, 101, dtype=torch.float64).unsqueeze(-1)).squeeze(-1)
    assert (lengths.diff() > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_huge_vectors_become_unit_vectors(dtype):
    s = torch.tensor([[1e6, 0.0], [-1e6, 1e6]], dtype=dtype, requires_grad=True)
    v = squash(s)
    v.sum().backward()
    expected = torch.tensor([[1.0, 0.0], [-(0.5**0.5), 0.5**0.5]], dtype=dtype)
    torch.testing.assert_close(v, expected)
    assert s.grad.isfinite().all()
    assert s.grad.abs().max() < 2e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_vectors_become_their_square(dtype):
    s = torch.tensor([[3e-12, 4e-12]], dtype=dtype, requires_grad=True)
    v = squash(s)
    v.sum().backward()
    torch.testing.assert_close(v / 1e-24, torch.tensor([[15.0, 20.0]], dtype=dtype))
    # d/ds of norm(s) s: norm on the diagonal plus s s^T / norm.
    expected = torch.tensor([[5 + 3 * 7 / 5, 5 + 4 * 7 / 5]], dtype=dtype)
    torch.testing.assert_close(s.grad / 1e-12, expected)


@pytest.mark.parametrize("function", [squash, capsule_length])
def test_the_dtype_is_kept(function):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert function(torch.randn(2, 3).to(dtype)).dtype == dtype


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: squash(torch.ones(2, dtype=torch.int32)),
            "squash: s must be a floating-point tensor; got torch.int32. "
            "Convert it first, for example with .float().",
        ),
        (lambda: squash([1.0]), "squash: s must be a tensor; got list."),
        (
            lambda: capsule_length(torch.ones(2, dtype=torch.int32)),
            "capsule_length: v must be a floating-point tensor; got torch.int32. "
            "Convert it first, for example with .float().",
        ),
        (lambda: capsule_length(3.0), "capsule_length: v must be a tensor; got float."),
    ],
)
def test_bad_input_is_told_what_is_wrong(call, message):
    with pytest.raises(InputTypeError) as caught:
        call()
    assert str(caught.value) == message
