"""Packed networks as files: one safetensors file with bits, numbers and the card.

The header's metadata hold ``format``, ``version``, ``dtype``, ``card`` and ``digest``: the SHA-256
of the whole file with the digest's own 64 characters as zeros. Nothing in a file is run; nothing of
it is believed before the digest is right and the tensors are those of the card's network.
"""

import hashlib
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from xncaps.deploy.card import Card
from xncaps.deploy.pack import SCALE_TYPES, pack
from xncaps.errors import InputError, RunError, look_up, message
from xncaps.networks import Classifier
from xncaps.system import write_whole

FORMAT, VERSION = "xncaps-packed", "1"
ZEROS = "0" * 64
MOST_HEADER = 2**20
NAMES = {torch.float32: "F32", torch.float16: "F16", torch.uint8: "U8", torch.int64: "I64"}


def write_packed(
    path: str | os.PathLike[str], network: Classifier, card: Card, dtype: str = "float32"
) -> Classifier:
    """Write a network as a packed file; returns the packed network.

    Args:
        path: the file.
        network: the network, packed or not.
        card: what it is.
        dtype: ``float32``, or ``float16`` for half the bytes of all that is not bits.
    """
    number = look_up("export", "dtype", dtype, SCALE_TYPES)
    packed = pack(network, scales=dtype)
    tensors = {}
    for name, tensor in packed.state_dict().items():
        written = tensor.to(number) if tensor.is_floating_point() else tensor
        if not torch.equal(written.isfinite(), tensor.isfinite()):
            requirement = f"be float32 for numbers above 65504, as in {name!r}"
            raise InputError(message("export", "dtype", requirement, repr(dtype)))
        tensors[name] = written.contiguous()
    write_whole(Path(path), _file(tensors, card, dtype))
    return packed  # type: ignore[return-value]


def read_packed(path: str | os.PathLike[str]) -> tuple[Card, Classifier]:
    """The card and the network of a packed file. Anything wrong with it is one line."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}.") from None
    try:
        metadata = check_file(content)
        card = Card.from_json(metadata["card"])
        skeleton = _skeleton(card, metadata["dtype"])
        if skeleton.scores != card.scores:
            raise InputError(f"its network gives {skeleton.scores}, not {card.scores}")
        _fill(skeleton, load_tensors(content), SCALE_TYPES[metadata["dtype"]])
    except (InputError, SafetensorError, RuntimeError, OverflowError, TypeError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise RunError(f"{path}: not a packed network that can be used: {reason}.") from None
    return card, skeleton


def check_file(content: bytes) -> dict[str, str]:
    """The metadata of a packed file, if it is whole and unchanged."""
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or size > min(len(content) - 8, MOST_HEADER):
        raise InputError("it is damaged, or no safetensors file")
    header = content[8 : 8 + size]
    try:
        values = json.loads(header)
        metadata = values["__metadata__"]
        given = {name: metadata[name] for name in ("format", "version", "dtype", "card", "digest")}
    except (KeyError, RecursionError, TypeError, ValueError):
        hint = "it is damaged, or not written by xncaps export --format packed"
        raise InputError(hint) from None
    if not all(isinstance(value, str) for value in given.values()):
        raise InputError("its header is damaged")
    place = header.find(given["digest"].encode())
    if not re.fullmatch("[0-9a-f]{64}", given["digest"]) or place < 0:
        raise InputError("its digest is damaged")
    if _digest(content, 8 + place) != given["digest"]:
        raise InputError("it is damaged: its digest is another")
    if (given["format"], given["version"]) != (FORMAT, VERSION):
        raise InputError(
            f"it is of format {given['format']!r}, version {given['version']!r}; "
            f"this xncaps reads {FORMAT!r}, version {VERSION!r}"
        )
    return given


def _digest(content: bytes, place: int) -> str:
    digest = hashlib.sha256(content[:place])
    digest.update(ZEROS.encode())
    digest.update(memoryview(content)[place + len(ZEROS) :])
    return digest.hexdigest()


def _file(tensors: dict[str, Tensor], card: Card, dtype: str) -> bytes:
    """A safetensors file whose bytes are the same whenever its content is."""
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "digest": ZEROS,
        "dtype": dtype,
        "card": card.to_json(),
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    parts, end = [], 0
    # The widest numbers first: then each starts at a multiple of its size.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        parts.append(tensor.numpy().tobytes())
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    content = b"".join([len(text).to_bytes(8, "little"), text, *parts])
    place = content.index(f'"digest":"{ZEROS}"'.encode()) + len('"digest":"')
    digest = _digest(content, place).encode()
    return content[:place] + digest + content[place + len(ZEROS) :]


class _NoRandomNumbers(TorchFunctionMode):
    """Leaves tensors without numbers as they are; torch would load its compiler to fill them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func in (Tensor.normal_, Tensor.uniform_)
            or getattr(func, "__module__", "") == "torch.nn.init"
        ):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _skeleton(card: Card, dtype: str) -> Classifier:
    """The packed network of a card, without numbers and so without memory."""
    look_up("card", "dtype", dtype, SCALE_TYPES)
    with warnings.catch_warnings(), torch.device("meta"), _NoRandomNumbers():
        warnings.simplefilter("ignore")  # nothing is trained
        return pack(card.build(), scales=dtype)  # type: ignore[return-value]


def _fill(skeleton: nn.Module, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    wanted = skeleton.state_dict()
    if wanted.keys() != tensors.keys():
        name = sorted(wanted.keys() ^ tensors.keys())[0]
        raise InputError(f"its tensors are not those of its network ({name!r})")
    for name, tensor in tensors.items():
        shape, own = wanted[name].shape, wanted[name].dtype
        kind = dtype if own.is_floating_point else own
        if (tensor.shape, tensor.dtype) != (shape, kind):
            raise InputError(
                f"{name!r} is not the tensor of its network: {tuple(tensor.shape)}, "
                f"{tensor.dtype} in place of {tuple(shape)}, {kind}"
            )
    state = {name: tensor.to(wanted[name].dtype) for name, tensor in tensors.items()}
    skeleton.load_state_dict(state, assign=True)
    skeleton.requires_grad_(False)
