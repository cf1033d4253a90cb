"""One process or many: what they share, and how they speak with one another.

Nothing is pickled: what travels between processes is tensors of numbers and of bytes.
"""

import atexit
import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies.ddp import DDPStrategy
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from xncaps.errors import InputError, RunError, message

try:
    import fcntl
except ImportError:  # pragma: no cover
    fcntl = None  # type: ignore[assignment]


AGREE_SECONDS = 300.0


class LockedError(RunError):
    """Another process works there."""


def start_fabric(precision: str) -> Fabric:
    """Join the processes that torchrun started, or be the only one."""
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # its greetings
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    if world > 1:
        _join(int(os.environ.get("RANK", "0")), world)
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


def _join(rank: int, world: int) -> None:
    """Form the group of all processes, on keys that no earlier attempt has used.

    torchrun keeps its store when it starts workers again, so the addresses of dead processes are
    still in it, and a group formed over them would wait forever.
    """
    if distributed.is_initialized():
        return
    store = _store(rank, world)
    fresh = PrefixStore(f"xncaps/{_agree(store, rank, world)}", store)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(backend, store=fresh, rank=rank, world_size=world)
    # Its threads may hold tensors: freed after Python has gone, they would take the process down.
    atexit.register(_leave)


def _leave() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


@lru_cache(maxsize=1)
def _store(rank: int, world: int) -> Store:
    """The store that all processes share; torchrun's own, which outlives them, if it is there."""
    store: Store = next(rendezvous("env://", rank, world))[0]
    return store


def _agree(store: Store, rank: int, world: int) -> str:
    """A word that the living processes share and dead ones never knew.

    Each process asks with a random question; the first one answers every question with its word
    until all have taken it. Questions that dead processes left behind are answered in vain.
    """
    deadline = time.monotonic() + AGREE_SECONDS
    if rank > 0:
        question = secrets.token_hex(8)
        store.set(f"xncaps/question/{rank}", question)
        while not store.check([f"xncaps/answer/{question}"]):
            _wait(deadline)
        word: str = store.get(f"xncaps/answer/{question}").decode()
        store.set(f"xncaps/taken/{word}/{rank}", "")
        return word
    word = secrets.token_hex(8)
    missing = set(range(1, world))
    while missing:
        for other in sorted(missing):
            if store.check([f"xncaps/question/{other}"]):
                question = store.get(f"xncaps/question/{other}").decode()
                store.set(f"xncaps/answer/{question}", word)
        missing = {other for other in missing if not store.check([f"xncaps/taken/{word}/{other}"])}
        if missing:
            _wait(deadline)
    return word


def _wait(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise RunError(f"train: not all processes came within {AGREE_SECONDS:.0f} seconds.")
    time.sleep(0.02)


def was_begun(out: Path) -> bool:
    """Whether this job began to write ``out`` before torchrun started its processes again."""
    return _under_torchrun() and _own_store().check([_begun(out)])


def note_begun(out: Path) -> None:
    """Note that this job begins to write ``out``, where torchrun's restarts will find it."""
    if _under_torchrun():
        _own_store().set(_begun(out), "")


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _own_store() -> Store:
    return _store(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def _begun(out: Path) -> str:
    return f"xncaps/begun/{out.absolute()}"


@contextmanager
def told_in_a_line(fabric: Fabric) -> Iterator[None]:
    """Say in one line what torch tells in many: a lost process, a network it cannot compile."""
    try:
        yield
    except RuntimeError as error:
        detail = str(error).strip().partition("\n")[0][:200]
        lost = isinstance(error, distributed.DistError) or "gloo" in str(error)
        if fabric.world_size > 1 and lost and not isinstance(error, RunError):
            raise RunError(f"train: another process was lost ({detail}).") from None
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            hint = "Train without --compile."
            raise RunError(f"train: torch.compile failed ({detail}). {hint}") from None
        raise


BUSY = (
    "other programs keep this machine busy; if training is slow, stop it and go on with the "
    "environment variable OMP_WAIT_POLICY=passive, or with --threads 1"
)


def busy_machine() -> bool:
    """Whether threads that wait actively for one another would wait for other programs instead."""
    if torch.get_num_threads() == 1 or os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive":
        return False
    cores = os.cpu_count() or 1
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > cores - torch.get_num_threads() + 0.5


EMULATED = "precision bf16: this processor has no instructions for it; 32 is many times as fast"


def emulates_bf16() -> bool:
    """Whether the processor works in bfloat16 without instructions for it."""
    has_them = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return has_them is not None and not has_them()


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
                raise LockedError(f"{path.parent}: another process is training there.") from None
            except OSError:
                pass  # a file system without locks
        yield
