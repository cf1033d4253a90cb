"""The packed layers of XNOR-Net."""

from typing import Any

from torch import Tensor, nn

from xncaps.deploy.layout import bytes_for, from_lanes, pack_bits, to_lanes, unpack_bits
from xncaps.deploy.packed import Hooks, Packed, Places, does_as, mean_of, signs_of, widen
from xncaps.errors import check_floating
from xncaps.kernels.library import CODES, pointer
from xncaps.xnor import XnorConv2d, XnorLinear


class PackedXnorLinear(Packed, XnorLinear):
    """An :class:`XnorLinear` for inference.

    Its buffers: ``bits``, laned by out_features (``layout.py``) with the bytes of in_features as
    rows; ``scales`` and ``bias``, each ``(out_features,)``.

    Args:
        layer: the layer to pack.

    Shape:
        As :class:`XnorLinear`.

    >>> packed = PackedXnorLinear(XnorLinear(512, 10))
    >>> packed(torch.randn(2, 512)).shape, packed.bits.shape
    (torch.Size([2, 10]), torch.Size([640]))
    """

    bits: Tensor
    scales: Tensor
    learned: bool

    def __init__(self, layer: XnorLinear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        _take_over(self, layer)
        signs = signs_of(layer.weight.detach(), layer.binarizer, 1)
        self.register_buffer("bits", to_lanes(pack_bits(signs)))

    @classmethod
    def takes(cls, layer: nn.Module) -> bool:
        return does_as(layer, XnorLinear)

    @staticmethod
    def size_of(layer: XnorLinear) -> int:
        numbers = 4 if layer.bias is None else 8
        return layer.out_features * (bytes_for(layer.in_features) + numbers)

    @property
    def params(self) -> int:
        return self.out_features * (self.in_features + self.learned + (self.bias is not None))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """What the buffers stand for: signs times their scale, if that is not learned."""
        shape = (self.out_features, bytes_for(self.in_features))
        signs = unpack_bits(from_lanes(self.bits, shape), self.in_features)
        return signs if self.learned else signs * widen(self.scales)[:, None]

    @property
    def scale(self) -> Tensor | None:  # type: ignore[override]
        """The learned scale, if there is one."""
        return widen(self.scales) if self.learned else None

    def forward(self, x: Tensor) -> Tensor:
        y = self._run(x)
        if y is not None:
            return y
        check_floating(type(self).__name__, "x", x)
        if x.dim() == 2 or x.shape[-1:] != (self.in_features,) or not x.numel():
            return XnorLinear.forward(self, x)
        return self.forward(x.reshape(-1, self.in_features)).reshape(*x.shape[:-1], -1)

    def _counts(self) -> dict[str, int]:
        bits = self.out_features * bytes_for(self.in_features)
        return {"bits": bits, "scales": self.out_features, "bias": self.out_features}

    def _connect(self, native: Any, places: Places, hooks: Hooks) -> Any:
        if self.binarizer not in CODES:
            return None
        return native.PackedLinear(
            places,
            hooks,
            self.in_features,
            self.out_features,
            CODES[self.binarizer],
            pointer(self.bits),
            pointer(self.scales),
            self.learned,
            pointer(self.bias),
        )


class PackedXnorConv2d(Packed, XnorConv2d):
    """An :class:`XnorConv2d` for inference.

    Its buffers: ``bits`` ``(out_channels, height, width, bytes of in_channels)`` of the kernel;
    ``scales`` and ``bias``, each ``(out_channels,)``. After some images of one size, if that makes
    it faster, it keeps its filters in a second form for that size, too (``plan_bytes``).

    Args:
        layer: the layer to pack.

    Shape:
        As :class:`XnorConv2d`.

    >>> packed = PackedXnorConv2d(XnorConv2d(64, 128, 3, padding=1))
    >>> packed(torch.randn(2, 64, 14, 14)).shape, packed.bits.shape
    (torch.Size([2, 128, 14, 14]), torch.Size([128, 3, 3, 8]))
    """

    bits: Tensor
    scales: Tensor
    learned: bool

    def __init__(self, layer: XnorConv2d) -> None:
        nn.Module.__init__(self)
        self.in_channels, self.out_channels = layer.in_channels, layer.out_channels
        self.kernel_size, self.stride = layer.kernel_size, layer.stride
        self.padding, self.dilation = layer.padding, layer.dilation
        _take_over(self, layer)
        signs = signs_of(layer.weight.detach(), layer.binarizer, (1, 2, 3))
        self.register_buffer("bits", pack_bits(signs.permute(0, 2, 3, 1)))

    @classmethod
    def takes(cls, layer: nn.Module) -> bool:
        return does_as(layer, XnorConv2d)

    @staticmethod
    def size_of(layer: XnorConv2d) -> int:
        bits = layer.kernel_size[0] * layer.kernel_size[1] * bytes_for(layer.in_channels)
        return layer.out_channels * (bits + (4 if layer.bias is None else 8))

    @property
    def params(self) -> int:
        area = self.kernel_size[0] * self.kernel_size[1]
        return self.out_channels * (
            self.in_channels * area + self.learned + (self.bias is not None)
        )

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """What the buffers stand for: signs times their scale, if that is not learned."""
        signs = unpack_bits(self.bits, self.in_channels).permute(0, 3, 1, 2)
        scales = widen(self.scales)
        return signs if self.learned else signs * scales.view(-1, 1, 1, 1)

    @property
    def scale(self) -> Tensor | None:  # type: ignore[override]
        """The learned scale, if there is one."""
        return widen(self.scales) if self.learned else None

    @property
    def plan_bytes(self) -> int:
        """Bytes held besides the buffers: filters sorted for images of the size that came last.

        About four times the bits; 0 where there are none. They are part of no file, give the same
        numbers, and are made anew after torch has written to ``bits`` (which it does not notice of
        ``.data`` or NumPy: pack the layer again after such writes).
        """
        return 0 if self._native is None else int(self._native.plan_bytes())

    def forward(self, x: Tensor) -> Tensor:
        y = self._run(x)
        return XnorConv2d.forward(self, x) if y is None else y

    def _counts(self) -> dict[str, int]:
        area = self.kernel_size[0] * self.kernel_size[1]
        bits = self.out_channels * area * bytes_for(self.in_channels)
        return {"bits": bits, "scales": self.out_channels, "bias": self.out_channels}

    def _connect(self, native: Any, places: Places, hooks: Hooks) -> Any:
        if self.binarizer not in CODES:
            return None
        return native.PackedConv(
            places,
            hooks,
            self.in_channels,
            self.out_channels,
            *(*self.kernel_size, *self.stride, *self.padding, *self.dilation),
            CODES[self.binarizer],
            pointer(self.bits),
            pointer(self.scales),
            self.learned,
            pointer(self.bias),
        )


def _take_over(packed: Any, layer: XnorLinear | XnorConv2d) -> None:
    """The options of a layer, and its scales and bias as buffers."""
    packed.binarizer = layer.binarizer
    packed.detach_scale = layer.detach_scale
    packed.learned = layer.scale is not None
    weight = layer.weight.detach().flatten(1)
    scale = mean_of(weight, 1).squeeze(1) if layer.scale is None else layer.scale.detach()
    packed.register_buffer("scales", scale.clone())
    packed.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())
