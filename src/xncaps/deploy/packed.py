"""The packed layers: as the layers they are made of, with signs in bits, for inference.

A packed layer hands the pointers of its buffers to a native kernel. Whatever that does not take
(another device or dtype, gradients, a network that is being traced, a wrong shape) goes to the
layer's own ``forward``, on the weights that the bits and scales stand for.
"""

from abc import ABC, abstractmethod
from copy import deepcopy
from inspect import isfunction
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from xncaps.binarizers import BINARIZERS, mean_scale
from xncaps.deploy.layout import bytes_for, from_lanes, pack_bits, to_lanes, unpack_bits
from xncaps.errors import check_size
from xncaps.kernels import native as native_module
from xncaps.kernels.library import CODES, padded, pointer
from xncaps.layers import CapsuleLinear
from xncaps.routing import DotAgreement, DynamicRouting, XnorAgreement

FREE = ("__init__", "reset_parameters", "extra_repr")
"""What a subclass of a layer may have of its own and is packed all the same."""

Places = list[tuple[dict[str, Any], str, Any, int]]
"""Dictionaries, keys, what is there, and the address of its numbers if it is a tensor, else 0."""

Hooks = list[dict[int, Any]]
HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
"""What nn.Module calls its dictionaries of them."""


class Packed(nn.Module, ABC):
    """What packed layers share: the native object behind them, and when it may be called."""

    _scale_dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    _native: Any = None  # not part of the state
    _own_forward: Any = None  # the forward that does nothing but run the native object

    @classmethod
    @abstractmethod
    def takes(cls, layer: nn.Module) -> bool:
        """Whether a layer does only what this class knows."""

    @staticmethod
    @abstractmethod
    def size_of(layer: Any) -> int:
        """Bytes that a layer takes once it is packed, its scales in float32."""

    @property
    @abstractmethod
    def params(self) -> int:
        """How many parameters the layer had."""

    @abstractmethod
    def _counts(self) -> dict[str, int]:
        """How many numbers each buffer has."""

    def _needed(self) -> tuple[str, ...]:
        """Buffers without which there is no layer."""
        return ("bits", "scales")

    @abstractmethod
    def _connect(self, native: Any, places: Places, hooks: Hooks) -> Any:
        """A native object on the buffers, that is used while all places hold what they hold.

        Called with the module and a tensor it gives the output, or None where there is more to do:
        hooks, another forward.
        """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "_connect" in vars(cls):
            cls._own_forward = vars(cls)["forward"]

    def __call__(self, *args: Any, **options: Any) -> Any:
        """As that of any module, which takes a microsecond by itself: where it would do nothing but
        run the native object, that is called straight away."""
        if not is_dynamo_compiling() and not options and len(args) == 1:
            native = self._native
            if native is not None:
                y = native(self, args[0])
                if y is not None:
                    return y
        return super().__call__(*args, **options)

    def _run(self, x: Tensor, *more: Any) -> Tensor | None:
        """The output of the native object; None where it cannot be used."""
        if is_dynamo_compiling():
            return None
        native = self._native
        y: Tensor | None = None if native is None else native.run(x, *more)
        if y is None and (native is None or not native.is_current()):
            self._native = native = self._reconnect(x)
            y = None if native is None else native.run(x, *more)
        return y

    def _reconnect(self, x: Tensor) -> Any:
        module = native_module()
        if module is None or not module.are_plain(x) or not self._is_readable():
            return None
        # functional_call, for one, puts other tensors in the place of the buffers.
        places: Places = [
            (part._buffers, name, buffer, pointer(buffer))
            for part in self.modules()
            for name, buffer in part._buffers.items()
        ]
        hooks = [vars(self)[f"_{name}"] for name in HOOKS]
        hooks += [vars(nn.modules.module)[f"_global_{name}"] for name in HOOKS]
        return self._connect(module, places, hooks)

    def _is_readable(self) -> bool:
        """Whether the buffers are still what the kernels read."""
        numbers, counts = (torch.uint8, torch.float32), self._counts()
        if any(self._buffers.get(name) is None for name in self._needed()):
            return False
        return all(
            buffer.is_cpu
            and buffer.is_contiguous()
            and buffer.numel() == counts[name]
            and buffer.dtype in (self._scale_dtypes if name == "scales" else numbers)
            for name, buffer in self.named_buffers()
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._native = None
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        self._native = None
        super()._load_from_state_dict(*args, **options)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_native"}


class PackedCapsules(Packed, CapsuleLinear):
    """A :class:`CapsuleLinear` for inference.

    Its buffers are laned by caps_in (``layout.py``): of a binarized projection ``bits``, rows
    ``(caps_out, dim_out, bytes of dim_in)``, and ``scales``, rows ``(caps_out, dim_out)``; of a
    float one ``floats``, rows ``(caps_out, dim_out, dim_in)``.

    Args:
        layer: the layer to pack.
        scales: float32 or float16, how the scales of a binarized projection are held.

    Shape:
        As :class:`CapsuleLinear`.

    >>> from xncaps.layers import XnODR
    >>> packed = PackedCapsules(XnODR(128, 8, 10, 16))
    >>> packed(torch.randn(2, 128, 8)).shape, packed.bits.shape
    (torch.Size([2, 10, 16]), torch.Size([20480]))
    """

    _scale_dtypes = (torch.float32, torch.float16)
    floats: Tensor
    bits: Tensor
    scales: Tensor

    def __init__(self, layer: CapsuleLinear, scales: torch.dtype = torch.float32) -> None:
        nn.Module.__init__(self)
        self.caps_in, self.dim_in = layer.caps_in, layer.dim_in
        self.caps_out, self.dim_out = layer.caps_out, layer.dim_out
        self.binarizer = layer.binarizer
        self.detach_scale = layer.detach_scale
        self.learned = layer.scale is not None
        weight = layer.weight.detach()
        if self.binarizer is None:
            self.register_buffer("floats", to_lanes(weight.transpose(2, 3)))
        else:
            signs = signs_of(weight, self.binarizer, 2)
            scale = mean_of(weight, 2) if layer.scale is None else layer.scale.detach()
            self.register_buffer("bits", to_lanes(pack_bits(signs.transpose(2, 3))))
            self.register_buffer("scales", to_lanes(scale.squeeze(2)).to(scales))
        self.routing = deepcopy(layer.routing)
        for part in self.routing.modules():
            for name, parameter in list(part._parameters.items()):
                if parameter is not None:
                    delattr(part, name)
                    part.register_buffer(name, parameter.detach().clone())

    @classmethod
    def takes(cls, layer: nn.Module) -> bool:
        return (
            isinstance(layer, CapsuleLinear)
            and does_as(layer, CapsuleLinear)
            and type(layer.routing) is DynamicRouting
            and type(layer.routing.agreement) in (DotAgreement, XnorAgreement)
        )

    @staticmethod
    def size_of(layer: CapsuleLinear) -> int:
        rest = 4 * sum(parameter.numel() for parameter in layer.routing.parameters())
        if layer.binarizer is None:
            return 4 * layer.weight.numel() + rest
        return layer.caps_in * layer.caps_out * layer.dim_out * (bytes_for(layer.dim_in) + 4) + rest

    @property
    def params(self) -> int:
        columns = self.caps_in * self.caps_out * self.dim_out
        rest = sum(buffer.numel() for buffer in self.routing.buffers())
        return columns * (self.dim_in + self.learned) + rest

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """What the buffers stand for: signs times their scale, if that is not learned."""
        rows = (self.caps_in, self.caps_out, self.dim_out)
        if self.binarizer is None:
            return from_lanes(self.floats, (*rows, self.dim_in)).transpose(2, 3)
        packed = from_lanes(self.bits, (*rows, bytes_for(self.dim_in)))
        signs = unpack_bits(packed, self.dim_in).transpose(2, 3)
        return signs if self.learned else signs * self._scale()

    @property
    def scale(self) -> Tensor | None:  # type: ignore[override]
        """The learned scale ``(caps_in, caps_out, 1, dim_out)``, if there is one."""
        return self._scale() if self.learned else None

    def _scale(self) -> Tensor:
        rows = (self.caps_in, self.caps_out, 1, self.dim_out)
        return widen(from_lanes(self.scales, rows))

    def forward(self, x: Tensor, return_couplings: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        if return_couplings:
            return self._with_couplings(x)
        v = self._run(x, 0)
        return CapsuleLinear.forward(self, x) if v is None else v

    def _with_couplings(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        rounds = self.routing.iterations - 1  # in the first the couplings are all the same
        batch = len(x) if isinstance(x, Tensor) and x.dim() == 3 else 0
        plain: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults
        couplings = torch.empty(batch, rounds, self.caps_out, padded(self.caps_in), **plain)
        v = self._run(x, couplings.data_ptr() if rounds else 0)
        if v is None:
            return CapsuleLinear.forward(self, x, return_couplings=True)
        if not rounds:
            return v, torch.full((batch, self.caps_in, self.caps_out), 1 / self.caps_out, **plain)
        return v, couplings[:, -1, :, : self.caps_in].transpose(1, 2).contiguous()

    def _counts(self) -> dict[str, int]:
        columns = self.caps_in * self.caps_out * self.dim_out
        return {
            "floats": columns * self.dim_in,
            "bits": columns * bytes_for(self.dim_in),
            "scales": columns,
            "routing.bias": self.caps_out * self.dim_out,
            "routing.agreement.scale": self.caps_out,
        }

    def _needed(self) -> tuple[str, ...]:
        return ("floats",) if self.binarizer is None else ("bits", "scales")

    def _connect(self, native: Any, places: Places, hooks: Hooks) -> Any:
        check_size(type(self).__name__, "iterations", self.routing.iterations)
        agreement = self.routing.agreement
        how = agreement.binarizer if isinstance(agreement, XnorAgreement) else None
        if self.binarizer not in CODES or how not in CODES:
            return None
        scales = self._buffers.get("scales")
        places.append((vars(self.routing), "iterations", self.routing.iterations, 0))
        return native.PackedCapsules(
            places,
            hooks,
            self.caps_in,
            self.dim_in,
            self.caps_out,
            self.dim_out,
            self.routing.iterations,
            CODES[self.binarizer],
            CODES[how],
            pointer(self._buffers.get("floats")),
            pointer(self._buffers.get("bits")),
            pointer(scales),
            scales is not None and scales.dtype is torch.float16,
            self.learned,
            pointer(self.routing.bias),
            pointer(agreement.scale if isinstance(agreement, XnorAgreement) else None),
        )

    def extra_repr(self) -> str:
        scales = self._buffers.get("scales")
        held = "" if scales is None else f", scales={str(scales.dtype).removeprefix('torch.')}"
        return f"{super().extra_repr()}{held}"


def does_as(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a layer is of a kind and has left its methods as they are."""
    return isinstance(layer, kind) and all(
        name not in layer.__dict__ and getattr(type(layer), name) is method
        for name, method in vars(kind).items()
        if isfunction(method) and name not in FREE
    )


def is_called_plainly(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling a module is to run the forward of this very class, and nothing else."""
    own = vars(module)
    return (
        type(module) is kind
        and "forward" not in own
        and "_compiled_call_impl" not in own
        and not any(own[f"_{name}"] for name in HOOKS)
        and not any(vars(nn.modules.module)[f"_global_{name}"] for name in HOOKS)
    )


def signs_of(weight: Tensor, binarizer: str, dim: int | tuple[int, ...]) -> Tensor:
    """The signs of a weight; if that has no numbers, the weight, lest torch load its compiler."""
    return weight if weight.is_meta else BINARIZERS[binarizer](weight, dim)


def mean_of(weight: Tensor, dim: int) -> Tensor:
    """The mean scale of a weight; if that has no numbers, neither has its scale."""
    if weight.is_meta:
        return weight.new_empty([1 if k == dim else n for k, n in enumerate(weight.shape)])
    return mean_scale(weight, dim)


def widen(scales: Tensor) -> Tensor:
    """Scales in the precision they are worked with: float32, unless they are in float64."""
    return scales.to(torch.promote_types(scales.dtype, torch.float32))
