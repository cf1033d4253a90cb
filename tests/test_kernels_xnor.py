"""The native XnorLinear and XnorConv2d: bits counted one by one, means and shapes."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import oracles
from kernel_cases import (
    KERNELS,
    SIZES,
    assert_close,
    reference,
    seeded,
    shake,
    threads,
)
from xncaps import XnorConv2d, XnorLinear, kernels
from xncaps.binarizers import BINARIZERS

pytestmark = pytest.mark.usefixtures("_no_gradients")


@pytest.fixture
def _no_gradients():
    with torch.no_grad():
        yield


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
@pytest.mark.parametrize(
    ("in_features", "out_features", "counts"),
    [
        (509, 129, (7, 8, 9, 10, 11, 13)),
        (2041, 481, (15, 16, 17, 18, 19)),
        (2055, 1024, (16, 31)),
        (2048, 2048, (15, 16, 17)),
        (4089, 2017, (63, 64, 65, 66, 67)),
        (4103, 2080, (64, 68)),
    ],
)
def test_many_rows_and_columns_count_exactly(kernel, in_features, out_features, counts):
    layer = exact(linear(in_features, out_features, scale="learned", bias=False))
    layer.weight[3], layer.weight[-1], layer.weight[-2] = 1.0, 1.0, -1.0
    x = rows(layer, max(counts))
    x[1], x[2], x[-1] = 1.0, -1.0, x[0]
    x[4] = -x[0]
    expected = (signs(x, "sign", 1) @ signs(layer.weight, "sign", 1).T).float()
    with kernels.use(kernel):
        for count in counts:
            assert torch.equal(layer(x[:count]), expected[:count])


@pytest.mark.parametrize("kernel", KERNELS)
def test_threads_share_many_rows_and_columns(kernel):
    layer = exact(linear(4090, 2050, scale="learned", bias=False))
    x = rows(layer, 67 if kernel == "reference" else 515)
    expected = (signs(x, "sign", 1) @ signs(layer.weight, "sign", 1).T).float()
    for count in range(1, 5):
        with kernels.use(kernel), threads(count):
            assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("in_features", "out_features", "count"),
    [
        *((places, 2048, 64) for places in (8191, 8192, 8193)),
        *((places, 512, 16) for places in (16_383, 16_384, 16_385)),
        (16_384, 2048, 16),
    ],
)
def test_the_longest_rows_of_many_overflow_no_counter(kernel, in_features, out_features, count):
    layer = exact(XnorLinear(in_features, out_features, bias=False, scale="learned"))
    layer.weight[1::2] = -layer.weight[::2]
    layer.weight[0] = 1.0
    x = layer.weight[:count].clone()
    x[-8:] = 1.0  # all places are of one class
    expected = (signs(x, "sign", 1) @ signs(layer.weight, "sign", 1).T).float()
    assert expected.max() == in_features
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
@pytest.mark.parametrize("windows", range(1, 6))
def test_few_windows_of_many_filters_are_counted_exactly(kernel, windows):
    for filters in (64, 130, 288, 600):
        layer = shake(XnorConv2d(11, filters, 3, bias=False, scale="learned"), filters)
        x = torch.randn(1, 11, 3, 2 + windows, generator=seeded(windows))
        weight = signs(layer.weight, "sign", 1).double()
        expected = F.conv2d(signs(x, "sign", 1).double(), weight)
        with kernels.use(kernel):
            assert torch.equal(exact(layer)(x), expected.float())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("channels", "filters"), [(67, 131), (233, 515), (512, 2049)])
def test_many_windows_of_many_filters_are_counted_exactly(kernel, channels, filters):
    layer = shake(XnorConv2d(channels, filters, 3, padding=1, bias=False, scale="learned"), filters)
    height = 26 if filters == 515 else 7  # more windows than a group has
    x = torch.randn(2, channels, height, 10, generator=seeded(channels))
    padded = F.pad(signs(x, "sign", 1).float(), (1, 1, 1, 1), value=-1.0)
    expected = F.conv2d(padded, signs(layer.weight, "sign", 1).float())
    with kernels.use(kernel):
        assert torch.equal(exact(layer)(x), expected)


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
