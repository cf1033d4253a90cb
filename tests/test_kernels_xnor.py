"""The native XnorLinear and XnorConv2d: popcounts bit for bit, means, shapes and refusals."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import oracles
from kernel_cases import (
    KERNELS,
    NUMBERS,
    SIZES,
    Recorder,
    assert_close,
    jvp_warns,
    reference,
    seeded,
    threads,
)
from xncaps import XnorConv2d, XnorLinear, kernels
from xncaps.binarizers import BINARIZERS

pytestmark = pytest.mark.usefixtures("_no_gradients")


@pytest.fixture
def _no_gradients():
    with torch.no_grad():
        yield


def shake(layer, *numbers):
    """No parameter at its start, all of them of these numbers alone."""
    random = seeded(*numbers)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=random))
    return layer


def exact(layer):
    """A layer whose outputs are the dot products of signs."""
    layer.scale.fill_(1.0)
    return layer


def linear(in_features, out_features, *, scale="mean", binarizer="sign", bias=True, seed=0):
    layer = XnorLinear(in_features, out_features, bias, binarizer=binarizer, scale=scale)
    return shake(layer, seed, in_features, out_features)


def rows(layer, count, seed=0):
    return torch.randn(count, layer.in_features, generator=seeded(seed, count, layer.in_features))


def signs(values, how, dim):
    middle = torch.zeros(())
    if how == "midrange":
        middle = (values.amax(dim, True) + values.amin(dim, True)) / 2
    return torch.where(values > middle, 1, -1)


# Linear


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_popcount_of_every_pair_of_bytes_is_exact(kernel):
    patterns = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=8)))
    layer = exact(XnorLinear(8, 256, bias=False, scale="learned"))
    layer.weight.copy_(patterns * torch.rand(256, 8, generator=seeded(1)).add(0.1))
    x = patterns * torch.rand(256, 8, generator=seeded(2)).add(0.1)
    with kernels.use(kernel):
        assert torch.equal(layer(x), patterns @ patterns.T)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("binarizer", BINARIZERS)
def test_dot_products_are_exact_and_padding_bits_never_leak(kernel, binarizer):
    for in_features in (*range(1, 18), 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, 513, 1000):
        for out_features in (1, 33):
            layer = exact(
                linear(in_features, out_features, scale="learned", binarizer=binarizer, bias=False)
            )
            x = rows(layer, 3)
            expected = signs(x, binarizer, 1) @ signs(layer.weight, binarizer, 1).T
            with kernels.use(kernel):
                assert torch.equal(layer(x), expected.float())


@pytest.mark.parametrize("kernel", KERNELS)
def test_tiles_of_all_sizes_count_exactly(kernel):
    few = (1, 31, 33, 64, 65, 96, 97, 127, 128, 129)
    for out_features in (*few, 160, 255, 256, 257, 288, 480, 511, 512, 513, 544, 641):
        layer = exact(linear(1021, out_features, scale="learned", bias=False))
        x = rows(layer, 131)
        expected = (signs(x, "sign", 1) @ signs(layer.weight, "sign", 1).T).float()
        with kernels.use(kernel):
            for count in (*range(1, 10), 47, 48, 49, 63, 64, 65, 131):
                assert torch.equal(layer(x[:count]), expected[:count])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("out_features", [160, 544])
def test_groups_of_rows_and_steps_of_all_sizes_count_exactly(kernel, out_features):
    for in_features, count in (
        *((places, 5) for places in (*range(1, 10), 23, 24, 25, 47, 48, 49, 95, 96, 97, 145)),
        *((57, count) for count in (127, 129, 255, 256, 257, 258, 515)),
    ):
        layer = exact(linear(in_features, out_features, scale="learned", bias=False))
        x = rows(layer, count)
        expected = (signs(x, "sign", 1) @ signs(layer.weight, "sign", 1).T).float()
        with kernels.use(kernel):
            assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("in_features", [8 * 8184 + 7, 140_003])
def test_long_rows_overflow_no_counter(kernel, in_features):
    layer = exact(XnorLinear(in_features, 3, bias=False, scale="learned"))
    layer.weight[0], layer.weight[1] = 1.0, -1.0
    layer.weight[2] = torch.randn(in_features, generator=seeded(5)).sign()
    x = torch.stack(
        [-layer.weight[0], layer.weight[0], layer.weight[2], -layer.weight[2], layer.weight[1]]
    )
    expected = (signs(x, "sign", 1) @ signs(layer.weight, "sign", 1).T).float()
    assert expected.abs().max() == in_features
    with kernels.use(kernel):
        for count in (1, 5):
            assert torch.equal(layer(x[:count]), expected[:count])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("in_features", [6095, 6096, 6097, 6144, 12_191, 12_193])
@pytest.mark.parametrize("out_features", [128, 512])
def test_long_rows_and_many_columns_overflow_no_counter(kernel, in_features, out_features):
    layer = exact(XnorLinear(in_features, out_features, bias=False, scale="learned"))
    layer.weight[::3] = 1.0
    layer.weight[1::3] = -1.0
    x = torch.stack([layer.weight[k] for k in (0, 1, 2, 5, 1)]).neg()
    expected = (signs(x, "sign", 1) @ signs(layer.weight, "sign", 1).T).float()
    assert expected.min() == -in_features
    with kernels.use(kernel):
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("binarizer", BINARIZERS)
@pytest.mark.parametrize("scale", ["mean", "learned"])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_equals_the_layer_and_the_oracle(kernel, binarizer, scale, bias):
    options = {"scale": scale, "binarizer": binarizer, "bias": bias}
    for size in SIZES:
        for sizes in ((size, 9), (9, size)):
            layer = linear(*sizes, **options)
            x = rows(layer, 3)
            with kernels.use(kernel):
                assert_close(layer(x), reference(layer, x))
    layer = linear(13, 5, **options)
    x = rows(layer, 2)
    listed = [None if p is None else p.tolist() for p in (layer.scale, layer.bias)]
    expected = oracles.xnor_linear(x.tolist(), layer.weight.tolist(), binarizer, *listed)
    with kernels.use(kernel):
        assert_close(layer(x), torch.tensor(expected))


@pytest.mark.parametrize("kernel", KERNELS)
def test_linear_takes_any_leading_axes_strides_and_number_of_rows(kernel):
    layer = linear(33, 7)
    with kernels.use(kernel):
        for shape in ((33,), (0, 33), (1, 33), (2, 3, 5, 33), (2, 0, 33), (70, 33)):
            x = torch.randn(shape, generator=seeded(3))
            assert layer(x).shape == (*shape[:-1], 7)
            assert_close(layer(x), reference(layer, x))
        x = torch.randn(33, 4, generator=seeded(4)).T
        assert not x.is_contiguous()
        assert torch.equal(layer(x), layer(x.contiguous()))


SPECIAL = (0.0, -0.0, 1e-40, -1e-40, float("nan"), float("inf"), float("-inf"))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("binarizer", BINARIZERS)
@pytest.mark.parametrize("scale", ["mean", "learned"])
def test_special_values_do_what_they_do_in_pytorch(kernel, binarizer, scale):
    layer = linear(9, 33, scale=scale, binarizer=binarizer)
    conv = shake(XnorConv2d(9, 5, 2, padding=1, binarizer=binarizer, scale=scale), 5)
    x = rows(layer, 2 * len(SPECIAL))
    images = torch.randn(2, 9, 4, 4, generator=seeded(6))
    with kernels.use(kernel):
        for k, value in enumerate(SPECIAL):
            x[2 * k, k] = value
            x[2 * k + 1] = value
        got = layer(x)
        assert got.isnan().any() == (scale == "mean")
        assert_close(got, reference(layer, x))
        for value in SPECIAL:
            layer.weight[1, 3] = value
            layer.weight[32] = value
            assert_close(layer(x), reference(layer, x))
            pixels = images.clone()
            pixels[0, 3, 1, 1] = value
            pixels[1, :, 2, 0] = value
            assert_close(conv(pixels), reference(conv, pixels))
            conv.weight[2, 8, 1, 0] = value
            assert_close(conv(pixels), reference(conv, pixels))


# Convolution

GEOMETRIES = {
    "1x1": {"kernel_size": 1},
    "3x3": {"kernel_size": 3, "padding": 1},
    "strided": {"kernel_size": 3, "stride": 2, "padding": 1},
    "dilated": {"kernel_size": 2, "dilation": 2, "padding": 2},
    "wide": {"kernel_size": (1, 3), "stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)},
    "tall": {"kernel_size": (4, 2), "stride": (1, 3), "padding": (3, 0), "dilation": (2, 1)},
    "far out": {"kernel_size": 2, "padding": 5, "stride": 3},
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())
def test_windows_are_counted_exactly_and_padding_bits_never_leak(kernel, geometry):
    outputs = dict.fromkeys((*range(1, 18), 31, 33, 64, 65), 3)
    outputs |= {127: 16, 128: 33, 300: 130, 19: 256, 11: 301}
    for channels, filters in outputs.items():
        for how in ("sign", "midrange"):
            options = {"bias": False, "binarizer": how, "scale": "learned"}
            layer = exact(shake(XnorConv2d(channels, filters, **geometry, **options), channels))
            x = torch.randn(2, channels, 7, 9, generator=seeded(channels))
            across, down = layer.padding[1], layer.padding[0]
            padded = F.pad(signs(x, how, 1).double(), (across, across, down, down), value=-1.0)
            weight = signs(layer.weight, how, (1, 2, 3)).double()
            expected = F.conv2d(padded, weight, None, layer.stride, 0, layer.dilation)
            with kernels.use(kernel):
                assert torch.equal(layer(x), expected.float())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())
@pytest.mark.parametrize("binarizer", BINARIZERS)
@pytest.mark.parametrize("scale", ["mean", "learned"])
def test_conv_equals_the_layer(kernel, geometry, binarizer, scale):
    for channels, outputs, bias in ((1, 1, True), (9, 33, False), (32, 8, True)):
        layer = XnorConv2d(
            channels, outputs, **geometry, bias=bias, binarizer=binarizer, scale=scale
        )
        shake(layer, channels)
        x = torch.randn(2, channels, 6, 5, generator=seeded(channels))
        with kernels.use(kernel):
            assert_close(layer(x), reference(layer, x))


pair = st.tuples(st.integers(1, 3), st.integers(1, 3))


@given(
    channels=st.tuples(st.integers(1, 20), st.integers(1, 5)),
    kernel_size=pair,
    stride=pair,
    dilation=pair,
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    extra=pair,
    binarizer=st.sampled_from(list(BINARIZERS)),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=20, derandomize=True)
def test_conv_of_any_geometry_equals_the_oracle(
    channels, kernel_size, stride, dilation, padding, extra, binarizer, seed
):
    geometry = (kernel_size, stride, padding, dilation)
    layer = shake(XnorConv2d(*channels, *geometry, binarizer=binarizer), seed)
    sizes = (d * (k - 1) + e for d, k, e in zip(dilation, kernel_size, extra, strict=True))
    x = torch.randn(1, channels[0], *sizes, generator=seeded(seed))
    expected = oracles.xnor_conv2d(
        x.tolist(),
        layer.weight.tolist(),
        stride,
        padding,
        dilation,
        binarizer,
        bias=layer.bias.tolist(),
    )
    for kernel in KERNELS:
        with kernels.use(kernel):
            assert_close(layer(x), torch.tensor(expected))


@pytest.mark.parametrize("kernel", KERNELS)
def test_images_may_lie_in_memory_as_they_like(kernel):
    layer = shake(XnorConv2d(9, 5, 3, padding=1), 1)
    x = torch.randn(2, 9, 6, 5, generator=seeded(2))
    with kernels.use(kernel):
        for other in (x.to(memory_format=torch.channels_last), x.mT.contiguous().mT):
            assert not other.is_contiguous()
            assert torch.equal(layer(other), layer(x))
        assert layer(x[:0]).shape == (0, 5, 6, 5)
        assert_close(layer(x[1:]), reference(layer, x[1:]))


# The call

LAYERS = {
    "linear": (lambda: shake(XnorLinear(100, 40), 1), (9, 100)),
    "conv": (lambda: shake(XnorConv2d(16, 8, 3, padding=1), 2), (3, 16, 9, 7)),
}
each_layer = pytest.mark.parametrize(("build", "shape"), LAYERS.values(), ids=LAYERS.keys())


@pytest.mark.parametrize("kernel", KERNELS)
@each_layer
def test_the_number_of_threads_changes_no_bit(kernel, build, shape):
    layer, x = build(), torch.randn(shape, generator=seeded(3))
    with kernels.use(kernel):
        one = layer(x)
        for count in (2, 3, 4):
            with threads(count):
                assert torch.equal(layer(x), one)


def arguments(layer, x):
    how = NUMBERS[layer.binarizer]
    if isinstance(layer, XnorLinear):
        return (x, layer.weight, layer.scale, layer.bias, how)
    geometry = ([*layer.stride], [*layer.padding], [*layer.dilation])
    return (x, layer.weight, layer.scale, layer.bias, *geometry, how)


def op_of(layer):
    name = "xnor_linear" if isinstance(layer, XnorLinear) else "xnor_conv2d"
    return getattr(torch.ops.xncaps, name).default


@each_layer
def test_layers_run_natively_where_no_gradient_is_wanted(build, shape):
    layer, x = build(), torch.randn(shape, generator=seeded(3))
    with Recorder() as recorder:
        got = layer(x)
    assert recorder.names == [op_of(layer)._opname]
    assert torch.equal(op_of(layer)(*arguments(layer, x)), got)
    for call in (lambda: reference(layer, x), lambda: build().double()(x.double())):
        with Recorder() as recorder:
            call()
        assert recorder.names == []
    with torch.enable_grad():
        wanted = torch.autograd.grad(reference(layer, x).square().sum(), layer.weight)
        found = torch.autograd.grad(layer(x).square().sum(), layer.weight)
        assert_close(found[0], wanted[0])
        assert found[0].any()


@each_layer
def test_a_change_of_the_weights_is_seen_by_the_next_call(build, shape):
    layer, x = build(), torch.randn(shape, generator=seeded(3))
    before = layer(x)
    layer.weight.data.neg_()
    assert not torch.equal(layer(x), before)
    assert_close(layer(x), reference(layer, x))


@each_layer
def test_the_ops_are_as_their_schemas_say_and_change_nothing(build, shape):
    layer, x = build(), torch.randn(shape, generator=seeded(3))
    before = x.clone()
    plain = [t.detach() if isinstance(t, torch.Tensor) else t for t in arguments(layer, x)]
    torch.library.opcheck(op_of(layer), tuple(plain))
    y = op_of(layer)(*plain)
    assert torch.equal(x, before)
    assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@each_layer
def test_compiled_and_exported_layers_equal_eager_ones(build, shape):
    torch.compiler.reset()
    layer, x = build().eval(), torch.randn(shape, generator=seeded(3))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), layer(x))
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    more = torch.randn(5, *shape[1:], generator=seeded(4))
    assert_close(program.module()(more), layer(more))


@jvp_warns
@each_layer
def test_function_transforms_and_autocast_still_work(build, shape):
    layer, x = build(), torch.randn(shape, generator=seeded(3))
    assert_close(torch.func.vmap(layer)(x[:, None])[:, 0], layer(x))
    tangent = torch.ones_like(x)
    got = torch.func.jvp(layer, (x,), (tangent,))
    with kernels.disabled():
        for left, right in zip(got, torch.func.jvp(layer, (x,), (tangent,)), strict=True):
            torch.testing.assert_close(left, right)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), reference(layer, x))


BAD_LINEAR = {
    "x of other features": {0: torch.ones(2, 99)},
    "x a number": {0: torch.tensor(1.0)},
    "x in float64": {0: torch.ones(2, 100, dtype=torch.float64)},
    "x of whole numbers": {0: torch.ones(2, 100, dtype=torch.int32)},
    "x without data": {0: torch.ones(2, 100, device="meta")},
    "x no tensor": {0: [1.0] * 100},
    "weight of rank 1": {1: torch.ones(100)},
    "weight in float16": {1: torch.ones(40, 100, dtype=torch.float16)},
    "scale too large": {2: torch.ones(41)},
    "bias too small": {3: torch.ones(39)},
    "bias of rank 2": {3: torch.ones(40, 1)},
    "no binarizer": {4: 0},
    "binarizer too high": {4: 4},
    "binarizer by name": {4: "sign"},
}
BAD_CONV = {
    "x of rank 3": {0: torch.ones(16, 9, 7)},
    "x of other channels": {0: torch.ones(3, 15, 9, 7)},
    "x in float64": {0: torch.ones(3, 16, 9, 7, dtype=torch.float64)},
    "x too small": {0: torch.ones(3, 16, 9, 0)},
    "x missing": {0: None},
    "weight of rank 3": {1: torch.ones(8, 16, 3)},
    "weight of other channels": {1: torch.ones(8, 17, 3, 3)},
    "scale too small": {2: torch.ones(7)},
    "bias too small": {3: torch.ones(7)},
    "stride of 0": {4: [0, 1]},
    "three strides": {4: [1, 1, 1]},
    "negative padding": {5: [-1, 1]},
    "one padding": {5: [1]},
    "dilation of 0": {6: [1, 0]},
    "half a dilation": {6: [1, 0.5]},
    "no binarizer": {7: 0},
    "negative binarizer": {7: -1},
}
BAD = [("linear", name, bad) for name, bad in BAD_LINEAR.items()]
BAD += [("conv", name, bad) for name, bad in BAD_CONV.items()]


@pytest.mark.parametrize(("which", "name", "bad"), BAD, ids=lambda value: str(value)[:30])
def test_the_ops_refuse_what_does_not_fit(which, name, bad):
    build, shape = LAYERS[which]
    layer = build()
    good = arguments(layer, torch.ones(shape))
    op_of(layer)(*good)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        op_of(layer)(*(bad.get(k, value) for k, value in enumerate(good)))
