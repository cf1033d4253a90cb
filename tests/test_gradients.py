"""Gradients of the capsule layers: true ones, closed forms, and an independent stand-in."""

import pytest
import torch

import oracles
from layer_cases import F64, KINDS, capsules, gradients, make
from stand_in import stand_in
from xncaps.binarizers import BINARIZERS


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("routing_bias", [False, True])
def test_plain_gradients_are_the_true_ones(iterations, routing_bias):
    torch.manual_seed(0)
    layer = make("plain", 2, 2, 2, 2, iterations, routing_bias=routing_bias)
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    x = capsules(1, 2, 2).requires_grad_()
    assert torch.autograd.gradcheck(run, (x, *layer.parameters()))


def reference(layer, x, projection, agreement, detach_scale, detach_routing):
    """The layer written once more, with signs that carry a given slope."""

    def mean_abs(t, dim):
        return (t.detach() if detach_scale else t).abs().sum(dim) / t.shape[dim]

    weight = layer.weight
    if projection is None:
        u = (x[:, :, None, :, None] * weight).sum(3)
    else:
        signs = stand_in(x, projection, 2)[:, :, None, :, None]
        u = (signs * stand_in(weight, projection, 2)).sum(3)
        if layer.scale is None:
            u = u * mean_abs(x, 2)[:, :, None, None] * mean_abs(weight, 2)
        else:
            u = u * layer.scale[:, :, 0]
    logits = torch.zeros(u.shape[:3], dtype=u.dtype)
    for step in range(layer.routing.iterations):
        last = step == layer.routing.iterations - 1
        seen = u.detach() if detach_routing and not last else u
        coupling = logits.exp() / logits.exp().sum(2, keepdim=True)
        s = (coupling[..., None] * seen).sum(1)
        s = s if layer.routing.bias is None else s + layer.routing.bias
        square = s.square().sum(2, keepdim=True)
        v = square.sqrt() / (1 + square) * s
        if agreement is None:
            logits = logits + (seen * v[:, None]).sum(3)
        else:
            signs = stand_in(seen, agreement, 3) * stand_in(v, agreement, 2)[:, None]
            if layer.routing.agreement.scale is None:
                means = mean_abs(seen, 3) * mean_abs(v, 2)[:, None]
            else:
                means = layer.routing.agreement.scale
            logits = logits + signs.sum(3) * means
    return v


@pytest.mark.parametrize("kind", ["out", "in", "both"])
@pytest.mark.parametrize("binarizer", BINARIZERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"iterations": 1},
        {"detach_scale": False},
        {"detach_routing": True},
        {"scale": "learned", "routing_bias": True},
        {"detach_scale": False, "detach_routing": True, "routing_bias": True},
    ],
    ids=str,
)
def test_gradients_are_those_of_the_reference(kind, binarizer, options):
    torch.manual_seed(7)
    layer = make(kind, 5, 4, 3, 6, binarizer=binarizer, **options)
    x = capsules(3, 5, 4).requires_grad_()
    used = [None if how is None else binarizer for how in KINDS[kind][1:]]
    detach_scale = options.get("detach_scale", True)
    detach_routing = options.get("detach_routing", False)
    inputs = (x, *layer.parameters())
    v = layer(x)
    expected = reference(layer, x, *used, detach_scale, detach_routing)
    torch.testing.assert_close(v, expected, rtol=1e-10, atol=1e-12)
    for got, wanted in zip(gradients(v, inputs), gradients(expected, inputs), strict=True):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("binarizer", BINARIZERS)
def test_gradients_of_one_evenly_coupled_iteration_have_their_closed_form(binarizer):
    torch.manual_seed(8)
    caps_in, dim_in, caps_out, dim_out = 3, 4, 2, 5
    layer = make("out", caps_in, dim_in, caps_out, dim_out, 1, binarizer=binarizer)
    x = capsules(1, caps_in, dim_in).requires_grad_()
    v = layer(x)
    (cotangent,) = torch.randn(v.shape, dtype=F64, generator=torch.Generator().manual_seed(11))
    x_grad, weight_grad = gradients(v, (x, layer.weight))

    rows, weight, g = x[0].tolist(), layer.weight.tolist(), cotangent.tolist()
    u = oracles.project(rows, weight, binarizer)
    expected_x = torch.zeros(caps_in, dim_in, dtype=F64)
    expected_weight = torch.zeros(caps_in, caps_out, dim_in, dim_out, dtype=F64)
    for j in range(caps_out):
        s = [sum(u[i][j][e] for i in range(caps_in)) / caps_out for e in range(dim_out)]
        n = oracles.length(s)
        along = oracles.dot(s, g[j]) * (1 - n**2) / (1 + n**2) ** 2 / n
        s_grad = [n / (1 + n**2) * g[j][e] + along * s[e] for e in range(dim_out)]
        for i in range(caps_in):
            x_signs = oracles.signs(rows[i], binarizer)
            for e in range(dim_out):
                column = [weight[i][j][d][e] for d in range(dim_in)]
                w_signs = oracles.signs(column, binarizer)
                passed = s_grad[e] / caps_out * oracles.scale(rows[i]) * oracles.scale(column)
                for d in range(dim_in):
                    expected_x[i, d] += passed * w_signs[d] * oracles.slope(rows[i][d], binarizer)
                    expected_weight[i, j, d, e] = (
                        passed * x_signs[d] * oracles.slope(column[d], binarizer)
                    )
    torch.testing.assert_close(x_grad[0], expected_x, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(weight_grad, expected_weight, rtol=1e-9, atol=1e-12)


# What a layer is
