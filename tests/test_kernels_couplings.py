"""Couplings that kernels give out have the gradients that the readable layers give them."""

import pytest
import torch

from kernel_cases import KERNELS
from xncaps import CapsFC, XnODR, kernels

CASES = {
    "plain": (CapsFC, {}),
    "bias": (CapsFC, {"routing_bias": True}),
    "signs": (XnODR, {}),
    "detached": (XnODR, {"detach_routing": True, "routing_bias": True}),
    "learned": (XnODR, {"scale": "learned", "detach_scale": False}),
}


def make(case, iterations):
    build, options = CASES[case]
    torch.manual_seed(3)
    layer = build(33, 5, 4, 7, iterations, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return layer, 0.5 * torch.randn(3, 33, 5)


def gradients(layer, x, of_v, **options):
    """Of a sum over couplings, and over v if it is wanted."""
    x = x.clone().requires_grad_()
    v, couplings = layer(x, return_couplings=True)
    at_v, at_couplings = (
        torch.linspace(-1, 1, each.numel(), dtype=each.dtype).sin().view_as(each)
        for each in (v, couplings)
    )
    loss = (couplings * at_couplings).sum() + ((v * at_v).sum() if of_v else 0)
    wanted = [x, *layer.parameters()]
    return torch.autograd.grad(loss, wanted, allow_unused=True, **options)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("iterations", [2, 3])
@pytest.mark.parametrize("of_v", [True, False])
def test_gradients_through_couplings(kernel, case, iterations, of_v):
    layer, x = make(case, iterations)
    with kernels.use(kernel):
        found = gradients(layer, x, of_v)
    with kernels.disabled():
        wanted = gradients(layer.double(), x.double(), of_v)
    assert any(each is not None and each.any() for each in wanted)
    for got, want in zip(found, wanted, strict=True):
        if want is None or not want.any():
            assert got is None or not got.any()
        else:
            assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def test_second_gradients_through_couplings():
    layer, x = make("plain", 3)
    first = gradients(layer, x, True, create_graph=True)
    second = torch.autograd.grad(first[0].square().sum(), layer.weight)[0]
    with kernels.disabled():
        first = gradients(layer, x, True, create_graph=True)
        wanted = torch.autograd.grad(first[0].square().sum(), layer.weight)[0]
    assert wanted.any()
    torch.testing.assert_close(second, wanted, rtol=1e-4, atol=1e-6)


def test_even_couplings_have_no_gradient():
    layer, x = make("plain", 1)
    _, couplings = layer(x, return_couplings=True)
    assert torch.equal(couplings, torch.full((3, 33, 4), 0.25))
    assert not couplings.requires_grad
