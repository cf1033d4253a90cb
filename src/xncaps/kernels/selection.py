"""Which native kernel is used, and for which tensors."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from xncaps.errors import InputError, message

VARIABLE = "XNCAPS_KERNEL"
# One that returns a true value wants to see every operation: a function transform such as vmap, a
# tracer, a mode that counts or fakes operations.
_MODES = (
    torch._C._are_functorch_transforms_active,
    torch._C._is_tracing,
    torch._C._len_torch_dispatch_stack,
)


def _empty_strided() -> object:
    """What makes a tensor without the dispatcher, for compiled networks; None if not as expected.

    It is no public part of torch, so it is tried.
    """
    make = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cpu", None)
    try:
        tensor = make((3, 2), (2, 1), torch.float32)  # type: ignore[misc]
    except (TypeError, RuntimeError):  # there is none, or it wants something else
        return None
    same = tensor.shape == (3, 2) and tensor.is_contiguous() and tensor.dtype is torch.float32
    return make if same and tensor.is_cpu else None


# Ways around torch's own functions, for tell_of_torch: small calls consist of little else.
QUICK = (getattr(Tensor, "__dlpack_c_exchange_api__", None), _empty_strided())


class _State:
    """What is chosen for this process.

    Attributes:
        native: the extension module, if it was built.
        problem: why the kernel that the environment names cannot be used; said at the first use.
        is_enabled: whether layers may use kernels at all.
        has_warned: whether a missing module has been told of.
    """

    def __init__(self) -> None:
        self.native: ModuleType | None
        try:
            self.native = import_module("xncaps.kernels._native")
        except ImportError:
            self.native = None
        self.problem: str | None = None
        self.is_enabled = True
        self.has_warned = False
        if self.native is None:
            return
        tell_of_torch(self.native, *QUICK)
        wanted = os.environ.get(VARIABLE)
        if wanted and not self.native.select(wanted):
            self.problem = _unknown(VARIABLE, wanted, self.native)

    def enable(self, on: bool) -> None:
        self.is_enabled = on
        if self.native is not None:
            self.native.enable(on)


def tell_of_torch(module: ModuleType, exchange: object, empty_strided: object) -> None:
    """Tell the extension module where torch keeps what it asks for.

    Args:
        module: the extension module.
        exchange: the capsule through which tensors are looked at in no time; None where torch has
            none yet (before 2.10), and they are asked for their attributes.
        empty_strided: what makes a tensor in two thirds of the time; None where torch has it
            elsewhere, and tensors are asked for new ones.
    """
    module.set_torch(
        (Tensor, nn.Parameter),
        torch.float32,
        torch.strided,
        torch.is_grad_enabled,
        torch.get_num_threads,
        _MODES,
        vars(forward_ad),
        exchange,
        empty_strided,
    )


def _unknown(what: str, name: str, module: ModuleType) -> str:
    requirement = f"be one that this machine runs: {', '.join(module.available())}"
    return message("kernels", what, requirement, repr(name))


def available() -> tuple[str, ...]:
    """Names of the kernels that this machine can run, from the slowest; none if not built."""
    return () if _state.native is None else tuple(_state.native.available())


def native() -> ModuleType | None:
    """The extension module that packed modules call directly, or None where it must not be used."""
    if not _state.is_enabled or _state.native is None:
        return None
    if _state.problem is not None:
        raise InputError(_state.problem)
    return _state.native


def selected() -> str:
    """Name of the kernel in use; ``torch`` if there is none, and the reference runs."""
    module = native()
    return "torch" if module is None else str(module.selected())


@contextmanager
def use(name: str) -> Iterator[None]:
    """Use this kernel within a block, in all threads.

    Args:
        name: one of :func:`available`.
    """
    module = _state.native
    if module is None:
        hint = "Install xncaps where a C++ compiler is."
        raise InputError(message("kernels", "name", "name a kernel that was built", name, hint))
    before = module.selected()
    if not module.select(name):
        raise InputError(_unknown("name", name, module))
    try:
        yield
    finally:
        module.select(before)


@contextmanager
def disabled() -> Iterator[None]:
    """Run the readable reference within a block, in all threads."""
    before = _state.is_enabled
    _state.enable(False)
    try:
        yield
    finally:
        _state.enable(before)


def serves(*tensors: Tensor | None) -> bool:
    """Whether the native ops can take these tensors: float32, on the CPU, dense, and plain.

    Function transforms (``vmap``, ``jvp``), tracing, autocast, dispatch modes (which count or fake
    operations) and subclasses of tensors get the reference, which all of them understand.
    """
    if not _state.is_enabled or torch.is_autocast_enabled("cpu"):
        return False
    is_compiling = torch.compiler.is_compiling()
    if is_compiling and not all(tensor is None or _is_float(tensor) for tensor in tensors):
        return False
    if _state.native is None:
        _warn_once()
        return False
    if not is_compiling and not _state.native.are_plain(*tensors):
        return False
    if _state.problem is not None:
        raise InputError(_state.problem)
    return True


def _is_float(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_cpu


def _warn_once() -> bool:
    """Say that the reference runs; where layers are compiled, while that is done."""
    if not _state.has_warned:
        _state.has_warned = True
        warnings.warn(
            "xncaps was installed without its native kernels (they need a C++ compiler): it runs "
            "its reference, which gives the same results, slowly. Install a compiler, then run in "
            "the folder of xncaps: pip install --force-reinstall --no-deps .",
            RuntimeWarning,
            stacklevel=3,
        )
    return True


# What torch.compiler.assume_constant_result does, which loads all of the compiler.
_warn_once._dynamo_marked_constant = True  # type: ignore[attr-defined]


_state = _State()
