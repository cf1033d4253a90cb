"""Tensors that are float32 on the CPU, and yet not plain numbers in memory."""

import pytest
import torch

import xncaps
from xncaps.kernels import native, selection
from xncaps.layers import xnorize_both

LAYERS = {
    "capsfc": (lambda: xncaps.CapsFC(7, 5, 3, 4), (2, 7, 5)),
    "xnodr": (lambda: xncaps.XnODR(7, 5, 3, 4), (2, 7, 5)),
    "xnboth": (lambda: xnorize_both(7, 5, 3, 4), (2, 7, 5)),
    "linear": (lambda: xncaps.XnorLinear(5, 3), (2, 5)),
    "conv": (lambda: xncaps.XnorConv2d(3, 4, 3), (2, 3, 5, 5)),
}
CASES = [(name, packed) for name in LAYERS for packed in (False, True)]


@pytest.fixture(params=[(True, True), (True, False), (False, True), (False, False)], autouse=True)
def _quick(request):
    """Tensors are looked at and made by torch's quick ways, or as with a torch that lacks them."""
    ways = list(zip(selection.QUICK, request.param, strict=True))
    if any(way is None and wanted for way, wanted in ways):
        pytest.skip("this torch does not have them")
    selection.tell_of_torch(native(), *(way if wanted else None for way, wanted in ways))
    yield
    selection.tell_of_torch(native(), *selection.QUICK)


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


@pytest.mark.parametrize(("name", "packed"), CASES)
@pytest.mark.parametrize("batch", [1, 300])
def test_outputs_are_plain_tensors(name, packed, batch):
    layer, x = case(name, packed)
    x = x[:1].expand(batch, *x.shape[1:])
    with torch.no_grad():
        y = layer(x)
    assert y.is_contiguous()
    assert y.dtype is torch.float32
    assert not y.is_inference()
    torch.testing.assert_close(y, y[:1].expand(y.shape))
    y.requires_grad_().square().sum().backward()
    torch.testing.assert_close(y.grad, 2 * y.detach())
    with torch.inference_mode():
        assert layer(x).is_inference()


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


@pytest.mark.parametrize(("name", "packed"), CASES)
def test_where_the_numbers_lie(name, packed):
    layer, x = case(name, packed)
    wanted = layer(x)
    wide = torch.randn(*x.shape[:-1], 2 * x.shape[-1])
    wide[..., ::2] = x
    swapped = x.transpose(0, -1).contiguous().transpose(0, -1)
    with torch.no_grad():
        for other in (wide[..., ::2], swapped, torch.cat([x, x])[len(x) :]):
            torch.testing.assert_close(layer(other), wanted)
        one = x[:1].as_strided(x[:1].shape, (7, *x.stride()[1:]))  # a step that is never taken
        torch.testing.assert_close(layer(one), layer(x[:1]))
        repeated = x[:1].expand(3, *x.shape[1:])
        torch.testing.assert_close(layer(repeated), wanted[:1].expand(3, *wanted.shape[1:]))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32, torch.complex64])
def test_numbers_of_another_kind_are_not_read_as_floats(name, dtype):
    layer, x = case(name, packed=True)
    layer(x)
    with pytest.raises(TypeError, match=f"x must .*; got {dtype}"):
        layer(x.to(dtype))


@pytest.mark.parametrize(("name", "packed"), CASES)
def test_more_dimensions_than_a_view_holds(name, packed):
    layer, x = case(name, packed)
    layer(x)
    more = x.expand(2, 2, 2, *x.shape)
    if name == "linear":
        assert layer(more).shape == (*more.shape[:-1], 3)
    else:
        with pytest.raises(ValueError, match="x must have shape"):
            layer(more)
