"""What the tests of the native kernels share: layers, inputs off the ties, and comparisons."""

import contextlib
import copy

import pytest
import torch

from xncaps import CapsuleLinear, kernels
from xncaps.kernels import selection

# Without the native module every test fails on this name, where an empty list would skip them all.
KERNELS = kernels.available() or ("not-built",)

SIZES = (1, 7, 8, 9, 31, 32, 33, 63, 65, 128)
NUMBERS = {None: 0, "sign": 1, "midrange": 2, "approxsign": 3}  # what the ops call the binarizers

# torch.func.jvp warns of its own use of torch.jit.script.
jvp_warns = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

# name: the binarizers of the projection and of the agreement
KINDS = {
    "plain": (None, None),
    "out": ("sign", None),
    "in": (None, "sign"),
    "both": ("sign", "sign"),
}


def seeded(*numbers):
    """A generator that belongs to these numbers alone."""
    seed = 0
    for number in numbers:
        seed = seed * 1009 + number + 1
    return torch.Generator().manual_seed(seed)


def shake(layer, *numbers):
    """No parameter at its start, all of them of these numbers alone."""
    random = seeded(*numbers)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=random))
    return layer


def make(projection, agreement, *sizes, iterations=3, seed=0, **options):
    """A float32 layer with weights as wide as at its start, and no other parameter at it."""
    layer = CapsuleLinear(
        *sizes,
        iterations,
        binarizer=projection,
        agreement="dot" if agreement is None else "xnor",
        agreement_binarizer=agreement,
        **options,
    )
    random = seeded(seed, *sizes)
    caps_in, _, caps_out, dim_out = sizes
    std = min(0.5, caps_out / (caps_in * dim_out) ** 0.5)
    start = {"scale": 0.4 * std / layer.dim_in**0.5, "routing.agreement.scale": 1 / layer.dim_out}
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random))
            if name in start:
                parameter.copy_((1 + 0.3 * parameter) * start[name])
            else:
                parameter.mul_(std if name == "weight" else 0.2)
    return layer


def capsules(layer, batch, seed=0, length=1.5):
    """Input capsules of about this length."""
    random = seeded(seed, batch, layer.caps_in, layer.dim_in)
    x = torch.randn(batch, layer.caps_in, layer.dim_in, generator=random)
    return x * length / layer.dim_in**0.5


def off_ties(layer, x, slopes=False, most=True):
    """The samples whose signs in the agreement any float32 arithmetic finds, by one in float64.

    On a tie is a sample with an element of u or v within 1e-5 of its scale from its threshold,
    unless it is there exactly, and with ``slopes`` one that near to where its gradient ends.
    ``most`` of the samples must be off them.
    """
    agreement = layer.routing.agreement
    how = getattr(agreement, "binarizer", None)
    if how is None or len(x) == 0:
        return x

    def ties(values):
        middle = 0.0
        if how == "midrange":
            middle = (values.amax(-1, True) + values.amin(-1, True)) / 2
        distance, scale = (values - middle).abs(), values.abs().mean(-1, True)
        near = (distance < 1e-5 * scale) & (distance > 0)
        if slopes:
            near |= (values.abs() - 1).abs() < 1e-5
        return near.flatten(1).any(1)

    double = copy.deepcopy(layer).double()
    with torch.no_grad(), kernels.disabled():
        u = double.project(x.double())
        tied, logits, agree = ties(u), u.new_zeros(u.shape[:3]), double.routing.agreement(u)
        for _ in range(layer.routing.iterations - 1):
            v, _ = double.routing.weighted_sum(u, logits)
            tied |= ties(v)
            logits = logits + agree(v)
    assert tied.float().mean() <= 0.4 or not most
    return x[~tied]


def reference(layer, *args, **options):
    """What the layer gives in plain PyTorch."""
    with kernels.disabled():
        return layer(*args, **options)


def assert_close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6, equal_nan=True)


def op_inputs(layer, x):
    """The tensors of the capsule ops, and then their other arguments."""
    agreement = layer.routing.agreement
    scale = None if layer.scale is None else layer.scale.squeeze(2)
    learned = getattr(agreement, "scale", None)
    tensors = (x, layer.weight, scale, layer.routing.bias, learned)
    how = (NUMBERS[layer.binarizer], NUMBERS[getattr(agreement, "binarizer", None)])
    others = (layer.routing.iterations, *how, layer.detach_scale, layer.routing.detach)
    return tensors, others


def run_op(layer, x):
    """v, sums and couplings of the forward op."""
    tensors, others = op_inputs(layer, x)
    tensors = [None if tensor is None else tensor.detach() for tensor in tensors]
    return torch.ops.xncaps.capsules_recorded(*tensors, *others)


def named_parameters(layer):
    return {name.replace(".", "_"): parameter for name, parameter in layer.named_parameters()}


def gradients(layer, x, cotangent):
    """Those of sum(v * cotangent) by x and all parameters, by name; what has none gets zeros."""
    x = x.detach().clone().requires_grad_()
    inputs = {"x": x, **named_parameters(layer)}
    v = layer(x)
    found = torch.autograd.grad((v * cotangent).sum(), inputs.values(), allow_unused=True)
    return {
        name: torch.zeros_like(value) if grad is None else grad
        for (name, value), grad in zip(inputs.items(), found, strict=True)
    }


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Recorder:
    """The names of the native functions that were called, each in the words of its op."""

    def __init__(self):
        self.names = []

    def __enter__(self):
        self.native = selection._state.native
        selection._state.native = self
        return self

    def __exit__(self, *problem):
        selection._state.native = self.native

    def __getattr__(self, name):
        if name in ("capsules_forward", "capsules_backward", "xnor_linear", "xnor_conv2d"):
            self.names.append(name.removesuffix("_forward"))
        return getattr(self.native, name)
