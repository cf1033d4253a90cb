"""Calls of the native XnorLinear and XnorConv2d: threads, who runs them, compilers, refusals."""

import contextlib

import pytest
import torch

from kernel_cases import (
    KERNELS,
    NUMBERS,
    Recorder,
    assert_close,
    jvp_warns,
    reference,
    seeded,
    shake,
    threads,
)
from xncaps import XnorConv2d, XnorLinear, kernels
from xncaps.deploy import pack
from xncaps.errors import InputError

pytestmark = pytest.mark.usefixtures("_no_gradients")


@pytest.fixture
def _no_gradients():
    with torch.no_grad():
        yield


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
    "x too small": {0: torch.ones(3, 16, 1, 1), 5: [0, 0]},
    "x without height": {0: torch.ones(3, 16, 0, 7), 5: [2, 2]},
    "x without width": {0: torch.ones(3, 16, 9, 0), 5: [2, 2]},
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


@pytest.mark.parametrize("shape", [(1, 3, 0, 5), (2, 3, 5, 0), (1, 3, 0, 0)])
@pytest.mark.parametrize("is_packed", [True, False])
def test_images_without_pixels_are_refused(shape, is_packed):
    layer = XnorConv2d(3, 4, 3, padding=2)
    layer = pack(layer) if is_packed else layer
    side = "height" if shape[2] == 0 else "width"
    for around in (contextlib.nullcontext, kernels.disabled):
        with (
            around(),
            torch.no_grad(),
            pytest.raises(InputError, match=f"have a {side} of at least"),
        ):
            layer(torch.ones(shape))
