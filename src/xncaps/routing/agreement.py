"""How much a prediction agrees with an output capsule: what routing adds to its logits.

An agreement is called once per forward pass with the predictions ``u`` and answers with a function
of the output capsules ``v``, so that what depends on ``u`` alone is computed once. To add one,
write such a module and name it in ``AGREEMENTS``; :class:`CapsuleLinear` builds it without
arguments.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from xncaps.binarizers import BINARIZERS, SCALES, mean_scale
from xncaps.errors import check_choice, check_size


class DotAgreement(nn.Module):
    """The dot product ``u . v`` of dynamic routing (the paper's Eq. 6).

    Called with u, it gives the function to call with v.

    Shape:
        u ``(batch, caps_in, caps_out, dim_out)``, v ``(batch, caps_out, dim_out)`` ->
        ``(batch, caps_in, caps_out)``.

    >>> u, v = torch.ones(1, 3, 2, 4), torch.ones(1, 2, 4)
    >>> DotAgreement()(u)(v)[0, 0]
    tensor([4., 4.])
    """

    def forward(self, u: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda v: torch.einsum("bije,bje->bij", u, v)


class XnorAgreement(nn.Module):
    """The xnorized dot product of XnIDR (Algorithm 2, lines 10 to 12).

    ``(sign(u) . sign(v)) * mean(abs(u)) * mean(abs(v))``, signs and means over dim_out. Gradients
    pass the signs as the binarizer says, and the means only if ``detach_scale`` is false. With
    ``scale="learned"`` one parameter for each output capsule stands in place of both means,
    starting at 1 / dim_out.

    Args:
        caps_out: number of output capsules.
        dim_out: size of an output capsule.
        binarizer: a name in ``BINARIZERS``.
        scale: ``mean`` or ``learned``.
        detach_scale: treat the means as constants in the backward pass.

    Shape:
        u ``(batch, caps_in, caps_out, dim_out)``, v ``(batch, caps_out, dim_out)`` ->
        ``(batch, caps_in, caps_out)``.

    >>> u, v = torch.full((1, 3, 2, 4), 0.5), torch.full((1, 2, 4), -0.1)
    >>> XnorAgreement(2, 4)(u)(v)[0, 0]
    tensor([-0.2000, -0.2000])
    """

    def __init__(
        self,
        caps_out: int,
        dim_out: int,
        *,
        binarizer: str = "sign",
        scale: str = "mean",
        detach_scale: bool = True,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        check_size(where, "caps_out", caps_out)
        check_size(where, "dim_out", dim_out)
        check_choice(where, "binarizer", binarizer, BINARIZERS)
        check_choice(where, "scale", scale, SCALES)
        self.dim_out = dim_out
        self.binarizer = binarizer
        self.detach_scale = detach_scale
        self.scale = nn.Parameter(torch.empty(caps_out)) if scale == "learned" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.scale is not None:
            nn.init.constant_(self.scale, 1 / self.dim_out)

    def forward(self, u: Tensor) -> Callable[[Tensor], Tensor]:
        binarizer = BINARIZERS[self.binarizer]
        u_signs = binarizer(u, -1)

        def dots(v: Tensor) -> Tensor:
            return torch.einsum("bije,bje->bij", u_signs, binarizer(v, -1))

        if (scale := self.scale) is not None:
            return lambda v: dots(v) * scale
        u_scale = self.mean_scale(u)  # (batch, caps_in, caps_out)
        return lambda v: dots(v) * u_scale * self.mean_scale(v).unsqueeze(1)

    def mean_scale(self, x: Tensor) -> Tensor:
        return mean_scale(x, -1, self.detach_scale).squeeze(-1)

    def extra_repr(self) -> str:
        scale = "mean" if self.scale is None else "learned"
        return f"binarizer={self.binarizer!r}, scale={scale!r}"


AGREEMENTS: dict[str, type[nn.Module]] = {"dot": DotAgreement, "xnor": XnorAgreement}
