"""Tensors that are float32 on the CPU, and yet not plain numbers in memory."""

import pytest
import torch

import xncaps
from xncaps.layers import xnorize_both

LAYERS = {
    "capsfc": (lambda: xncaps.CapsFC(7, 5, 3, 4), (2, 7, 5)),
    "xnodr": (lambda: xncaps.XnODR(7, 5, 3, 4), (2, 7, 5)),
    "xnboth": (lambda: xnorize_both(7, 5, 3, 4), (2, 7, 5)),
    "linear": (lambda: xncaps.XnorLinear(5, 3), (2, 5)),
    "conv": (lambda: xncaps.XnorConv2d(3, 4, 3), (2, 3, 5, 5)),
}
CASES = [(name, packed) for name in LAYERS for packed in (False, True)]


def case(name, packed):
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer, x = make(), torch.randn(shape)
    return xncaps.pack(layer) if packed else layer, x


@pytest.mark.parametrize(("name", "packed"), CASES)
@pytest.mark.parametrize("gradients", [False, True])
def test_views_that_are_negated_later(name, packed, gradients):
    layer, x = case(name, packed)
    view = torch._neg_view(x)
    assert view.is_neg()
    assert view.is_contiguous()
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(layer(view), layer(-x))


@pytest.mark.parametrize(("name", "packed"), CASES)
@pytest.mark.parametrize("gradients", [False, True])
def test_zeros_without_memory(name, packed, gradients):
    layer, x = case(name, packed)
    zeros = torch._efficientzerotensor(x.shape)
    assert zeros.data_ptr() == 0
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(layer(zeros), layer(torch.zeros_like(x)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("name", "packed"), CASES)
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda x: x.to_sparse(), "torch.sparse_coo"),
        (lambda x: x.to_mkldnn(), "torch._mkldnn"),
        (lambda x: torch.nested.nested_tensor(list(x)), "a nested one"),
    ],
)
def test_what_is_not_dense_is_refused(name, packed, make, what):
    layer, x = case(name, packed)
    with pytest.raises(TypeError, match=f": x must be a dense tensor; got {what}. Convert it"):
        layer(make(x))
