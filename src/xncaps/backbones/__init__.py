"""Backbones: images in, feature maps out. ``BACKBONES`` names them."""

from xncaps.backbones.base import Backbone
from xncaps.backbones.convnet import ConvNet
from xncaps.backbones.mobilenetv2 import MobileNetV2
from xncaps.backbones.resnet50 import ResNet50

BACKBONES: dict[str, type[ConvNet] | type[MobileNetV2] | type[ResNet50]] = {
    "convnet": ConvNet,
    "mobilenetv2": MobileNetV2,
    "resnet50": ResNet50,
}

__all__ = ["BACKBONES", "Backbone", "ConvNet", "MobileNetV2", "ResNet50"]
