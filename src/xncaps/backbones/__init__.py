"""Backbones: images in, feature maps out. ``BACKBONES`` names them."""

from xncaps.backbones.base import Backbone
from xncaps.backbones.convnet import ConvNet
from xncaps.backbones.mobilenetv2 import MobileNetV2
from xncaps.backbones.resnet50 import ResNet50
from xncaps.backbones.widenet import WideNet

BACKBONES: dict[str, type[ConvNet] | type[MobileNetV2] | type[ResNet50] | type[WideNet]] = {
    "convnet": ConvNet,
    "mobilenetv2": MobileNetV2,
    "resnet50": ResNet50,
    "widenet": WideNet,
}

__all__ = ["BACKBONES", "Backbone", "ConvNet", "MobileNetV2", "ResNet50", "WideNet"]
