"""The backbone of an ONNX file in int8: what is quantised, and what it costs."""

import tempfile
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

import xncaps
from cards import card_for
from checks import refused
from pack_cases import create, live
from xncaps.data import Splits, load_data
from xncaps.deploy import onnx_int8
from xncaps.deploy.card import Card
from xncaps.deploy.onnx_export import OPSET, export_onnx
from xncaps.deploy.onnx_int8 import quantise
from xncaps.deploy.onnx_model import OnnxModel, open_onnx
from xncaps.errors import InputError, RunError

OPTIONS = {"width": 0.25, "caps_in": 8}
STEPS = 256
MOST_LOST = 0.02
"""How much of its accuracy a network may lose with its backbone in int8."""


@pytest.fixture(scope="module")
def digits() -> Splits:
    return load_data("sample")


def learned(head: str, data: Splits) -> tuple[Any, Card]:
    """A network that has seen a thousand digits a few times."""
    torch.manual_seed(0)
    network = create("convnet", head, "replace", 28, **OPTIONS)
    card = card_for(network, "convnet", head, "replace", OPTIONS)
    pixels, labels = card.preprocess(data.train.images[:1024]), data.train.labels[:1024]
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    slower = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, STEPS)
    for step in range(STEPS):
        part = slice(step % 16 * 64, step % 16 * 64 + 64)
        loss = xncaps.margin_loss(network.train()(pixels[part]), labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        slower.step()
    return network.eval(), card


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "normalised"])
def files(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, digits: Splits
) -> tuple[Path, Path, Card]:
    folder = tmp_path_factory.mktemp("int8")
    network, card = learned("xnboth" if request.param else "xnidr", digits)
    path, other = folder / "model.onnx", folder / "model.int8.onnx"
    export_onnx(network, card, path, images=digits.test.images, normalise=request.param)
    quantise(path, other, digits.train.images[:256], card)
    assert sorted(file.name for file in folder.iterdir()) == [other.name, path.name]
    return path, other, card


def accuracy(model: OnnxModel, data: Splits) -> float:
    seen = model.scores(data.test.images).argmax(dim=1)
    return (seen == data.test.labels).float().mean().item()


def test_accuracy_stays(files: tuple[Path, Path, Card], digits: Splits) -> None:
    before, after = (accuracy(open_onnx(path, 1), digits) for path in files[:2])
    assert before > 0.8
    assert after > before - MOST_LOST


def test_the_file_says_what_it_is(files: tuple[Path, Path, Card]) -> None:
    before, after = (open_onnx(path, 1) for path in files[:2])
    assert after.metadata == {**before.metadata, "quantised": "backbone int8"}
    assert after.card == before.card
    model = onnx.load(files[1])
    onnx.checker.check_model(model)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", OPSET)]


def test_the_backbone_is_quantised_and_the_head_is_not(files: tuple[Path, Path, Card]) -> None:
    model = onnx.load(files[1])
    makers = {name: node.op_type for node in model.graph.node for name in node.output}
    convolutions = [node for node in model.graph.node if node.op_type == "Conv"]
    assert len(convolutions) == 6
    for node in convolutions:
        assert [makers[name] for name in node.input] == ["DequantizeLinear"] * 3
    in_head = [node for node in model.graph.node if "head" in onnx_int8.modules_of(node)]
    kinds = {node.op_type for node in in_head}
    assert {"Gemm", "MatMul", "Softmax", "ReduceL2"} <= kinds
    assert "QuantizeLinear" not in kinds
    quantised = {name for name, kind in makers.items() if kind == "DequantizeLinear"}
    fed = [node for node in in_head if quantised.intersection(node.input)]
    assert [node.op_type for node in fed] == ["ReduceMean"]  # it takes the backbone's maps
    plain = onnx.load(files[0])
    assert not any("Linear" in node.op_type for node in plain.graph.node)
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    names = [
        name
        for name in weights
        if name.startswith("backbone.") and name.endswith("weight_quantized")
    ]
    assert len(names) == 6
    for name in names:
        assert weights[name].data_type == onnx.TensorProto.INT8
        scale = weights[name.replace("_quantized", "_scale")]
        assert list(scale.dims) == [weights[name].dims[0]]  # one for each channel


def test_the_file_is_smaller(files: tuple[Path, Path, Card]) -> None:
    before, after = (onnx.load(path) for path in files[:2])

    def held(model: Any) -> int:
        return sum(len(tensor.raw_data) for tensor in model.graph.initializer)

    saved = sum(
        3 * len(tensor.raw_data) // 4
        for tensor in before.graph.initializer
        if tensor.name.startswith("backbone.") and tensor.name.endswith("weight")
    )
    assert held(after) < held(before) - 0.8 * saved


def test_layers_of_signs_stay_as_they_are(tmp_path: Path, digits: Splits) -> None:
    options = {"width": 0.125}
    network = live(create("xnornet", "linear", "replace", 16, **options), 16, 32).eval()
    card = card_for(network, "xnornet", "linear", "replace", options)
    path, other = tmp_path / "a.onnx", tmp_path / "b.onnx"
    export_onnx(network, card, path, images=digits.test.images)
    quantise(path, other, digits.train.images[:64], card)
    model = onnx.load(other)
    makers = {name: node.op_type for node in model.graph.node for name in node.output}
    quantised = [
        node.input[1]
        for node in model.graph.node
        if node.op_type in ("Conv", "MatMul") and makers.get(node.input[1]) == "DequantizeLinear"
    ]
    assert quantised == ["backbone.0.weight_DequantizeLinear_Output"]  # the stem is of floats


def test_failures_leave_nothing(
    tmp_path: Path,
    files: tuple[Path, Path, Card],
    digits: Splits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, _, card = files
    images = digits.train.images[:32]
    target, scratch = tmp_path / "out", tmp_path / "scratch"
    target.mkdir()
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    def stop(*given: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(onnx_int8, "_quantised", stop)
    with pytest.raises(KeyboardInterrupt):
        quantise(path, target / "x.onnx", images, card)
    monkeypatch.setattr(onnx_int8, "backbone_nodes", lambda model: [])
    line = refused(RunError, quantise, path, target / "x.onnx", images, card)
    assert line == f"{path}: cannot be quantised: its backbone has no layer of floats."
    line = refused(InputError, quantise, path, target / "x.onnx", images[:0], card)
    assert line == "export: calibration must hold images; got none."
    (tmp_path / "bad.onnx").write_bytes(b"bad")
    refused(RunError, quantise, tmp_path / "bad.onnx", target / "x.onnx", images, card)
    assert not [*target.iterdir(), *scratch.iterdir()]


def test_nothing_is_said_and_no_scratch_is_left(
    tmp_path: Path,
    files: tuple[Path, Path, Card],
    digits: Splits,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path, other, card = files
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    quantise(path, other, digits.train.images[:256], card)
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
