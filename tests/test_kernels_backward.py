"""The native backward pass of the capsule layers, and the ops under PyTorch's transforms."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_cases import (
    KERNELS,
    KINDS,
    NUMBERS,
    SIZES,
    Recorder,
    assert_close,
    capsules,
    gradients,
    jvp_warns,
    make,
    off_ties,
    op_inputs,
    reference,
    run_op,
    seeded,
    threads,
)
from xncaps import CapsuleLinear, XnODR, kernels

BASE = (5, 4, 3, 6)  # caps_in, dim_in, caps_out, dim_out


def cotangent_of(layer, x):
    return torch.randn(len(x), layer.caps_out, layer.dim_out, generator=seeded(7, len(x)))


def assert_near(got, expected, tolerance=1e-4):
    """Every gradient within a part of the largest one of its tensor."""
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        assert got[name].dtype == torch.float32
        assert got[name].shape == wanted.shape
        if wanted.numel():
            error = (got[name].double() - wanted).abs().max().item()
            assert error <= tolerance * wanted.abs().max().item() + 1e-9, name


def assert_gradients(layer, x, kernel, most=True):
    """Those of a kernel are those of autograd in float64."""
    x = off_ties(layer, x, slopes=True, most=most)
    cotangent = cotangent_of(layer, x)
    expected = gradients(copy.deepcopy(layer).double(), x.double(), cotangent.double())
    with kernels.use(kernel):
        got = gradients(layer, x, cotangent)
    assert_near(got, expected)
    return got


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", range(4), ids=["caps_in", "dim_in", "caps_out", "dim_out"])
def test_gradients_of_every_size_equal_those_in_float64(kernel, kind, axis):
    for size in SIZES:
        sizes = (*BASE[:axis], size, *BASE[axis + 1 :])
        layer = make(*KINDS[kind], *sizes, routing_bias=True)
        got = assert_gradients(layer, capsules(layer, 3), kernel)
        assert all(grad.abs().max() > 0 for grad in got.values())


OPTIONS = [
    {},
    {"detach_scale": False},
    {"detach_routing": True},
    {"scale": "learned", "routing_bias": True},
    {"detach_scale": False, "detach_routing": True, "routing_bias": True},
    {"scale": "learned", "detach_routing": True, "routing_bias": True},
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_of_all_options_equal_those_in_float64(kernel, kind, options):
    projection, agreement = KINDS[kind]
    if projection is None and agreement is None:
        options = {name: value for name, value in options.items() if name != "scale"}
    for how in ("sign", "midrange", "approxsign"):
        used = (projection and how, agreement and how)
        for iterations in (1, 2, 3, 4):
            layer = make(*used, 9, 5, 4, 7, iterations=iterations, **options)
            # Long enough to have elements of x beyond 1, where the signs pass no gradient.
            x = capsules(layer, 3, length=2.5)
            assert (x.abs() > 1).any()
            got = assert_gradients(layer, x, kernel)
            assert got["x"].abs().max() > 0
        if not any(used):
            return


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_batch_equal_those_in_float64(kernel, kind):
    layer = make(*KINDS[kind], 34, 5, 3, 6, routing_bias=True)
    for batch in (1, 15, 16, 17, 47, 127, 128, 129, 145):
        assert_gradients(layer, capsules(layer, batch), kernel)


@given(
    sizes=st.tuples(*(st.integers(*ends) for ends in ((1, 40), (1, 20), (1, 12), (2, 20)))),
    batch=st.integers(0, 5),
    iterations=st.integers(1, 4),
    projection=st.sampled_from(list(NUMBERS)),
    agreement=st.sampled_from(list(NUMBERS)),
    detach=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=25, derandomize=True)
def test_gradients_of_any_layer_equal_those_in_float64(
    sizes, batch, iterations, projection, agreement, detach, seed
):
    options = {"iterations": iterations, "seed": seed, "routing_bias": True}
    options |= dict(zip(("detach_scale", "detach_routing"), detach, strict=True))
    layer = make(projection, agreement, *sizes, **options)
    for kernel in KERNELS:
        assert_gradients(layer, capsules(layer, batch, seed), kernel, most=False)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_threads_changes_no_bit_of_a_gradient(kernel, kind):
    layer = make(*KINDS[kind], 70, 8, 6, 16, routing_bias=True)
    x = capsules(layer, 7)
    cotangent = cotangent_of(layer, x)
    with kernels.use(kernel):
        one = gradients(layer, x, cotangent)
        for count in (2, 3, 4):
            with threads(count):
                several = gradients(layer, x, cotangent)
            for name, grad in one.items():
                assert torch.equal(several[name], grad), name


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_zeros_and_nothing_are_zero(kernel, kind):
    layer = make(*KINDS[kind], 9, 5, 3, 6)
    with kernels.use(kernel):
        for x in (torch.zeros(2, 9, 5), torch.ones(0, 9, 5)):
            got = gradients(layer, x, torch.ones(len(x), 3, 6))
            assert got["x"].shape == x.shape
            assert all(not grad.any() for grad in got.values())


@pytest.mark.parametrize("kernel", KERNELS)
def test_only_what_is_wanted_gets_a_gradient(kernel):
    layer = make("sign", "sign", 9, 5, 3, 6, scale="learned", routing_bias=True)
    x = capsules(layer, 2)
    with kernels.use(kernel):
        whole = gradients(layer, x, cotangent_of(layer, x))
        layer.requires_grad_(False)
        layer.routing.bias.requires_grad_(True)
        (layer(x) * cotangent_of(layer, x)).sum().backward()
    assert torch.equal(layer.routing.bias.grad, whole["routing_bias"])
    assert layer.weight.grad is None
    with torch.no_grad():
        assert not layer(x).requires_grad


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_cotangent_may_lie_in_memory_as_it_likes(kernel):
    layer = make("sign", None, 9, 5, 3, 6)
    x = capsules(layer, 2)
    scattered = torch.ones(1, 1, 1).expand(2, 3, 6)  # as v.sum().backward() gives it
    with kernels.use(kernel):
        got = gradients(layer, x, scattered)
        expected = gradients(layer, x, scattered.contiguous())
    for name, grad in expected.items():
        assert torch.equal(got[name], grad)


@pytest.mark.parametrize("changed", ["x", "weight"])
def test_a_change_in_place_after_the_forward_pass_is_noticed(changed):
    layer = make("sign", None, 9, 5, 3, 6)
    x = capsules(layer, 2).requires_grad_() * 1
    v = layer(x)
    with torch.no_grad():
        (x if changed == "x" else layer.weight).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        v.sum().backward()


def test_a_change_of_the_output_does_not_reach_the_gradients():
    layer = make("sign", "sign", 9, 5, 3, 6)
    x = capsules(layer, 2).requires_grad_()
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    (got,) = torch.autograd.grad(layer(x).mul_(1).sum(), x)
    assert torch.equal(got, expected)


def backward_arguments(layer, x):
    tensors, others = op_inputs(layer, x)
    tensors = [None if tensor is None else tensor.detach() for tensor in tensors]
    _, sums, couplings = run_op(layer, x)
    return (cotangent_of(layer, x), *tensors, sums, couplings, *others)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_backward_op_gives_what_autograd_gives(kernel):
    full = {"scale": "learned", "routing_bias": True}
    for kind, options in (("plain", {}), ("both", full), ("out", {"scale": "learned"})):
        layer = make(*KINDS[kind], 9, 5, 3, 6, **options)
        x = capsules(layer, 2)
        with kernels.use(kernel):
            got = torch.ops.xncaps.capsules_backward(*backward_arguments(layer, x))
            expected = gradients(layer, x, cotangent_of(layer, x))
        names = ("x", "weight", "scale", "routing_bias", "routing_agreement_scale")
        for name, grad in zip(names, got, strict=True):
            if name in expected:
                assert torch.equal(grad.reshape(expected[name].shape), expected[name])
            else:
                assert grad.numel() == 0


# Under PyTorch's transforms


@pytest.mark.parametrize(
    ("kind", "options"),
    [("plain", {}), ("out", {}), ("both", {"scale": "learned", "routing_bias": True})],
    ids=["plain", "out", "all parameters"],
)
def test_the_ops_are_as_their_schemas_say(kind, options):
    layer = make(*KINDS[kind], *BASE, **options)
    x = capsules(layer, 2)
    tensors, others = op_inputs(layer, x)
    tensors = [t if t is None else t.detach().clone().requires_grad_() for t in tensors]
    torch.library.opcheck(torch.ops.xncaps.capsules_recorded.default, (*tensors, *others))
    plain = [None if tensor is None else tensor.detach() for tensor in tensors]
    torch.library.opcheck(torch.ops.xncaps.capsules.default, (*plain, *others[:3]))
    backward = backward_arguments(layer, x)
    torch.library.opcheck(torch.ops.xncaps.capsules_backward.default, backward)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("plain", {}), ("out", {"detach_routing": True}), ("both", {"scale": "learned"})],
)
def test_compiled_layers_equal_eager_ones_forward_and_backward(kind, options):
    torch.compiler.reset()
    layer = make(*KINDS[kind], *BASE, **options)
    x = capsules(layer, 3)
    cotangent = cotangent_of(layer, x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = gradients(layer, x, cotangent)
    compiled_gradients = gradients(Renamed(compiled, layer), x, cotangent)
    for name, grad in expected.items():
        torch.testing.assert_close(compiled_gradients[name], grad)
    torch.testing.assert_close(compiled(x), layer(x))


class Renamed:
    """A compiled layer with the parameters under the names of the plain one."""

    def __init__(self, compiled, layer):
        self.compiled, self.named_parameters = compiled, layer.named_parameters

    def __call__(self, x):
        return self.compiled(x)


def test_an_exported_layer_calls_the_op_at_any_batch_size():
    layer = XnODR(*BASE).eval()
    batch = {0: torch.export.Dim.DYNAMIC}
    with torch.no_grad():
        program = torch.export.export(layer, (capsules(layer, 3),), dynamic_shapes=(batch,))
        targets = [node.target for node in program.graph.nodes]
        assert targets.count(torch.ops.xncaps.capsules.default) == 1
        for size in (2, 5):
            x = capsules(layer, size)
            assert_close(program.module()(x), layer(x))


@jvp_warns
@pytest.mark.parametrize("kind", KINDS)
def test_function_transforms_give_what_they_give_in_pytorch(kind):
    layer = make(*KINDS[kind], *BASE)
    stack = torch.stack([off_ties(layer, capsules(layer, 9, seed))[:4] for seed in (1, 2)])
    assert_close(torch.func.vmap(layer)(stack), torch.stack([layer(x) for x in stack]))
    for transform in (
        lambda: torch.func.jvp(layer, (stack[0],), (stack[1],)),
        lambda: (torch.func.grad(lambda x: layer(x).square().sum())(stack[0]),),
        lambda: (torch.func.jacrev(layer)(stack[0]),),
    ):
        got = transform()
        with kernels.disabled():
            expected = transform()
        for left, right in zip(got, expected, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)


def test_gradients_have_gradients_where_a_parameter_is_of_no_use():
    layer = CapsuleLinear(3, 4, 2, 2, 1, agreement="xnor", scale="learned")
    x, parameters = torch.randn(2, 3, 4), list(layer.parameters())
    got = torch.autograd.grad(layer(x).sum(), parameters, create_graph=True)
    expected = torch.autograd.grad(layer(x).sum(), parameters)
    torch.testing.assert_close(got, expected)
    assert layer.routing.agreement.scale.shape in [grad.shape for grad in got]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_have_gradients(kind):
    layer = make(*KINDS[kind], *BASE)
    start = off_ties(layer, capsules(layer, 4), slopes=True)

    def second(layer, x):
        x = x.clone().requires_grad_()
        inputs = (x, layer.weight)
        first = torch.autograd.grad(layer(x).square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), inputs)

    got = second(layer, start)
    expected = second(copy.deepcopy(layer).double(), start.double())
    for left, right in zip(got, expected, strict=True):
        assert right.abs().max() > 0
        assert (left.double() - right).abs().max() <= 1e-3 * right.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_gives_what_it_gives_in_pytorch(kind):
    layer = make(*KINDS[kind], *BASE)
    x = capsules(layer, 3)
    with torch.autocast("cpu", torch.bfloat16):
        with Recorder() as recorder:
            got = layer(x)
        expected = reference(layer, x)
    assert recorder.names == []
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


# Refusals of the ops: each case changes one argument of a call that passes


FORWARD = ("x", "weight", "scale", "bias", "agreement_scale", "iterations", "projection")
FORWARD += ("agreement", "detach_scale", "detach_routing")
BACKWARD = ("grad_v", *FORWARD[:5], "sums", "couplings", *FORWARD[5:])

BAD = {
    "x of rank 2": {"x": torch.ones(2, 4)},
    "x of other capsules": {"x": torch.ones(2, 6, 4)},
    "x of other dimensions": {"x": torch.ones(2, 5, 3)},
    "x in float64": {"x": torch.ones(2, 5, 4, dtype=torch.float64)},
    "x of whole numbers": {"x": torch.ones(2, 5, 4, dtype=torch.int64)},
    "x without data": {"x": torch.ones(2, 5, 4, device="meta")},
    "x no tensor": {"x": [[[1.0] * 4] * 5] * 2},
    "x missing": {"x": None},
    "weight of rank 3": {"weight": torch.ones(5, 3, 4)},
    "weight in float16": {"weight": torch.ones(5, 3, 4, 6, dtype=torch.float16)},
    "weight missing": {"weight": None},
    "scale too small": {"scale": torch.ones(5, 3)},
    "scale in float64": {"scale": torch.ones(5, 3, 6, dtype=torch.float64)},
    "bias too small": {"bias": torch.ones(3)},
    "bias without data": {"bias": torch.ones(3, 6, device="meta")},
    "agreement_scale too large": {"agreement_scale": torch.ones(4)},
    "no iterations": {"iterations": 0},
    "negative iterations": {"iterations": -3},
    "half an iteration": {"iterations": 1.5},
    "projection too high": {"projection": 4},
    "projection below 0": {"projection": -1},
    "agreement too high": {"agreement": 4},
    "agreement by name": {"agreement": "sign"},
}
BAD_BACKWARD = {
    "grad_v of other capsules": {"grad_v": torch.ones(2, 4, 6)},
    "grad_v of another batch": {"grad_v": torch.ones(3, 3, 6)},
    "grad_v in float64": {"grad_v": torch.ones(2, 3, 6, dtype=torch.float64)},
    "no sums": {"sums": torch.ones(0)},
    "sums of fewer iterations": {"sums": torch.ones(2, 2, 3, 6)},
    "no couplings": {"couplings": torch.ones(0)},
    "couplings without padding": {"couplings": torch.ones(2, 2, 3, 5)},
}
REFUSALS = (TypeError, ValueError, RuntimeError)


@pytest.fixture
def good():
    """A layer with all parameters, and the arguments of both ops by name."""
    layer = make("sign", "sign", *BASE, scale="learned", routing_bias=True)
    x = capsules(layer, 2)
    tensors, others = op_inputs(layer, x)
    forward = (*(tensor.detach() for tensor in tensors), *others)
    backward = backward_arguments(layer, x)
    return dict(zip(FORWARD, forward, strict=True)), dict(zip(BACKWARD, backward, strict=True))


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_the_forward_op_refuses_what_does_not_fit(good, bad):
    torch.ops.xncaps.capsules_recorded(*good[0].values())
    with pytest.raises(REFUSALS):
        torch.ops.xncaps.capsules_recorded(*(good[0] | bad).values())
    with pytest.raises(REFUSALS):
        torch.ops.xncaps.capsules(*list((good[0] | bad).values())[:8])


@pytest.mark.parametrize(
    "bad", [*BAD.values(), *BAD_BACKWARD.values()], ids=[*BAD.keys(), *BAD_BACKWARD.keys()]
)
def test_the_backward_op_refuses_what_does_not_fit(good, bad):
    torch.ops.xncaps.capsules_backward(*good[1].values())
    with pytest.raises(REFUSALS):
        torch.ops.xncaps.capsules_backward(*(good[1] | bad).values())
