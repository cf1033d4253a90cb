"""ONNX Runtime as a peer: small graphs of one or a few layers, in float and in int8, on one thread.

onnx and onnxruntime come with the extra ``export``; :func:`missing` says what to show without them.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Call = Callable[[], Any]

OPSET, IR_VERSION = 21, 10
INT8_STEPS, UINT8_MIDDLE = 127, 128
WEIGHT_STEPS = 63
"""Half of them: processors without VNNI add two products up in 16 bits, which must not overflow."""


def missing() -> str:
    """Empty where ONNX Runtime can be used, else the words that stand in place of its figures."""
    if find_spec("onnx") is None or find_spec("onnxruntime") is None:
        return "not installed (in xncaps' folder: pip install -c constraints.txt '.[export]')"
    return ""


def runtime_version() -> str:
    """Of the installed onnxruntime, or empty."""
    try:
        return version("onnxruntime")
    except PackageNotFoundError:
        return ""


class Graph:
    """A graph under construction: nodes and constants, from the input ``x`` to the output ``y``."""

    def __init__(self) -> None:
        self.onnx: Any = import_module("onnx")
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def node(
        self, kind: str, inputs: Sequence[str], output: str | list[str], **options: Any
    ) -> str:
        """Add a node; returns the name of its first output."""
        outputs = [output] if isinstance(output, str) else output
        self.nodes.append(self.onnx.helper.make_node(kind, list(inputs), outputs, **options))
        return outputs[0]

    def constant(self, name: str, value: np.ndarray[Any, Any]) -> str:
        """Add a constant; returns its name."""
        self.constants.append(self.onnx.numpy_helper.from_array(value, name))
        return name

    def call(self, x: Tensor, shape: Sequence[int]) -> Call:
        """The function that runs the graph on x and gives y of this shape.

        It is called as users call it, with an array that is not copied, and gives a new one: as
        the packed layers take a tensor and give a new one.
        """
        runtime: Any = import_module("onnxruntime")
        helper, kind = self.onnx.helper, self.onnx.TensorProto.FLOAT
        graph = helper.make_graph(
            self.nodes,
            "bench",
            [helper.make_tensor_value_info("x", kind, list(x.shape))],
            [helper.make_tensor_value_info("y", kind, list(shape))],
            self.constants,
        )
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        options = runtime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = runtime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        given = {"x": x.numpy()}
        return lambda: session.run(None, given)[0]


def fc_stack(stack: nn.Sequential, x: Tensor) -> Call:
    """A stack of linear layers and ReLUs as Gemm and Relu nodes."""
    graph, name, rows = Graph(), "x", x.shape[0]
    layers = [layer for layer in stack if isinstance(layer, nn.Linear)]
    for number, layer in enumerate(layers):
        weight = graph.constant(f"w{number}", _array(layer.weight))
        bias = graph.constant(f"b{number}", _array(layer.bias))
        last = number == len(layers) - 1
        name = graph.node("Gemm", [name, weight, bias], "y" if last else f"h{number}", transB=1)
        if not last:
            name = graph.node("Relu", [name], f"r{number}")
    return graph.call(x, (rows, layers[-1].out_features))


def matmul(weight: Tensor, x: Tensor) -> Call:
    """``x @ weight.T`` in float."""
    graph = Graph()
    graph.node("MatMul", ["x", graph.constant("w", _array(weight.t()))], "y")
    return graph.call(x, (x.shape[0], weight.shape[0]))


def matmul_int8(weight: Tensor, x: Tensor, *, dynamic: bool) -> Call:
    """``x @ weight.T`` in int8: x is quantized by its own range (dynamic), or by a known one."""
    graph = Graph()
    _quantized(graph, weight.t(), x, "MatMul", dynamic=dynamic)
    return graph.call(x, (x.shape[0], weight.shape[0]))


def conv(weight: Tensor, x: Tensor) -> Call:
    """A convolution with padding that keeps the size, in float."""
    graph = Graph()
    graph.node("Conv", ["x", graph.constant("w", _array(weight))], "y", **_same(weight))
    return graph.call(x, (x.shape[0], weight.shape[0], *x.shape[2:]))


def conv_int8(weight: Tensor, x: Tensor, *, dynamic: bool) -> Call:
    """A convolution with padding that keeps the size, in int8."""
    graph = Graph()
    _quantized(graph, weight, x, "Conv", dynamic=dynamic, **_same(weight))
    return graph.call(x, (x.shape[0], weight.shape[0], *x.shape[2:]))


def _quantized(
    graph: Graph, weight: Tensor, x: Tensor, kind: str, *, dynamic: bool, **options: Any
) -> None:
    """y = kind(x, weight) by int8 weights and uint8 activations.

    Dynamic: DynamicQuantizeLinear and the Integer form of the node, whose int32 result is scaled.
    Static: quantize and dequantize around the float node, which ONNX Runtime fuses into one of
    int8; a Conv is fused only where its result is quantized too.
    """
    w_step = float(weight.detach().abs().max()) / WEIGHT_STEPS
    rounded = torch.round(weight.detach() / w_step).to(torch.int8)
    wq = graph.constant("wq", _array(rounded))
    wz = graph.constant("wz", np.array(0, np.int8))
    ws = graph.constant("ws", np.array(w_step, np.float32))
    if dynamic:
        graph.node("DynamicQuantizeLinear", ["x"], ["xq", "xs", "xz"])
        whole = graph.node(f"{kind}Integer", ["xq", wq, "xz", wz], "whole", **options)
        cast = graph.node("Cast", [whole], "cast", to=graph.onnx.TensorProto.FLOAT)
        graph.node("Mul", [cast, graph.node("Mul", ["xs", ws], "step")], "y")
        return
    zero = graph.constant("xz", np.array(UINT8_MIDDLE, np.uint8))
    x_step = np.array(float(x.abs().max()) / INT8_STEPS, np.float32)
    x_pair = [graph.constant("xs", x_step), zero]
    xd = graph.node(
        "DequantizeLinear", [graph.node("QuantizeLinear", ["x", *x_pair], "xq"), *x_pair], "xd"
    )
    wd = graph.node("DequantizeLinear", [wq, ws, wz], "wd")
    if kind == "MatMul":
        graph.node(kind, [xd, wd], "y", **options)
        return
    product = graph.node(kind, [xd, wd], "product", **options)
    # Random operands: five standard deviations of a sum of so many products.
    spread = 5 * float(x.std() * weight.detach().std()) * (weight[0].numel() ** 0.5)
    y_pair = [graph.constant("ys", np.array(spread / INT8_STEPS, np.float32)), zero]
    yq = graph.node("QuantizeLinear", [product, *y_pair], "yq")
    graph.node("DequantizeLinear", [yq, *y_pair], "y")


def _same(weight: Tensor) -> dict[str, Any]:
    height, width = weight.shape[2:]
    pads = [height // 2, width // 2] * 2
    return {"kernel_shape": [height, width], "pads": pads}


def _array(x: Tensor) -> np.ndarray[Any, Any]:
    return x.detach().contiguous().numpy()
