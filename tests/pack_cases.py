"""What the tests of packing share: networks that have lived, comparisons, and bytes."""

import contextlib
import warnings

import torch
from torch import nn

import xncaps
from xncaps import kernels
from xncaps.layers import xnorize_both

LAYERS = {
    "plain": xncaps.CapsFC,
    "out": xncaps.XnODR,
    "in": xncaps.XnIDR,
    "both": xnorize_both,
}


def assert_close(got, wanted, within=1e-5):
    torch.testing.assert_close(got, wanted, rtol=within, atol=within, equal_nan=True)


def bytes_of(model):
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def create(backbone, head, attach, size, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # append freezes random weights
        return xncaps.create_model(backbone, head, 10, 1, size, attach, **options)


def shaken_norm(norm):
    """The norm with statistics and weights as training leaves them."""
    if norm.affine:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, std=0.2)
    if norm.track_running_stats:
        norm.running_mean.add_(0.1 * torch.randn_like(norm.running_mean))
        norm.running_var.mul_(torch.empty_like(norm.running_var).uniform_(0.8, 1.25))
    return norm


def live(model, size, images=4):
    """The network with norms as training leaves them, in training mode."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model.train()(torch.randn(images, 1, size, size))
    for norm in norms:
        shaken_norm(norm)
    return model


@contextlib.contextmanager
def path(name):
    """As the library runs, or without the native module; every test of pack runs both ways."""
    torch.manual_seed(7)
    with contextlib.nullcontext() if name == "native" else kernels.disabled():
        yield


def shaken(layer):
    """The layer with all parameters but the weight away from where they start."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name != "weight":
                parameter.add_(0.3 * torch.randn_like(parameter) * parameter.abs().mean() + 0.01)
    return layer
