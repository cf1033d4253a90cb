"""One process or many: what they share, and how they speak with one another.

Nothing is pickled: what travels between processes is tensors of numbers and of bytes.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, distributed

from xncaps.errors import InputError, RunError, message

try:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.ddp import DDPStrategy
except ImportError:  # pragma: no cover
    raise RunError(
        "training needs Lightning Fabric: pip install -c constraints.txt 'xncaps[train]'."
    ) from None

try:
    import fcntl
except ImportError:  # pragma: no cover
    fcntl = None  # type: ignore[assignment]


def start_fabric(precision: str) -> Fabric:
    """Join the processes that torchrun started, or be the only one."""
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # its greetings
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    fabric = Fabric(
        accelerator="auto",
        # A layer may have a weight that nothing reads, such as the scale of an agreement that one
        # iteration never makes: a static graph allows it.
        strategy=DDPStrategy(static_graph=True) if world > 1 else "auto",
        devices=local if world > 1 else 1,
        num_nodes=world // local,
        precision="bf16-mixed" if precision == "bf16" else "32-true",
    )
    fabric.launch()
    if precision == "bf16" and fabric.device.type == "cuda" and not torch.cuda.is_bf16_supported():
        name = torch.cuda.get_device_name(fabric.device)
        raise InputError(message("train", "precision", f"be 32 on {name}", "bf16"))
    return fabric


def add_up(fabric: Fabric, values: Sequence[float]) -> list[float]:
    """The sums of these numbers over all processes."""
    if fabric.world_size == 1:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64, device=fabric.device)
    distributed.all_reduce(total)
    return total.tolist()


def add_up_tensor(fabric: Fabric, part: Tensor) -> Tensor:
    """The sum of a tensor over all processes."""
    if fabric.world_size == 1:
        return part
    total = part.to(fabric.device)
    distributed.all_reduce(total)
    return total.cpu()


def share_bytes(fabric: Fabric, content: bytes | None) -> bytes | None:
    """What the first process holds, in all of them."""
    if fabric.world_size == 1:
        return content
    size = torch.tensor([-1 if content is None else len(content)], device=fabric.device)
    distributed.broadcast(size, src=0)
    if size.item() < 0:
        return None
    buffer = torch.empty(int(size), dtype=torch.uint8, device=fabric.device)
    if fabric.is_global_zero and content:
        buffer.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    distributed.broadcast(buffer, src=0)
    return buffer.cpu().numpy().tobytes()


def share_tensors(fabric: Fabric, tensors: Sequence[Tensor]) -> None:
    """Give all processes the first one's values, in place."""
    if fabric.world_size > 1:
        for tensor in tensors:
            distributed.broadcast(tensor, src=0)


def check_same(fabric: Fabric, what: str, digest: str) -> None:
    """Refuse to go on if the processes hold different things."""
    first = share_bytes(fabric, digest.encode())
    different = add_up(fabric, [float(first != digest.encode())])[0]
    if different:
        raise RunError(
            f"train: {what} must be the same in every process; got another in {different:.0f} of "
            f"{fabric.world_size}."
        )


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Hold a lock that the system gives back however the process ends."""
    with path.open("ab") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"{path.parent}: another process is training there.") from None
            except OSError:
                pass  # a file system without locks
        yield
