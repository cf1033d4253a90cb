"""The capsule layers: CapsuleLinear and its presets CapsFC, XnODR and XnIDR.

XnODR and XnIDR are one layer with two switches: a binarizer for the projection outside the routing
(LP_out), and the agreement inside it (LP_in). With neither it is the plain CapsFC.
"""

from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from xncaps import kernels, reference
from xncaps.binarizers import BINARIZERS, SCALES, mean_scale
from xncaps.errors import (
    InputError,
    check_choice,
    check_floating,
    check_like,
    check_shape,
    check_size,
    look_up,
    message,
)
from xncaps.routing import AGREEMENTS, ROUTINGS, DotAgreement, DynamicRouting, XnorAgreement


class CapsuleLinear(nn.Module):
    """A capsule layer: project every input capsule for every output capsule, then route.

    ``u_ij = x_i W_ij``, then ``v = routing(u)``. With a binarizer the projection is xnorized
    (Algorithm 1): ``u_ij = (sign(x_i) sign(W_ij)) * mean(abs(x_i)) * mean(abs(W_ij))``, signs and
    means over dim_in. Gradients pass the signs as the binarizer says, and the means only if
    ``detach_scale`` is false.

    Args:
        caps_in: number of input capsules.
        dim_in: size of an input capsule.
        caps_out: number of output capsules.
        dim_out: size of an output capsule.
        iterations: routing iterations, at least 1.
        binarizer: a name in ``BINARIZERS`` to xnorize the projection; None leaves it alone.
        agreement: ``dot`` or ``xnor``, how routing compares predictions with output capsules.
        agreement_binarizer: the binarizer of the xnor agreement; ``sign`` if not given.
        routing: a name in ``ROUTINGS``.
        scale: ``mean``, or ``learned``: parameters in place of the means (XNOR-Net++), of shape
            ``(caps_in, caps_out, 1, dim_out)`` in the projection, ``(caps_out,)`` in the agreement.
        detach_scale: treat the means as constants in the backward pass.
        routing_bias: add a learned ``(caps_out, dim_out)`` to the weighted sums.
        detach_routing: predictions are constants everywhere but in the last weighted sum.
        device, dtype: of the parameters.

    Shape:
        x ``(batch, caps_in, dim_in)`` -> v ``(batch, caps_out, dim_out)``; on request also the
        couplings ``(batch, caps_in, caps_out)`` that v was summed with.

    >>> layer = CapsuleLinear(128, 8, 10, 16)
    >>> v, couplings = layer(torch.randn(2, 128, 8), return_couplings=True)
    >>> v.shape, couplings.shape
    (torch.Size([2, 10, 16]), torch.Size([2, 128, 10]))
    """

    def __init__(
        self,
        caps_in: int,
        dim_in: int,
        caps_out: int,
        dim_out: int,
        iterations: int = 3,
        *,
        binarizer: str | None = None,
        agreement: str = "dot",
        agreement_binarizer: str | None = None,
        routing: str = "dynamic",
        scale: str = "mean",
        detach_scale: bool = True,
        routing_bias: bool = False,
        detach_routing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        self.caps_in = check_size(where, "caps_in", caps_in)
        self.dim_in = check_size(where, "dim_in", dim_in)
        self.caps_out = check_size(where, "caps_out", caps_out)
        self.dim_out = check_size(where, "dim_out", dim_out)
        check_size(where, "iterations", iterations)
        if binarizer is not None:
            check_choice(where, "binarizer", binarizer, BINARIZERS)
        make_agreement = look_up(where, "agreement", agreement, AGREEMENTS)
        is_xnor = make_agreement is XnorAgreement
        if agreement_binarizer is not None:
            check_choice(where, "agreement_binarizer", agreement_binarizer, BINARIZERS)
            if not is_xnor:
                hint = "Pass agreement='xnor', or leave agreement_binarizer out."
                requirement = "go with agreement='xnor'"
                got = f"{agreement_binarizer!r} with agreement={agreement!r}"
                raise InputError(message(where, "agreement_binarizer", requirement, got, hint))
        make_routing = look_up(where, "routing", routing, ROUTINGS)
        check_choice(where, "scale", scale, SCALES)
        if scale == "learned" and binarizer is None and not is_xnor:
            hint = "Pass binarizer=... or agreement='xnor'."
            requirement = "be mean where nothing is xnorized"
            raise InputError(message(where, "scale", requirement, scale, hint))

        self.binarizer = binarizer
        self.detach_scale = detach_scale
        self.weight = nn.Parameter(torch.empty(caps_in, caps_out, dim_in, dim_out))
        learned = binarizer is not None and scale == "learned"
        self.scale = nn.Parameter(torch.empty(caps_in, caps_out, 1, dim_out)) if learned else None
        self.routing = make_routing(
            caps_out,
            dim_out,
            iterations,
            XnorAgreement(
                caps_out,
                dim_out,
                binarizer=agreement_binarizer or "sign",
                scale=scale,
                detach_scale=detach_scale,
            )
            if is_xnor
            else make_agreement(),
            bias=routing_bias,
            detach=detach_routing,
        )
        self.reset_parameters()
        self.to(device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        # Evenly coupled input capsules of length 1 then sum to vectors of length about 1: long
        # enough that squash lets gradients through. Above 0.5 many weights would leave [-1, 1],
        # where straight-through gradients stop.
        std = min(0.5, self.caps_out / (self.caps_in * self.dim_out) ** 0.5)
        nn.init.normal_(self.weight, std=std)
        if self.scale is not None:
            # What the means would give for input capsules of length 1/2 with equal coordinates;
            # twice as much learns far more slowly.
            with torch.no_grad():
                self.scale.copy_(mean_scale(self.weight, 2) * 0.5 / self.dim_in**0.5)

    def forward(self, x: Tensor, return_couplings: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        where = type(self).__name__
        check_floating(where, "x", x)
        check_shape(where, "x", x, batch=None, caps_in=self.caps_in, dim_in=self.dim_in)
        check_like(where, "x", x, _parameter(self, "weight"))
        fused = self._fused(x, return_couplings)
        if fused is not None:
            return fused
        v, couplings = self.routing(self.project(x))
        return (v, couplings) if return_couplings else v

    def project(self, x: Tensor) -> Tensor:
        """The predictions u ``(batch, caps_in, caps_out, dim_out)`` of LP_out."""
        return reference.project(x, self.weight, self.binarizer, self.scale, self.detach_scale)

    def _fused(self, x: Tensor, return_couplings: bool) -> Tensor | tuple[Tensor, Tensor] | None:
        """All at once by a kernel; None if no kernel can, or someone looks at what is inside."""
        if type(self).project is not CapsuleLinear.project:
            return None
        routing: DynamicRouting = self._modules["routing"]  # type: ignore[assignment]
        agreement = routing._modules["agreement"]
        if type(routing) is not DynamicRouting or _is_watched(routing) or _is_watched(agreement):
            return None
        learned = binarizer = None
        if type(agreement) is XnorAgreement:
            learned, binarizer = _parameter(agreement, "scale"), agreement.binarizer
        elif type(agreement) is not DotAgreement:
            return None
        weight, scale = _parameter(self, "weight"), _parameter(self, "scale")
        bias = _parameter(routing, "bias")
        if not kernels.serves(x, weight, scale, bias, learned):
            return None
        return kernels.capsules(
            x,
            weight,
            scale,
            bias,
            learned,
            routing.iterations,
            self.binarizer,
            binarizer,
            self.detach_scale,
            routing.detach,
            return_couplings=return_couplings,
        )

    def extra_repr(self) -> str:
        sizes = f"{self.caps_in}, {self.dim_in}, {self.caps_out}, {self.dim_out}"
        binarizer = "" if self.binarizer is None else f", binarizer={self.binarizer!r}"
        scale = "" if self.scale is None else ", scale='learned'"
        return f"{sizes}{binarizer}{scale}"


def _parameter(module: nn.Module, name: str) -> Any:
    """What ``module.name`` is, in a tenth of the time if that is a parameter."""
    found = module._parameters
    return found[name] if name in found else getattr(module, name)


_METHODS = frozenset({"forward", "weighted_sum", "mean_scale"})


def _is_watched(module: nn.Module | None) -> bool:
    """Whether hooks or replaced methods want to see what goes in and out."""
    return module is not None and bool(
        not _METHODS.isdisjoint(module.__dict__)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


class LayerOptions(TypedDict, total=False):
    """The options of :class:`CapsuleLinear` that XnODR and XnIDR pass on."""

    routing: str
    scale: str
    detach_scale: bool
    routing_bias: bool
    detach_routing: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


class CapsFC(CapsuleLinear):
    """The plain capsule layer of Sabour et al.: float projection, dot agreement (section 3.1).

    ``u_ij = x_i W_ij``, then dynamic routing, where ``logits += u . v``.

    Args:
        caps_in, dim_in: number and size of the input capsules.
        caps_out, dim_out: number and size of the output capsules.
        iterations: routing iterations, at least 1.
        routing, routing_bias, detach_routing, device, dtype: as in :class:`CapsuleLinear`.

    Shape:
        x ``(batch, caps_in, dim_in)`` -> v ``(batch, caps_out, dim_out)``.

    >>> CapsFC(128, 8, 10, 16)(torch.randn(2, 128, 8)).shape
    torch.Size([2, 10, 16])
    """

    def __init__(
        self,
        caps_in: int,
        dim_in: int,
        caps_out: int,
        dim_out: int,
        iterations: int = 3,
        *,
        routing: str = "dynamic",
        routing_bias: bool = False,
        detach_routing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            caps_in,
            dim_in,
            caps_out,
            dim_out,
            iterations,
            routing=routing,
            routing_bias=routing_bias,
            detach_routing=detach_routing,
            device=device,
            dtype=dtype,
        )


class XnODR(CapsuleLinear):
    """Xnorize the linear projection Outside the Dynamic Routing (Algorithm 1).

    ``u_ij = (sign(x_i) sign(W_ij)) * mean(abs(x_i)) * mean(abs(W_ij))``, then dynamic routing as in
    :class:`CapsFC`. Gradients pass the signs as the binarizer says; the means are constants unless
    ``detach_scale`` is false.

    Args:
        caps_in, dim_in: number and size of the input capsules.
        caps_out, dim_out: number and size of the output capsules.
        iterations: routing iterations, at least 1.
        binarizer: a name in ``BINARIZERS``; None makes it a :class:`CapsFC`.
        options: as in :class:`CapsuleLinear`.

    Shape:
        x ``(batch, caps_in, dim_in)`` -> v ``(batch, caps_out, dim_out)``.

    >>> XnODR(128, 8, 10, 16, iterations=3, binarizer="sign")(torch.randn(2, 128, 8)).shape
    torch.Size([2, 10, 16])
    """

    def __init__(
        self,
        caps_in: int,
        dim_in: int,
        caps_out: int,
        dim_out: int,
        iterations: int = 3,
        *,
        binarizer: str | None = "sign",
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(
            caps_in, dim_in, caps_out, dim_out, iterations, binarizer=binarizer, **options
        )


class XnorAgreementOptions(TypedDict, total=False):
    """What makes a :class:`CapsuleLinear` xnorize its agreement."""

    agreement: str
    agreement_binarizer: str


def _xnor_agreement(where: str, binarizer: str | None) -> XnorAgreementOptions:
    if binarizer is None:
        return {}
    check_choice(where, "binarizer", binarizer, BINARIZERS)
    return {"agreement": "xnor", "agreement_binarizer": binarizer}


class XnIDR(CapsuleLinear):
    """Xnorize the linear projection Inside the Dynamic Routing (Algorithm 2).

    ``u_ij = x_i W_ij``, then dynamic routing, where
    ``logits += (sign(u) . sign(v)) * mean(abs(u)) * mean(abs(v))``. Gradients pass the signs as the
    binarizer says; the means are constants unless ``detach_scale`` is false.

    Args:
        caps_in, dim_in: number and size of the input capsules.
        caps_out, dim_out: number and size of the output capsules.
        iterations: routing iterations, at least 1.
        binarizer: a name in ``BINARIZERS``; None makes it a :class:`CapsFC`.
        options: as in :class:`CapsuleLinear`.

    Shape:
        x ``(batch, caps_in, dim_in)`` -> v ``(batch, caps_out, dim_out)``.

    >>> XnIDR(128, 8, 10, 16)(torch.randn(2, 128, 8)).shape
    torch.Size([2, 10, 16])
    """

    def __init__(
        self,
        caps_in: int,
        dim_in: int,
        caps_out: int,
        dim_out: int,
        iterations: int = 3,
        *,
        binarizer: str | None = "sign",
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(
            caps_in,
            dim_in,
            caps_out,
            dim_out,
            iterations,
            **_xnor_agreement("XnIDR", binarizer),
            **options,
        )


def xnorize_both(
    caps_in: int,
    dim_in: int,
    caps_out: int,
    dim_out: int,
    iterations: int = 3,
    *,
    binarizer: str | None = "sign",
    **options: Unpack[LayerOptions],
) -> CapsuleLinear:
    """A :class:`CapsuleLinear` with both linear projections xnorized by the same binarizer.

    Args:
        caps_in, dim_in: number and size of the input capsules.
        caps_out, dim_out: number and size of the output capsules.
        iterations: routing iterations, at least 1.
        binarizer: a name in ``BINARIZERS``; None leaves both projections alone.
        options: as in :class:`CapsuleLinear`.

    >>> xnorize_both(128, 8, 10, 16)(torch.randn(2, 128, 8)).shape
    torch.Size([2, 10, 16])
    """
    return CapsuleLinear(
        caps_in,
        dim_in,
        caps_out,
        dim_out,
        iterations,
        binarizer=binarizer,
        **_xnor_agreement("xnorize_both", binarizer),
        **options,
    )
