"""int8 for the backbone of an ONNX file, by ONNX Runtime's own tools.

The head stays as it is: its signs are cheaper than bytes, and its routing needs the precision. So
do layers of signs in the backbone: a byte that stands for a range has no exact 1.
"""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from xncaps.deploy.card import Card
from xncaps.deploy.onnx_export import PACKAGES, SCOPES, check_standard, write_metadata
from xncaps.deploy.onnx_file import check_packages
from xncaps.deploy.onnx_model import INPUT, open_bytes, read_bytes
from xncaps.errors import InputError, RunError, message
from xncaps.system import write_whole

CALIBRATED, BATCH = 256, 32
"""The most images that ranges are measured on, and how many at once."""
LABEL = "backbone int8"
KINDS = ("Add", "Clip", "Conv", "Gemm", "MatMul", "MaxPool", "Relu")
"""The operators that are quantised."""


def quantise(
    path_fp32: str | os.PathLike[str],
    path_int8: str | os.PathLike[str],
    calibration: Tensor,
    card: Card,
) -> None:
    """Write a copy of an ONNX file whose backbone computes in int8.

    Weights are int8 with a scale for each channel; activations are uint8, with the ranges that the
    images give. Who loads the file sees ``quantised`` in its metadata.

    Args:
        path_fp32: a file of :func:`export_onnx`.
        path_int8: the file to write.
        calibration: uint8 images ``(n, channels, height, width)``, of which up to 256 are used.
        card: of the network.
    """
    check_packages("export to ONNX", *PACKAGES)
    if not len(calibration):
        raise InputError(message("export", "calibration", "hold images", "none"))
    path = Path(path_fp32)
    content = read_bytes(path)
    given, metadata, _ = open_bytes(content, 1, path)
    onnx: Any = import_module("onnx")
    model = onnx.load_from_string(content)
    opset = model.opset_import[0].version
    nodes = backbone_nodes(model)
    if not nodes:
        raise RunError(f"{path}: cannot be quantised: its backbone has no layer of floats.")
    preprocess = replace(card, normalised=given.normalised).preprocess
    with TemporaryDirectory(prefix="xncaps-") as folder, _quiet():
        pixels = preprocess(calibration[:CALIBRATED])
        try:
            made = _quantised(content, nodes, pixels, Path(folder))
        except Exception as error:  # the tool asserts and raises whatever it meets
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RunError(f"{path}: cannot be quantised: {reason[:200]}.") from None
    model = onnx.load_from_string(made)
    _drop_unused_domains(model)
    check_standard(model, opset)
    write_metadata(model, {**metadata, "quantised": LABEL})
    content = model.SerializeToString()
    open_bytes(content, 1, Path(path_int8))
    write_whole(Path(path_int8), content)


def backbone_nodes(model: Any) -> list[str]:
    """The names of the nodes to quantise: those of the backbone, but for its layers of signs."""
    inside = [node for node in model.graph.node if "backbone" in modules_of(node)]
    signs = {modules_of(node)[-1] for node in inside if node.op_type == "Greater"}
    return [
        node.name
        for node in inside
        if node.op_type in KINDS and not signs.intersection(modules_of(node))
    ]


def modules_of(node: Any) -> list[str]:
    """The modules that a node belongs to, from the outermost, as the exporter has noted them."""
    noted = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), "")
    return re.findall(r"'([^']*)'", noted)[:-1]  # the last is the node itself


def _quantised(content: bytes, nodes: list[str], pixels: Tensor, folder: Path) -> bytes:
    tools: Any = import_module("onnxruntime.quantization")
    before, after = folder / "before.onnx", folder / "after.onnx"
    before.write_bytes(content)
    tools.quantize_static(
        before,
        after,
        _Reader(pixels),
        quant_format=tools.QuantFormat.QDQ,
        per_channel=True,
        activation_type=tools.QuantType.QUInt8,
        weight_type=tools.QuantType.QInt8,
        # Seven bits: with eight, sums overflow on x86 processors without VNNI, and the accuracy
        # would depend on the machine.
        reduce_range=True,
        nodes_to_quantize=nodes,
    )
    return after.read_bytes()


class _Reader:
    """The images, as the tool asks for them: a batch at a time, then None."""

    def __init__(self, pixels: Tensor) -> None:
        self.batches = iter(torch.split(pixels, BATCH))

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self.batches, None)
        return None if batch is None else {INPUT: batch.numpy()}


def _drop_unused_domains(model: Any) -> None:
    """The tool names its own operators as needed, used or not."""
    used = {node.domain for node in model.graph.node}
    kept = [(entry.domain, entry.version) for entry in model.opset_import if entry.domain in used]
    del model.opset_import[:]
    for domain, version in kept:
        model.opset_import.add(domain=domain, version=version)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the tool's advice to fold norms first, which is done, said by the root logger."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
