"""Checkpoints: written whole or not at all, and never believed unchecked.

A checkpoint is two files: ``<step>.safetensors`` with all tensors, and ``<step>.json`` with the
rest and the digests of both. The JSON file is written last: without it there is no checkpoint.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from xncaps.errors import RunError
from xncaps.system import write_whole

KEEP = 2


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to go on: tensors by name, and plain values."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, then remove all but the newest two."""
    folder.mkdir(parents=True, exist_ok=True)
    content = save({name: tensor.contiguous() for name, tensor in checkpoint.tensors.items()})
    state = {**checkpoint.state, "tensors_sha256": hashlib.sha256(content).hexdigest()}
    path = folder / f"{checkpoint.state['step']:09d}.json"
    write_whole(path.with_suffix(".safetensors"), content)
    write_whole(path, _encode(state))
    _tidy(folder, int(path.stem))


def _tidy(folder: Path, step: int) -> None:
    """Keep the newest two checkpoints up to this step.

    Later ones were found damaged when the run went on: they are set aside, not deleted. What a
    killed process left half-written goes.
    """
    kept = [path.stem for path in _steps(folder) if int(path.stem) <= step][-KEEP:]
    for path in sorted(folder.iterdir()):
        found = re.fullmatch(r"\.?(\d{9,})\.(json|safetensors)(\.tmp)?", path.name)
        if found is None or found[1] in kept:
            continue
        if int(found[1]) > step and not path.name.startswith("."):
            path.replace(path.with_name(path.name + ".damaged"))
        else:
            path.unlink()


def read_checkpoint(
    folder: Path, say: Callable[[str], None] | None = None
) -> tuple[bytes, bytes] | None:
    """The newest good checkpoint as (JSON, safetensors) bytes, None if there is none at all.

    A damaged one is passed over, and ``say`` is told; if all are damaged, that is an error.
    """
    problems = []
    for path in reversed(_steps(folder)):
        try:
            pair = path.read_bytes(), path.with_suffix(".safetensors").read_bytes()
            parse_checkpoint(*pair)
        except (RunError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            problems.append(f"{path}: {reason}")
            continue
        if say:
            for problem in problems:
                say(f"damaged checkpoint passed over: {problem}; going on from step {path.stem}")
        return pair
    if problems:
        raise RunError(
            f"{folder}: no checkpoint is whole ({'; '.join(problems)}). "
            "Restore one, or train anew with another --out."
        )
    return None


def parse_checkpoint(text: bytes, content: bytes) -> Checkpoint:
    """The checkpoint in these bytes; anything that is not exactly what was written is refused."""
    state = _decode(text)
    if hashlib.sha256(content).hexdigest() != state.pop("tensors_sha256", None):
        raise RunError("its tensors are not the ones that were written")
    try:
        return Checkpoint(load(content), state)
    except (SafetensorError, ValueError) as error:
        raise RunError(f"its tensors cannot be read ({error})") from None


def _encode(state: Mapping[str, Any]) -> bytes:
    body = json.dumps(state, sort_keys=True)
    whole = {"sha256": hashlib.sha256(body.encode()).hexdigest(), "state": state}
    return (json.dumps(whole, indent=1, sort_keys=True) + "\n").encode()


def _decode(text: bytes) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(text)["state"]
        written = _encode(state) == text
    except (ValueError, KeyError, TypeError, RecursionError):
        written = False
    if not written:
        raise RunError("its state is not the one that was written")
    return state


def _steps(folder: Path) -> list[Path]:
    """The JSON files of the checkpoints, oldest first."""
    if not folder.exists():
        return []
    if not folder.is_dir():
        raise RunError(f"{folder}: must be a folder; got a file. Move it away.")
    return sorted(path for path in folder.iterdir() if re.fullmatch(r"\d{9,}\.json", path.name))
