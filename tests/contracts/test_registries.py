"""Contracts that everything in a registry keeps: a new entry is covered once it is named there."""

import itertools

import pytest
import torch

from xncaps import (
    AGREEMENTS,
    BINARIZERS,
    HEADS,
    ROUTINGS,
    CapsFC,
    CapsuleHead,
    CapsuleLinear,
    XnIDR,
    XnODR,
    capsule_length,
)
from xncaps.heads import HEAD_OPTIONS
from xncaps.layers import xnorize_both

F64 = torch.float64
DTYPES = [torch.float32, torch.float64, torch.bfloat16]

PROJECTIONS = [None, *BINARIZERS]
AGREEMENT_CHOICES = [
    (agreement, binarizer)
    for agreement in AGREEMENTS
    for binarizer in ([None] if agreement == "dot" else BINARIZERS)
]
LAYERS = {
    f"{routing}-{projection}-{agreement}-{binarizer}": {
        "routing": routing,
        "binarizer": projection,
        "agreement": agreement,
        "agreement_binarizer": binarizer,
    }
    for routing, projection, (agreement, binarizer) in itertools.product(
        ROUTINGS, PROJECTIONS, AGREEMENT_CHOICES
    )
}
every_layer = pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS.keys())
every_head = pytest.mark.parametrize("name", HEADS)


def make_layer(options, sizes=(5, 4, 3, 6), seed=0, **more):
    """A layer with a bias and a learned scale (if it has any), all parameters drawn at random."""
    torch.manual_seed(seed)
    chosen = {"scale": "learned", "routing_bias": True, "dtype": F64, **options, **more}
    if chosen["binarizer"] is None and chosen["agreement"] == "dot":
        chosen["scale"] = "mean"
    layer = CapsuleLinear(*sizes, **chosen)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return layer


def make_head(name, classes=3, in_features=12, **options):
    torch.manual_seed(0)
    known = {key: value for key, value in options.items() if key in HEAD_OPTIONS[name]}
    return HEADS[name](in_features, classes, **known)


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


# Layers: every binarizer, agreement and routing


@pytest.mark.parametrize("make", [CapsuleLinear, XnODR, XnIDR, xnorize_both])
def test_no_binarizer_makes_any_layer_the_plain_one(make):
    plain, other = CapsFC(5, 4, 3, 6), make(5, 4, 3, 6, binarizer=None)
    other.load_state_dict(plain.state_dict(), strict=True)
    x = torch.randn(2, 5, 4)
    assert torch.equal(other(x), plain(x))


@every_layer
@pytest.mark.parametrize("scale", ["mean", "learned"])
def test_a_sample_does_not_depend_on_its_batch_mates(options, scale):
    layer = make_layer(options, scale=scale)
    x = torch.randn(4, 5, 4, dtype=F64)
    loud = torch.cat([x[:1], -50 * x[1:]])
    for got, expected in zip(layer(loud, True), layer(x[:1], True), strict=True):
        close(got[:1], expected)


@every_layer
@pytest.mark.parametrize("caps_in", [1, 5, 33])
@pytest.mark.parametrize("caps_out", [1, 2, 7])
def test_couplings_sum_to_one_and_shapes_fit(options, caps_in, caps_out):
    layer = make_layer(options, (caps_in, 4, caps_out, 6))
    v, couplings = layer(torch.randn(2, caps_in, 4, dtype=F64), return_couplings=True)
    assert v.shape == (2, caps_out, 6)
    assert couplings.shape == (2, caps_in, caps_out)
    close(couplings.sum(-1), torch.ones(2, caps_in, dtype=F64))


@every_layer
@pytest.mark.parametrize("scale", ["mean", "learned"])
def test_permuted_output_capsules_give_permuted_outputs(options, scale):
    layer = make_layer(options, scale=scale)
    x, order = torch.randn(2, 5, 4, dtype=F64), torch.tensor([2, 0, 1])
    v, couplings = layer(x, return_couplings=True)
    axis = {"weight": 1, "scale": 1, "routing.bias": 0, "routing.agreement.scale": 0}
    state = {key: p.index_select(axis[key], order) for key, p in layer.state_dict().items()}
    layer.load_state_dict(state)
    permuted, permuted_couplings = layer(x, return_couplings=True)
    close(permuted, v[:, order])
    close(permuted_couplings, couplings[:, :, order])


@every_layer
@pytest.mark.parametrize("scale", ["mean", "learned"])
def test_the_order_of_input_capsules_does_not_matter(options, scale):
    layer = make_layer(options, scale=scale)
    x, order = torch.randn(2, 5, 4, dtype=F64), torch.tensor([3, 0, 4, 1, 2])
    v, couplings = layer(x, return_couplings=True)
    state = layer.state_dict()
    state.update({key: state[key][order] for key in ("weight", "scale") if key in state})
    layer.load_state_dict(state)
    permuted, permuted_couplings = layer(x[:, order], return_couplings=True)
    close(permuted, v)
    close(permuted_couplings, couplings[:, order])


@every_layer
def test_lengths_stay_below_one(options):
    layer = make_layer(options)
    lengths = capsule_length(layer(20 * torch.randn(8, 5, 4, dtype=F64)))
    assert (lengths < 1).all()
    assert lengths.max() > 0.5


@every_layer
@pytest.mark.parametrize("more", [{}, {"scale": "mean", "routing_bias": False}], ids=["all", "few"])
def test_gradients_are_finite_at_an_all_zero_input(options, more):
    layer = make_layer(options, **more)
    x = torch.zeros(2, 5, 4, dtype=F64, requires_grad=True)
    capsule_length(layer(x)).sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@every_layer
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_keeps_its_dtype(options, dtype):
    layer = make_layer(options, dtype=dtype)
    x = torch.randn(2, 5, 4).to(dtype).requires_grad_()
    v, couplings = layer(x, return_couplings=True)
    v.sum().backward()
    assert (v.dtype, couplings.dtype, x.grad.dtype) == (dtype, dtype, dtype)


@every_layer
def test_a_layer_is_its_state_dict(options):
    layer, other = make_layer(options), make_layer(options, seed=1)
    x = torch.randn(2, 5, 4, dtype=F64)
    assert not torch.equal(other(x), layer(x))
    assert (
        str(other.load_state_dict(layer.state_dict(), strict=True))
        == "<All keys matched successfully>"
    )
    assert torch.equal(other(x), layer(x))


@every_layer
def test_every_parameter_learns(options):
    layer = make_layer(options)
    layer(torch.randn(4, 5, 4, dtype=F64)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("routing", ROUTINGS)
def test_without_a_binarizer_a_layer_is_exactly_capsfc(routing):
    neutral = CapsuleLinear(33, 4, 7, 6, routing=routing)
    plain = CapsFC(33, 4, 7, 6, routing=routing)
    plain.load_state_dict(neutral.state_dict(), strict=True)
    x = torch.randn(3, 33, 4)
    for got, expected in zip(neutral(x, True), plain(x, True), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", BINARIZERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_binarizers_give_plus_and_minus_one_with_zero_at_minus_one(name, dtype):
    x = torch.randn(50, 8).to(dtype)
    signs = BINARIZERS[name](x, -1)
    assert signs.dtype == dtype
    assert set(signs.flatten().tolist()) == {-1.0, 1.0}
    assert (BINARIZERS[name](torch.zeros(2, 8, dtype=dtype), -1) == -1).all()


@pytest.mark.parametrize("name", BINARIZERS)
def test_binarizers_pass_no_gradient_beyond_one(name):
    x = torch.tensor([-7.0, -1.5, 0.5, 1.5, 7.0], requires_grad=True)
    BINARIZERS[name](x, -1).sum().backward()
    assert (x.grad != 0).tolist() == [False, False, True, False, False]


# Heads


@every_head
@pytest.mark.parametrize("classes", [1, 2, 7])
@pytest.mark.parametrize("caps_in", [1, 5, 33])
def test_scores_have_shape_batch_classes(name, classes, caps_in):
    head = make_head(name, classes, caps_in=caps_in)
    scores = head(torch.randn(4, 12))
    assert scores.shape == (4, classes)
    assert head.num_classes == classes
    assert head.in_features == 12
    assert head(torch.randn(0, 12)).shape == (0, classes)


@every_head
def test_scores_are_lengths_or_logits(name):
    head = make_head(name).double()
    assert head.scores == ("lengths" if isinstance(head, CapsuleHead) else "logits")
    scores = head(30 * torch.randn(64, 12, dtype=F64))
    if head.scores == "lengths":
        assert (scores >= 0).all()
        assert (scores < 1).all()
    else:
        assert (scores < 0).any()


@every_head
def test_heads_average_feature_maps(name):
    head = make_head(name, caps_in=5).double()
    maps = torch.randn(3, 12, 2, 5, dtype=F64)
    close(head(maps), head(maps.sum((2, 3)) / 10))


@every_head
def test_a_head_scores_each_sample_alone(name):
    head = make_head(name, caps_in=5).double()
    x = torch.randn(4, 12, dtype=F64)
    close(head(torch.cat([x[:1], -50 * x[1:]]))[:1], head(x[:1]))


@every_head
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_keeps_its_dtype(name, dtype):
    head = make_head(name, caps_in=5).to(dtype)
    assert head(torch.randn(2, 12).to(dtype)).dtype == dtype


@every_head
def test_a_head_has_finite_gradients_at_an_all_zero_input(name):
    head = make_head(name, caps_in=5)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 1:
                parameter.zero_()
    x = torch.zeros(2, 12, requires_grad=True)
    head(x).sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in head.parameters())


@every_head
def test_a_head_is_its_state_dict(name):
    head, other = make_head(name, caps_in=5), make_head(name, caps_in=5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1)
    x = torch.randn(3, 12)
    assert not torch.equal(other(x), head(x))
    other.load_state_dict(head.state_dict(), strict=True)
    assert torch.equal(other(x), head(x))


@pytest.mark.parametrize("name", [name for name in HEADS if "caps_in" in HEAD_OPTIONS[name]])
def test_capsule_heads_give_couplings_on_request(name):
    head = make_head(name, 3, caps_in=5)
    x = torch.randn(2, 12)
    scores, couplings = head(x, return_couplings=True)
    assert torch.equal(scores, head(x))
    assert couplings.shape == (2, 5, 3)
    torch.testing.assert_close(couplings.sum(-1), torch.ones(2, 5))


def test_a_capsule_head_without_binarizers_is_exactly_the_dr_head():
    plain = make_head("dr", 7, caps_in=5)
    neutral = CapsuleHead(12, 7, layer=CapsuleLinear, caps_in=5)
    neutral.load_state_dict(plain.state_dict(), strict=True)
    x = torch.randn(3, 12)
    assert torch.equal(neutral(x), plain(x))
