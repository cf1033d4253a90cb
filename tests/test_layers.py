"""The capsule layers: oracles, dtypes, compile and export."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from layer_cases import F64, KINDS, capsules, gradients, make
from xncaps import CapsFC, CapsuleLinear, XnIDR, XnODR
from xncaps.binarizers import BINARIZERS
from xncaps.layers import xnorize_both


def expected_layer(layer, x, projection, agreement):
    """What the oracle makes of this layer's parameters."""
    learned = getattr(layer.routing.agreement, "scale", None)
    v, couplings = oracles.capsule_layer(
        x.tolist(),
        layer.weight.tolist(),
        layer.routing.iterations,
        projection,
        agreement,
        None if layer.scale is None else layer.scale.tolist(),
        None if learned is None else learned.tolist(),
        None if layer.routing.bias is None else layer.routing.bias.tolist(),
    )
    return torch.tensor(v, dtype=F64), torch.tensor(couplings, dtype=F64)


def assert_equals_oracle(layer, x, projection, agreement):
    v, couplings = layer(x, return_couplings=True)
    expected_v, expected_couplings = expected_layer(layer, x, projection, agreement)
    torch.testing.assert_close(v, expected_v, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(couplings, expected_couplings, rtol=1e-10, atol=1e-12)
    assert torch.equal(layer(x), v)


# Forward


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (5, 3, 2, 7), (7, 8, 3, 5), (3, 9, 5, 1)])
@pytest.mark.parametrize("iterations", [1, 3])
def test_layers_equal_the_oracle(kind, sizes, iterations):
    torch.manual_seed(sum(sizes))
    layer = make(kind, *sizes, iterations)
    assert_equals_oracle(layer, capsules(3, *sizes[:2]), *KINDS[kind][1:])


@pytest.mark.parametrize("kind", ["out", "in", "both"])
@pytest.mark.parametrize("binarizer", BINARIZERS)
@pytest.mark.parametrize("scale", ["mean", "learned"])
@pytest.mark.parametrize("routing_bias", [False, True])
def test_binarizers_scales_and_bias_equal_the_oracle(kind, binarizer, scale, routing_bias):
    torch.manual_seed(3)
    layer = make(kind, 5, 4, 3, 6, binarizer=binarizer, scale=scale, routing_bias=routing_bias)
    used = [None if how is None else binarizer for how in KINDS[kind][1:]]
    assert_equals_oracle(layer, capsules(2, 5, 4), *used)


def test_projection_and_agreement_may_have_different_binarizers():
    torch.manual_seed(4)
    layer = CapsuleLinear(
        5,
        4,
        3,
        6,
        binarizer="midrange",
        agreement="xnor",
        agreement_binarizer="approxsign",
        dtype=F64,
    )
    assert_equals_oracle(layer, capsules(2, 5, 4), "midrange", "approxsign")


def test_the_xnor_agreement_takes_sign_by_default():
    torch.manual_seed(5)
    layer = CapsuleLinear(5, 4, 3, 6, agreement="xnor", dtype=F64)
    assert_equals_oracle(layer, capsules(2, 5, 4), None, "sign")


size = st.integers(1, 5)


@given(
    sizes=st.tuples(size, size, size, size),
    batch=st.integers(1, 3),
    iterations=st.integers(1, 4),
    projection=st.sampled_from([None, *BINARIZERS]),
    agreement=st.sampled_from([None, *BINARIZERS]),
    scale=st.sampled_from(["mean", "learned"]),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=25, derandomize=True)
def test_layers_of_any_size_equal_the_oracle(
    sizes, batch, iterations, projection, agreement, scale, bias, seed
):
    torch.manual_seed(seed)
    layer = CapsuleLinear(
        *sizes,
        iterations,
        binarizer=projection,
        agreement="dot" if agreement is None else "xnor",
        agreement_binarizer=agreement,
        scale=scale,
        routing_bias=bias,
        dtype=F64,
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    assert_equals_oracle(layer, capsules(batch, *sizes[:2]), projection, agreement)


def test_capsules_of_zeros_after_a_relu_have_sign_minus_one():
    layer = make("out", 2, 4, 3, 5, iterations=1)
    x = torch.tensor([[[0.0, 0.0, 2.0, 0.0], [0.0, 1.0, 1.0, 0.0]]], dtype=F64)
    signs = torch.tensor([[[-1.0, -1, 1, -1], [-1, 1, 1, -1]]], dtype=F64)
    weight_signs = torch.where(layer.weight > 0, 1.0, -1.0).double()
    dots = (signs[0][:, None, :, None] * weight_signs).sum(2)
    expected = dots * 0.5 * layer.weight.abs().mean(2)
    torch.testing.assert_close(layer.project(x)[0], expected)


# Gradients


def test_weight_and_output_have_the_documented_shapes():
    layer = XnODR(6, 8, 5, 4, scale="learned", routing_bias=True)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "weight": (6, 5, 8, 4),
        "scale": (6, 5, 1, 4),
        "routing.bias": (5, 4),
    }
    both = xnorize_both(6, 8, 5, 4, scale="learned")
    assert both.routing.agreement.scale.shape == (5,)
    v, couplings = layer(torch.randn(3, 6, 8), return_couplings=True)
    assert v.shape == (3, 5, 4)
    assert couplings.shape == (3, 6, 5)


def test_a_mean_scale_and_no_bias_are_no_parameters():
    for kind in KINDS:
        assert list(make(kind, 6, 8, 5, 4).state_dict()) == ["weight"]


@pytest.mark.parametrize("sizes", [(256, 8, 10, 16), (2, 64, 40, 32), (400, 16, 3, 8)])
def test_weights_start_with_the_stated_spread(sizes):
    torch.manual_seed(0)
    caps_in, _, caps_out, dim_out = sizes
    expected = min(0.5, caps_out / math.sqrt(caps_in * dim_out))
    weight = CapsFC(*sizes).weight
    assert weight.std().item() == pytest.approx(expected, rel=0.02)
    assert weight.mean().item() == pytest.approx(0, abs=0.02 * expected)


def test_a_learned_scale_starts_at_the_means_of_the_weights():
    layer = XnODR(6, 16, 5, 4, scale="learned")
    torch.testing.assert_close(layer.scale, layer.weight.abs().mean(2, keepdim=True) / 8)


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (CapsFC(6, 8, 5, 4), "6, 8, 5, 4"),
        (XnODR(6, 8, 5, 4, binarizer="midrange"), "6, 8, 5, 4, binarizer='midrange'"),
        (XnODR(6, 8, 5, 4, scale="learned"), "6, 8, 5, 4, binarizer='sign', scale='learned'"),
    ],
)
def test_repr_says_sizes_and_binarizer(layer, text):
    assert layer.extra_repr() == text


@pytest.mark.parametrize("kind", KINDS)
def test_non_contiguous_input_is_the_same_input(kind):
    layer = make(kind, 6, 8, 5, 4)
    x = capsules(6, 3, 8).transpose(0, 1)
    assert not x.is_contiguous()
    torch.testing.assert_close(layer(x), layer(x.contiguous()), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [0, 1])
def test_empty_and_single_batches_have_gradients(kind, batch):
    layer = make(kind, 6, 8, 5, 4)
    x = capsules(batch, 6, 8).requires_grad_()
    v, couplings = layer(x, return_couplings=True)
    v.sum().backward()
    assert v.shape == (batch, 5, 4)
    assert couplings.shape == (batch, 6, 5)
    assert x.grad.shape == x.shape
    assert bool(layer.weight.grad.abs().sum() > 0) == (batch > 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_does_not_depend_on_its_batch_mates(kind):
    torch.manual_seed(1)
    layer = make(kind, 6, 8, 5, 4)
    x = capsules(4, 6, 8)
    loud = torch.cat([x[:1], 100 * x[1:]])
    torch.testing.assert_close(layer(x)[:1], layer(x[:1]), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(layer(loud)[:1], layer(x[:1]), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["plain", "out"])
def test_a_bfloat16_layer_is_near_the_float64_one(kind):
    torch.manual_seed(2)
    layer = KINDS[kind][0](6, 8, 5, 4, dtype=torch.bfloat16)
    x = capsules(3, 6, 8, dtype=torch.bfloat16)
    v = layer(x)
    assert v.dtype == torch.bfloat16
    expected = copy.deepcopy(layer).double()(x.double())
    torch.testing.assert_close(v.double(), expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_takes_both_dtypes_and_trains(kind):
    torch.manual_seed(2)
    layer = KINDS[kind][0](6, 8, 5, 4)
    x = capsules(3, 6, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        v = layer(x)
        assert layer(x.bfloat16()).isfinite().all()
    v.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert layer.weight.grad.isfinite().all()
    if kind in ("plain", "out"):  # a flipped sign moves an xnor agreement at once
        torch.testing.assert_close(v.float(), layer(x), rtol=0.05, atol=0.03)


COMPILED = {
    "plain": ("plain", {}),
    "out": ("out", {}),
    "in midrange": ("in", {"binarizer": "midrange"}),
    "both learned": ("both", {"scale": "learned", "routing_bias": True}),
    "out approxsign": ("out", {"binarizer": "approxsign", "detach_routing": True}),
}


@pytest.mark.parametrize(("kind", "options"), COMPILED.values(), ids=COMPILED.keys())
def test_compiled_layers_equal_eager_ones_forward_and_backward(kind, options):
    torch.compiler.reset()
    torch.manual_seed(6)
    layer = make(kind, 5, 4, 3, 6, **options)
    x = capsules(3, 5, 4).requires_grad_()
    inputs = (x, *layer.parameters())
    eager = layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, eager)
    for got, wanted in zip(gradients(compiled, inputs), gradients(eager, inputs), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(("kind", "options"), COMPILED.values(), ids=COMPILED.keys())
def test_exported_layers_equal_eager_ones_at_other_batch_sizes(kind, options):
    torch.manual_seed(6)
    layer = make(kind, 5, 4, 3, 6, **options).eval()
    batch = {0: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(layer, (capsules(3, 5, 4),), dynamic_shapes=(batch,)).module()
    for size in (2, 3, 7):
        x = capsules(size, 5, 4)
        torch.testing.assert_close(exported(x), layer(x))


@pytest.mark.parametrize("kind", ["out", "in", "both"])
def test_copies_and_state_dicts_carry_everything(kind):
    options = {"scale": "learned", "routing_bias": True}
    layer, x = make(kind, 5, 4, 3, 6, **options), capsules(2, 5, 4)
    other = make(kind, 5, 4, 3, 6, **options)
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(other(x), layer(x))
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))
    twin.weight.data.zero_()
    assert torch.equal(other(x), layer(x))


def test_a_layer_can_be_built_on_another_device():
    layer = XnIDR(6, 8, 5, 4, scale="learned", routing_bias=True, device="meta", dtype=F64)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", F64)}
    assert layer(torch.empty(2, 6, 8, device="meta", dtype=F64)).shape == (2, 5, 4)


# Refusals
