"""The capsule layer as ops: projection and routing in one, forward and backward.

Without gradients a layer calls the native module straight away. ``torch.compile`` and
``torch.export`` see ``torch.ops.xncaps.capsules``, and where a gradient is needed
``torch.ops.xncaps.capsules_recorded``, which returns what the backward pass needs as well.
"""

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from xncaps import reference
from xncaps.errors import InputError, message
from xncaps.kernels.capsule_calls import (
    backward,
    empty_gradients,
    empty_kept,
    forward,
    recorded_forward,
)
from xncaps.kernels.library import CODES, NAMES, check_one_device, library
from xncaps.routing import DotAgreement, DynamicRouting, XnorAgreement

library.define(  # type: ignore[no-untyped-call]
    "capsules(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, Tensor? agreement_scale, "
    "int iterations, int projection, int agreement) -> Tensor"
)
library.define(  # type: ignore[no-untyped-call]
    "capsules_recorded(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, "
    "Tensor? agreement_scale, int iterations, int projection, int agreement, bool detach_scale, "
    "bool detach_routing) -> (Tensor, Tensor, Tensor)"
)
library.define(  # type: ignore[no-untyped-call]
    "capsules_backward(Tensor grad_v, Tensor x, Tensor weight, Tensor? scale, Tensor? bias, "
    "Tensor? agreement_scale, Tensor sums, Tensor couplings, int iterations, int projection, "
    "int agreement, bool detach_scale, bool detach_routing, Tensor? grad_couplings=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def capsules(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    agreement_scale: Tensor | None,
    iterations: int,
    projection: str | None,
    agreement: str | None,
    detach_scale: bool,
    detach_routing: bool,
    *,
    return_couplings: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """A whole capsule layer: projection and routing in one op.

    Shape:
        x ``(batch, caps_in, dim_in)`` -> v ``(batch, caps_out, dim_out)`` and, if asked for, the
        couplings ``(batch, caps_in, caps_out)`` that v was summed with.
    """
    parameters = (weight, scale, bias, agreement_scale)
    keep = return_couplings or (
        torch.is_grad_enabled()
        and (x.requires_grad or any(p is not None and p.requires_grad for p in parameters))
    )
    if scale is not None:
        scale = scale.squeeze(2)
    tensors = x, weight, scale, bias, agreement_scale
    codes = iterations, CODES[projection], CODES[agreement]
    v: Tensor
    is_compiling = torch.compiler.is_compiling()
    if not keep:
        v = (torch.ops.xncaps.capsules if is_compiling else forward)(*tensors, *codes)
        return v
    run: Any = torch.ops.xncaps.capsules_recorded if is_compiling else _Recorded.apply
    v, _, kept = run(*tensors, *codes, detach_scale, detach_routing)
    if not return_couplings:
        return v
    caps_in, caps_out = weight.shape[:2]
    if iterations == 1:
        return v, x.new_full((x.shape[0], caps_in, caps_out), 1 / caps_out)
    return v, kept[:, -1, :, :caps_in].transpose(1, 2)


def _fake_capsules(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    check_one_device("capsules", x, weight, *others[:3])
    return x.new_empty(x.shape[0], weight.shape[1], weight.shape[3])


def _fake_capsules_recorded(
    x: Tensor, weight: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    sums, couplings = empty_kept(x, weight, others[3])
    return _fake_capsules(x, weight, *others), sums, couplings


def _fake_capsules_backward(
    grad_v: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    agreement_scale: Tensor | None,
    sums: Tensor,
    couplings: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = grad_v, x, weight, scale, bias, agreement_scale, sums, couplings
    check_one_device("capsules_backward", *given)
    return empty_gradients(x, weight, scale, bias, agreement_scale)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, sums, couplings = output
    ctx.mark_non_differentiable(sums)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:5], sums, couplings)
    ctx.options = inputs[5:]


def _backward(
    ctx: Any, grad_v: Tensor | None, _: Any, grad_couplings: Tensor | None
) -> tuple[Tensor | None, ...]:
    *inputs, sums, couplings = ctx.saved_tensors
    if grad_v is None:
        batch, _, caps_out, dim_out = sums.shape
        grad_v = sums.new_zeros(batch, caps_out, dim_out)
    if torch.is_grad_enabled():
        grads = _differentiable_gradients(
            (grad_v, grad_couplings), inputs, ctx.needs_input_grad[:5], ctx.options
        )
    else:
        made = torch.ops.xncaps.capsules_backward(
            grad_v, *inputs, sums, couplings, *ctx.options, grad_couplings
        )
        grads = [None if x is None else grad for x, grad in zip(inputs, made, strict=True)]
    return (*grads, None, None, None, None, None)


class _Recorded(torch.autograd.Function):
    """The op for autograd alone: by way of the dispatcher a call takes several times as long."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = recorded_forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    backward = staticmethod(_backward)


def _differentiable_gradients(
    grads: tuple[Tensor, Tensor | None],
    inputs: list[Any],
    needed: tuple[bool, ...],
    options: tuple[Any, ...],
) -> list[Tensor | None]:
    """Gradients that have gradients themselves (``create_graph=True``), by the reference."""
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need and x is not None]
    grad_v, grad_couplings = grads
    v, couplings = _reference(*inputs, *options)
    outputs, cotangents = [v], [grad_v]
    if grad_couplings is not None and options[0] > 1:
        # Of the kept couplings only the last are given out.
        outputs.append(couplings)
        cotangents.append(grad_couplings[:, -1, :, : couplings.shape[1]].transpose(1, 2))
    found = iter(  # with one iteration nothing comes of the agreement's scale
        torch.autograd.grad(outputs, wanted, cotangents, create_graph=True, materialize_grads=True)
    )
    return [next(found) if need else None for need in needed]


def _reference(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    agreement_scale: Tensor | None,
    iterations: int,
    projection: int,
    agreement: int,
    detach_scale: bool,
    detach_routing: bool,
) -> tuple[Tensor, Tensor]:
    caps_out, dim_out = weight.shape[1], weight.shape[3]
    scale = None if scale is None else scale.unsqueeze(2)
    u = reference.project(x, weight, NAMES[projection], scale, detach_scale)
    name = NAMES[agreement]
    kind = "mean" if agreement_scale is None else "learned"
    routing = DynamicRouting(
        caps_out,
        dim_out,
        iterations,
        DotAgreement()
        if name is None
        else XnorAgreement(
            caps_out, dim_out, binarizer=name, scale=kind, detach_scale=detach_scale
        ),
        bias=bias is not None,
        detach=detach_routing,
    )
    given = {"bias": bias, "agreement.scale": agreement_scale}
    parameters = {name: tensor for name, tensor in given.items() if tensor is not None}
    both: tuple[Tensor, Tensor] = functional_call(routing, parameters, (u,))
    return both


def _no_backward(ctx: Any, grad: Tensor) -> None:
    requirement = "be capsules_recorded where a gradient is needed"
    raise InputError(message("capsules", "the op", requirement, "capsules"))


for name, function, fake in (
    ("capsules", forward, _fake_capsules),
    ("capsules_recorded", recorded_forward, _fake_capsules_recorded),
    ("capsules_backward", backward, _fake_capsules_backward),
):
    library.impl(name, function, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"xncaps::{name}", fake, lib=library)
torch.library.register_autograd("xncaps::capsules", _no_backward, lib=library)
torch.library.register_autograd(
    "xncaps::capsules_recorded", _backward, setup_context=_setup_context, lib=library
)
