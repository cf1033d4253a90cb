"""Dynamic routing against the oracle: both agreements, couplings, bias, detaching."""

import pytest
import torch

import oracles
from xncaps.binarizers import BINARIZERS
from xncaps.errors import InputError, InputTypeError
from xncaps.routing import DotAgreement, DynamicRouting, XnorAgreement

AGREEMENT_CASES = [None, *BINARIZERS]


def make_agreement(how, caps_out, dim_out, **options):
    return (
        DotAgreement()
        if how is None
        else XnorAgreement(caps_out, dim_out, binarizer=how, **options)
    )


def predictions(batch, caps_in, caps_out, dim_out, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, caps_in, caps_out, dim_out, dtype=torch.float64, generator=generator)


def expected_routing(u, *args, **options):
    routed = [oracles.route(sample, *args, **options) for sample in u.tolist()]
    v, coupling = zip(*routed, strict=True)
    return torch.tensor(v, dtype=torch.float64), torch.tensor(coupling, dtype=torch.float64)


@pytest.mark.parametrize("how", AGREEMENT_CASES)
@pytest.mark.parametrize("iterations", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("sizes", [(2, 5, 3, 4), (1, 1, 1, 1), (3, 7, 2, 5)])
def test_outputs_and_last_couplings_equal_the_oracle(how, iterations, sizes):
    u = predictions(*sizes)
    routing = DynamicRouting(*sizes[2:], iterations, make_agreement(how, *sizes[2:]))
    v, couplings = routing(u)
    expected_v, expected_couplings = expected_routing(u, iterations, how)
    torch.testing.assert_close(v, expected_v, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(couplings, expected_couplings, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("how", AGREEMENT_CASES)
def test_bias_is_added_to_the_weighted_sum_in_every_iteration(how):
    u = predictions(2, 5, 3, 4)
    routing = DynamicRouting(3, 4, 3, make_agreement(how, 3, 4), bias=True).double()
    assert torch.equal(routing.bias, torch.zeros(3, 4, dtype=torch.float64))
    torch.nn.init.normal_(routing.bias)
    expected, _ = expected_routing(u, 3, how, bias=routing.bias.tolist())
    torch.testing.assert_close(routing(u)[0], expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("how", BINARIZERS)
def test_a_learned_scale_stands_in_place_of_both_means(how):
    u = predictions(2, 5, 3, 4)
    agreement = make_agreement(how, 3, 4, scale="learned").double()
    assert agreement.scale.tolist() == [0.25, 0.25, 0.25]
    torch.nn.init.normal_(agreement.scale)
    expected, _ = expected_routing(u, 3, how, scales=agreement.scale.tolist())
    torch.testing.assert_close(DynamicRouting(3, 4, 3, agreement)(u)[0], expected)


@pytest.mark.parametrize("how", AGREEMENT_CASES)
def test_agreements_equal_the_oracle(how):
    u, v = predictions(2, 5, 3, 4), predictions(1, 2, 3, 4, seed=1)[0]
    got = make_agreement(how, 3, 4)(u)(v)
    compare = oracles.dot if how is None else lambda a, b: oracles.xnor_dot(a, b, how)
    expected = [
        [[compare(p, q) for p, q in zip(row, outputs, strict=True)] for row in sample]
        for sample, outputs in zip(u.tolist(), v.tolist(), strict=True)
    ]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("how", AGREEMENT_CASES)
@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_couplings_sum_to_one_over_caps_out(how, iterations):
    routing = DynamicRouting(3, 4, iterations, make_agreement(how, 3, 4))
    _, couplings = routing(3 * predictions(2, 5, 3, 4))
    assert couplings.shape == (2, 5, 3)
    assert (couplings >= 0).all()
    torch.testing.assert_close(couplings.sum(-1), torch.ones(2, 5, dtype=torch.float64))


@pytest.mark.parametrize("how", AGREEMENT_CASES)
def test_one_iteration_couples_evenly_and_two_do_not(how):
    u = predictions(2, 5, 3, 4)
    evenly = torch.full((2, 5, 3), 1 / 3, dtype=torch.float64)
    _, first = DynamicRouting(3, 4, 1, make_agreement(how, 3, 4))(u)
    _, second = DynamicRouting(3, 4, 2, make_agreement(how, 3, 4))(u)
    torch.testing.assert_close(first, evenly)
    assert (second - evenly).abs().max() > 1e-3


@pytest.mark.parametrize("how", AGREEMENT_CASES)
def test_nothing_is_kept_between_calls(how):
    routing = DynamicRouting(3, 4, 3, make_agreement(how, 3, 4))
    u, other = predictions(2, 5, 3, 4), predictions(2, 5, 3, 4, seed=1)
    first = routing(u)
    routing(other)
    again = routing(u)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert list(routing.state_dict()) == []


def test_the_default_is_three_iterations_of_the_dot_agreement():
    routing = DynamicRouting(3, 4)
    u = predictions(2, 5, 3, 4)
    assert isinstance(routing.agreement, DotAgreement)
    torch.testing.assert_close(routing(u)[0], expected_routing(u, 3)[0])
    assert routing.extra_repr() == "iterations=3, bias=False, detach=False"


def detached_loop(u, bias, iterations):
    """Routing with a dot agreement in which u is a constant but in the last weighted sum."""
    frozen = u.detach()
    logits = torch.zeros(u.shape[:3], dtype=u.dtype)
    for step in range(iterations):
        coupling = logits.exp() / logits.exp().sum(2, keepdim=True)
        source = u if step == iterations - 1 else frozen
        s = (coupling.unsqueeze(3) * source).sum(1) + bias
        square = s.square().sum(2, keepdim=True)
        v = square / (1 + square) * s / square.sqrt()
        logits = logits + (frozen * v.unsqueeze(1)).sum(3)
    return v


@pytest.mark.parametrize("iterations", [1, 2, 4])
def test_detached_routing_has_the_gradients_of_the_hand_written_loop(iterations):
    u = predictions(2, 5, 3, 4).requires_grad_()
    routing = DynamicRouting(3, 4, iterations, bias=True, detach=True).double()
    torch.nn.init.normal_(routing.bias)
    cotangent = predictions(1, 2, 3, 4, seed=1)[0]
    got = torch.autograd.grad((routing(u)[0] * cotangent).sum(), (u, routing.bias))
    by_hand = detached_loop(u, routing.bias, iterations)
    expected = torch.autograd.grad((by_hand * cotangent).sum(), (u, routing.bias))
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("how", AGREEMENT_CASES)
def test_detaching_changes_gradients_but_not_values(how):
    u = predictions(2, 5, 3, 4).requires_grad_()
    results = []
    for detach in (False, True):
        routing = DynamicRouting(3, 4, 3, make_agreement(how, 3, 4), detach=detach)
        v, couplings = routing(u)
        assert couplings.requires_grad is not detach
        results.append((v, torch.autograd.grad(v.sum(), u)[0]))
    assert torch.equal(results[0][0], results[1][0])
    assert (results[0][1] - results[1][1]).abs().max() > 1e-4


@pytest.mark.parametrize("iterations", [1, 3])
def test_gradients_of_the_dot_agreement_are_the_true_ones(iterations):
    u = predictions(2, 4, 3, 2).requires_grad_()
    assert torch.autograd.gradcheck(DynamicRouting(3, 2, iterations), (u,))


@pytest.mark.parametrize("how", AGREEMENT_CASES)
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_finite_at_zero_predictions(how, bias):
    u = torch.zeros(2, 5, 3, 4, requires_grad=True)
    routing = DynamicRouting(3, 4, 3, make_agreement(how, 3, 4), bias=bias)
    v, couplings = routing(u)
    (v.sum() + couplings.square().sum()).backward()
    assert torch.equal(v, torch.zeros_like(v))
    assert u.grad.isfinite().all()


def test_no_input_capsules_give_zero_output_capsules():
    v, couplings = DynamicRouting(3, 4)(torch.zeros(2, 0, 3, 4))
    assert torch.equal(v, torch.zeros(2, 3, 4))
    assert couplings.shape == (2, 0, 3)


REFUSED = {
    "rank": (
        lambda: DynamicRouting(3, 4)(torch.ones(5, 3, 4)),
        InputError,
        "DynamicRouting: u must have shape (batch, caps_in, caps_out=3, dim_out=4); got (5, 3, 4).",
    ),
    "caps_out": (
        lambda: DynamicRouting(3, 4)(torch.ones(2, 5, 4, 4)),
        InputError,
        "DynamicRouting: u must have shape (batch, caps_in, caps_out=3, dim_out=4); "
        "got (2, 5, 4, 4).",
    ),
    "int": (
        lambda: DynamicRouting(3, 4)(torch.ones(2, 5, 3, 4, dtype=torch.int64)),
        InputTypeError,
        "DynamicRouting: u must be a floating-point tensor; got torch.int64. "
        "Convert it first, for example with .float().",
    ),
    "list": (
        lambda: DynamicRouting(3, 4)([1.0]),
        InputTypeError,
        "DynamicRouting: u must be a tensor; got list.",
    ),
    "no iterations": (
        lambda: DynamicRouting(3, 4, 0),
        InputError,
        "DynamicRouting: iterations must be at least 1; got 0.",
    ),
    "half an iteration": (
        lambda: DynamicRouting(3, 4, 1.5),
        InputTypeError,
        "DynamicRouting: iterations must be a whole number; got 1.5.",
    ),
    "no capsules": (
        lambda: DynamicRouting(0, 4),
        InputError,
        "DynamicRouting: caps_out must be at least 1; got 0.",
    ),
    "binarizer": (
        lambda: XnorAgreement(3, 4, binarizer="sing"),
        InputError,
        "XnorAgreement: binarizer must be one of sign, midrange, approxsign; got 'sing'. "
        "Did you mean 'sign'?",
    ),
    "scale": (
        lambda: XnorAgreement(3, 4, scale="median"),
        InputError,
        "XnorAgreement: scale must be one of mean, learned; got 'median'. Did you mean 'mean'?",
    ),
    "dim_out": (
        lambda: XnorAgreement(3, True),
        InputTypeError,
        "XnorAgreement: dim_out must be a whole number; got True.",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_told_what_is_wrong(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
