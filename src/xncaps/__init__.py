"""Capsule heads with real XNOR arithmetic: the layers of "XnODR and XnIDR" for PyTorch networks."""

from os import PathLike

from xncaps.attach import attach_head
from xncaps.backbones import BACKBONES
from xncaps.binarizers import BINARIZERS, binarize
from xncaps.capsules import capsule_length, squash
from xncaps.counting import summary
from xncaps.deploy import pack
from xncaps.errors import InputError
from xncaps.heads import HEADS, CapsuleHead, FCHead, LinearHead
from xncaps.layers import CapsFC, CapsuleLinear, XnIDR, XnODR
from xncaps.losses import margin_loss
from xncaps.metrics import METRICS
from xncaps.models import create_model
from xncaps.networks import CapsNet, Classifier, XnorNet
from xncaps.primary import PrimaryCaps
from xncaps.routing import AGREEMENTS, ROUTINGS
from xncaps.xnor import XnorConv2d, XnorLinear

__version__ = "0.1.0"


def load(path: str | PathLike[str]) -> Classifier:
    """The trained network of a run's folder, in evaluation mode.

    Args:
        path: the folder that ``xncaps train --out`` wrote.
    """
    from xncaps.training.run import load_run  # brings Pillow along, which few need

    return load_run(path).network


__all__ = [
    "AGREEMENTS",
    "BACKBONES",
    "BINARIZERS",
    "HEADS",
    "METRICS",
    "ROUTINGS",
    "CapsFC",
    "CapsNet",
    "CapsuleHead",
    "CapsuleLinear",
    "FCHead",
    "InputError",
    "LinearHead",
    "PrimaryCaps",
    "XnIDR",
    "XnODR",
    "XnorConv2d",
    "XnorLinear",
    "XnorNet",
    "attach_head",
    "binarize",
    "capsule_length",
    "create_model",
    "load",
    "margin_loss",
    "pack",
    "squash",
    "summary",
]
