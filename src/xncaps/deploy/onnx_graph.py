"""The network as it is drawn in ONNX: a copy whose layers are traced well.

What depends on weights alone is worked out here, because the exporter folds constants only while
they are small. Batch normalisation goes into the layer before it, in float64, where ``pack`` does
the same; elsewhere it stays one node. Signs of weights are bytes in the file and are cast where
they are used: runtimes do that once, when they load. Signs and scales stay apart, because a sum of
signs that is 0 must stay exactly 0: routing may ask for its sign.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xncaps.binarizers import BINARIZERS, mean_scale
from xncaps.capsules import squash
from xncaps.deploy.pack import fold_and_replace, make_plan
from xncaps.deploy.packed import Packed, PackedCapsules
from xncaps.deploy.packed_xnor import PackedXnorConv2d, PackedXnorLinear
from xncaps.layers import CapsuleLinear
from xncaps.networks import Classifier
from xncaps.routing import XnorAgreement
from xncaps.xnor import XnorConv2d, XnorLinear

Numbers = tuple[float, ...]


class DrawnCapsules(nn.Module):
    """A capsule layer in products of matrices, which runtimes do many times as fast as Einsum.

    Predictions are kept as ``(batch, caps_out, caps_in, dim_out)``: then no round of routing moves
    them.

    Args:
        layer: a layer with dynamic routing, packed or not.

    Shape:
        As :class:`CapsuleLinear`.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    agreement_scale: Tensor | None

    def __init__(self, layer: CapsuleLinear) -> None:
        super().__init__()
        self.sizes = (layer.caps_out, layer.dim_out)
        self.iterations = layer.routing.iterations
        self.binarizer = layer.binarizer
        self.is_learned = layer.scale is not None
        weight = layer.weight.detach()
        if self.binarizer is not None:
            scale = mean_scale(weight, 2) if layer.scale is None else layer.scale.detach()
            weight = BINARIZERS[self.binarizer](weight, 2).to(torch.int8)
            self.register_buffer("scale", scale.transpose(1, 2).flatten(2))
        # (caps_in, dim_in, caps_out * dim_out), and the scale likewise
        self.register_buffer("weight", weight.transpose(1, 2).flatten(2).contiguous())
        bias = layer.routing.bias
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.agreement_binarizer: str | None = None
        learned: Tensor | None = None
        if isinstance(agreement := layer.routing.agreement, XnorAgreement):
            self.agreement_binarizer = agreement.binarizer
            learned = None if agreement.scale is None else agreement.scale.detach().unsqueeze(1)
        self.register_buffer("agreement_scale", learned)

    def forward(self, x: Tensor) -> Tensor:
        u = self._project(x.transpose(0, 1))  # (caps_in, batch, caps_out * dim_out)
        u = torch.unflatten(u, 2, self.sizes).permute(1, 2, 0, 3)
        v = self._squash(u.sum(dim=2) / self.sizes[0])  # logits of 0 couple evenly
        agree = self._agreement(u)
        logits: Tensor | None = None
        for _ in range(self.iterations - 1):
            agreed = agree(v)
            logits = agreed if logits is None else logits + agreed
            coupling = torch.softmax(logits, dim=1)  # (batch, caps_out, caps_in)
            v = self._squash(torch.matmul(coupling.unsqueeze(2), u).squeeze(2))
        return v

    def _project(self, x: Tensor) -> Tensor:
        if self.binarizer is None:
            return torch.matmul(x, self.weight)
        dots = torch.matmul(BINARIZERS[self.binarizer](x, -1), self.weight.float())
        return (dots if self.is_learned else dots * mean_scale(x, -1)) * self.scale

    def _squash(self, s: Tensor) -> Tensor:
        return squash(s if self.bias is None else s + self.bias)

    def _agreement(self, u: Tensor) -> Callable[[Tensor], Tensor]:
        """What compares v ``(batch, caps_out, dim_out)`` with u."""

        def dots(left: Tensor, right: Tensor) -> Tensor:
            return torch.matmul(left, right.unsqueeze(3)).squeeze(3)

        if self.agreement_binarizer is None:
            return lambda v: dots(u, v)
        signs = BINARIZERS[self.agreement_binarizer]
        u_signs = signs(u, -1)
        if (learned := self.agreement_scale) is not None:
            return lambda v: dots(u_signs, signs(v, -1)) * learned
        u_scale = mean_scale(u, -1).squeeze(-1)
        return lambda v: dots(u_signs, signs(v, -1)) * u_scale * mean_scale(v, -1)


class DrawnXnorLinear(nn.Module):
    """An :class:`XnorLinear` whose signs are constants.

    Args:
        layer: the layer, packed or not.

    Shape:
        As :class:`XnorLinear`.
    """

    signs: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, layer: XnorLinear) -> None:
        super().__init__()
        self.binarizer, self.is_learned = layer.binarizer, layer.scale is not None
        weight = layer.weight.detach()
        signs = BINARIZERS[self.binarizer](weight, 1).to(torch.int8)
        self.register_buffer("signs", signs.t().contiguous())
        scale = mean_scale(weight, 1).squeeze(1) if layer.scale is None else layer.scale.detach()
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        y = torch.matmul(BINARIZERS[self.binarizer](x, -1), self.signs.float())
        y = (y if self.is_learned else y * mean_scale(x, -1)) * self.scale
        return y if self.bias is None else y + self.bias


class DrawnXnorConv2d(nn.Module):
    """An :class:`XnorConv2d` whose signs are constants.

    Args:
        layer: the layer, packed or not.

    Shape:
        As :class:`XnorConv2d`.
    """

    signs: Tensor
    scale: Tensor
    window: Tensor
    bias: Tensor | None

    def __init__(self, layer: XnorConv2d) -> None:
        super().__init__()
        self.binarizer, self.is_learned = layer.binarizer, layer.scale is not None
        self.stride, self.padding, self.dilation = layer.stride, layer.padding, layer.dilation
        weight, axes = layer.weight.detach(), (1, 2, 3)
        self.register_buffer("signs", BINARIZERS[self.binarizer](weight, axes).to(torch.int8))
        scale = mean_scale(weight, axes) if layer.scale is None else layer.scale.detach()
        self.register_buffer("scale", scale.view(-1, 1, 1))
        kernel = layer.kernel_size
        self.register_buffer("window", torch.full((1, 1, *kernel), 1 / (kernel[0] * kernel[1])))
        bias = None if layer.bias is None else layer.bias.detach().view(-1, 1, 1)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self.padding
        signs = BINARIZERS[self.binarizer](x, 1)
        padded = F.pad(signs, (columns, columns, rows, rows), value=-1.0)
        y = F.conv2d(padded, self.signs.float(), None, self.stride, 0, self.dilation)
        if self.is_learned:
            y = y * self.scale
        else:
            places = self.stride, self.padding, self.dilation
            y = y * (F.conv2d(mean_scale(x, 1), self.window, None, *places) * self.scale)
        return y if self.bias is None else y + self.bias


class Normalised(Classifier):
    """A network that takes pixels from 0 to 255.

    Args:
        network: the network.
        mean, std: of each channel, for pixels from 0 to 1.

    Shape:
        As :class:`Classifier`.
    """

    factor: Tensor
    offset: Tensor

    def __init__(self, network: Classifier, mean: Numbers, std: Numbers) -> None:
        super().__init__(network.backbone, network.head, network.in_channels, network.image_size)
        factor = [1 / (255 * each) if each > 0 else 0.0 for each in std]
        offset = [-255 * middle * times for middle, times in zip(mean, factor, strict=True)]
        self.register_buffer("factor", torch.tensor(factor).view(-1, 1, 1))
        self.register_buffer("offset", torch.tensor(offset).view(-1, 1, 1))

    def forward(
        self, images: Tensor, return_couplings: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        return super().forward(images * self.factor + self.offset, return_couplings)


DRAWN: dict[type[Packed], Callable[[Any], nn.Module]] = {
    PackedCapsules: DrawnCapsules,
    PackedXnorLinear: DrawnXnorLinear,
    PackedXnorConv2d: DrawnXnorConv2d,
}


def drawn(network: Classifier) -> Classifier:
    """The copy of a network that is traced; in evaluation mode, without gradients.

    Layers that ``pack`` would leave alone, such as those with another routing, are left alone here
    too and traced as they are.
    """
    copy = deepcopy(network).requires_grad_(False)
    plan = make_plan(copy)
    kinds = dict(plan.packed)
    kinds.update({module: type(module) for module in copy.modules() if isinstance(module, Packed)})
    fold_and_replace(copy, plan, {layer: DRAWN[kind](layer) for layer, kind in kinds.items()})
    return copy.eval()
