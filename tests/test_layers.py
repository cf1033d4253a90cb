"""The capsule layers and primary capsules: oracles, gradients, compile, export and refusals."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import oracles
from xncaps import CapsFC, CapsuleLinear, PrimaryCaps, XnIDR, XnODR, squash
from xncaps.binarizers import BINARIZERS
from xncaps.errors import InputError, InputTypeError
from xncaps.layers import xnorize_both
from xncaps.primary import CapsuleNorm, ConvPrimaryCaps

F64 = torch.float64

# name: (what builds the layer, the projection's binarizer, the agreement's)
KINDS = {
    "plain": (CapsFC, None, None),
    "out": (XnODR, "sign", None),
    "in": (XnIDR, None, "sign"),
    "both": (xnorize_both, "sign", "sign"),
}


def make(kind, *sizes, dtype=F64, **options):
    """A layer whose weights go beyond 1 and whose optional parameters are not at their start."""
    layer = KINDS[kind][0](*sizes, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return layer


def capsules(*shape, dtype=F64):
    return torch.randn(*shape, dtype=dtype)


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


def gradients(v, inputs, seed=11):
    cotangent = torch.randn(v.shape, dtype=F64, generator=torch.Generator().manual_seed(seed))
    return torch.autograd.grad((v * cotangent).sum(), inputs)


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


class StandIn(torch.autograd.Function):
    """Signs forward; backward multiplies by a slope that is given, not derived."""

    @staticmethod
    def forward(ctx, x, middle, slope):
        ctx.save_for_backward(slope)
        return torch.where(x > middle, 1.0, -1.0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (slope,) = ctx.saved_tensors
        return grad * slope, None, None


def stand_in(x, how, dims):
    size = x.detach().abs()
    slope = torch.where(size < 1, 2 - 2 * size, 0.0) if how == "approxsign" else size <= 1
    middle = torch.zeros(())
    if how == "midrange":
        middle = (x.detach().amax(dims, True) + x.detach().amin(dims, True)) / 2
    return StandIn.apply(x, middle, slope)


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
    torch.testing.assert_close(layer.scale, layer.weight.abs().mean(2, keepdim=True) / 4)


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (CapsFC(6, 8, 5, 4), "6, 8, 5, 4, binarizer=None"),
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


# Primary capsules


def test_pooling_first_equals_a_1x1_convolution_then_pooling():
    primary = PrimaryCaps(10, 6, 4).double()
    maps = capsules(3, 10, 5, 7)
    kernel = primary.projection.weight.view(24, 10, 1, 1)
    convolved = F.conv2d(maps, kernel, primary.projection.bias)
    expected = squash(F.adaptive_avg_pool2d(convolved, 1).view(3, 6, 4))
    torch.testing.assert_close(primary(maps), expected)
    torch.testing.assert_close(primary(maps.mean((2, 3))), expected)


def test_primary_capsules_without_projection_cut_the_features():
    primary = PrimaryCaps(24, 6, 4, project=False)
    assert list(primary.parameters()) == []
    features = capsules(3, 24)
    rows = [[row[4 * i : 4 * i + 4] for i in range(6)] for row in features.tolist()]
    expected = [[oracles.squash(capsule) for capsule in row] for row in rows]
    torch.testing.assert_close(primary(features), torch.tensor(expected, dtype=F64))
    assert primary.extra_repr() == "caps=6, dim=4"


def test_conv_primary_capsules_are_cut_by_type_then_place():
    primary = ConvPrimaryCaps(2, 3, 4, kernel_size=3, stride=2).double()
    maps = capsules(2, 2, 7, 9)
    convolved = F.conv2d(maps, primary.conv.weight, primary.conv.bias, stride=2)  # 3 x 4 places
    v = primary(maps)
    assert v.shape == (2, 3 * 12, 4)
    for sample in range(2):
        for kind in range(3):
            for row in range(3):
                for column in range(4):
                    s = convolved[sample, 4 * kind : 4 * kind + 4, row, column].tolist()
                    got = v[sample, 12 * kind + 4 * row + column]
                    torch.testing.assert_close(got, torch.tensor(oracles.squash(s), dtype=F64))


def test_capsule_norm_normalises_each_coordinate_then_relus():
    norm = CapsuleNorm(3).double()
    x = capsules(4, 5, 3)
    mean = x.mean((0, 1))
    variance = (x - mean).square().mean((0, 1))
    expected = ((x - mean) / (variance + 1e-3).sqrt()).clamp(min=0)
    torch.testing.assert_close(norm(x), expected)
    torch.testing.assert_close(norm.norm.running_mean, 0.1 * mean)
    unbiased = variance * 20 / 19
    torch.testing.assert_close(norm.norm.running_var, 0.9 + 0.1 * unbiased)
    norm.eval()
    one = x[:1]
    stored = (one - 0.1 * mean) / (0.9 + 0.1 * unbiased + 1e-3).sqrt()
    torch.testing.assert_close(norm(one), stored.clamp(min=0))


# Refusals

INT = "Convert it first, for example with .float()."
CHOICES = "must be one of sign, midrange, approxsign; got"

REFUSED = {
    "rank": (
        lambda: CapsFC(6, 8, 5, 4)(torch.ones(6, 8)),
        InputError,
        "CapsFC: x must have shape (batch, caps_in=6, dim_in=8); got (6, 8).",
    ),
    "caps_in": (
        lambda: XnODR(6, 8, 5, 4)(torch.ones(2, 7, 8)),
        InputError,
        "XnODR: x must have shape (batch, caps_in=6, dim_in=8); got (2, 7, 8).",
    ),
    "dim_in": (
        lambda: XnIDR(6, 8, 5, 4)(torch.ones(2, 6, 9)),
        InputError,
        "XnIDR: x must have shape (batch, caps_in=6, dim_in=8); got (2, 6, 9).",
    ),
    "int": (
        lambda: CapsuleLinear(6, 8, 5, 4)(torch.ones(2, 6, 8, dtype=torch.int64)),
        InputTypeError,
        f"CapsuleLinear: x must be a floating-point tensor; got torch.int64. {INT}",
    ),
    "list": (
        lambda: CapsFC(6, 8, 5, 4)([1.0]),
        InputTypeError,
        "CapsFC: x must be a tensor; got list.",
    ),
    "float64": (
        lambda: CapsFC(6, 8, 5, 4)(torch.ones(2, 6, 8, dtype=F64)),
        InputTypeError,
        "CapsFC: x must have the layer's dtype torch.float32; got torch.float64. "
        "Convert one of them with .to(dtype), or use torch.autocast.",
    ),
    "device": (
        lambda: CapsFC(6, 8, 5, 4)(torch.ones(2, 6, 8, device="meta")),
        InputTypeError,
        "CapsFC: x must be on the layer's device cpu; got meta. Move one of them with .to(device).",
    ),
    "iterations": (
        lambda: CapsFC(6, 8, 5, 4, iterations=0),
        InputError,
        "CapsFC: iterations must be at least 1; got 0.",
    ),
    "no input capsules": (
        lambda: XnODR(0, 8, 5, 4),
        InputError,
        "XnODR: caps_in must be at least 1; got 0.",
    ),
    "negative": (
        lambda: XnODR(6, 8, -5, 4),
        InputError,
        "XnODR: caps_out must be at least 1; got -5.",
    ),
    "bool": (
        lambda: XnODR(6, True, 5, 4),
        InputTypeError,
        "XnODR: dim_in must be a whole number; got True.",
    ),
    "float": (
        lambda: XnODR(6, 8, 5, 4.0),
        InputTypeError,
        "XnODR: dim_out must be a whole number; got 4.0.",
    ),
    "binarizer": (
        lambda: XnODR(6, 8, 5, 4, binarizer="sgn"),
        InputError,
        f"XnODR: binarizer {CHOICES} 'sgn'. Did you mean 'sign'?",
    ),
    "agreement binarizer": (
        lambda: XnIDR(6, 8, 5, 4, binarizer="zebra"),
        InputError,
        f"XnIDR: agreement_binarizer {CHOICES} 'zebra'.",
    ),
    "agreement": (
        lambda: CapsuleLinear(6, 8, 5, 4, agreement="xor"),
        InputError,
        "CapsuleLinear: agreement must be one of dot, xnor; got 'xor'. Did you mean 'xnor'?",
    ),
    "routing": (
        lambda: CapsFC(6, 8, 5, 4, routing="dynamical"),
        InputError,
        "CapsFC: routing must be one of dynamic; got 'dynamical'. Did you mean 'dynamic'?",
    ),
    "scale": (
        lambda: XnODR(6, 8, 5, 4, scale="learnt"),
        InputError,
        "XnODR: scale must be one of mean, learned; got 'learnt'. Did you mean 'learned'?",
    ),
    "agreement binarizer with dot": (
        lambda: CapsuleLinear(6, 8, 5, 4, agreement_binarizer="sign"),
        InputError,
        "CapsuleLinear: agreement_binarizer must go with agreement='xnor'; "
        "got 'sign' with agreement='dot'. Pass agreement='xnor', or leave agreement_binarizer out.",
    ),
    "primary features": (
        lambda: PrimaryCaps(10, 6, 4)(torch.ones(2, 11)),
        InputError,
        "PrimaryCaps: features must have shape (batch, features=10); got (2, 11).",
    ),
    "primary maps": (
        lambda: PrimaryCaps(10, 6, 4)(torch.ones(2, 11, 3, 3)),
        InputError,
        "PrimaryCaps: features must have shape (batch, features=10, height, width); "
        "got (2, 11, 3, 3).",
    ),
    "primary int": (
        lambda: PrimaryCaps(10, 6, 4)(torch.ones(2, 10, dtype=torch.uint8)),
        InputTypeError,
        f"PrimaryCaps: features must be a floating-point tensor; got torch.uint8. {INT}",
    ),
    "primary float64": (
        lambda: PrimaryCaps(10, 6, 4)(torch.ones(2, 10, dtype=F64)),
        InputTypeError,
        "PrimaryCaps: features must have the layer's dtype torch.float32; got torch.float64. "
        "Convert one of them with .to(dtype), or use torch.autocast.",
    ),
    "primary without projection": (
        lambda: PrimaryCaps(10, 6, 4, project=False),
        InputError,
        "PrimaryCaps: in_features must be caps * dim = 24 without a projection; got 10.",
    ),
    "primary size": (
        lambda: PrimaryCaps(10, 0, 4),
        InputError,
        "PrimaryCaps: caps must be at least 1; got 0.",
    ),
    "conv primary shape": (
        lambda: ConvPrimaryCaps(2, 3, 4, kernel_size=3)(torch.ones(2, 3, 7, 7)),
        InputError,
        "ConvPrimaryCaps: maps must have shape (batch, channels=2, height, width); "
        "got (2, 3, 7, 7).",
    ),
    "conv primary float64": (
        lambda: ConvPrimaryCaps(2, 3, 4, kernel_size=3)(torch.ones(2, 2, 7, 7, dtype=F64)),
        InputTypeError,
        "ConvPrimaryCaps: maps must have the layer's dtype torch.float32; got torch.float64. "
        "Convert one of them with .to(dtype), or use torch.autocast.",
    ),
    "conv primary size": (
        lambda: ConvPrimaryCaps(2, 0, 4, kernel_size=3),
        InputError,
        "ConvPrimaryCaps: types must be at least 1; got 0.",
    ),
    "conv primary kernel": (
        lambda: ConvPrimaryCaps(2, 3, 4, kernel_size=0),
        InputError,
        "ConvPrimaryCaps: kernel_size must be at least 1; got 0.",
    ),
    "norm size": (
        lambda: CapsuleNorm(0),
        InputError,
        "CapsuleNorm: dim must be at least 1; got 0.",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_told_what_is_wrong(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
