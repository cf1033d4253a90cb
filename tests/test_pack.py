"""pack: outputs as the original's, bits where the kernels look for them, and bytes as counted."""

import copy
import itertools

import pytest
import torch

import xncaps
from checks import refused
from kernel_cases import off_ties
from pack_cases import LAYERS, assert_close, bytes_of, create, live, path, shaken
from xncaps.binarizers import BINARIZERS
from xncaps.deploy import PackedCapsules, PackedXnorConv2d, PackedXnorLinear
from xncaps.deploy.layout import from_lanes, pack_bits, to_lanes, unpack_bits
from xncaps.errors import InputError
from xncaps.heads import CAPSULE_HEADS, HEADS


@pytest.fixture(params=["native", "reference"], autouse=True)
def _path(request):
    with path(request.param):
        yield


def pairs(layer, batch=5, **options):
    """What the layer and its packed copy give for the same capsules, with the couplings."""
    x = off_ties(layer, torch.randn(batch, layer.caps_in, layer.dim_in))
    packed = xncaps.pack(layer, **options)
    with torch.no_grad():
        return packed(x, return_couplings=True), layer(x, return_couplings=True)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("caps_in", [1, 7, 31, 33, 65, 100])
def test_layers_of_any_size(kind, caps_in):
    for dim_in in (1, 3, 8, 9, 16, 17):
        layer = LAYERS[kind](caps_in, dim_in, 3, 5)
        for got, wanted in zip(*pairs(layer), strict=True):
            assert_close(got, wanted)
        packed = xncaps.pack(layer)
        assert bytes_of(packed) == xncaps.summary(layer, (caps_in, dim_in)).packed_bytes


OPTIONS = [
    {"iterations": 1},
    {"iterations": 5},
    {"routing_bias": True},
    {"detach_routing": True, "iterations": 2},
    {"binarizer": "midrange"},
    {"binarizer": "approxsign", "detach_scale": False},
    {"scale": "learned"},
    {"scale": "learned", "binarizer": "midrange", "routing_bias": True},
]


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(kind, options):
    if kind == "plain":
        options = {k: v for k, v in options.items() if k not in ("binarizer", "scale")}
        options.pop("detach_scale", None)
    layer = shaken(LAYERS[kind](35, 9, 4, 6, **options))
    packed = xncaps.pack(layer)
    assert not list(packed.parameters())
    assert bytes_of(packed) == xncaps.summary(layer, (35, 9)).packed_bytes
    for got, wanted in zip(*pairs(layer), strict=True):
        assert_close(got, wanted)


@pytest.mark.parametrize("kind", ["out", "both"])
@pytest.mark.parametrize("scale", ["mean", "learned"])
def test_half_scales(kind, scale):
    layer = shaken(LAYERS[kind](65, 8, 10, 16, scale=scale))
    packed = xncaps.pack(layer, scales="float16")
    assert packed.scales.dtype == torch.float16
    rows = 65 * 10 * 16
    assert bytes_of(packed) == xncaps.summary(layer, (65, 8)).packed_bytes - 2 * rows
    counts = xncaps.summary(packed, (65, 8))
    assert counts.packed_bytes == counts.bytes == bytes_of(packed)
    if kind == "out":  # sign ties are told apart by the exact scales
        (v, _), (wanted, _) = pairs(layer, scales="float16")
        assert_close(v, wanted, 5e-4)


def test_half_scales_do_not_overflow():
    layer = xncaps.XnODR(2, 3, 2, 2)
    with torch.no_grad():
        layer.weight.fill_(1e5)
    assert refused(InputError, xncaps.pack, layer, scales="float16") == (
        "pack: scales must be float32 for scales above 65504; got 'float16'."
    )
    xncaps.pack(layer)


@pytest.mark.parametrize("binarizer", BINARIZERS)
@pytest.mark.parametrize("scale", ["mean", "learned"])
@pytest.mark.parametrize("bias", [True, False])
def test_xnor_layers(binarizer, scale, bias):
    options = {"binarizer": binarizer, "scale": scale, "bias": bias}
    for sizes in ((1, 1), (7, 33), (8, 32), (65, 9), (100, 70)):
        layer = xncaps.XnorLinear(*sizes, **options)
        for shape in ((sizes[0],), (4, sizes[0]), (2, 3, sizes[0])):
            x = torch.randn(shape)
            assert_close(xncaps.pack(layer)(x), layer(x).detach())
        counts = xncaps.summary(layer, (sizes[0],))
        assert bytes_of(xncaps.pack(layer)) == counts.packed_bytes
    for channels, kernel, stride, padding, dilation in (
        (1, 1, 1, 0, 1),
        (9, 3, 1, 1, 1),
        (8, (3, 2), (2, 1), (1, 2), (1, 2)),
        (33, 5, 3, 2, 1),
    ):
        layer = xncaps.XnorConv2d(channels, 5, kernel, stride, padding, dilation, **options)
        x = torch.randn(2, channels, 11, 8)
        packed = xncaps.pack(layer)
        assert_close(packed(x), layer(x).detach())
        assert_close(packed(x.mT), layer(x.mT).detach())
        assert bytes_of(packed) == xncaps.summary(layer, (channels, 11, 8)).packed_bytes


def in_memory_order(count, rows):
    """(row, lane) as a laned array has them, one after the other: block, row, lane."""
    blocks = [range(first, min(first + 32, count)) for first in range(0, count, 32)]
    return [(row, lane) for block in blocks for row in range(rows) for lane in block]


@pytest.mark.parametrize("caps_in", [1, 31, 32, 33, 70])
def test_where_the_bits_and_scales_are(caps_in):
    dim_in, caps_out, dim_out = 11, 2, 3
    layer = xncaps.XnODR(caps_in, dim_in, caps_out, dim_out)
    weight = layer.weight.tolist()
    bits, scales, floats = [], [], []
    for row, i in in_memory_order(caps_in, caps_out * dim_out * 2):
        j, e, byte = row // 2 // dim_out, row // 2 % dim_out, row % 2
        value = 0
        for k in range(8):
            if 8 * byte + k < dim_in and weight[i][j][8 * byte + k][e] > 0:
                value += 2**k
        bits.append(value)
    for row, i in in_memory_order(caps_in, caps_out * dim_out):
        column = [weight[i][row // dim_out][d][row % dim_out] for d in range(dim_in)]
        scales.append(sum(map(abs, column)) / dim_in)
    for row, i in in_memory_order(caps_in, caps_out * dim_out * dim_in):
        j, e, d = row // dim_in // dim_out, row // dim_in % dim_out, row % dim_in
        floats.append(weight[i][j][d][e])
    packed = xncaps.pack(layer)
    assert packed.bits.tolist() == bits
    assert_close(packed.scales, torch.tensor(scales))
    plain = xncaps.CapsFC(caps_in, dim_in, caps_out, dim_out)
    plain.load_state_dict(layer.state_dict())
    assert xncaps.pack(plain).floats.tolist() == floats


def test_where_the_bits_of_xnor_layers_are():
    layer = xncaps.XnorLinear(19, 37)
    weight = layer.weight.tolist()
    wanted = [
        sum(2**k for k in range(8) if 8 * byte + k < 19 and weight[o][8 * byte + k] > 0)
        for byte, o in in_memory_order(37, 3)
    ]
    assert xncaps.pack(layer).bits.tolist() == wanted
    conv = xncaps.XnorConv2d(10, 2, (1, 3))
    weight, packed = conv.weight.tolist(), xncaps.pack(conv).bits
    assert packed.shape == (2, 1, 3, 2)
    for o, s, byte in itertools.product(range(2), range(3), range(2)):
        channels = range(8 * byte, min(8 * byte + 8, 10))
        value = sum(2 ** (c % 8) for c in channels if weight[o][c][0][s] > 0)
        assert packed[o, 0, s, byte] == value


@pytest.mark.parametrize("count", [1, 7, 8, 9, 31, 32, 33, 64, 65])
def test_layouts_are_undone(count):
    signs = torch.randn(3, count).sign()
    assert torch.equal(unpack_bits(pack_bits(signs), count), signs)
    x = torch.randn(count, 3, 2)
    assert torch.equal(from_lanes(to_lanes(x), x.shape), x)


@pytest.mark.parametrize("kind", LAYERS)
def test_unusual_values_give_what_the_original_gives(kind):
    layer = LAYERS[kind](9, 5, 3, 4)
    x = torch.randn(6, 9, 5)
    x[0] = 0
    x[1, 2, 3] = torch.nan
    x[2, 4, 1] = torch.inf
    x[3] = -0.0
    x[4, 5] = 0
    x[5] = 1e-40
    packed = xncaps.pack(layer)
    with torch.no_grad():
        for got, wanted in zip(packed(x, True), layer(x, True), strict=True):
            assert_close(got, wanted)
        for weight in (0.0, torch.nan):
            layer.weight[3].fill_(weight)
            assert_close(xncaps.pack(layer)(x), layer(x))


def test_unusual_values_in_xnor_layers():
    x = torch.randn(4, 9, 6, 6)
    x[0], x[1, 2, 3, 4], x[2, :, 1, 1], x[3, 5, 5, 5] = 0, torch.nan, 0, -torch.inf
    for layer in (xncaps.XnorLinear(6, 5), xncaps.XnorConv2d(9, 5, 3, padding=1)):
        assert_close(xncaps.pack(layer)(x), layer(x).detach())


# An xnor agreement behind a deep network would meet sign ties.
COMBINATIONS = [
    *itertools.product(["convnet"], HEADS, ["replace", "append", "features"]),
    ("mobilenetv2", "xnodr", "replace"),
    ("mobilenetv2", "dr", "append"),
    ("resnet50", "xnodr", "replace"),
]


@pytest.mark.parametrize(("backbone", "head", "attach"), COMBINATIONS)
def test_networks(backbone, head, attach):
    model = live(create(backbone, head, attach, 28), 28, images=16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    learns = [parameter.requires_grad for parameter in model.parameters()]
    modes = {name: module.training for name, module in model.named_modules()}
    images = torch.randn(3, 1, 28, 28)
    packed = xncaps.pack(model)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == learns
    assert not any(module.training for module in packed.modules())
    assert not any(parameter.requires_grad for parameter in packed.parameters())
    assert not any(type(m).__name__.startswith("BatchNorm") for m in packed.modules())
    with torch.no_grad():
        scores = model.eval()(images)
        exact = copy.deepcopy(model).double()(images.double())
        noise = 2 * (scores - exact).abs().max().item()  # of float32 in a deep network
        assert_close(packed(images), scores, max(1e-5, noise))
        if head in CAPSULE_HEADS:
            got, wanted = packed(images, return_couplings=True), model(images, True)
            assert_close(got[0], wanted[0], max(1e-5, noise))
            assert_close(got[1], wanted[1], max(1e-5, noise))
            assert isinstance(packed.head.capsules, PackedCapsules)
    assert (packed.scores, packed.num_classes) == (model.scores, 10)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert refused(InputError, packed, torch.zeros(2, 3, 28, 28)) == (
        "Classifier: images must have shape (batch, channels=1, height, width); got (2, 3, 28, 28)."
    )


@pytest.mark.parametrize("head", CAPSULE_HEADS)
def test_capsnet(head):
    model = xncaps.CapsNet(10, 1, 17, head, caps_in=32).eval()
    images = torch.randn(2, 1, 17, 17)
    with torch.no_grad():
        assert_close(xncaps.pack(model)(images), model(images))


@pytest.mark.parametrize("options", [{}, {"scale": "learned"}, {"binarizer": "midrange"}], ids=str)
def test_xnornet(options):
    model = live(xncaps.XnorNet(10, 1, 16, width=1 / 16, **options), 16).eval()
    images = torch.randn(2, 1, 16, 16)
    packed = xncaps.pack(model)
    with torch.no_grad():
        assert_close(packed(images), model(images))
    kinds = [type(module) for module in packed.modules()]
    assert (kinds.count(PackedXnorConv2d), kinds.count(PackedXnorLinear)) == (5, 2)
