"""Packed convolutions after some images of one size: by a plan, with the very same numbers."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
import xncaps
from kernel_cases import KERNELS, assert_close, reference, seeded, shake
from xncaps import XnorConv2d, kernels
from xncaps.binarizers import BINARIZERS

PATIENCE = 8
"""Images of one size that come before there is a plan."""
FAST = [kernel for kernel in KERNELS if kernel != "reference"]

CASES = {  # channels, filters, (height, width) of images, options
    "smallest": (8, 8, (16, 16), {}),
    "odd numbers": (9, 11, (17, 13), {}),
    "a channel less than whole bytes": (23, 13, (21, 16), {}),
    "many places": (229, 9, (14, 14), {}),
    "more places than are added up at once": (450, 8, (15, 14), {}),
    "several slices": (12, 10, (40, 29), {}),
    "a slice is a row": (8, 8, (3, 256), {}),
    "rows of 56": (64, 8, (20, 56), {}),
    "1x1": (70, 9, (16, 15), {"kernel_size": 1, "padding": 0}),
    "2x3": (16, 9, (24, 16), {"kernel_size": (2, 3), "padding": (0, 1)}),
    "5x5": (5, 17, (24, 32), {"kernel_size": 5, "padding": 2}),
    "no padding": (9, 8, (26, 18), {"padding": 0}),
    "wide padding": (9, 8, (20, 12), {"padding": (3, 2)}),
    "padding wider than the image": (9, 8, (4, 3), {"padding": 7}),
    "dilated": (9, 8, (24, 16), {"dilation": 2, "padding": 2}),
    "dilated one way": (9, 8, (24, 16), {"dilation": (1, 3), "padding": (1, 3)}),
    "no bias": (9, 8, (24, 16), {"bias": False}),
    "learned scale": (9, 8, (24, 16), {"scale": "learned"}),
    "midrange": (9, 8, (24, 15), {"binarizer": "midrange"}),
    "approxsign": (9, 8, (24, 15), {"binarizer": "approxsign"}),
}


def make(channels, filters, size, options, batch=PATIENCE):
    """A layer, and images for it."""
    layer = XnorConv2d(channels, filters, **{"kernel_size": 3, "padding": 1, **options})
    with torch.no_grad():
        shake(layer, channels)
    return layer, torch.randn(batch, channels, *size, generator=seeded(filters, *size))


def planned(packed, x):
    """What a layer gives once it has seen images enough."""
    for _ in range(0, PATIENCE, len(x)):
        packed(x)
    assert packed.plan_bytes > 0
    return packed(x)


def one_by_one(layer, x):
    """What it gives without a plan."""
    outputs = []
    for image in x:
        packed = xncaps.pack(layer)
        outputs.append(packed(image[None]))
        assert packed.plan_bytes == 0
    return torch.cat(outputs)


@torch.inference_mode()
@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_plan_changes_no_number(kernel, case):
    layer, x = make(*case, batch=3)
    with kernels.use(kernel):
        before = one_by_one(layer, x)
        packed = xncaps.pack(layer)
        for _ in range(PATIENCE):
            y = packed(x)
        assert torch.equal(y, before)
        assert_close(y, reference(layer, x))


@torch.inference_mode()
@pytest.mark.parametrize("kernel", FAST)
def test_there_are_plans_where_they_are_faster(kernel):
    for name in ("smallest", "several slices", "rows of 56", "5x5", "wide padding", "midrange"):
        with kernels.use(kernel):
            layer, x = make(*CASES[name])
            packed = xncaps.pack(layer)
            assert packed.plan_bytes == 0
            few = name == "smallest" and kernel == "avx512"  # half a slice
            assert few or torch.equal(planned(packed, x), one_by_one(layer, x)), name
    with kernels.use(kernel):
        for case in (
            (9, 8, (16, 16), {"stride": 2}),
            (9, 7, (16, 16), {}),  # few filters
            (7, 8, (16, 16), {}),  # few places
            (9, 8, (6, 6), {}),  # few windows
            (9, 8, (2, 513), {}),  # a row is longer than a slice
            (3000, 8, (16, 16), {}),  # places too far off
        ):
            layer, x = make(*case)
            packed = xncaps.pack(layer)
            for _ in range(3):
                y = packed(x)
            assert packed.plan_bytes == 0
            assert torch.equal(y, one_by_one(layer, x))


@given(
    channels=st.integers(1, 40),
    filters=st.integers(8, 13),
    size=st.tuples(st.integers(1, 20), st.integers(1, 70)),
    kernel_size=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    binarizer=st.sampled_from(list(BINARIZERS)),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=40, derandomize=True)
@torch.inference_mode()
def test_any_geometry(channels, filters, size, kernel_size, padding, dilation, binarizer, seed):
    options = {"padding": padding, "dilation": dilation, "binarizer": binarizer}
    layer, x = make(channels, filters, size, {"kernel_size": kernel_size, **options}, batch=1)
    if any(
        n + 2 * p < d * (k - 1) + 1
        for n, p, d, k in zip(size, padding, dilation, kernel_size, strict=True)
    ):
        return
    x = torch.randn(x.shape, generator=seeded(seed))
    for kernel in FAST:
        with kernels.use(kernel):
            packed = xncaps.pack(layer)
            first = packed(x)
            for _ in range(PATIENCE):
                assert torch.equal(packed(x), first)


@torch.inference_mode()
@pytest.mark.parametrize("kernel", FAST)
def test_a_plan_equals_plain_loops(kernel):
    layer, x = make(9, 8, (16, 24), {"padding": (2, 1), "dilation": (2, 1)}, batch=1)
    expected = oracles.xnor_conv2d(
        x.tolist(),
        layer.weight.tolist(),
        (1, 1),
        (2, 1),
        (2, 1),
        "sign",
        bias=layer.bias.tolist(),
    )
    with kernels.use(kernel):
        assert_close(planned(xncaps.pack(layer), x), torch.tensor(expected))


@torch.inference_mode()
@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("binarizer", BINARIZERS)
def test_odd_numbers(kernel, binarizer):
    layer, x = make(9, 8, (24, 15), {"binarizer": binarizer})
    values = [0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, float("inf"), float("-inf"), float("nan")]
    for n, value in enumerate(values[: len(x)]):
        x[n, n % 9, 1 + n, 14 - n] = value
        x[n, :, 23, 0] = value  # a whole pixel
    x[-1, 4] = values[-1]
    with kernels.use(kernel):
        y = planned(xncaps.pack(layer), x)
        expected = one_by_one(layer, x)
        is_nan = y.isnan()  # which NaN it is does not matter
        assert torch.equal(is_nan, expected.isnan())
        assert torch.equal(y[~is_nan], expected[~is_nan])
        assert 0 < is_nan.sum() < y.numel()


@torch.inference_mode()
@pytest.mark.parametrize("kernel", FAST)
def test_signs_that_are_all_the_same(kernel):
    for filters in (1.0, -1.0):
        layer, x = make(230, 8, (16, 16), {"scale": "learned", "bias": False, "padding": 0})
        layer.weight.fill_(filters)
        layer.scale.fill_(1.0)
        with kernels.use(kernel):
            for image in (1.0, -1.0):
                y = planned(xncaps.pack(layer), torch.full_like(x, image))
                assert torch.equal(y, torch.full_like(y, filters * image * 230 * 9))


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_bits_that_are_written_to_count_at_once(kernel, mode):
    with mode():
        check_bits_that_are_written_to(kernel)


def check_bits_that_are_written_to(kernel):
    layer, x = make(9, 8, (24, 16), {})
    other, _ = make(9, 8, (24, 16), {})
    other.weight.neg_()
    with kernels.use(kernel):
        packed, opposite = xncaps.pack(layer), xncaps.pack(other)
        before = planned(packed, x)
        packed.bits.copy_(opposite.bits)
        after = packed(x)
        assert torch.equal(after, opposite(x))
        assert not torch.equal(after, before)
        assert torch.equal(planned(packed, x), after)
        packed.scales.mul_(2)  # not part of the plan
        opposite.scales.mul_(2)
        assert torch.equal(packed(x), opposite(x))


@torch.inference_mode()
def test_images_of_other_sizes_and_other_kernels():
    layer, x = make(9, 8, (24, 16), {})
    _, y = make(9, 8, (24, 31), {})
    packed = xncaps.pack(layer)
    for kernel in FAST * 2:
        with kernels.use(kernel):
            for images in (x, y, x[:1], y[:1], x[:3], x[3:], x):
                assert torch.equal(packed(images), one_by_one(layer, images))


@torch.inference_mode()
def test_sizes_in_turns_get_no_plan():
    layer, x = make(9, 8, (24, 16), {})
    _, y = make(9, 8, (24, 31), {})
    packed = xncaps.pack(layer)
    for _ in range(PATIENCE):
        packed(x[:1])
        packed(y[:1])
        assert packed.plan_bytes == 0


@torch.inference_mode()
@pytest.mark.parametrize("kernel", FAST)
def test_threads_give_the_same(kernel):
    layer, x = make(20, 9, (24, 31), {}, batch=11)
    threads = torch.get_num_threads()
    with kernels.use(kernel):
        expected = one_by_one(layer, x)
        packed = xncaps.pack(layer)
        try:
            for count in (1, 2, 3, 4):
                torch.set_num_threads(count)
                assert torch.equal(planned(packed, x), expected)
        finally:
            torch.set_num_threads(threads)


def test_callers_in_several_threads_may_share_a_layer():
    layer, x = make(30, 9, (24, 31), {}, batch=9)
    _, y = make(30, 9, (24, 16), {}, batch=9)
    packed = xncaps.pack(layer)
    with torch.inference_mode():
        expected = {id(images): one_by_one(layer, images) for images in (x, y)}
    wrong = []

    def call(images):
        with torch.inference_mode():
            for _ in range(60):
                if not torch.equal(packed(images), expected[id(images)]):
                    wrong.append(images.shape)

    callers = [threading.Thread(target=call, args=[images]) for images in (x, y, x, y)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@torch.inference_mode()
def test_a_plan_is_no_part_of_the_state():
    layer, x = make(9, 8, (24, 16), {})
    packed = xncaps.pack(layer)
    bytes_before = {name: value.clone() for name, value in packed.state_dict().items()}
    y = planned(packed, x)
    assert packed.state_dict().keys() == bytes_before.keys()
    assert all(torch.equal(value, bytes_before[k]) for k, value in packed.state_dict().items())
    packed.load_state_dict(bytes_before)
    assert packed.plan_bytes == 0
    assert torch.equal(packed(x), y)
