"""The native calls of a capsule layer: what is given is checked, and goes there as raw pointers."""

import torch
from torch import Tensor

from xncaps.errors import InputError, check_tensor, message
from xncaps.kernels.library import check, check_code, native, padded, plain, pointer


def forward(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    agreement_scale: Tensor | None,
    iterations: int,
    projection: int,
    agreement: int,
) -> Tensor:
    """v of a layer."""
    tensors = x, weight, scale, bias, agreement_scale
    return _run(*tensors, iterations, projection, agreement, keep=False)[0]


def recorded_forward(
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
    """v and what the backward pass needs: the sums that squash got, and the couplings.

    The last two arguments are there for that pass alone.
    """
    tensors = x, weight, scale, bias, agreement_scale
    v, sums, couplings = _run(*tensors, iterations, projection, agreement, keep=True)
    return v, sums, couplings


def backward(
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
    """The gradients of x, weight, scale, bias and the agreement's scale."""
    where = "capsules_backward"
    batch, caps_in, dim_in, caps_out, dim_out = _check(
        where, x, weight, scale, bias, agreement_scale, iterations, projection, agreement
    )
    check(where, "grad_v", grad_v, (batch, caps_out, dim_out))
    check(where, "sums", sums, (batch, iterations, caps_out, dim_out))
    kept = (batch, iterations - 1, caps_out, padded(caps_in))
    check(where, "couplings", couplings, kept)
    if grad_couplings is not None:
        check(where, "grad_couplings", grad_couplings, kept)
    grads = empty_gradients(x, weight, scale, bias, agreement_scale)
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


def empty_gradients(
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
    batch, caps_in, dim_in, caps_out, dim_out = _check(
        "capsules", x, weight, scale, bias, agreement_scale, iterations, projection, agreement
    )
    v = x.new_empty(batch, caps_out, dim_out)
    kept = empty_kept(x, weight, iterations) if keep else []
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


def empty_kept(x: Tensor, weight: Tensor, iterations: int) -> list[Tensor]:
    """The sums that squash got, and the couplings of all iterations but the first."""
    batch, (caps_in, caps_out, _, dim_out) = x.shape[0], weight.shape
    sums = x.new_empty(batch, iterations, caps_out, dim_out)
    return [sums, x.new_empty(batch, iterations - 1, caps_out, padded(caps_in))]


def _check(
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
