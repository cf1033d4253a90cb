"""timm and torchvision for the tests, beside a torch for CPUs too.

torchvision's wheel is built for CUDA. Beside a CPU build of torch its operators do not load, and
importing it fails on the two that it looks up at once. No classifier calls them: declared without
a kernel, they are enough.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import xncaps

os.environ["HF_HUB_OFFLINE"] = "1"  # no test downloads weights

_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")


def import_guest(name: str) -> ModuleType:
    """Import ``timm`` or ``torchvision``, declaring the operators that torchvision misses."""
    try:
        return importlib.import_module(name)
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
    for operator in ("nms", "qnms"):
        _OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for module in [
        known for known in sys.modules if known.split(".")[0] in ("torchvision", "timm")
    ]:
        del sys.modules[module]
    return importlib.import_module(name)


torchvision = import_guest("torchvision")
timm = import_guest("timm")


@dataclass(frozen=True)
class Guest:
    """A network of somebody else's, as small as it can be had.

    Attributes:
        build: what makes it.
        size: side of its images.
        heads: the names of what is replaced.
        attention: multiply-accumulates of its fused attention, which PyTorch's counter leaves out:
            ``2 * tokens ** 2 * dim`` for each layer.
    """

    build: Callable[[], nn.Module]
    size: int
    heads: tuple[str, ...]
    attention: int = 0


def _timm(name: str, size: int, *heads: str, attention: int = 0, **options: Any) -> Guest:
    return Guest(partial(timm.create_model, name, **options), size, heads, attention)


TIMM = {
    "mobilenetv2": _timm("mobilenetv2_035", 32, "classifier"),
    "mobilenetv3": _timm("mobilenetv3_small_050", 32, "classifier"),
    "efficientnet": _timm("test_efficientnet", 32, "classifier"),
    "resnet": _timm("test_resnet", 32, "fc"),
    "convnext": _timm("test_convnext", 64, "head.fc"),
    "vit": _timm("test_vit", 32, "head", attention=6 * 2 * 5**2 * 64, img_size=32),
    "deit distilled": _timm(
        *("deit_tiny_distilled_patch16_224", 32, "head", "head_dist"),
        **{"attention": 2 * 2 * 6**2 * 48, "img_size": 32, "embed_dim": 48, "depth": 2},
    ),
    "swin": _timm(
        *("swin_tiny_patch4_window7_224", 56, "head.fc"),
        **{"img_size": 56, "embed_dim": 24, "depths": (1, 1), "num_heads": (2, 2)},
    ),
}


def _convnext() -> nn.Module:
    block = torchvision.models.convnext.CNBlockConfig
    return torchvision.models.ConvNeXt([block(24, 48, 1), block(48, None, 1)])


def _vit() -> nn.Module:
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
    return torchvision.models.VisionTransformer(image_size=32, patch_size=8, **sizes)


def _swin() -> nn.Module:
    sizes = {"embed_dim": 24, "depths": [1, 1], "num_heads": [2, 2], "window_size": [4, 4]}
    return torchvision.models.SwinTransformer([4, 4], **sizes)


_ZOO = torchvision.models
TORCHVISION = {
    "mobilenet_v2": Guest(partial(_ZOO.mobilenet_v2, width_mult=0.35), 32, ("classifier.1",)),
    "mobilenet_v3": Guest(_ZOO.mobilenet_v3_small, 32, ("classifier",)),
    "resnet": Guest(_ZOO.resnet18, 32, ("fc",)),
    "efficientnet": Guest(_ZOO.efficientnet_b0, 32, ("classifier.1",)),
    "convnext": Guest(_convnext, 32, ("classifier.2",)),
    "vit": Guest(_vit, 32, ("heads",), attention=2 * 2 * 17**2 * 32),
    "squeezenet": Guest(_ZOO.squeezenet1_1, 64, ("classifier.1",)),
    "densenet": Guest(partial(_ZOO.DenseNet, 8, (2, 2), 16), 32, ("classifier",)),
    "shufflenet": Guest(_ZOO.shufflenet_v2_x0_5, 32, ("fc",)),
    "regnet": Guest(_ZOO.regnet_y_400mf, 32, ("fc",)),
    "swin": Guest(_swin, 32, ("head",)),
}

GUESTS = {
    **{f"timm {name}": guest for name, guest in TIMM.items()},
    **{f"torchvision {name}": guest for name, guest in TORCHVISION.items()},
}

CLASSES = 7


def attached(guest: Guest, head: str = "xnidr") -> nn.Module:
    torch.manual_seed(0)
    return xncaps.attach_head(guest.build(), head, CLASSES)


def images_of(guest: Guest, batch: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, guest.size, guest.size, generator=generator)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def in_head(guest: Guest, key: str) -> bool:
    return key.startswith(tuple(f"{name}." for name in guest.heads))


def train_step(model: nn.Module, images: Tensor) -> None:
    """One step of plain PyTorch, in training mode."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    labels = torch.arange(len(images)) % CLASSES
    loss = xncaps.margin_loss(model.train()(images), labels)
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss)


def far_from_ties(model: nn.Module, images: Tensor) -> Tensor:
    """The images of which no coordinate of a capsule is so near zero that its sign may turn."""
    seen: list[Tensor] = []
    layers = [module for module in model.modules() if isinstance(module, xncaps.XnODR)]
    hooks = [m.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for m in layers]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    sizes = torch.cat(seen, dim=1).abs().flatten(1)
    return images[sizes.amin(dim=1) > 1e-5 * sizes.mean(dim=1)]


def norms_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
