"""XnorLinear and XnorConv2d against the oracles and independent gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import oracles
from stand_in import stand_in
from xncaps import XnorConv2d, XnorLinear
from xncaps.binarizers import BINARIZERS
from xncaps.errors import InputError, InputTypeError

F64 = torch.float64


def shake(layer):
    """Double precision, weights beyond 1, and no parameter at its start."""
    layer.double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return layer


def listed(parameter):
    return None if parameter is None else parameter.tolist()


def assert_linear_equals_oracle(layer, x):
    expected = oracles.xnor_linear(
        x.tolist(), layer.weight.tolist(), layer.binarizer, listed(layer.scale), listed(layer.bias)
    )
    torch.testing.assert_close(layer(x), torch.tensor(expected, dtype=F64), rtol=1e-11, atol=1e-13)


def assert_conv_equals_oracle(layer, x):
    expected = oracles.xnor_conv2d(
        x.tolist(),
        layer.weight.tolist(),
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.binarizer,
        listed(layer.scale),
        listed(layer.bias),
    )
    torch.testing.assert_close(layer(x), torch.tensor(expected, dtype=F64), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("sizes", [(1, 1), (7, 5), (33, 2)])
@pytest.mark.parametrize("binarizer", BINARIZERS)
@pytest.mark.parametrize("scale", ["mean", "learned"])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_equals_the_oracle(sizes, binarizer, scale, bias):
    torch.manual_seed(1)
    layer = shake(XnorLinear(*sizes, bias, binarizer=binarizer, scale=scale))
    assert_linear_equals_oracle(layer, torch.randn(4, sizes[0], dtype=F64))


GEOMETRIES = {
    "1x1": {"kernel_size": 1},
    "3x3": {"kernel_size": 3},
    "padded": {"kernel_size": 3, "padding": 1},
    "strided": {"kernel_size": 3, "stride": 2, "padding": 1},
    "dilated": {"kernel_size": 2, "dilation": 2, "padding": 2},
    "rectangular": {
        "kernel_size": (1, 3),
        "stride": (2, 1),
        "padding": (0, 2),
        "dilation": (1, 2),
    },
    "tall": {"kernel_size": (4, 2), "stride": (1, 3), "padding": (3, 0), "dilation": (2, 1)},
}


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())
@pytest.mark.parametrize("binarizer", BINARIZERS)
@pytest.mark.parametrize("scale", ["mean", "learned"])
def test_conv_equals_the_oracle(geometry, binarizer, scale):
    torch.manual_seed(2)
    layer = shake(XnorConv2d(3, 2, **geometry, binarizer=binarizer, scale=scale))
    assert_conv_equals_oracle(layer, torch.randn(2, 3, 5, 7, dtype=F64))


def test_conv_without_bias_equals_the_oracle():
    layer = shake(XnorConv2d(2, 3, 3, padding=1, bias=False))
    assert layer.bias is None
    assert_conv_equals_oracle(layer, torch.randn(1, 2, 4, 5, dtype=F64))


pair = st.tuples(st.integers(1, 3), st.integers(1, 3))


@given(
    channels=pair,
    kernel=pair,
    stride=pair,
    dilation=pair,
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    extra=pair,
    binarizer=st.sampled_from(list(BINARIZERS)),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=25, derandomize=True)
def test_conv_of_any_geometry_equals_the_oracle(
    channels, kernel, stride, dilation, padding, extra, binarizer, seed
):
    torch.manual_seed(seed)
    layer = shake(XnorConv2d(*channels, kernel, stride, padding, dilation, binarizer=binarizer))
    height, width = (d * (k - 1) + e for d, k, e in zip(dilation, kernel, extra, strict=True))
    assert_conv_equals_oracle(layer, torch.randn(1, channels[0], height, width, dtype=F64))


def test_padding_counts_as_minus_one_in_the_signs_and_as_zero_in_the_scale():
    layer = shake(XnorConv2d(1, 1, 3, padding=1, bias=False))
    layer.weight.data.fill_(1.0)
    y = layer(torch.full((1, 1, 1, 1), 4.0, dtype=F64))
    # One pixel of +1 among eight of -1; A = 4 / 9; the scale of W is 1.
    assert y.item() == pytest.approx((1 - 8) * 4 / 9)


def test_a_1x1_conv_is_a_linear_layer_on_pixels():
    conv, linear = shake(XnorConv2d(5, 3, 1)), shake(XnorLinear(5, 3))
    linear.load_state_dict({"weight": conv.weight.flatten(1), "bias": conv.bias})
    x = torch.randn(2, 5, 4, 3, dtype=F64)
    expected = linear(x.movedim(1, -1)).movedim(-1, 1)
    torch.testing.assert_close(conv(x), expected)


def test_linear_takes_any_number_of_leading_axes():
    layer = shake(XnorLinear(6, 4))
    x = torch.randn(2, 3, 5, 6, dtype=F64)
    torch.testing.assert_close(layer(x), layer(x.flatten(0, 2)).view(2, 3, 5, 4))
    torch.testing.assert_close(layer(x[0, 0, 0]), layer(x)[0, 0, 0])


@pytest.mark.parametrize("layer", [XnorLinear(3, 2), XnorConv2d(3, 2, 1)])
def test_an_empty_batch_passes(layer):
    x = torch.ones(0, 3) if isinstance(layer, XnorLinear) else torch.ones(0, 3, 4, 4)
    assert layer(x).shape == (0, 2, *x.shape[2:])


# Gradients


@pytest.mark.parametrize("binarizer", BINARIZERS)
@pytest.mark.parametrize("detach_scale", [True, False])
def test_linear_gradients_have_their_closed_form(binarizer, detach_scale):
    torch.manual_seed(3)
    features, outputs, batch = 5, 3, 2
    layer = shake(XnorLinear(features, outputs, binarizer=binarizer, detach_scale=detach_scale))
    x = torch.randn(batch, features, dtype=F64, requires_grad=True)
    g = torch.randn(batch, outputs, dtype=F64)
    got = torch.autograd.grad((layer(x) * g).sum(), (x, layer.weight, layer.bias))

    rows, weight = x.tolist(), layer.weight.tolist()
    x_grad = torch.zeros(batch, features, dtype=F64)
    weight_grad = torch.zeros(outputs, features, dtype=F64)
    for b, row in enumerate(rows):
        for o, filter_ in enumerate(weight):
            a, w = oracles.scale(row), oracles.scale(filter_)
            row_signs, filter_signs = (
                oracles.signs(row, binarizer),
                oracles.signs(filter_, binarizer),
            )
            count = oracles.dot(row_signs, filter_signs)
            for f in range(features):
                up = g[b, o].item()
                x_grad[b, f] += up * a * w * filter_signs[f] * oracles.slope(row[f], binarizer)
                weight_grad[o, f] += (
                    up * a * w * row_signs[f] * oracles.slope(filter_[f], binarizer)
                )
                if not detach_scale:
                    x_grad[b, f] += up * count * w * (1 if row[f] > 0 else -1) / features
                    weight_grad[o, f] += up * count * a * (1 if filter_[f] > 0 else -1) / features
    for left, right in zip(got, (x_grad, weight_grad, g.sum(0)), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


def conv_reference(layer, x, detach_scale):
    """The convolution as a matrix product over unfolded windows."""
    rows, columns = layer.padding
    frame = (columns, columns, rows, rows)
    unfold = {
        "kernel_size": layer.kernel_size,
        "dilation": layer.dilation,
        "stride": layer.stride,
    }
    signs = F.pad(stand_in(x, layer.binarizer, 1), frame, value=-1.0)
    filters = stand_in(layer.weight, layer.binarizer, (1, 2, 3)).flatten(1)
    y = filters @ F.unfold(signs, **unfold)
    if layer.scale is None:
        seen = x.detach() if detach_scale else x
        weight = layer.weight.detach() if detach_scale else layer.weight
        windows = F.unfold(F.pad(seen.abs(), frame), **unfold).mean(1, keepdim=True)
        y = y * windows * weight.abs().flatten(1).mean(1)[:, None]
    else:
        y = y * layer.scale[:, None]
    return y + layer.bias[:, None]


@pytest.mark.parametrize("binarizer", BINARIZERS)
@pytest.mark.parametrize(
    "options", [{}, {"detach_scale": False}, {"scale": "learned"}], ids=["mean", "kept", "learned"]
)
@pytest.mark.parametrize("geometry", ["strided", "rectangular", "dilated"])
def test_conv_gradients_are_those_of_unfolded_windows(binarizer, options, geometry):
    torch.manual_seed(4)
    layer = shake(XnorConv2d(3, 2, **GEOMETRIES[geometry], binarizer=binarizer, **options))
    x = torch.randn(2, 3, 5, 7, dtype=F64, requires_grad=True)
    y = layer(x)
    expected = conv_reference(layer, x, options.get("detach_scale", True)).view_as(y)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-13)
    g, inputs = torch.randn_like(y), (x, *layer.parameters())
    got = torch.autograd.grad((y * g).sum(), inputs)
    wanted = torch.autograd.grad((expected * g).sum(), inputs)
    for left, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


# What a layer is


@pytest.mark.parametrize("layer", [XnorLinear(64, 32), XnorConv2d(16, 32, 2)])
def test_parameters_start_like_those_of_torch_layers(layer):
    torch.manual_seed(0)
    layer.reset_parameters()
    fan_in = layer.weight[0].numel()
    assert fan_in == 64
    assert layer.weight.abs().max().item() == pytest.approx(1 / 8, rel=0.01)
    assert layer.weight.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.05)
    assert layer.bias.abs().max().item() == pytest.approx(1 / 8, rel=0.15)
    assert layer.bias.abs().max() <= 1 / 8


@pytest.mark.parametrize(
    "layer", [XnorLinear(9, 4, scale="learned"), XnorConv2d(3, 4, 2, scale="learned")]
)
def test_a_learned_scale_starts_at_the_means_of_the_weights(layer):
    assert layer.scale.shape == (4,)
    torch.testing.assert_close(layer.scale, layer.weight.flatten(1).abs().mean(1))


def test_repr_says_everything():
    assert XnorLinear(4, 3).extra_repr() == "4, 3, bias=True, binarizer='sign'"
    assert (
        XnorConv2d(4, 3, 2, bias=False, scale="learned").extra_repr()
        == "4, 3, kernel_size=(2, 2), stride=(1, 1), padding=(0, 0), dilation=(1, 1), "
        "bias=False, binarizer='sign', scale=learned"
    )


CASES = {
    "linear": (lambda: XnorLinear(6, 4, binarizer="midrange"), (6,)),
    "conv": (lambda: XnorConv2d(3, 4, 3, padding=1), (3, 5, 6)),
}


@pytest.mark.parametrize(("make", "shape"), CASES.values(), ids=CASES.keys())
def test_compiled_equals_eager_forward_and_backward(make, shape):
    torch.compiler.reset()
    layer, x = shake(make()), torch.randn(2, *shape, dtype=F64, requires_grad=True)
    inputs = (x, *layer.parameters())
    eager = layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, eager)
    got = torch.autograd.grad(compiled.square().sum(), inputs)
    wanted = torch.autograd.grad(eager.square().sum(), inputs)
    for left, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize(("make", "shape"), CASES.values(), ids=CASES.keys())
def test_exported_equals_eager_at_other_batch_sizes(make, shape):
    layer = shake(make()).eval()
    example = (torch.randn(3, *shape, dtype=F64),)
    batch = {0: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(layer, example, dynamic_shapes=(batch,)).module()
    for size in (2, 5):
        x = torch.randn(size, *shape, dtype=F64)
        torch.testing.assert_close(exported(x), layer(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("make", "shape"), CASES.values(), ids=CASES.keys())
def test_the_dtype_is_kept(make, shape, dtype):
    assert make().to(dtype)(torch.randn(2, *shape).to(dtype)).dtype == dtype


REFUSED = {
    "linear size": (
        lambda: XnorLinear(6, 4)(torch.ones(2, 5)),
        InputError,
        "XnorLinear: x must have shape (..., in_features=6); got (2, 5).",
    ),
    "linear scalar": (
        lambda: XnorLinear(6, 4)(torch.tensor(1.0)),
        InputError,
        "XnorLinear: x must have shape (..., in_features=6); got ().",
    ),
    "linear int": (
        lambda: XnorLinear(6, 4)(torch.ones(2, 6, dtype=torch.int64)),
        InputTypeError,
        "XnorLinear: x must be a floating-point tensor; got torch.int64. "
        "Convert it first, for example with .float().",
    ),
    "linear float64": (
        lambda: XnorLinear(6, 4)(torch.ones(2, 6, dtype=F64)),
        InputTypeError,
        "XnorLinear: x must have the layer's dtype torch.float32; got torch.float64. "
        "Convert one of them with .to(dtype), or use torch.autocast.",
    ),
    "linear device": (
        lambda: XnorLinear(6, 4)(torch.ones(2, 6, device="meta")),
        InputTypeError,
        "XnorLinear: x must be on the layer's device cpu; got meta. "
        "Move one of them with .to(device).",
    ),
    "linear no features": (
        lambda: XnorLinear(0, 4),
        InputError,
        "XnorLinear: in_features must be at least 1; got 0.",
    ),
    "linear binarizer": (
        lambda: XnorLinear(6, 4, binarizer="aproxsign"),
        InputError,
        "XnorLinear: binarizer must be one of sign, midrange, approxsign; got 'aproxsign'. "
        "Did you mean 'approxsign'?",
    ),
    "linear scale": (
        lambda: XnorLinear(6, 4, scale="max"),
        InputError,
        "XnorLinear: scale must be one of mean, learned; got 'max'.",
    ),
    "conv rank": (
        lambda: XnorConv2d(3, 4, 3)(torch.ones(3, 5, 5)),
        InputError,
        "XnorConv2d: x must have shape (batch, in_channels=3, height, width); got (3, 5, 5).",
    ),
    "conv channels": (
        lambda: XnorConv2d(3, 4, 3)(torch.ones(1, 2, 5, 5)),
        InputError,
        "XnorConv2d: x must have shape (batch, in_channels=3, height, width); got (1, 2, 5, 5).",
    ),
    "conv float64": (
        lambda: XnorConv2d(3, 4, 3)(torch.ones(1, 3, 5, 5, dtype=F64)),
        InputTypeError,
        "XnorConv2d: x must have the layer's dtype torch.float32; got torch.float64. "
        "Convert one of them with .to(dtype), or use torch.autocast.",
    ),
    "conv small image": (
        lambda: XnorConv2d(3, 4, 3, padding=1, dilation=3)(torch.ones(1, 3, 6, 4)),
        InputError,
        "XnorConv2d: x must have a padded width of at least the kernel's 7; got 6.",
    ),
    "conv empty image": (
        lambda: XnorConv2d(3, 4, 1)(torch.ones(1, 3, 0, 4)),
        InputError,
        "XnorConv2d: x must have a height of at least 1; got (1, 3, 0, 4).",
    ),
    "conv kernel": (
        lambda: XnorConv2d(3, 4, (3, 0)),
        InputError,
        "XnorConv2d: kernel_size must be at least 1; got 0.",
    ),
    "conv three strides": (
        lambda: XnorConv2d(3, 4, 3, stride=(1, 1, 1)),
        InputTypeError,
        "XnorConv2d: stride must be a whole number; got (1, 1, 1).",
    ),
    "conv padding": (
        lambda: XnorConv2d(3, 4, 3, padding=-1),
        InputError,
        "XnorConv2d: padding must be at least 0; got -1.",
    ),
    "conv dilation": (
        lambda: XnorConv2d(3, 4, 3, dilation=1.0),
        InputTypeError,
        "XnorConv2d: dilation must be a whole number; got 1.0.",
    ),
    "conv binarizer": (
        lambda: XnorConv2d(3, 4, 3, binarizer=None),
        InputError,
        "XnorConv2d: binarizer must be one of sign, midrange, approxsign; got None.",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_told_what_is_wrong(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
