"""Networks as ONNX files: standard operators, any batch size, compared before they are written."""

import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xncaps.deploy.card import Card
from xncaps.deploy.onnx_check import Difference, compare
from xncaps.deploy.onnx_file import FORMAT, STANDARD, VERSION, check_packages
from xncaps.deploy.onnx_graph import Normalised, drawn
from xncaps.deploy.onnx_model import INPUT, OUTPUT, open_bytes, run_session
from xncaps.errors import InputError, RunError, check_size, message
from xncaps.kernels import disabled
from xncaps.networks import Classifier
from xncaps.system import write_whole

OPSET, LATEST_OPSET = 18, 23
"""The version of the operators, and the latest that can be asked for.

PyTorch writes 18 as it is and converts to all others; runtimes have known it since 2023.
"""
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
SCOPES = "pkg.torch.onnx.name_scopes"
"""The only metadata of nodes that are kept: the modules that a node belongs to."""
MOST_BYTES = 2**31 - 2**20
"""What one file can hold, but for the graph."""


def export_onnx(
    network: Classifier,
    card: Card,
    path: str | os.PathLike[str],
    *,
    images: Tensor,
    normalise: bool = False,
    opset: int = OPSET,
) -> Difference:
    """Write a network as one ONNX file, after ONNX Runtime has given the scores of PyTorch.

    The file takes ``images`` ``(batch, channels, image_size, image_size)`` in float32 and gives
    ``scores`` ``(batch, classes)``. Its metadata hold the card and the names of the classes. If the
    two runtimes differ there is one line why, no file, and an older one stays.

    Args:
        network: the network.
        card: what it is.
        path: the file.
        images: uint8 images of real data to compare on, ``(n, channels, height, width)``.
        normalise: take pixels from 0 to 255 and normalise them inside.
        opset: the version of the operators, from 18 to 23.
    """
    path = Path(path)
    check_size("export", "opset", opset)
    if not OPSET <= opset <= LATEST_OPSET:
        requirement = f"be from {OPSET} to {LATEST_OPSET}"
        raise InputError(message("export", "opset", requirement, opset))
    check_packages("export to ONNX", *PACKAGES)
    network = deepcopy(network).cpu().float().eval()
    card = replace(card.portable(), normalised=normalise)
    content = onnx_bytes(network, card, opset)
    try:
        _, _, session = open_bytes(content, torch.get_num_threads(), path)
        difference = compare(lambda pixels: run_session(session, pixels), network, card, images)
    except RunError as error:
        raise RunError(f"{path}: not written: {error}") from None
    write_whole(path, content)
    return difference


def onnx_bytes(network: Classifier, card: Card, opset: int) -> bytes:
    """The file's content, not yet compared."""
    size = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
    if size > MOST_BYTES:
        requirement = "be below 2 GB, which is what an ONNX file holds"
        raise InputError(message("export", "network", requirement, f"{size:,} bytes"))
    traced = drawn(network)
    if card.normalised:
        traced = Normalised(traced, card.facts.mean, card.facts.std).eval()
    model = _trace(traced, (2, network.in_channels, network.image_size, network.image_size), opset)
    check_standard(model, opset)
    _strip(model)
    classes = list(card.facts.classes)
    write_metadata(
        model,
        {
            "format": FORMAT,
            "version": VERSION,
            "card": card.to_json(),
            "classes": json.dumps(classes, ensure_ascii=False),
        },
    )
    content: bytes = model.SerializeToString()
    return content


def check_standard(model: Any, opset: int) -> None:
    """Refuse a graph with anything in it but operators of ONNX itself."""
    domains = {node.domain for node in model.graph.node}
    found = {entry.domain: entry.version for entry in model.opset_import}
    if model.functions or not domains <= {*STANDARD} or found != {"": opset}:
        strange = sorted(domains - {*STANDARD}) or [function.name for function in model.functions]
        names = ", ".join(strange) or f"operators {found}"
        raise RunError(f"export to ONNX gave more than standard operators of {opset}: {names}.")


def write_metadata(model: Any, values: dict[str, str]) -> None:
    """Give a model these metadata and no others."""
    del model.metadata_props[:]
    for key, value in values.items():
        model.metadata_props.add(key=key, value=value)


def _trace(traced: nn.Module, shape: tuple[int, ...], opset: int) -> Any:
    onnx_export: Any = import_module("torch.onnx").export
    dynamic = ({0: torch.export.Dim("batch")},)
    with disabled(), torch.no_grad(), _quiet():
        program = torch.export.export(
            traced, (torch.zeros(shape),), dynamic_shapes=dynamic, strict=False
        )
        written = onnx_export(
            program,
            dynamo=True,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=({0: "batch"},),  # the name of the axis
            opset_version=opset,
            verbose=False,
        )
    return written.model_proto


def _strip(model: Any) -> None:
    """Leave out what PyTorch notes for itself, such as the paths of source files."""
    model.doc_string = ""
    for node in model.graph.node:
        node.doc_string = ""
        kept = [(entry.key, entry.value) for entry in node.metadata_props if entry.key == SCOPES]
        del node.metadata_props[:]
        for key, value in kept:
            node.metadata_props.add(key=key, value=value)
    graph = model.graph
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.doc_string = ""
        del value.metadata_props[:]
    del graph.metadata_props[:]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says of operators and types that no network here has."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # Copying an exported program does this inside PyTorch itself.
            warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec", FutureWarning)
            yield
    finally:
        logger.setLevel(before)
