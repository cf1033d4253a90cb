"""ONNX files from elsewhere: damaged, foreign, or made to do harm. Each is one line."""

import json
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from cards import card_for
from checks import refused
from pack_cases import create
from xncaps.data import load_data
from xncaps.deploy.model import open_model
from xncaps.deploy.onnx_export import export_onnx
from xncaps.deploy.onnx_model import open_onnx
from xncaps.errors import RunError

Change = Callable[[Any], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    torch.manual_seed(0)
    options = {"width": 0.125}
    network = create("convnet", "linear", "replace", 28, **options).eval()
    card = card_for(network, "convnet", "linear", "replace", options)
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    export_onnx(network, card, path, images=load_data("sample").test.images)
    return path.read_bytes()


def reason(path: Path, content: bytes) -> str:
    """Why a file with this content is refused."""
    path.write_bytes(content)
    line = refused(RunError, open_onnx, path, 1)
    start = f"{path}: not an ONNX network that can be used: "
    assert line.startswith(start)
    return line.removeprefix(start)


def changed(content: bytes, change: Change) -> bytes:
    model = onnx.load_from_string(content)
    change(model)
    return bytes(model.SerializeToString())


def test_a_whole_file_opens(tmp_path: Path, whole: bytes) -> None:
    (tmp_path / "MODEL.ONNX").write_bytes(whole)
    model = open_model(tmp_path / "MODEL.ONNX", threads=2)
    assert (model.kind, model.path.name) == ("onnx", "MODEL.ONNX")
    assert model.scores(torch.zeros(0, 1, 28, 28, dtype=torch.uint8)).shape == (0, 10)


def test_threads_share_a_model(tmp_path: Path, whole: bytes) -> None:
    (tmp_path / "x.onnx").write_bytes(whole)
    model = open_onnx(tmp_path / "x.onnx", 2)
    parts = torch.split(load_data("sample").test.images[:400], 50)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(model.scores, parts))
    for part, scores in zip(parts, found, strict=True):
        torch.testing.assert_close(scores, model.scores(part))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it was not written by xncaps export --format onnx, or is damaged."),
        (b"\0" * 100, "it is damaged, or no ONNX file."),
        (b"not an onnx file at all", "it is damaged, or no ONNX file."),
        (b"\x08\x00\x00\x00ORTM" + b"\0" * 64, "it is damaged, or no ONNX file."),
        (b"\xff" * 40, "it is damaged, or no ONNX file."),
        (b"\x72\x05\x0a\x03\xff\xfe\xfd", "it is damaged, or no ONNX file."),
    ],
)
def test_not_onnx(content: bytes, why: str, tmp_path: Path) -> None:
    assert reason(tmp_path / "x.onnx", content) == why


def test_cut_anywhere(tmp_path: Path, whole: bytes) -> None:
    places = random.Random(0).sample(range(len(whole)), 60)
    for place in (*places, len(whole) - 1):
        reason(tmp_path / "x.onnx", whole[:place])


def test_damaged_anywhere(tmp_path: Path, whole: bytes) -> None:
    """A changed byte may go unseen in a weight; it is never a traceback."""
    chance, path = random.Random(0), tmp_path / "x.onnx"
    image = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    lines: list[str] = []
    for _ in range(150):
        content = bytearray(whole)
        content[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        try:
            open_onnx(path, 1).scores(image)
        except RunError as error:
            lines.append(str(error))
    assert lines
    assert not any("\n" in line for line in lines)


def external(model: Any) -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="secret.bin")


def external_unsaid(model: Any) -> None:
    model.graph.initializer[0].external_data.add(key="location", value="*/_ORT_MEM_ADDR_/*")


def external_constant(model: Any) -> None:
    tensor = TensorProto(dims=[4], data_type=TensorProto.FLOAT, data_location=1)
    tensor.external_data.add(key="location", value="../secret.bin")
    model.graph.node.append(helper.make_node("Constant", [], ["c"], value=tensor))


def external_sparse(model: Any) -> None:
    tensor = TensorProto(dims=[4], data_type=TensorProto.FLOAT, data_location=1)
    model.graph.sparse_initializer.add(values=tensor)


def custom_domain(model: Any) -> None:
    model.graph.node.append(helper.make_node("Gelu", ["images"], ["g"], domain="com.microsoft"))


def custom_opset(model: Any) -> None:
    model.opset_import.add(domain="com.example", version=1)


def custom_function(model: Any) -> None:
    model.functions.add(name="f", domain="")


def control_flow(model: Any) -> None:
    branch = helper.make_graph([], "g", [], [])
    model.graph.node.append(
        helper.make_node("If", ["c"], ["d"], then_branch=branch, else_branch=branch)
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (external, "its weights lie in other files, which are not opened."),
        (external_unsaid, "its weights lie in other files, which are not opened."),
        (external_constant, "its weights lie in other files, which are not opened."),
        (external_sparse, "its weights lie in other files, which are not opened."),
        (custom_domain, "it brings operators that are not ONNX's own ('com.microsoft')."),
        (custom_opset, "it brings operators that are not ONNX's own ('com.example')."),
        (custom_function, "it brings operators that are not ONNX's own."),
        (control_flow, "it holds control flow."),
    ],
)
def test_made_to_do_harm(
    change: Change,
    why: str,
    tmp_path: Path,
    whole: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where ONNX Runtime would look for other files, there is one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.bin").write_bytes(b"\0" * 100_000)
    assert reason(tmp_path / "x.onnx", changed(whole, change)) == why


def metadata(**values: str | None) -> Change:
    """A model with other metadata; None leaves an entry out."""

    def change(model: Any) -> None:
        found = {entry.key: entry.value for entry in model.metadata_props}
        del model.metadata_props[:]
        for key, value in {**found, **values}.items():
            if value is not None:
                model.metadata_props.add(key=key, value=value)

    return change


def twice(model: Any) -> None:
    model.metadata_props.add(key="card", value="{}")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (metadata(card=None), "it was not written by xncaps export --format onnx, or is damaged."),
        (metadata(format="x"), "it is of format 'x', version '1'; this xncaps reads .*"),
        (metadata(version="2"), "it is of format 'xncaps-onnx', version '2'; this xncaps .*"),
        (metadata(version=None), "it is of format 'xncaps-onnx', version None; this xncaps .*"),
        (twice, "its metadata have 'card' twice."),
        (metadata(card="{"), "card: text must hold what xncaps writes; got .*"),
        (metadata(card="[" * 100_000), "card: text must hold what xncaps writes; got .*"),
        (metadata(card="[]"), "card: text must hold what xncaps writes; got .*"),
    ],
)
def test_metadata(change: Change, why: str, tmp_path: Path, whole: bytes) -> None:
    assert re.fullmatch(why, reason(tmp_path / "x.onnx", changed(whole, change)))


def other_card(**changes: Any) -> Change:
    """A model whose card says something else of the network or its data."""

    def change(model: Any) -> None:
        entry = next(entry for entry in model.metadata_props if entry.key == "card")
        card = json.loads(entry.value)
        for name, value in changes.items():
            place, _, key = name.partition("_")
            card[place][key] = value
        entry.value = json.dumps(card)

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (other_card(network_image_size=32), "it takes something else than its card says."),
        (
            other_card(network_num_classes=3, facts_classes=["a", "b", "c"]),
            "it gives something else than its card says.",
        ),
        (other_card(network_image_size=10**9), "card: images must be at most 1024 px wide; .*"),
        (other_card(facts_std=["x"]), "card: text must hold what xncaps writes; .*"),
    ],
)
def test_a_card_of_another_network(change: Change, why: str, tmp_path: Path, whole: bytes) -> None:
    assert re.fullmatch(why, reason(tmp_path / "x.onnx", changed(whole, change)))


def test_what_onnx_runtime_refuses(tmp_path: Path, whole: bytes, capfd: Any) -> None:
    def change(model: Any) -> None:
        model.graph.node[0].op_type = "NoSuchOperator"

    why = reason(tmp_path / "x.onnx", changed(whole, change))
    assert why.startswith("ONNX Runtime refuses it: ")
    assert capfd.readouterr() == ("", "")


def too_many_rows(model: Any) -> None:
    model.graph.node.append(helper.make_node("Concat", ["before", "before"], ["scores"], axis=0))


def too_few_numbers(model: Any) -> None:
    model.graph.initializer.append(helper.make_tensor("three", TensorProto.INT64, [1], [3]))
    model.graph.node.extend(
        [
            helper.make_node("Shape", ["before"], ["shape"]),
            helper.make_node("Mul", ["shape", "three"], ["larger"]),
            helper.make_node("Reshape", ["before", "larger"], ["scores"]),
        ]
    )


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (too_many_rows, "gave scores of shape \\(4, 10\\)."),
        (too_few_numbers, "ONNX Runtime failed: .*"),
    ],
)
def test_a_network_that_fails_when_it_runs(
    make: Change, why: str, tmp_path: Path, whole: bytes, capfd: Any
) -> None:
    def change(model: Any) -> None:
        model.graph.node[-1].output[0] = "before"
        make(model)

    path = tmp_path / "x.onnx"
    path.write_bytes(changed(whole, change))
    model = open_onnx(path, 1)
    images = torch.zeros(2, 1, 28, 28, dtype=torch.uint8)
    line = refused(RunError, model.scores, images)
    assert re.fullmatch(f"{re.escape(str(path))}: {why}", line)
    assert capfd.readouterr() == ("", "")


def test_no_file(tmp_path: Path) -> None:
    line = refused(RunError, open_onnx, tmp_path / "x.onnx", 1)
    assert line == f"{tmp_path / 'x.onnx'}: cannot be read: No such file or directory."
    line = refused(RunError, open_onnx, tmp_path, 1)
    assert line == f"{tmp_path}: cannot be read: Is a directory."
