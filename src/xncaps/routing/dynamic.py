"""Dynamic routing between capsules (Sabour et al.; the paper's section 3.1 and Algorithm 2)."""

import torch
from torch import Tensor, nn

from xncaps.capsules import squash
from xncaps.errors import (
    InputError,
    InputTypeError,
    brief,
    check_floating,
    check_like,
    check_shape,
    check_size,
    message,
)
from xncaps.routing.agreement import DotAgreement


class DynamicRouting(nn.Module):
    """Route predictions to output capsules by agreement.

    The logits start at 0 in every forward pass. Each iteration computes::

        coupling = softmax(logits) over caps_out
        v_j      = squash(sum_i coupling_ij * u_ij  [+ bias_j])
        logits  += agreement(u, v)        # not after the last iteration: nothing would read it

    Gradients run through all iterations. With ``detach`` the predictions are constants everywhere
    but in the last weighted sum.

    Args:
        caps_out: number of output capsules.
        dim_out: size of an output capsule.
        iterations: how many times to route, at least 1.
        agreement: the module that compares u with v; the dot product if not given.
        bias: add a learned ``(caps_out, dim_out)`` to the weighted sum, starting at 0.
        detach: see above.

    Shape:
        u ``(batch, caps_in, caps_out, dim_out)`` -> v ``(batch, caps_out, dim_out)`` and
        couplings ``(batch, caps_in, caps_out)``, the ones that v was summed with.

    >>> v, couplings = DynamicRouting(caps_out=2, dim_out=4)(torch.ones(1, 3, 2, 4))
    >>> v.shape, couplings[0, 0]
    (torch.Size([1, 2, 4]), tensor([0.5000, 0.5000]))
    """

    def __init__(
        self,
        caps_out: int,
        dim_out: int,
        iterations: int = 3,
        agreement: nn.Module | None = None,
        *,
        bias: bool = False,
        detach: bool = False,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        self.caps_out = check_size(where, "caps_out", caps_out)
        self.dim_out = check_size(where, "dim_out", dim_out)
        self.iterations = check_size(where, "iterations", iterations)
        if agreement is not None and not isinstance(agreement, nn.Module):
            hint = "Such as DotAgreement() or XnorAgreement(caps_out, dim_out)."
            raise InputTypeError(message(where, "agreement", "be a module", brief(agreement), hint))
        self.agreement = DotAgreement() if agreement is None else agreement
        self.bias = nn.Parameter(torch.empty(caps_out, dim_out)) if bias else None
        self.detach = detach
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, u: Tensor) -> tuple[Tensor, Tensor]:
        where = type(self).__name__
        check_floating(where, "u", u)
        if self.iterations < 1:  # it may have been set since
            raise InputError(message(where, "iterations", "be at least 1", self.iterations))
        check_shape(
            where, "u", u, batch=None, caps_in=None, caps_out=self.caps_out, dim_out=self.dim_out
        )
        if self.bias is not None:
            check_like(where, "u", u, self.bias)
        routed = u.detach() if self.detach else u
        agree = self.agreement(routed)
        logits = u.new_zeros(u.shape[:3])
        for _ in range(self.iterations - 1):
            v, _ = self.weighted_sum(routed, logits)
            logits = logits + agree(v)
        return self.weighted_sum(u, logits)

    def weighted_sum(self, u: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """One step: the output capsules that these logits give, and their couplings."""
        coupling = torch.softmax(logits, dim=-1)
        s = torch.einsum("bij,bije->bje", coupling, u)
        return squash(s if self.bias is None else s + self.bias), coupling

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}, bias={self.bias is not None}, detach={self.detach}"
