"""Capsule heads with real XNOR arithmetic: the layers of "XnODR and XnIDR" for PyTorch networks."""

from os import PathLike
from typing import TYPE_CHECKING, Any

from xncaps.attach import attach_head
from xncaps.backbones import BACKBONES
from xncaps.binarizers import BINARIZERS, binarize
from xncaps.capsules import capsule_length, squash
from xncaps.counting import summary
from xncaps.deploy import pack
from xncaps.errors import InputError, message
from xncaps.finetune import freeze_backbone, parameter_groups, unfreeze_backbone
from xncaps.heads import HEADS, CapsuleHead, FCHead, LinearHead
from xncaps.layers import CapsFC, CapsuleLinear, XnIDR, XnODR
from xncaps.losses import margin_loss
from xncaps.metrics import METRICS
from xncaps.models import create_model
from xncaps.networks import CapsNet, Classifier, XnorNet
from xncaps.primary import PrimaryCaps
from xncaps.routing import AGREEMENTS, ROUTINGS
from xncaps.xnor import XnorConv2d, XnorLinear

if TYPE_CHECKING:
    from xncaps.deploy.predictor import Predictor

__version__ = "0.1.0"


def load(path: str | PathLike[str]) -> Classifier:
    """The trained network of a run's folder or a packed file, in evaluation mode.

    It takes images as the training did, brought to mean 0 and deviation 1; :class:`Predictor` takes
    them as they come.

    Args:
        path: the folder that ``xncaps train`` wrote, or the file of ``xncaps export``.
    """
    from xncaps.deploy.model import TorchModel, open_model  # brings Pillow along, which few need

    model = open_model(path)
    if not isinstance(model, TorchModel):
        hint = "xncaps.Predictor runs it."
        raise InputError(message("load", "path", "hold a PyTorch network", f"{path}", hint))
    return model.network


def __getattr__(name: str) -> Any:
    if name != "Predictor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from xncaps.deploy.predictor import Predictor

    return Predictor


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
    "Predictor",
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
    "freeze_backbone",
    "load",
    "margin_loss",
    "pack",
    "parameter_groups",
    "squash",
    "summary",
    "unfreeze_backbone",
]
