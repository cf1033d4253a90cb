"""Primary capsules for inference: as before, in fewer steps."""

from typing import Any

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from xncaps.deploy.packed import does_as, is_called_plainly
from xncaps.kernels import native as native_module
from xncaps.primary import PrimaryCaps


class PackedPrimaryCaps(PrimaryCaps):
    """A :class:`PrimaryCaps` for inference: its capsules are cut and squashed in one native call.

    For one image the projection is in that call, too: the steps by themselves take longer than what
    they compute. Whatever the native module does not take, a wrong shape among it, goes to the
    layer's own ``forward``.

    Args:
        layer: the layer, whose projection is used.

    Shape:
        As :class:`PrimaryCaps`.

    >>> import torch
    >>> PackedPrimaryCaps(PrimaryCaps(320, 128, 8))(torch.randn(2, 320, 7, 7)).shape
    torch.Size([2, 128, 8])
    """

    def __init__(self, layer: PrimaryCaps) -> None:
        nn.Module.__init__(self)
        self.in_features, self.caps, self.dim = layer.in_features, layer.caps, layer.dim
        self.projection = layer.projection

    @classmethod
    def takes(cls, layer: nn.Module) -> bool:
        """Whether a layer does only what this class knows."""
        return does_as(layer, PrimaryCaps)

    def forward(self, features: Tensor) -> Tensor:
        native = None if is_dynamo_compiling() else native_module()
        capsules = None if native is None else self._run(native, features)
        return super().forward(features) if capsules is None else capsules

    def _run(self, native: Any, features: Tensor) -> Tensor | None:
        """The capsules, if the native module takes all this."""
        projection: Any = self._modules.get("projection")
        weight = None if projection is None else projection._parameters.get("weight")
        if not native.are_plain(features, weight):
            return None
        pooled, sizes = features, features.shape
        if len(sizes) == 4:
            pixels = sizes[2] * sizes[3]
            if pixels > 0:  # what has none is refused in the layer's words
                pooled = features.flatten(1) if pixels == 1 else features.mean(dim=(2, 3))
        if pooled.dim() != 2 or sizes[1] != self.in_features:
            return None
        capsules: Tensor | None = None
        if weight is not None and sizes[0] == 1 and is_called_plainly(projection, nn.Linear):
            bias = projection._parameters["bias"]
            capsules = native.primary(pooled, weight, bias, self.caps, self.dim)
        if capsules is None:
            pooled = pooled if projection is None else projection(pooled)
            capsules = native.squash(pooled, self.caps, self.dim)
        return capsules
