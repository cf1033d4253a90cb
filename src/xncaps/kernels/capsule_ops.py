"""The capsule layer as ops: projection and routing in one, forward and backward.

An op checks its arguments and calls the native module with raw pointers. ``torch.compile`` and
``torch.export`` see ``torch.ops.xncaps.capsules``, and where a gradient is needed
``torch.ops.xncaps.capsules_recorded``, which returns what the backward pass needs as well.
"""

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from xncaps import reference
from xncaps.errors import InputError, check_tensor, message
from xncaps.kernels.library import (
    CODES,
    NAMES,
    check,
    check_code,
    check_one_device,
    library,
    native,
    padded,
    plain,
    pointer,
)
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
        v = (torch.ops.xncaps.capsules if is_compiling else _capsules)(*tensors, *codes)
        return v
    run: Any = torch.ops.xncaps.capsules_recorded if is_compiling else _Recorded.apply
    v, _, kept = run(*tensors, *codes, detach_scale, detach_routing)
    if not return_couplings:
        return v
    caps_in, caps_out = weight.shape[:2]
    if iterations == 1:
        return v, x.new_full((x.shape[0], caps_in, caps_out), 1 / caps_out)
    return v, kept[:, -1, :, :caps_in].transpose(1, 2)


def _check_capsules(
    where: str,
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    agreement_scale: Tensor | None,
    iterations: int,
    projection: int,
    agreement: int,
) -> tuple[int, int, int, int, int]:
    """The sizes, if the native code can be called with all this."""
    check_tensor(where, "weight", weight)
    check_tensor(where, "x", x)
    shape = weight.shape
    if len(shape) != 4 or 0 in shape:
        requirement = "have shape (caps_in, caps_out, dim_in, dim_out), none of them 0"
        raise InputError(message(where, "weight", requirement, tuple(shape)))
    caps_in, caps_out, dim_in, dim_out = shape
    check(where, "weight", weight, shape)
    batch = x.shape[0] if x.dim() else 0
    check(where, "x", x, (batch, caps_in, dim_in))
    if iterations < 1:
        raise InputError(message(where, "iterations", "be at least 1", iterations))
    check_code(where, "projection", projection)
    check_code(where, "agreement", agreement)
    if scale is not None:
        check(where, "scale", scale, (caps_in, caps_out, dim_out))
        if projection == 0:
            raise InputError(message(where, "scale", "go with a binarizer", "one without"))
    if bias is not None:
        check(where, "bias", bias, (caps_out, dim_out))
    if agreement_scale is not None:
        check(where, "agreement_scale", agreement_scale, (caps_out,))
        if agreement == 0:
            raise InputError(
                message(where, "agreement_scale", "go with a binarizer", "one without")
            )
    return batch, caps_in, dim_in, caps_out, dim_out


def _run(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    agreement_scale: Tensor | None,
    iterations: int,
    projection: int,
    agreement: int,
    keep: bool,
) -> list[Tensor]:
    """v and, if they are to be kept, the sums that squash got and the couplings."""
    batch, caps_in, dim_in, caps_out, dim_out = _check_capsules(
        "capsules", x, weight, scale, bias, agreement_scale, iterations, projection, agreement
    )
    v = x.new_empty(batch, caps_out, dim_out)
    kept = _empty_kept(x, weight, iterations) if keep else []
    sums_at, couplings_at = (tensor.data_ptr() for tensor in kept) if keep else (0, 0)
    x, weight = x.contiguous(), weight.contiguous()
    scale, bias, agreement_scale = plain(scale), plain(bias), plain(agreement_scale)
    native().capsules_forward(
        batch,
        caps_in,
        dim_in,
        caps_out,
        dim_out,
        iterations,
        projection,
        agreement,
        x.data_ptr(),
        weight.data_ptr(),
        pointer(scale),
        pointer(bias),
        pointer(agreement_scale),
        v.data_ptr(),
        sums_at,
        couplings_at,
        torch.get_num_threads(),
    )
    return [v, *kept]


def _empty_kept(x: Tensor, weight: Tensor, iterations: int) -> list[Tensor]:
    """The sums that squash got, and the couplings of all iterations but the first."""
    batch, (caps_in, caps_out, _, dim_out) = x.shape[0], weight.shape
    sums = x.new_empty(batch, iterations, caps_out, dim_out)
    return [sums, x.new_empty(batch, iterations - 1, caps_out, padded(caps_in))]


def _capsules(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    agreement_scale: Tensor | None,
    iterations: int,
    projection: int,
    agreement: int,
) -> Tensor:
    tensors = x, weight, scale, bias, agreement_scale
    return _run(*tensors, iterations, projection, agreement, keep=False)[0]


def _capsules_recorded(
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
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = x, weight, scale, bias, agreement_scale
    v, sums, couplings = _run(*tensors, iterations, projection, agreement, keep=True)
    return v, sums, couplings


def _fake_capsules(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    check_one_device("capsules", x, weight, *others[:3])
    return x.new_empty(x.shape[0], weight.shape[1], weight.shape[3])


def _fake_capsules_recorded(
    x: Tensor, weight: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    sums, couplings = _empty_kept(x, weight, others[3])
    return _fake_capsules(x, weight, *others), sums, couplings


def _capsules_backward(
    grad_v: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    agreement_scale: Tensor | None,
    sums: Tensor,
    couplings: Tensor,
    iterations: int,
    projection: int,
    agreement: int,
    detach_scale: bool,
    detach_routing: bool,
    grad_couplings: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    where = "capsules_backward"
    batch, caps_in, dim_in, caps_out, dim_out = _check_capsules(
        where, x, weight, scale, bias, agreement_scale, iterations, projection, agreement
    )
    check(where, "grad_v", grad_v, (batch, caps_out, dim_out))
    check(where, "sums", sums, (batch, iterations, caps_out, dim_out))
    kept = (batch, iterations - 1, caps_out, padded(caps_in))
    check(where, "couplings", couplings, kept)
    if grad_couplings is not None:
        check(where, "grad_couplings", grad_couplings, kept)
    grads = _empty_gradients(x, weight, scale, bias, agreement_scale)
    x, weight, grad_v = x.contiguous(), weight.contiguous(), grad_v.contiguous()
    sums, couplings = sums.contiguous(), couplings.contiguous()
    grad_couplings = plain(grad_couplings)
    scale, bias, agreement_scale = plain(scale), plain(bias), plain(agreement_scale)
    native().capsules_backward(
        batch,
        caps_in,
        dim_in,
        caps_out,
        dim_out,
        iterations,
        projection,
        agreement,
        detach_scale,
        detach_routing,
        x.data_ptr(),
        weight.data_ptr(),
        pointer(scale),
        pointer(bias),
        pointer(agreement_scale),
        sums.data_ptr(),
        couplings.data_ptr(),
        grad_v.data_ptr(),
        pointer(grad_couplings),
        *(grad.data_ptr() for grad in grads),
        torch.get_num_threads(),
    )
    return grads


def _empty_gradients(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    agreement_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of the tensors that are there; the others get none, and their pointer is null."""
    wanted = (x, weight, scale, bias, agreement_scale)
    made = [x.new_empty(0 if tensor is None else tensor.shape) for tensor in wanted]
    return made[0], made[1], made[2], made[3], made[4]


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
    return _empty_gradients(x, weight, scale, bias, agreement_scale)


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
        output = _capsules_recorded(*inputs)
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
    ("capsules", _capsules, _fake_capsules),
    ("capsules_recorded", _capsules_recorded, _fake_capsules_recorded),
    ("capsules_backward", _capsules_backward, _fake_capsules_backward),
):
    library.impl(name, function, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"xncaps::{name}", fake, lib=library)
torch.library.register_autograd("xncaps::capsules", _no_backward, lib=library)
torch.library.register_autograd(
    "xncaps::capsules_recorded", _backward, setup_context=_setup_context, lib=library
)
