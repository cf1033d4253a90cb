"""What an ONNX file says of itself, read from its bytes before ONNX Runtime sees them.

ONNX is protocol buffers: a message is a row of fields, each with a number and a value. Only the few
messages that matter are looked into: weights are stepped over. A file is refused if it names other
files (external data, which ONNX Runtime would open), brings operators of its own, or holds control
flow: networks of xncaps have nothing of that.
"""

from collections.abc import Iterator
from importlib.util import find_spec

from xncaps.errors import InputError, RunError

FORMAT, VERSION = "xncaps-onnx", "1"
STANDARD = ("", "ai.onnx")
"""The names of the domain of ONNX's own operators."""
CUSTOM = "it brings operators that are not ONNX's own"

Field = tuple[int, int, memoryview]
"""A number, and a value: a whole number, or bytes and then 0."""

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
# Numbers of the fields in ONNX's messages.
MODEL_GRAPH, MODEL_OPSET, MODEL_METADATA, MODEL_TRAINING, MODEL_FUNCTION = 7, 8, 14, 20, 25
GRAPH_NODE, GRAPH_TENSOR, GRAPH_SPARSE = 1, 5, 15
NODE_ATTRIBUTE, NODE_DOMAIN = 5, 7
ATTRIBUTE_TENSORS, ATTRIBUTE_GRAPHS, ATTRIBUTE_SPARSE = (5, 10), (6, 11), (22, 23)
TENSOR_EXTERNAL, TENSOR_LOCATION = 13, 14


def check_packages(what: str, *names: str) -> None:
    """Refuse to go on without these packages."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise RunError(
            f"{what} needs {', '.join(missing)}: in the folder of xncaps, "
            "pip install -c constraints.txt '.[export]'."
        )


def read_metadata(content: bytes) -> dict[str, str]:
    """The metadata of an ONNX file of xncaps that holds nothing but a plain graph."""
    try:
        metadata = _check_model(memoryview(content))
    except (IndexError, UnicodeDecodeError):
        raise InputError("it is damaged, or no ONNX file") from None
    if "card" not in metadata or "format" not in metadata:
        raise InputError("it was not written by xncaps export --format onnx, or is damaged")
    given = metadata["format"], metadata.get("version")
    if given != (FORMAT, VERSION):
        raise InputError(
            f"it is of format {given[0]!r}, version {given[1]!r}; "
            f"this xncaps reads {FORMAT!r}, version {VERSION!r}"
        )
    return metadata


def _check_model(model: memoryview) -> dict[str, str]:
    metadata: dict[str, str] = {}
    for number, _, value in fields(model):
        if number == MODEL_GRAPH:
            _check_graph(value)
        elif number == MODEL_OPSET:
            _check_domain(value, 1)
        elif number == MODEL_METADATA:
            entry = {number: _text(text) for number, _, text in fields(value)}
            if entry.get(1, "") in metadata:
                raise InputError(f"its metadata have {entry.get(1, '')!r} twice")
            metadata[entry.get(1, "")] = entry.get(2, "")
        elif number in (MODEL_TRAINING, MODEL_FUNCTION):
            raise InputError(CUSTOM)
    return metadata


def _check_graph(graph: memoryview) -> None:
    for number, _, value in fields(graph):
        if number == GRAPH_NODE:
            _check_node(value)
        elif number == GRAPH_TENSOR:
            _check_tensor(value)
        elif number == GRAPH_SPARSE:
            _check_sparse(value)


def _check_node(node: memoryview) -> None:
    _check_domain(node, NODE_DOMAIN)
    for number, _, attribute in fields(node):
        if number != NODE_ATTRIBUTE:
            continue
        for kind, _, value in fields(attribute):
            if kind in ATTRIBUTE_GRAPHS:
                raise InputError("it holds control flow")
            if kind in ATTRIBUTE_TENSORS:
                _check_tensor(value)
            elif kind in ATTRIBUTE_SPARSE:
                _check_sparse(value)


def _check_domain(owner: memoryview, place: int) -> None:
    for number, _, value in fields(owner):
        if number == place and _text(value) not in STANDARD:
            raise InputError(f"{CUSTOM} ({_text(value)[:60]!r})")


def _check_sparse(sparse: memoryview) -> None:
    for number, _, value in fields(sparse):
        if number in (1, 2):
            _check_tensor(value)


def _check_tensor(tensor: memoryview) -> None:
    for number, whole, _ in fields(tensor):
        if number == TENSOR_EXTERNAL or (number == TENSOR_LOCATION and whole):
            raise InputError("its weights lie in other files, which are not opened")


def fields(message: memoryview) -> Iterator[Field]:
    """The fields of a message; IndexError if they do not fill it exactly."""
    place, end = 0, len(message)
    while place < end:
        tag, place = _varint(message, place)
        number, kind = tag >> 3, tag & 7
        if not 0 < number < 2**29:  # as the protocol has it
            raise IndexError
        whole, size = 0, 0
        if kind == VARINT:
            whole, place = _varint(message, place)
        elif kind == BYTES:
            size, place = _varint(message, place)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise IndexError
        if size > end - place:
            raise IndexError
        yield number, whole, message[place : place + size]
        place += size


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    """A whole number, seven bits a byte from the lowest on, and where it ends."""
    value = 0
    for count in range(10):
        byte = message[place + count]
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, place + count + 1
    raise IndexError


def _text(value: memoryview) -> str:
    return str(value, "utf-8")
