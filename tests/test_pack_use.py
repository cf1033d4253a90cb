"""Packed networks in use: copies, state dicts, tracers, shared layers, and bad input."""

import copy
import gc
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

import xncaps
from checks import refused
from pack_cases import LAYERS, assert_close, bytes_of, create, live, path, shaken
from xncaps import XnorConv2d, XnorLinear, kernels
from xncaps.deploy import PackedCapsules, PackedXnorLinear
from xncaps.errors import InputError, InputTypeError
from xncaps.layers import xnorize_both
from xncaps.routing import DotAgreement


@pytest.fixture(params=["native", "reference"], autouse=True)
def _path(request):
    with path(request.param):
        yield


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


def test_copies():
    for packed, x in some():
        wanted = packed(x)
        for other in (copy.deepcopy(packed), copy.copy(packed)):
            assert other._native is None
            assert torch.equal(other(x), wanted)


def test_state_dicts_go_round():
    for assign in (False, True):
        first, second = (create("convnet", "xnboth", "append", 28) for _ in range(2))
        images = torch.randn(2, 1, 28, 28)
        packed, other = xncaps.pack(live(first, 28)), xncaps.pack(second)
        assert not torch.equal(other(images), packed(images))
        other.load_state_dict(load(save(packed.state_dict())), assign=assign)
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


def test_the_iterations_of_a_packed_layer_can_be_set():
    layer = xncaps.XnODR(33, 9, 3, 4)
    packed, x = xncaps.pack(layer), torch.randn(2, 33, 9)
    before = packed(x)
    for iterations in (1, 2, 4):
        layer.routing.iterations = packed.routing.iterations = iterations
        assert_close(packed(x), layer(x))
        assert_close(packed(x, return_couplings=True), layer(x, return_couplings=True))
        assert not torch.equal(packed(x), before)


def test_no_iterations_are_refused():
    layer = xncaps.XnODR(33, 9, 3, 4)
    packed, x = xncaps.pack(layer), torch.randn(2, 33, 9)
    for iterations in (0, -2):
        layer.routing.iterations = packed.routing.iterations = iterations
        for network in (layer, packed):
            for around in (nullcontext, kernels.disabled):
                with around(), pytest.raises(InputError, match="iterations must be at least 1"):
                    network(x)


@pytest.mark.parametrize("is_called_before", [True, False])
@pytest.mark.parametrize("name", ["bits", "scales", "floats"])
def test_a_layer_without_its_numbers_fails_and_reads_no_memory(name, is_called_before):
    made = {
        "bits": [xncaps.XnODR(9, 8, 3, 4), XnorLinear(8, 3), XnorConv2d(8, 3, 1)],
        "scales": [xncaps.XnODR(9, 8, 3, 4), XnorLinear(8, 3), XnorConv2d(8, 3, 1)],
        "floats": [xncaps.XnIDR(9, 8, 3, 4)],
    }
    shapes = {"XnODR": (2, 9, 8), "XnIDR": (2, 9, 8), "XnorLinear": (2, 8)}
    for layer in made[name]:
        x = torch.randn(shapes.get(type(layer).__name__, (2, 8, 3, 3)))
        for take in (lambda p: setattr(p, name, None), lambda p: delattr(p, name)):
            packed = xncaps.pack(layer)
            if is_called_before:
                packed(x)
            take(packed)
            with pytest.raises((AttributeError, TypeError)):
                packed(x)


def test_the_memory_of_a_buffer_may_be_another():
    for packed, x in some():
        before, other = packed(x), copy.deepcopy(packed)
        name = "scales" if hasattr(packed, "scales") else "floats"
        getattr(packed, name).data = 2 * getattr(packed, name)
        getattr(other, name).mul_(2)
        assert torch.equal(packed(x), other(x))
        assert not torch.equal(packed(x), before)


def test_packing_again_changes_nothing():
    for packed, x in some():
        again = xncaps.pack(packed)
        assert again is not packed
        assert again.state_dict().keys() == packed.state_dict().keys()
        assert torch.equal(again(x), packed(x))


def test_hooks_and_other_forwards_are_called():
    for packed, x in some():
        wanted = packed(x)

        def more(module, args, output, packed=packed):
            return output + 1 if module is packed else None

        def other(module, args, packed=packed):
            return (-args[0],) if module is packed else None

        every = nn.modules.module
        for register in (packed.register_forward_hook, every.register_module_forward_hook):
            with register(more):
                assert torch.equal(packed(x), wanted + 1)
            assert torch.equal(packed(x), wanted)
        for register in (packed.register_forward_pre_hook, every.register_module_forward_pre_hook):
            with register(other):
                assert torch.equal(packed(x), packed.forward(-x))
        packed.forward = lambda x, wanted=wanted: -wanted
        assert torch.equal(packed(x), -wanted)
        del packed.forward
        assert torch.equal(packed(x), wanted)


def test_a_subclass_of_a_packed_layer_has_its_own_forward():
    class Twice(PackedCapsules):
        def forward(self, x):
            return 2 * super().forward(x)

    layer, x = xncaps.XnODR(33, 9, 3, 4), torch.randn(2, 33, 9)
    packed = Twice(layer)
    for _ in range(2):
        assert torch.equal(packed(x), 2 * PackedCapsules(layer)(x))


class Keeps(nn.Module):
    """Keeps what its layer gives, by a hook that holds the network."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        layer.register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.kept = output

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("around", [lambda packed: packed, Keeps])
def test_a_packed_layer_that_is_gone_leaves_nothing_behind(around):
    for packed, x in some():
        network = around(packed)
        network(x)
        gone = weakref.ref(network), weakref.ref(packed)
        del network, packed
        gc.collect()
        assert [each() for each in gone] == [None, None]


def test_a_class_may_get_another_forward(monkeypatch):
    packed, x = next(some())
    packed(x)
    monkeypatch.setattr(PackedCapsules, "forward", lambda self, x: "another")
    assert packed(x) == "another"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_couplings_whatever_the_default_is(dtype):
    for iterations in (1, 3):
        layer = xncaps.XnODR(33, 9, 3, 4, iterations=iterations)
        packed, x = xncaps.pack(layer), torch.randn(2, 33, 9)
        wanted = layer(x, return_couplings=True)
        torch.set_default_dtype(dtype)
        try:
            got = packed(x, return_couplings=True)
        finally:
            torch.set_default_dtype(torch.float32)
        assert got[1].dtype == torch.float32
        assert_close(got, wanted)


def test_a_buffer_of_another_size_is_not_read():
    for packed, x in some():
        packed(x)
        name = "scales" if hasattr(packed, "scales") else "floats"
        setattr(packed, name, getattr(packed, name)[:-1].clone())
        with pytest.raises(RuntimeError):
            packed(x)


def test_nothing_is_refused_in_a_line():
    for packed, x in some():
        packed(x)
        with pytest.raises(InputTypeError, match="x must be a tensor; got NoneType"):
            packed(None)


def test_tracers_see_through():
    for packed, x in some():
        torch.compiler.reset()  # it compiles one function for few modules only
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
