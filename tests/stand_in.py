"""Binarizers written differently from the library's: signs with a slope that is given."""

import torch


class StandIn(torch.autograd.Function):
    """Signs forward; backward multiplies by a slope that is given, not derived."""

    @staticmethod
    def forward(ctx, x, middle, slope):
        ctx.save_for_backward(slope)
        return torch.where(x > middle, 1.0, -1.0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (slope,) = ctx.saved_tensors
        return grad * slope, None, None


def stand_in(x, how, dims):
    size = x.detach().abs()
    slope = torch.where(size < 1, 2 - 2 * size, 0.0) if how == "approxsign" else size <= 1
    middle = torch.zeros(())
    if how == "midrange":
        middle = (x.detach().amax(dims, True) + x.detach().amin(dims, True)) / 2
    return StandIn.apply(x, middle, slope)
