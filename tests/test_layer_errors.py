"""What the capsule layers say to bad input."""

import pytest
import torch

from checks import refused
from layer_cases import F64
from xncaps import CapsFC, CapsuleLinear, XnIDR, XnODR
from xncaps.errors import InputError, InputTypeError

INT = "Convert it first, for example with .float()."
CHOICES = "must be one of sign, midrange, approxsign; got"

REFUSED = {
    "rank": (
        lambda: CapsFC(6, 8, 5, 4)(torch.ones(6, 8)),
        InputError,
        "CapsFC: x must have shape (batch, caps_in=6, dim_in=8); got (6, 8).",
    ),
    "caps_in": (
        lambda: XnODR(6, 8, 5, 4)(torch.ones(2, 7, 8)),
        InputError,
        "XnODR: x must have shape (batch, caps_in=6, dim_in=8); got (2, 7, 8).",
    ),
    "dim_in": (
        lambda: XnIDR(6, 8, 5, 4)(torch.ones(2, 6, 9)),
        InputError,
        "XnIDR: x must have shape (batch, caps_in=6, dim_in=8); got (2, 6, 9).",
    ),
    "int": (
        lambda: CapsuleLinear(6, 8, 5, 4)(torch.ones(2, 6, 8, dtype=torch.int64)),
        InputTypeError,
        f"CapsuleLinear: x must be a floating-point tensor; got torch.int64. {INT}",
    ),
    "list": (
        lambda: CapsFC(6, 8, 5, 4)([1.0]),
        InputTypeError,
        "CapsFC: x must be a tensor; got list.",
    ),
    "float64": (
        lambda: CapsFC(6, 8, 5, 4)(torch.ones(2, 6, 8, dtype=F64)),
        InputTypeError,
        "CapsFC: x must have the layer's dtype torch.float32; got torch.float64. "
        "Convert one of them with .to(dtype), or use torch.autocast.",
    ),
    "device": (
        lambda: CapsFC(6, 8, 5, 4)(torch.ones(2, 6, 8, device="meta")),
        InputTypeError,
        "CapsFC: x must be on the layer's device cpu; got meta. Move one of them with .to(device).",
    ),
    "iterations": (
        lambda: CapsFC(6, 8, 5, 4, iterations=0),
        InputError,
        "CapsFC: iterations must be at least 1; got 0.",
    ),
    "no input capsules": (
        lambda: XnODR(0, 8, 5, 4),
        InputError,
        "XnODR: caps_in must be at least 1; got 0.",
    ),
    "negative": (
        lambda: XnODR(6, 8, -5, 4),
        InputError,
        "XnODR: caps_out must be at least 1; got -5.",
    ),
    "bool": (
        lambda: XnODR(6, True, 5, 4),
        InputTypeError,
        "XnODR: dim_in must be a whole number; got True.",
    ),
    "float": (
        lambda: XnODR(6, 8, 5, 4.0),
        InputTypeError,
        "XnODR: dim_out must be a whole number; got 4.0.",
    ),
    "binarizer": (
        lambda: XnODR(6, 8, 5, 4, binarizer="sgn"),
        InputError,
        f"XnODR: binarizer {CHOICES} 'sgn'. Did you mean 'sign'?",
    ),
    "agreement binarizer": (
        lambda: XnIDR(6, 8, 5, 4, binarizer="zebra"),
        InputError,
        f"XnIDR: binarizer {CHOICES} 'zebra'.",
    ),
    "agreement": (
        lambda: CapsuleLinear(6, 8, 5, 4, agreement="xor"),
        InputError,
        "CapsuleLinear: agreement must be one of dot, xnor; got 'xor'. Did you mean 'xnor'?",
    ),
    "routing": (
        lambda: CapsFC(6, 8, 5, 4, routing="dynamical"),
        InputError,
        "CapsFC: routing must be one of dynamic; got 'dynamical'. Did you mean 'dynamic'?",
    ),
    "scale": (
        lambda: XnODR(6, 8, 5, 4, scale="learnt"),
        InputError,
        "XnODR: scale must be one of mean, learned; got 'learnt'. Did you mean 'learned'?",
    ),
    "learned scale of nothing": (
        lambda: CapsuleLinear(6, 8, 5, 4, scale="learned"),
        InputError,
        "CapsuleLinear: scale must be mean where nothing is xnorized; got learned. "
        "Pass binarizer=... or agreement='xnor'.",
    ),
    "agreement binarizer with dot": (
        lambda: CapsuleLinear(6, 8, 5, 4, agreement_binarizer="sign"),
        InputError,
        "CapsuleLinear: agreement_binarizer must go with agreement='xnor'; "
        "got 'sign' with agreement='dot'. Pass agreement='xnor', or leave agreement_binarizer out.",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_told_what_is_wrong(call, error, message):
    assert refused(error, call) == message
