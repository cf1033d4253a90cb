"""The capsule layers as others write them: the peers that the native layers are timed against.

Every function here computes what :class:`CapsFC`, :class:`XnODR` or :class:`XnIDR` computes, from
the same weights ``(caps_in, caps_out, dim_in, dim_out)``, by plain PyTorch, with gradients:

- :func:`tiled`: the literal port of the usual TensorFlow code, in the five dimensions of the paper.
  Inputs are repeated for every output capsule, weights for every sample, output capsules for every
  input capsule, all in memory. Signs are written by cases (:func:`sign_by_cases`), or as our own
  layers make them.
- :func:`broadcast`: the same without copies; multiply-and-sum leaves the product in memory.
- :class:`Bmm`: one batched matrix product of weights that are laid out (and binarized) beforehand.

Sizes in the comments: b batch, i caps_in, j caps_out, d dim_in, e dim_out.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from xncaps.binarizers import mean_scale, sign
from xncaps.capsules import squash
from xncaps.errors import InputError, check_choice, check_shape, message
from xncaps.heads import FCHead
from xncaps.layers import CapsFC, CapsuleLinear, XnIDR, XnODR

ITERATIONS = 3

LAYERS: dict[str, Callable[[int, int, int, int], CapsuleLinear]] = {
    "CapsFC": CapsFC,
    "XnODR": XnODR,
    "XnIDR": XnIDR,
}
"""What is timed, by name."""

FC_STACKS: dict[str, tuple[int, tuple[int, ...]]] = {
    "mb": (1280, (512, 256, 128)),
    "rn": (2048, (1024, 512)),
}
"""Features and hidden layers of the stacks that the heads replace (Appendix C), by shape."""


def sign_by_cases(x: Tensor) -> Tensor:
    """+1 where x > 0, else -1, as one would write it down: one pass that torch does not vectorise.

    :func:`sign` takes several passes that it does; in :func:`tiled` it is the quicker one for one
    sample, and the slower one for many. The gradient is the same.
    """
    signs = torch.where(x > 0, 1.0, -1.0)
    if not torch.is_grad_enabled():
        return signs
    inside = x.clamp(-1, 1)
    return signs + (inside - inside.detach())


def tiled(
    x: Tensor,
    weight: Tensor,
    layer: str,
    iterations: int = ITERATIONS,
    sign: Callable[[Tensor], Tensor] = sign_by_cases,
) -> Tensor:
    """The literal 5-D tiled port: everything is repeated until a plain matrix product does.

    Inputs, weights and predictions have the shapes that section 3 of the paper gives them.

    Args:
        x: input capsules.
        weight: of the layer.
        layer: a name in ``LAYERS``.
        iterations: of the routing.
        sign: how signs are made.

    Shape:
        x ``(batch, caps_in, dim_in)``, weight ``(caps_in, caps_out, dim_in, dim_out)`` -> v
        ``(batch, caps_out, dim_out)``.
    """
    batch, caps_in, caps_out, dim_out = _sizes("tiled", x, weight, layer)
    x_tiled = x[:, :, None, None, :].repeat(1, 1, caps_out, 1, 1)  # (b, i, j, 1, d)
    w_tiled = weight[None].repeat(batch, 1, 1, 1, 1)  # (b, i, j, d, e)
    if layer == "XnODR":
        u = torch.matmul(sign(x_tiled), sign(w_tiled))
        u = u * mean_scale(x_tiled, 4) * mean_scale(w_tiled, 3)
    else:
        u = torch.matmul(x_tiled, w_tiled)  # (b, i, j, 1, e)
    logits = x.new_zeros(batch, caps_in, caps_out, 1, 1)
    for iteration in range(1, iterations + 1):
        coupling = torch.softmax(logits, 2).repeat(1, 1, 1, 1, dim_out)
        v = squash((coupling * u).sum(1, keepdim=True))  # (b, 1, j, 1, e)
        if iteration < iterations:
            v_tiled = v.repeat(1, caps_in, 1, 1, 1)
            if layer == "XnIDR":
                dots = torch.matmul(sign(u), sign(v_tiled).transpose(3, 4))
                logits = logits + dots * mean_scale(u, 4) * mean_scale(v_tiled, 4)
            else:
                logits = logits + torch.matmul(u, v_tiled.transpose(3, 4))
    return v[:, 0, :, 0]


def tiled_bytes(batch: int, caps_in: int, caps_out: int, dim_in: int, dim_out: int) -> int:
    """What :func:`tiled` holds at once at least: repeated weights and, for XnODR, their signs."""
    return 2 * 4 * batch * caps_in * caps_out * dim_in * dim_out


def broadcast(x: Tensor, weight: Tensor, layer: str, iterations: int = ITERATIONS) -> Tensor:
    """Untiled: broadcasting multiplies and sums, which repeats nothing but keeps every product.

    Args:
        x: input capsules.
        weight: of the layer.
        layer: a name in ``LAYERS``.
        iterations: of the routing.

    Shape:
        as in :func:`tiled`.
    """
    batch, caps_in, caps_out, _ = _sizes("broadcast", x, weight, layer)
    x_wide = x[:, :, None, :, None]  # (b, i, 1, d, 1)
    if layer == "XnODR":
        u = (sign(x_wide) * sign(weight)).sum(3)
        u = u * mean_scale(x, 2)[:, :, None] * mean_scale(weight, 2).squeeze(2)
    else:
        u = (x_wide * weight).sum(3)  # (b, i, j, e)
    logits = x.new_zeros(batch, caps_in, caps_out, 1)
    for iteration in range(1, iterations + 1):
        v = squash((torch.softmax(logits, 2) * u).sum(1, keepdim=True))  # (b, 1, j, e)
        if iteration < iterations:
            if layer == "XnIDR":
                dots = (sign(u) * sign(v)).sum(3, keepdim=True)
                logits = logits + dots * mean_scale(u, 3) * mean_scale(v, 3)
            else:
                logits = logits + (u * v).sum(3, keepdim=True)
    return v[:, 0]


class Bmm(nn.Module):
    """One batched matrix product over the input capsules, then routing on what it gives.

    The weights are laid out once, and for XnODR binarized and scaled once: the best that a float
    layer can do with them beforehand. The first iteration's couplings are known to be 1 / caps_out.

    Args:
        weight: of the layer, ``(caps_in, caps_out, dim_in, dim_out)``.
        layer: a name in ``LAYERS``.
        iterations: of the routing.

    Shape:
        x ``(batch, caps_in, dim_in)`` -> v ``(batch, caps_out, dim_out)``.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, layer: str, iterations: int = ITERATIONS) -> None:
        super().__init__()
        self.layer = check_choice(type(self).__name__, "layer", layer, LAYERS)
        self.caps_out, self.dim_out = weight.shape[1], weight.shape[3]
        self.iterations = iterations
        if layer == "XnODR":
            weight = sign(weight, 2) * mean_scale(weight, 2)
        rows = weight.detach().permute(0, 2, 1, 3).flatten(2).contiguous()  # (i, d, j e)
        self.register_buffer("weight", rows)

    def forward(self, x: Tensor) -> Tensor:
        if self.layer == "XnODR":
            x = sign(x) * mean_scale(x, -1)
        u = torch.bmm(x.transpose(0, 1), self.weight)  # (i, b, j e)
        u = u.view(*u.shape[:2], self.caps_out, self.dim_out)
        xnor = self.layer == "XnIDR"
        signs, scale = (sign(u), mean_scale(u, -1).squeeze(-1)) if xnor else (u, None)
        v = squash(u.sum(0) / self.caps_out)
        logits = u.new_zeros(())
        for _ in range(1, self.iterations):
            if scale is None:
                dots = torch.einsum("ibje,bje->ibj", u, v)
            else:
                dots = torch.einsum("ibje,bje->ibj", signs, sign(v))
                dots = dots * scale * mean_scale(v, -1).squeeze(-1)
            logits = logits + dots
            v = squash(torch.einsum("ibj,ibje->bje", torch.softmax(logits, -1), u))
        return v


def fc_stack(shape: str, classes: int = 10) -> FCHead:
    """The fully connected stack that a head of this shape replaces, a name in ``FC_STACKS``."""
    check_choice("fc_stack", "shape", shape, FC_STACKS)
    features, hidden = FC_STACKS[shape]
    return FCHead(features, classes, hidden=hidden)


def _sizes(where: str, x: Tensor, weight: Tensor, layer: str) -> tuple[int, int, int, int]:
    """Check what was given; returns batch, caps_in, caps_out and dim_out."""
    check_choice(where, "layer", layer, LAYERS)
    if weight.dim() != 4:
        requirement = "have shape (caps_in, caps_out, dim_in, dim_out)"
        raise InputError(message(where, "weight", requirement, tuple(weight.shape)))
    caps_in, caps_out, dim_in, dim_out = weight.shape
    check_shape(where, "x", x, batch=None, caps_in=caps_in, dim_in=dim_in)
    return x.shape[0], caps_in, caps_out, dim_out
