"""Networks as ONNX files: every head, options, batch sizes, what the file holds, and failures."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest
import torch
from torch import nn

import xncaps
from cards import card_for
from checks import refused
from pack_cases import create, live, shaken
from xncaps.data import load_data
from xncaps.deploy import onnx_export, onnx_file
from xncaps.deploy.card import Card
from xncaps.deploy.model import open_model
from xncaps.deploy.onnx_check import TOLERANCE, Difference, distance
from xncaps.deploy.onnx_export import LATEST_OPSET, OPSET, SCOPES, export_onnx
from xncaps.deploy.onnx_graph import Normalised
from xncaps.deploy.onnx_model import OnnxModel, open_onnx
from xncaps.errors import InputError, RunError

SMALL = {"width": 0.25}
CAPSULES = {**SMALL, "caps_in": 8}


ODD_NAMES = ("null", "eins", 'zw"ei', "drei drei", "vièr", "五", "6", "7", "8", "9")


class Case(NamedTuple):
    """A network, and how it is exported; a fresh one makes zero vectors of an image of zeros."""

    name: str
    head: str | None
    attach: str = "replace"
    options: dict[str, Any] = CAPSULES
    size: int = 28
    normalise: bool = False
    fresh: bool = False


CASES = {
    "linear": Case("convnet", "linear", options=SMALL),
    "fc": Case("convnet", "fc", "features", {**SMALL, "hidden": (16,)}, normalise=True),
    "dr": Case("convnet", "dr", fresh=True),
    "dr-5": Case("convnet", "dr", "append", {**CAPSULES, "iterations": 5, "routing_bias": True}),
    "xnodr": Case("convnet", "xnodr", normalise=True),
    "xnodr-midrange": Case(
        "convnet",
        "xnodr",
        "features",
        {**CAPSULES, "binarizer": "midrange", "scale": "learned", "iterations": 1},
    ),
    "xnidr-5": Case(
        "convnet", "xnidr", options={**CAPSULES, "binarizer": "approxsign", "iterations": 5}
    ),
    "xnidr-append": Case(
        "convnet", "xnidr", "append", {**CAPSULES, "scale": "learned", "routing_bias": True}
    ),
    "xnboth": Case("convnet", "xnboth", fresh=True),
    "xnboth-midrange": Case(
        "convnet", "xnboth", "append", {**CAPSULES, "binarizer": "midrange", "iterations": 2}
    ),
    "mobilenetv2": Case("mobilenetv2", "xnodr", options={"caps_in": 16}, size=32),
    "mirrored": Case("widenet", "xnidr", "features", {**CAPSULES, "mirror": True}),
    "capsnet": Case("capsnet", "xnidr", options={"caps_in": 36}),
    "xnornet": Case("xnornet", "linear", options={"width": 0.125}, size=16, normalise=True),
    "xnornet-learned": Case("xnornet", None, options={"width": 0.125, "scale": "learned"}, size=16),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return load_data("sample").test.images


def build(case: Case) -> tuple[Any, Card]:
    torch.manual_seed(3)
    network = create(case.name, case.head, case.attach, case.size, **case.options)
    if case.fresh:
        nn.init.zeros_(network.head.primary.projection.bias)
    else:
        shaken_head(live(network, case.size, images=64))
    return network.eval(), card_for(network, case.name, case.head, case.attach, case.options)


def shaken_head(network: Any) -> None:
    capsules = getattr(network.head, "capsules", None)
    if capsules is not None:
        shaken(capsules)


@pytest.fixture(scope="module")
def small(
    tmp_path_factory: pytest.TempPathFactory, images: torch.Tensor
) -> tuple[Any, Card, bytes]:
    """A network, its card and its file, for what happens after tracing."""
    network, card = build(Case("convnet", "xnodr", options={**CAPSULES, "iterations": 2}))
    facts = replace(card.facts, classes=ODD_NAMES, name="folder:/home/somebody/pictures")
    card = replace(card, facts=facts)
    path = tmp_path_factory.mktemp("small") / "small.onnx"
    export_onnx(network, card, path, images=images)
    return network, card, path.read_bytes()


def agree(model: OnnxModel, network: Any, card: Card, images: torch.Tensor) -> None:
    """That two runtimes give the same scores at several batch sizes, but on a threshold."""
    for count in (1, 2, 7, 33):
        part = images[-count:]
        with torch.no_grad():
            wanted = network(card.preprocess(part))
        gaps = distance(model.run(model.card.preprocess(part)), wanted)
        assert (gaps > TOLERANCE).sum() <= count // 20, gaps


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_onnx_runtime_gives_what_pytorch_gives(
    case: Case, tmp_path: Path, images: torch.Tensor
) -> None:
    network, card = build(case)
    path = tmp_path / "model.onnx"
    found = export_onnx(network, card, path, images=images, normalise=case.normalise)
    # Fifty layers of random weights: PyTorch itself is as far from its own float64.
    assert found.largest <= (5e-5 if case.name == "mobilenetv2" else 1e-5)
    assert found.compared + found.on_threshold == 64 + 1 + 7 + 1 + 5 + 8
    assert found.on_threshold <= 4
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    model = open_model(path)
    assert isinstance(model, OnnxModel)
    assert model.card.normalised is case.normalise
    agree(model, network, card, images)
    if case.fresh:
        zeros = model.run(torch.zeros(3, 1, case.size, case.size))
        assert torch.equal(zeros, torch.zeros(3, 10))
        assert model.scores(images[:3]).min() > 0
    check_file(onnx.load(path), card, case)


def check_file(model: Any, card: Card, case: Case) -> None:
    """What an engineer sees who opens the file."""
    onnx.checker.check_model(model, full_check=True)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", OPSET)]
    assert {node.domain for node in model.graph.node} == {""}
    assert not model.functions
    kinds = {node.op_type for node in model.graph.node}
    assert not kinds & {"Einsum", "Loop", "Scan", "If", "Shape"}
    ends = [*model.graph.input, *model.graph.output]
    assert [end.name for end in ends] == ["images", "scores"]
    sizes = [
        [dim.dim_param or dim.dim_value for dim in end.type.tensor_type.shape.dim] for end in ends
    ]
    assert sizes == [["batch", 1, case.size, case.size], ["batch", 10]]
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    assert metadata.keys() == {"format", "version", "card", "classes"}
    assert (metadata["format"], metadata["version"]) == ("xncaps-onnx", "1")
    assert json.loads(metadata["classes"]) == list(card.facts.classes)
    assert Card.from_json(metadata["card"]).network == json.loads(card.to_json())["network"]
    noted = {entry.key for node in model.graph.node for entry in node.metadata_props}
    assert noted == {SCOPES}
    text = model.SerializeToString()
    assert b"/src/" not in text
    assert b"site-packages" not in text
    check_weights(model)


def check_weights(model: Any) -> None:
    """Nothing is computed from weights alone, but for casts of signs, which are bytes."""
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if all(name in weights for name in node.input):
            assert node.op_type == "Cast"
            assert weights[node.input[0]].data_type == onnx.TensorProto.INT8
            assert set(weights[node.input[0]].raw_data) == {1, 255}
    norms = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    producers = {name: node.op_type for node in model.graph.node for name in node.output}
    assert all(producers[node.input[0]] not in ("Conv", "Gemm") for node in norms)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["xnidr", "xnboth"])
def test_a_resnet_too(head: str, tmp_path: Path, images: torch.Tensor) -> None:
    network, card = build(Case("resnet50", head, options={}, size=64))
    path = tmp_path / "model.onnx"
    found = export_onnx(network, card, path, images=images)
    assert found.on_threshold <= 16
    assert path.stat().st_size < 4.1 * sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(
    "opset", [LATEST_OPSET, *(pytest.param(k, marks=pytest.mark.slow) for k in range(19, 23))]
)
def test_another_opset(opset: int, tmp_path: Path, images: torch.Tensor) -> None:
    network, card = build(Case("convnet", "xnboth", options={**CAPSULES, "iterations": 2}))
    path = tmp_path / "model.onnx"
    export_onnx(network, card, path, images=images, opset=opset)
    assert [entry.version for entry in onnx.load(path).opset_import] == [opset]
    agree(open_onnx(path, 1), network, card, images)


@pytest.mark.parametrize(
    ("opset", "line"),
    [
        (17, "export: opset must be from 18 to 23; got 17."),
        (24, "export: opset must be from 18 to 23; got 24."),
        ("18", "export: opset must be a whole number; got '18'."),
    ],
)
def test_an_opset_that_cannot_be_written(opset: Any, line: str, tmp_path: Path) -> None:
    network, card = build(CASES["linear"])
    with pytest.raises(InputError) as caught:
        export_onnx(network, card, tmp_path / "x", images=torch.zeros(1), opset=opset)
    assert str(caught.value) == line
    assert not list(tmp_path.iterdir())


def test_a_packed_network_gives_the_same_graph(
    tmp_path: Path, images: torch.Tensor, small: tuple[Any, Card, bytes]
) -> None:
    network, card, content = small
    export_onnx(xncaps.pack(network), card, tmp_path / "x.onnx", images=images)
    ours, other = onnx.load(tmp_path / "x.onnx"), onnx.load_from_string(content)
    assert [n.op_type for n in ours.graph.node] == [n.op_type for n in other.graph.node]
    signs = [
        tensor.raw_data
        for model in (ours, other)
        for tensor in model.graph.initializer
        if tensor.name == "head.capsules.weight"
    ]
    assert signs[0] == signs[1]


def test_a_layer_that_is_watched_is_traced_as_it_is(tmp_path: Path, images: torch.Tensor) -> None:
    network, card = build(Case("convnet", "xnodr", options={**CAPSULES, "iterations": 2}))
    network.head.capsules.routing.register_forward_hook(lambda *given: None)
    assert export_onnx(network, card, tmp_path / "x.onnx", images=images).largest <= 1e-5
    assert "Einsum" in {node.op_type for node in onnx.load(tmp_path / "x.onnx").graph.node}


def test_the_network_is_left_as_it_is(
    tmp_path: Path, images: torch.Tensor, small: tuple[Any, Card, bytes]
) -> None:
    network, card, content = small
    before = {name: value.clone() for name, value in network.state_dict().items()}
    network.train()
    export_onnx(network, card, tmp_path / "x.onnx", images=images)
    assert network.training
    network.eval()
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert (tmp_path / "x.onnx").read_bytes() == content  # the same at every time


def test_class_names_and_data_without_paths(tmp_path: Path, small: tuple[Any, Card, bytes]) -> None:
    (tmp_path / "x.onnx").write_bytes(small[2])
    model = open_onnx(tmp_path / "x.onnx", 1)
    assert model.card.facts.classes == ODD_NAMES
    assert json.loads(model.metadata["classes"]) == list(ODD_NAMES)
    assert (model.card.facts.name, model.card.data) == ("folder", {})
    assert b"somebody" not in small[2]


@pytest.fixture
def traced(small: tuple[Any, Card, bytes], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Card]:
    """The network and card of ``small``, whose content need not be traced again."""
    monkeypatch.setattr(onnx_export, "onnx_bytes", lambda *given: small[2])
    return small[:2]


@pytest.mark.parametrize("old", [b"", b"old"])
def test_a_difference_leaves_no_file_and_an_old_one(
    old: bytes,
    tmp_path: Path,
    images: torch.Tensor,
    traced: tuple[Any, Card],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "model.onnx"
    if old:
        path.write_bytes(old)
    real = onnx_export.run_session
    monkeypatch.setattr(onnx_export, "run_session", lambda *given: real(*given) + 1e-3)
    with pytest.raises(RunError) as caught:
        export_onnx(*traced, path, images=images)
    assert str(caught.value) == (
        f"{path}: not written: ONNX Runtime and PyTorch differ by 1.0e-03 on real image 1 of 64 "
        "(up to 1e-04 is allowed)."
    )
    assert [file.read_bytes() for file in tmp_path.iterdir()] == ([old] if old else [])


def test_another_network_is_seen_as_different(
    tmp_path: Path, images: torch.Tensor, traced: tuple[Any, Card]
) -> None:
    """One more round of routing: the sort of mistake that the comparison is there for."""
    network, card = traced
    network.head.capsules.routing.iterations = 3
    try:
        line = refused(RunError, export_onnx, network, card, tmp_path / "x", images=images)
    finally:
        network.head.capsules.routing.iterations = 2
    assert "ONNX Runtime and PyTorch differ by" in line
    assert not list(tmp_path.iterdir())


def test_ctrl_c_leaves_nothing(
    tmp_path: Path,
    images: torch.Tensor,
    traced: tuple[Any, Card],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*given: object) -> Difference:
        raise KeyboardInterrupt

    monkeypatch.setattr(onnx_export, "compare", stop)
    with pytest.raises(KeyboardInterrupt):
        export_onnx(*traced, tmp_path / "model.onnx", images=images)
    assert not list(tmp_path.iterdir())


def test_operators_of_others_are_refused(small: tuple[Any, Card, bytes]) -> None:
    model = onnx.load_from_string(small[2])
    onnx_export.check_standard(model, OPSET)
    model.graph.node[3].domain = "com.example"
    line = refused(RunError, onnx_export.check_standard, model, OPSET)
    assert line == "export to ONNX gave more than standard operators of 18: com.example."


def test_a_network_that_no_file_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    network, card = build(CASES["linear"])
    monkeypatch.setattr(onnx_export, "MOST_BYTES", 1000)
    line = refused(InputError, export_onnx, network, card, tmp_path / "x", images=torch.zeros(1))
    assert line.startswith("export: network must be below 2 GB, which is what an ONNX file holds;")


@pytest.mark.parametrize("shape", [(0, 1, 28, 28), (3, 2, 28, 28), (28, 28)])
def test_images_to_compare_on(
    shape: tuple[int, ...], tmp_path: Path, traced: tuple[Any, Card]
) -> None:
    images = torch.zeros(shape, dtype=torch.uint8)
    line = refused(InputError, export_onnx, *traced, tmp_path / "x", images=images)
    wanted = "export: images must be uint8 images (n, 1, height, width); got "
    assert line == f"{wanted}{shape}."


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    network, card = build(CASES["linear"])
    where = "in the folder of xncaps, pip install -c constraints.txt '.[export]'."
    monkeypatch.setattr(onnx_file, "find_spec", lambda name: None)
    line = refused(RunError, export_onnx, network, card, tmp_path / "x", images=torch.zeros(1))
    assert line == f"export to ONNX needs onnx, onnxscript, onnxruntime: {where}"
    line = refused(RunError, open_onnx, tmp_path / "x", 1)
    assert line == f"using an ONNX file needs onnxruntime: {where}"


def test_using_a_file_needs_no_onnx(tmp_path: Path, small: tuple[Any, Card, bytes]) -> None:
    (tmp_path / "x.onnx").write_bytes(small[2])
    code = (
        "import sys, pathlib, xncaps.deploy.onnx_export, xncaps.deploy.onnx_int8;"
        "loaded = {'onnxruntime', 'onnx', 'onnxscript'} & {*sys.modules};"
        "from xncaps.deploy.onnx_model import open_onnx;"
        f"open_onnx(pathlib.Path({str(tmp_path / 'x.onnx')!r}), 1);"
        "print(loaded, 'onnx' in sys.modules, 'onnxscript' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set() False False\n"


@pytest.mark.parametrize("std", [(0.3,), (0.0,)], ids=["varies", "constant"])
def test_the_normalisation_inside_is_that_of_the_data(
    std: tuple[float], images: torch.Tensor
) -> None:
    network, card = build(CASES["linear"])
    facts = replace(card.facts, std=std)
    inside = Normalised(network, facts.mean, facts.std)
    pixels = images[:3].float()
    with torch.no_grad():
        wanted = network(facts.preprocess()(images[:3]))
        torch.testing.assert_close(inside(pixels), wanted)
