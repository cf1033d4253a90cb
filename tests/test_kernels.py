"""The native forward pass of the capsule layers, and which kernel runs."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from checks import refused
from kernel_cases import (
    KERNELS,
    KINDS,
    NUMBERS,
    SIZES,
    Recorder,
    assert_close,
    capsules,
    make,
    off_ties,
    op_inputs,
    reference,
    run_op,
    threads,
)
from xncaps import kernels
from xncaps.errors import InputError

BASE = (5, 4, 3, 6)  # caps_in, dim_in, caps_out, dim_out


def assert_equals_reference(layer, x, kernel, most=True):
    """Values, sums and couplings, in a kernel and in plain PyTorch."""
    x = off_ties(layer, x, most=most)
    with torch.no_grad():
        expected, expected_couplings = reference(layer, x, return_couplings=True)
        with kernels.use(kernel):
            v, last_couplings = layer(x, return_couplings=True)
            kept, sums, couplings = run_op(layer, x)
            assert torch.equal(layer(x), v)
    assert_close(v, expected)
    assert_close(last_couplings, expected_couplings)
    assert torch.equal(kept, v)
    iterations = layer.routing.iterations
    assert sums.shape == (len(x), iterations, layer.caps_out, layer.dim_out)
    assert couplings.shape[:3] == (len(x), iterations - 1, layer.caps_out)
    assert couplings.shape[3] == (layer.caps_in + 31) // 32 * 32
    length = sums[:, -1].norm(dim=-1, keepdim=True)
    assert_close(sums[:, -1] * (length / (1 + length * length)), expected)
    if iterations > 1:
        assert_close(couplings[:, -1, :, : layer.caps_in].mT, expected_couplings)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", range(4), ids=["caps_in", "dim_in", "caps_out", "dim_out"])
def test_every_size_equals_the_layer(kernel, kind, axis):
    for size in SIZES:
        sizes = (*BASE[:axis], size, *BASE[axis + 1 :])
        layer = make(*KINDS[kind], *sizes)
        assert_equals_reference(layer, capsules(layer, 3), kernel)


MIXED = [(33, 9, 10, 16), (65, 8, 7, 1), (1, 128, 33, 9), (8, 63, 1, 65), (31, 1, 32, 7)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_mixed_sizes_iterations_and_batches_equal_the_layer(kernel, kind):
    for sizes in [BASE, (1, 1, 1, 1), *MIXED]:
        for iterations, batch in ((1, 5), (2, 1), (3, 0), (4, 3)):
            layer = make(*KINDS[kind], *sizes, iterations=iterations)
            assert_equals_reference(layer, capsules(layer, batch), kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("projection", NUMBERS)
@pytest.mark.parametrize("agreement", NUMBERS)
def test_binarizers_scales_and_bias_equal_the_layer(kernel, projection, agreement):
    for scale in ("mean", "learned"):
        if scale == "learned" and projection is None and agreement is None:
            continue
        for bias in (False, True):
            options = {"scale": scale, "routing_bias": bias}
            layer = make(projection, agreement, 33, 5, 3, 9, **options)
            assert_equals_reference(layer, capsules(layer, 4), kernel)


near = st.integers(1, 40)


@given(
    sizes=st.tuples(near, near, st.integers(1, 12), near),
    batch=st.integers(0, 6),
    iterations=st.integers(1, 4),
    projection=st.sampled_from(list(NUMBERS)),
    agreement=st.sampled_from(list(NUMBERS)),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=40, derandomize=True)
def test_layers_of_any_size_equal_the_reference(
    sizes, batch, iterations, projection, agreement, bias, seed
):
    options = {"iterations": iterations, "seed": seed, "routing_bias": bias}
    layer = make(projection, agreement, *sizes, **options)
    x = capsules(layer, batch, seed)
    for kernel in KERNELS:
        assert_equals_reference(layer, x, kernel, most=False)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_small_layers_equal_the_oracle(kernel, kind):
    for sizes in [(1, 1, 1, 1), BASE, (9, 9, 2, 3)]:
        options = {} if kind == "plain" else {"scale": "learned"}
        layer = make(*KINDS[kind], *sizes, routing_bias=True, **options)
        x = off_ties(layer, capsules(layer, 3))
        learned = getattr(layer.routing.agreement, "scale", None)
        expected, _ = oracles.capsule_layer(
            x.tolist(),
            layer.weight.tolist(),
            3,
            *KINDS[kind],
            None if layer.scale is None else layer.scale.tolist(),
            None if learned is None else learned.tolist(),
            layer.routing.bias.tolist(),
        )
        with torch.no_grad(), kernels.use(kernel):
            assert_close(layer(x), torch.tensor(expected))


# Whole numbers


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("projection", ["sign", "midrange", "approxsign"])
def test_dot_products_of_signs_are_exact_and_padding_bits_never_leak(kernel, projection):
    for dim_in in (*range(1, 18), 31, 32, 33, 63, 64, 65, 128):
        for caps_in in (1, 33):
            layer = make(projection, None, caps_in, dim_in, 1, 9, iterations=1, scale="learned")
            layer.scale.data.fill_(1.0)
            x = capsules(layer, 5)

            def signs(values, dim):
                middle = torch.zeros(())
                if projection == "midrange":
                    middle = (values.amax(dim, True) + values.amin(dim, True)) / 2
                return torch.where(values > middle, 1, -1)

            pairs = signs(x, 2)[:, :, None, :, None] * signs(layer.weight.detach(), 2)
            with kernels.use(kernel):
                _, sums, _ = run_op(layer, x)
            # One output capsule couples with weight 1: its sum is that of whole numbers.
            assert torch.equal(sums[:, 0], pairs.sum((1, 3)).float())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("caps_in", [1, 40])
def test_every_float16_scale_is_read_as_it_is(kernel, caps_in):
    halves = torch.arange(2**16).to(torch.uint16).view(torch.float16)
    # 2**16 output capsules of one element: each sum is caps_in * scale / 2**16, in powers of 2.
    blocks = [halves.repeat_interleave(width) for width in (caps_in % 32, 32 * (caps_in // 32))]
    scale = torch.cat(blocks[::-1])
    bits = torch.ones(2**16 * caps_in, dtype=torch.uint8)
    pointers = (0, bits.data_ptr(), scale.data_ptr(), True, True, 0, 0)
    with kernels.use(kernel):
        sizes = (caps_in, 1, 2**16, 1, 1, NUMBERS["sign"], NUMBERS[None])
        v = (
            kernels.native()
            .PackedCapsules([], [], *sizes, *pointers)
            .run(torch.ones(1, caps_in, 1), 0)
        )
    s = halves.double() * caps_in / 2**16
    torch.testing.assert_close(
        v.flatten(), (s * s.abs() / (1 + s * s)).float(), rtol=1e-5, atol=0.0, equal_nan=True
    )


SPECIAL = (0.0, -0.0, 1e-40, -1e-40, float("nan"), float("inf"), float("-inf"))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("projection", NUMBERS)
@pytest.mark.parametrize("agreement", [None, "sign", "midrange"])
def test_special_values_do_what_they_do_in_pytorch(kernel, projection, agreement):
    layer = make(projection, agreement, 9, 5, 3, 6, routing_bias=True)
    x = capsules(layer, 2 * len(SPECIAL))
    for k, value in enumerate(SPECIAL):
        x[2 * k, 3, 2] = value
        x[2 * k + 1, 8] = value
    with torch.no_grad(), kernels.use(kernel):
        got, expected = layer(x), reference(layer, x)
        assert got.isnan().any()
        assert not got[:8].isnan().any()
        assert_close(got, expected)
        for value in SPECIAL:
            layer.weight.data[4, 1, 2, 3] = value
            layer.weight.data[7, 2, :, 5] = value
            assert_close(layer(x[:2]), reference(layer, x[:2]))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_sum_of_zeros_stays_zero(kernel):
    for projection, agreement in KINDS.values():
        layer = make(projection, agreement, 33, 4, 3, 6)
        with torch.no_grad(), kernels.use(kernel):
            assert torch.equal(layer(torch.zeros(2, 33, 4)), torch.zeros(2, 3, 6))


# The call


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 5])
def test_the_number_of_threads_changes_no_bit(kernel, kind, batch):
    layer = make(*KINDS[kind], 100, 8, 10, 16)
    x = capsules(layer, batch)
    with kernels.use(kernel):
        one = run_op(layer, x)
        for count in (2, 3, 4):
            with threads(count):
                for got, expected in zip(run_op(layer, x), one, strict=True):
                    assert torch.equal(got, expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_several_threads_of_python_may_call_at_once(kernel):
    layer = make("sign", "sign", 40, 8, 10, 16)
    inputs = [capsules(layer, 5, seed) for seed in range(24)]
    with kernels.use(kernel), threads(2):
        expected = [run_op(layer, x)[0] for x in inputs]
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda x: run_op(layer, x)[0], inputs))
    for left, right in zip(got, expected, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_sample_does_not_depend_on_its_batch(kernel):
    for kind in KINDS.values():
        layer = make(*kind, 33, 9, 5, 7)
        x = off_ties(layer, capsules(layer, 11))
        loud = torch.cat([x[:1], 100 * x[1:]])
        with torch.no_grad(), kernels.use(kernel):
            whole = layer(x)
            assert_close(layer(loud)[:1], whole[:1])
            for b in range(len(x)):
                assert_close(layer(x[b : b + 1])[0], whole[b])


@pytest.mark.parametrize("kernel", KERNELS)
def test_inputs_may_lie_in_memory_as_they_like_and_stay_as_they_are(kernel):
    layer = make("sign", "sign", 9, 8, 5, 4, scale="learned", routing_bias=True)
    tensors, others = op_inputs(layer, capsules(layer, 3))
    tensors = [tensor.detach() for tensor in tensors]
    scattered = []
    for tensor in tensors:
        wide = torch.full((*tensor.shape, 2), float("nan"))
        wide[..., 1] = tensor
        scattered.append(wide[..., 1])
        assert not scattered[-1].is_contiguous()
    with kernels.use(kernel):
        expected = torch.ops.xncaps.capsules_recorded(*tensors, *others)
        before = [tensor.clone() for tensor in scattered]
        got = torch.ops.xncaps.capsules_recorded(*scattered, *others)
    for left, right in zip(got, expected, strict=True):
        assert torch.equal(left, right)
    for left, right in zip(scattered, before, strict=True):
        assert torch.equal(left, right)
    storages = {tensor.untyped_storage().data_ptr() for tensor in (*got, *expected, *tensors)}
    assert len(storages) == len(got) + len(expected) + len(tensors)


@pytest.mark.parametrize("kernel", KERNELS)
def test_recording_changes_nothing_of_the_output(kernel):
    layer = make("sign", "sign", 9, 8, 5, 4)
    x = capsules(layer, 3)
    tensors, others = op_inputs(layer, x)
    with kernels.use(kernel):
        assert torch.equal(torch.ops.xncaps.capsules(*tensors, *others[:3]), run_op(layer, x)[0])


def test_the_op_that_records_nothing_says_so_where_a_gradient_is_asked_for():
    layer = make("sign", None, 9, 8, 5, 4)
    tensors, others = op_inputs(layer, capsules(layer, 3))
    v = torch.ops.xncaps.capsules(*tensors, *others[:3])
    text = "capsules: the op must be capsules_recorded where a gradient is needed; got capsules."
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        v.sum().backward()


def test_a_change_of_the_weights_is_seen_by_the_next_call():
    layer = make("sign", None, 9, 8, 5, 4)
    x = capsules(layer, 3)
    with torch.no_grad():
        before = layer(x)
        layer.weight.neg_()
        assert not torch.equal(layer(x), before)
        assert_close(layer(x), reference(layer, x))
        layer.weight.data.mul_(2.0)  # behind the back of the version counter
        assert_close(layer(x), reference(layer, x))
        layer.load_state_dict(make("sign", None, 9, 8, 5, 4, seed=1).state_dict())
        assert_close(layer(x), reference(layer, x))


# Which kernel runs


def test_the_native_module_is_built_with_the_kernels_of_this_cpu():
    assert {"reference", "portable"} <= set(kernels.available())
    assert kernels.selected() in kernels.available()
    assert kernels.selected() != "reference"
    if Path("/proc/cpuinfo").exists():
        flags = set(Path("/proc/cpuinfo").read_text().split())
        assert ("avx2" in kernels.available()) == ({"avx2", "fma", "f16c"} <= flags)
        avx512bw = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
        assert ("avx512bw" in kernels.available()) == (avx512bw <= flags)
        avx512 = avx512bw | {"avx512_bitalg", "avx512vbmi"}
        assert ("avx512" in kernels.available()) == (avx512 <= flags)


def test_layers_run_natively_where_they_can():
    layer = make("sign", "sign", 9, 8, 5, 4)
    x = capsules(layer, 3)
    with Recorder() as recorder:
        layer(x)
    assert recorder.names == ["capsules"]
    for call in (
        lambda: reference(layer, x),
        lambda: make("sign", "sign", 9, 8, 5, 4).double()(x.double()),
        lambda: make("sign", "sign", 9, 8, 5, 4).bfloat16()(x.bfloat16()),
    ):
        with Recorder() as recorder:
            call()
        assert recorder.names == []


def test_a_block_uses_its_kernel_and_leaves_it_behind():
    before = kernels.selected()
    with kernels.use("portable"):
        assert kernels.selected() == "portable"
        with kernels.use("reference"):
            assert kernels.selected() == "reference"
        assert kernels.selected() == "portable"
    assert kernels.selected() == before
    with pytest.raises(KeyError), kernels.use("reference"):
        raise KeyError
    assert kernels.selected() == before


def test_a_misspelt_kernel_is_told_the_choices():
    def use(name):
        with kernels.use(name):
            pass

    told = refused(InputError, use, "portabel")
    assert "'portabel'" in told
    assert all(name in told for name in kernels.available())
