"""ONNX files of xncaps, run by ONNX Runtime."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xncaps.deploy.card import Card
from xncaps.deploy.model import Model
from xncaps.deploy.onnx_file import check_packages, read_metadata
from xncaps.errors import InputError, RunError

INPUT, OUTPUT = "images", "scores"
FATAL = 4
"""The least that ONNX Runtime may print: all else reaches the user as one line of ours."""


class OnnxModel(Model):
    """A network in ONNX Runtime.

    Args:
        card: what it is.
        path: its file.
        session: ONNX Runtime's; threads may share it.
        metadata: all that the file says of itself.
    """

    def __init__(self, card: Card, path: Path, session: Any, metadata: dict[str, str]) -> None:
        super().__init__(card, path, "onnx")
        self.session = session
        self.metadata = metadata

    def run(self, pixels: Tensor) -> Tensor:
        try:
            scores = run_session(self.session, pixels)
        except Exception as error:  # its exceptions have no base of their own
            raise RunError(f"{self.path}: ONNX Runtime failed: {one_line(error)}.") from None
        if scores.shape != (len(pixels), len(self.card.facts.classes)):
            raise RunError(f"{self.path}: gave scores of shape {tuple(scores.shape)}.")
        return scores


def open_onnx(path: Path, threads: int) -> OnnxModel:
    """The network of an ONNX file that xncaps wrote. Anything wrong with it is one line.

    Args:
        path: the file.
        threads: that ONNX Runtime uses.
    """
    check_packages("using an ONNX file", "onnxruntime")
    card, metadata, session = open_bytes(read_bytes(path), threads, path)
    return OnnxModel(card, path, session, metadata)


def read_bytes(path: Path) -> bytes:
    """What is in a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}.") from None


def open_bytes(content: bytes, threads: int, path: Path) -> tuple[Card, dict[str, str], Any]:
    """The card, the metadata and a session of a file's content; ``path`` is for messages."""
    try:
        metadata = read_metadata(content)
        card = Card.from_json(metadata["card"])
        session = make_session(content, threads)
        _check_ends(session, card)
    except InputError as error:
        reason = one_line(error)
        raise RunError(f"{path}: not an ONNX network that can be used: {reason}.") from None
    return card, metadata, session


def make_session(content: bytes, threads: int) -> Any:
    """ONNX Runtime on the CPU with the network of a file; InputError if it refuses it.

    It is given bytes, not a path: then it knows no folder to look for other files in.
    """
    runtime: Any = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = FATAL
    options.add_session_config_entry("session.load_model_format", "ONNX")  # not its own other one
    try:
        return runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions have no base of their own
        raise InputError(f"ONNX Runtime refuses it: {one_line(error)}") from None


def run_session(session: Any, pixels: Tensor) -> Tensor:
    """The scores of a batch. May be called by several threads at once."""
    given = {INPUT: pixels.detach().float().contiguous().numpy()}
    return torch.from_numpy(session.run([OUTPUT], given)[0])


def one_line(error: Exception) -> str:
    """What an error says, on one line that is not long."""
    return " ".join(str(error).split())[:300].rstrip(".")


def _check_ends(session: Any, card: Card) -> None:
    """Refuse a network that does not take and give what its card says."""
    side, channels = card.image_size, card.facts.shape[0]
    for what, ends, name, sizes in (
        ("takes", session.get_inputs(), INPUT, [channels, side, side]),
        ("gives", session.get_outputs(), OUTPUT, [len(card.facts.classes)]),
    ):
        got = [(end.name, end.type, list(end.shape[1:])) for end in ends]
        if got != [(name, "tensor(float)", sizes)] or isinstance(ends[0].shape[0], int):
            raise InputError(f"it {what} something else than its card says")
