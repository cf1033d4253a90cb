"""Primary capsules for inference: as before, in fewer steps."""

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from xncaps.deploy.packed import does_as
from xncaps.kernels import native as native_module
from xncaps.primary import PrimaryCaps


class PackedPrimaryCaps(PrimaryCaps):
    """A :class:`PrimaryCaps` for inference: its capsules are cut and squashed in one native call.

    For one image the layer's own steps take longer than what they compute. Whatever the native
    module does not take, a wrong shape among it, goes to the layer's own ``forward``.

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
        projection = self._modules.get("projection")
        weight = None if projection is None else projection._parameters.get("weight")
        if native is None or not native.are_plain(features, weight):
            return super().forward(features)
        pooled, sizes = features, features.shape
        if len(sizes) == 4 and sizes[2:].numel() > 0:
            pooled = features.flatten(1) if sizes[2:].numel() == 1 else features.mean(dim=(2, 3))
        if pooled.dim() != 2 or sizes[1] != self.in_features:
            return super().forward(features)
        if projection is not None:
            pooled = projection(pooled)
        capsules: Tensor | None = native.squash(pooled, self.caps, self.dim)
        return super().forward(features) if capsules is None else capsules
