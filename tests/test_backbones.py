"""Backbones: Keras' layers, counted; strides for small images; frozen and dropped tops."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from xncaps.backbones import BACKBONES, ConvNet, MobileNetV2, ResNet50
from xncaps.backbones.base import SameConv2d


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# Keras' include_top=False models: trainable parameters, and the running statistics beside them.
@pytest.mark.parametrize(
    ("make", "trainable", "statistics"),
    [(MobileNetV2, 2_223_872, 34_112), (ResNet50, 23_534_592, 53_120)],
)
def test_counts_are_those_of_keras(make: type[nn.Module], trainable: int, statistics: int) -> None:
    with torch.device("meta"):
        backbone = make(3, 224)
    assert count(backbone) == trainable
    buffers = [b for b in backbone.buffers() if b.dim() > 0]
    assert sum(b.numel() for b in buffers) == statistics


@pytest.mark.parametrize(("make", "eps"), [(MobileNetV2, 1e-3), (ResNet50, 1.001e-5)])
def test_batch_norm_epsilon_is_that_of_keras(make: type[nn.Module], eps: float) -> None:
    with torch.device("meta"):
        norms = [m for m in make(3, 224).modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms
    assert all((m.eps, m.momentum) == (eps, 0.1) for m in norms)


def test_resnet_strides_in_its_first_1x1_convolutions_and_has_biases() -> None:
    with torch.device("meta"):
        convs = [m for m in ResNet50(3, 224).modules() if isinstance(m, nn.Conv2d)]
    assert {m.kernel_size for m in convs if m.stride == (2, 2)} == {(7, 7), (1, 1)}
    assert all(m.bias is not None for m in convs)


@pytest.mark.parametrize(
    ("make", "size", "features"),
    [
        (MobileNetV2, 224, (1280, 7, 7)),
        (MobileNetV2, 108, (1280, 4, 4)),
        (MobileNetV2, 64, (1280, 2, 2)),
        (MobileNetV2, 63, (1280, 4, 4)),
        (MobileNetV2, 28, (1280, 2, 2)),
        (ResNet50, 224, (2048, 7, 7)),
        (ResNet50, 108, (2048, 4, 4)),
        (ResNet50, 64, (2048, 2, 2)),
        (ResNet50, 63, (2048, 4, 4)),
        (ResNet50, 28, (2048, 2, 2)),
        (ConvNet, 28, (128, 7, 7)),
        (ConvNet, 33, (128, 9, 9)),
        (ConvNet, 8, (128, 2, 2)),
    ],
)
def test_feature_sizes(make: type[nn.Module], size: int, features: tuple[int, ...]) -> None:
    with torch.device("meta"):
        backbone = make(2, size).eval()
        assert backbone(torch.zeros(1, 2, size, size)).shape[1:] == features


@pytest.mark.parametrize("size", range(5, 12))
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (1, 1), (1, 2), (5, 2)])
def test_same_padding_is_that_of_keras(size: int, kernel: int, stride: int) -> None:
    conv = SameConv2d(2, 3, kernel, stride).double()
    x = torch.randn(1, 2, size, size + 1, dtype=torch.float64)

    def pads(n: int) -> tuple[int, int]:
        """Keras: zeros for an output of ceil(n / stride) places, the odd one at the end."""
        places = -(-n // stride)
        total = max(0, (places - 1) * stride + kernel - n)
        return total // 2, total - total // 2

    padded = F.pad(x, (*pads(size + 1), *pads(size)))
    expected = F.conv2d(padded, conv.weight, conv.bias, stride)
    assert expected.shape[2:] == (-(-size // stride), -(-(size + 1) // stride))
    assert torch.equal(conv(x), expected)


def waves(*shape: int, phase: float = 0.0) -> torch.Tensor:
    """Numbers between -1 and 1 that are the same everywhere."""
    places = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return torch.sin(places * 0.7 + phase).float().view(shape)


def fill(model: nn.Module, gain: float) -> None:
    """Give every weight and statistic a known value."""
    with torch.no_grad():
        for index, (key, tensor) in enumerate(model.state_dict().items()):
            wave = waves(*tensor.shape, phase=float(index))
            if tensor.dim() == 4:
                tensor.copy_(wave * (gain / tensor[0].numel()) ** 0.5)
            elif key.endswith("running_var"):
                tensor.copy_(1 + 0.5 * wave)
            elif tensor.dim() == 1:
                tensor.copy_((1 + 0.2 * wave) if key.endswith("weight") else 0.1 * wave)


# What keras.applications (Keras 3.15.1, include_top=False) gives for the same weights and image:
# mean and standard deviation of all features, and some of those in the upper right corner.
@pytest.mark.parametrize(
    ("make", "gain", "size", "mean", "std", "some"),
    [
        (MobileNetV2, 4, 64, 1.3047007, 1.7452861, [0, 4.86675, 0, 3.274688, 0]),
        (MobileNetV2, 4, 75, 1.0438122, 1.5821993, [0, 5.456435, 0, 3.75915, 0]),
        (ResNet50, 0.1, 64, 0.7233091, 0.7815287, [1.541819, 0, 0, 0, 0.649179, 1.930679]),
        (ResNet50, 0.1, 75, 0.6898781, 0.7650296, [1.567605, 0, 0, 0, 0.648997, 1.987526]),
    ],
)
def test_features_are_those_of_keras(
    make: type[nn.Module], gain: float, size: int, mean: float, std: float, some: list[float]
) -> None:
    backbone = make(3, size).eval()
    fill(backbone, gain)
    with torch.no_grad():
        maps = backbone(2 * waves(1, 3, size, size))
    assert maps.mean().item() == pytest.approx(mean, rel=1e-4)
    assert maps.std().item() == pytest.approx(std, rel=1e-4)
    step = maps.shape[1] // 5
    assert maps[0, ::step, 0, -1].tolist() == pytest.approx(some, abs=1e-3)


def test_residuals_are_added_where_shapes_allow() -> None:
    with torch.device("meta"):
        blocks = MobileNetV2(3, 224).trunk
    adds = [name for name, block in blocks.named_children() if getattr(block, "adds_input", False)]
    assert adds == [f"block_{i}" for i in (2, 4, 5, 7, 8, 9, 11, 12, 14, 15)]


@pytest.mark.parametrize("name", BACKBONES)
def test_a_frozen_top_stays_in_eval_mode_and_learns_nothing(name: str) -> None:
    backbone = BACKBONES[name](1, 28)
    backbone.freeze_top()
    backbone.train()
    frozen = [m for module in backbone.frozen() for m in module.modules()]
    assert not any(m.training for m in frozen)
    assert backbone.trunk.training
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in backbone.parameters() if p.requires_grad], lr=0.1)
    backbone(torch.randn(4, 1, 28, 28)).square().mean().backward()
    optimizer.step()
    names = {id(t): key for key, t in backbone.state_dict(keep_vars=True).items()}
    held = {names[id(t)] for m in frozen for t in [*m.parameters(), *m.buffers()]}
    after = backbone.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in held)
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert any(key.startswith("trunk") for key in changed)


def test_the_last_five_keras_layers_of_mobilenetv2_are_frozen() -> None:
    with torch.device("meta"):
        backbone = MobileNetV2(3, 224)
        backbone.freeze_top()
    assert sum(p.numel() for p in backbone.parameters() if not p.requires_grad) == 720_000


@pytest.mark.parametrize("name", BACKBONES)
def test_a_dropped_top_leaves_the_trunk(name: str) -> None:
    with torch.device("meta"):
        backbone = BACKBONES[name](1, 28).eval()
        trunk = count(backbone.trunk)
        backbone.drop_top()
        assert count(backbone) == trunk
        maps = backbone(torch.zeros(1, 1, 28, 28))
    assert maps.shape[1] == backbone.features == backbone.trunk_features


def test_convnet_width() -> None:
    assert ConvNet(1, 28, width=0.5).features == 64
    assert ConvNet(1, 28, width=2).trunk_features == 128
    assert ConvNet(1, 28, width=0.001).features == 1
