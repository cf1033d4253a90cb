"""pack: outputs as the original's, bits where the kernels look for them, and bytes as counted."""

import copy
import io
import itertools
import pickle
import warnings

import pytest
import torch
from torch import nn

import xncaps
from checks import refused
from kernel_cases import off_ties
from pack_cases import assert_close, bytes_of, create, live
from xncaps import kernels
from xncaps.binarizers import BINARIZERS
from xncaps.deploy import PackedCapsules, PackedXnorConv2d, PackedXnorLinear
from xncaps.deploy.layout import from_lanes, pack_bits, to_lanes, unpack_bits
from xncaps.errors import InputError, InputTypeError
from xncaps.heads import CAPSULE_HEADS, HEADS
from xncaps.layers import xnorize_both
from xncaps.routing import DotAgreement

LAYERS = {
    "plain": xncaps.CapsFC,
    "out": xncaps.XnODR,
    "in": xncaps.XnIDR,
    "both": xnorize_both,
}


@pytest.fixture(params=["native", "reference"], autouse=True)
def _path(request):
    """Every test runs as the library does, and once more without the native module."""
    torch.manual_seed(7)
    if request.param == "native":
        yield
    else:
        with kernels.disabled():
            yield


def shaken(layer):
    """The layer with all parameters but the weight away from where they start."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name != "weight":
                parameter.add_(0.3 * torch.randn_like(parameter) * parameter.abs().mean() + 0.01)
    return layer


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


def test_training_mode_and_evaluation_mode_pack_the_same():
    model = live(create("convnet", "xnidr", "append", 28), 28)
    images = torch.randn(2, 1, 28, 28)
    assert torch.equal(xncaps.pack(model.train())(images), xncaps.pack(model.eval())(images))


def test_gradients_reach_the_input():
    for make in (*LAYERS.values(), None):
        layer = xncaps.XnorLinear(5, 4) if make is None else make(9, 5, 3, 4)
        x = torch.randn(2, 9, 5, requires_grad=True)
        wanted = torch.autograd.grad(layer(x).square().sum(), x)
        got = torch.autograd.grad(xncaps.pack(layer)(x).square().sum(), x)
        assert_close(got, wanted)


def some():
    """Packed layers of every kind, each with an input."""
    yield xncaps.pack(shaken(xnorize_both(33, 9, 3, 4, routing_bias=True))), torch.randn(2, 33, 9)
    yield xncaps.pack(xncaps.XnODR(33, 9, 3, 4), scales="float16"), torch.randn(2, 33, 9)
    yield xncaps.pack(xncaps.CapsFC(33, 9, 3, 4)), torch.randn(2, 33, 9)
    yield xncaps.pack(xncaps.XnorLinear(9, 5)), torch.randn(2, 9)
    yield xncaps.pack(xncaps.XnorConv2d(9, 5, 3)), torch.randn(2, 9, 5, 5)


def test_copies_and_pickles():
    for packed, x in some():
        wanted = packed(x)
        for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed)), copy.copy(packed)):
            assert other._native is None
            assert torch.equal(other(x), wanted)


def test_state_dicts_go_round():
    for assign in (False, True):
        first, second = (create("convnet", "xnboth", "append", 28) for _ in range(2))
        images = torch.randn(2, 1, 28, 28)
        packed, other = xncaps.pack(live(first, 28)), xncaps.pack(second)
        assert not torch.equal(other(images), packed(images))
        file = io.BytesIO()
        torch.save(packed.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=True), assign=assign)
        assert torch.equal(other(images), packed(images))


def test_a_packed_network_without_numbers_takes_a_state_dict():
    with torch.device("meta"):
        skeleton = create("convnet", "xnodr", "replace", 28)
    model = live(create("convnet", "xnodr", "replace", 28), 28)
    packed, empty = xncaps.pack(model), xncaps.pack(skeleton)
    assert all(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
    empty.load_state_dict(packed.state_dict(), assign=True)
    images = torch.randn(2, 1, 28, 28)
    assert torch.equal(empty(images), packed(images))


def test_buffers_may_move():
    for packed, x in some():
        wanted = packed(x)
        assert_close(packed.double()(x.double()).float(), wanted, 1e-3)
        assert torch.equal(packed.float().share_memory()(x).isfinite(), wanted.isfinite())
        assert packed.to("meta")(x.to("meta")).shape == wanted.shape


def test_a_buffer_may_be_another():
    for packed, x in some():
        state = {
            name: 2 * value if value.is_floating_point() else value
            for name, value in packed.state_dict().items()
        }
        before = packed(x)
        got = torch.func.functional_call(packed, state, (x,))
        other = copy.deepcopy(packed)
        other.load_state_dict(state)
        assert torch.equal(got, other(x))
        assert not torch.equal(got, before)
        assert torch.equal(packed(x), before)


def test_packing_again_changes_nothing():
    for packed, x in some():
        again = xncaps.pack(packed)
        assert again is not packed
        assert again.state_dict().keys() == packed.state_dict().keys()
        assert torch.equal(again(x), packed(x))


def test_tracers_see_through():
    for packed, x in some():
        wanted = packed(x)
        assert_close(torch.vmap(packed)(x[:, None])[:, 0], wanted)
        assert_close(torch.compile(packed, backend="eager", fullgraph=True)(x), wanted)
    packed, x = next(some())
    assert_close(torch.export.export(packed, (x,)).module()(x), packed(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and sizes become constants
        traced = torch.jit.trace(packed, x, check_trace=False)
    assert_close(traced(x + 1), packed(x + 1))


def test_shapes_of_memory():
    for packed, x in some():
        wide = torch.randn(*x.shape[:-1], 2 * x.shape[-1])[..., ::2]
        assert torch.equal(packed(wide), packed(wide.contiguous()))
        empty = packed(x[:0])
        assert empty.shape == (0, *packed(x).shape[1:])
        with torch.inference_mode():
            assert torch.equal(packed(x), packed(x.clone()))


def test_a_layer_that_is_there_twice_stays_one():
    layer = xncaps.XnorLinear(6, 6)
    packed = xncaps.pack(nn.Sequential(layer, nn.ReLU(), layer))
    assert packed[0] is packed[2]
    assert isinstance(packed[0], PackedXnorLinear)


def test_what_is_not_standard_is_left_alone():
    class Agrees(DotAgreement):
        pass

    class Scaled(xncaps.XnODR):
        def forward(self, x, return_couplings=False):
            return 2 * super().forward(x)

    class Named(xncaps.XnODR):
        pass

    own, watched = xncaps.CapsFC(5, 4, 3, 2), xncaps.XnODR(5, 4, 3, 2)
    own.routing.agreement = Agrees()
    watched.routing.register_forward_hook(lambda *_: None)
    for layer in (own, watched, Scaled(5, 4, 3, 2)):
        packed = xncaps.pack(layer)
        x = torch.randn(2, 5, 4)
        assert type(packed) is type(layer)
        assert packed is not layer
        assert torch.equal(packed(x), layer(x))
        assert bytes_of(packed) == xncaps.summary(layer, (5, 4)).packed_bytes
    assert isinstance(xncaps.pack(Named(5, 4, 3, 2)), PackedCapsules)


def test_how_it_prints():
    assert str(xncaps.pack(xncaps.XnODR(5, 4, 3, 2), scales="float16")).startswith(
        "PackedCapsules(\n  5, 4, 3, 2, binarizer='sign', scales=float16\n"
    )
    assert str(xncaps.pack(xncaps.XnorLinear(5, 4))) == (
        "PackedXnorLinear(5, 4, bias=True, binarizer='sign')"
    )


@pytest.mark.parametrize(
    ("model", "options", "kind", "text"),
    [
        ("net", {}, InputTypeError, "pack: model must be an nn.Module; got str."),
        (
            nn.Linear(2, 2),
            {"scales": "float61"},
            InputError,
            "pack: scales must be one of float32, float16; got 'float61'. Did you mean 'float16'?",
        ),
        (
            nn.Linear(2, 2),
            {"scales": 16},
            InputError,
            "pack: scales must be one of float32, float16; got 16.",
        ),
        (
            nn.Linear(2, 2).double(),
            {},
            InputTypeError,
            "pack: model must be of torch.float32; got torch.float64. Convert it with .float().",
        ),
        (
            xncaps.XnODR(2, 2, 2, 2).half(),
            {},
            InputTypeError,
            "pack: model must be of torch.float32; got torch.float16. Convert it with .float().",
        ),
    ],
)
def test_bad_models(model, options, kind, text):
    assert refused(kind, xncaps.pack, model, **options) == text


@pytest.mark.parametrize(
    ("x", "kind", "text"),
    [
        ([1.0], InputTypeError, "x must be a tensor; got list."),
        (
            torch.zeros(2, 9, 4),
            InputError,
            "x must have shape (batch, caps_in=9, dim_in=5); got (2, 9, 4).",
        ),
        (
            torch.zeros(9, 5),
            InputError,
            "x must have shape (batch, caps_in=9, dim_in=5); got (9, 5).",
        ),
        (
            torch.zeros(2, 9, 5, dtype=torch.long),
            InputTypeError,
            "x must be a floating-point tensor; got torch.int64."
            " Convert it first, for example with .float().",
        ),
        (
            torch.zeros(2, 9, 5).double(),
            InputTypeError,
            "x must have the layer's dtype torch.float32; got torch.float64."
            " Convert one of them with .to(dtype), or use torch.autocast.",
        ),
        (
            torch.zeros(2, 9, 5, device="meta"),
            InputTypeError,
            "x must be on the layer's device cpu; got meta. Move one of them with .to(device).",
        ),
    ],
)
def test_bad_input_to_capsules(x, kind, text):
    packed = xncaps.pack(xncaps.XnODR(9, 5, 3, 4), scales="float16")
    assert refused(kind, packed, x) == f"PackedCapsules: {text}"


def test_bad_input_to_xnor_layers():
    assert refused(InputError, xncaps.pack(xncaps.XnorLinear(5, 4)), torch.zeros(2, 4)) == (
        "PackedXnorLinear: x must have shape (..., in_features=5); got (2, 4)."
    )
    conv = xncaps.pack(xncaps.XnorConv2d(3, 4, 5))
    assert refused(InputError, conv, torch.zeros(2, 4, 8, 8)) == (
        "PackedXnorConv2d: x must have shape (batch, in_channels=3, height, width);"
        " got (2, 4, 8, 8)."
    )
    assert refused(InputError, conv, torch.zeros(2, 3, 8, 4)) == (
        "PackedXnorConv2d: x must have a padded width of at least the kernel's 5; got 4."
    )
