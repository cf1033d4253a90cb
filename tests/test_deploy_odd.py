"""What people do with exported networks that nobody thought of."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import xncaps
from cards import card_for
from runs import command, run, small, start
from xncaps.cli.main import main
from xncaps.deploy.packed_file import write_packed
from xncaps.errors import RunError


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("odd")
    assert run(command(small(epochs=1), "--out", base / "run"), base / "log") == 0
    return base / "run"


@pytest.fixture(scope="module")
def packed(trained: Path) -> Path:
    path = trained.parent / "x.safetensors"
    assert main(["export", str(trained), "--format", "packed", "--out", str(path)]) == 0
    return path


def call(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    status = main([str(arg) for arg in args])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def digit() -> np.ndarray:
    return xncaps.data.load_data("sample").test.images[0, 0].numpy()


def test_a_link_stays_a_link(capsys, trained, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "target")
    assert call(capsys, "export", trained, "--format", "packed", "--out", tmp_path / "link")[0] == 0
    assert (tmp_path / "link").is_symlink()
    assert xncaps.load(tmp_path / "folder" / "target").scores == "lengths"
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["target"]


def test_a_killed_export_leaves_a_whole_file_or_none(trained, tmp_path):
    out = tmp_path / "x.safetensors"
    args = ["export", str(trained), "--format", "packed", "--out", str(out)]
    for step in range(40):
        process = start(args, tmp_path / "log")
        process.join(step * 0.025)
        process.kill()
        process.join()
        if out.exists():
            assert xncaps.load(out).scores == "lengths"
            out.unlink()
        if process.exitcode == 0:
            break
    assert run(args, tmp_path / "log") == 0
    assert xncaps.load(out).scores == "lengths"


def test_files_are_known_by_their_content(capsys, trained, packed, tmp_path):
    shutil.copy(packed, tmp_path / "packed.onnx")
    shutil.copy(packed, tmp_path / "packed")
    args = ["--format", "onnx", "--int8", "--out", tmp_path / "v1.2"]
    assert call(capsys, "export", trained, *args)[0] == 0
    assert (tmp_path / "v1.2.int8.onnx").is_file()
    kinds = {}
    for name in ("packed.onnx", "packed", "v1.2", "v1.2.int8.onnx"):
        status, out, _ = call(capsys, "evaluate", tmp_path / name, "--json")
        assert status == 0
        kinds[name] = json.loads(out)["kind"]
    assert [*kinds.values()] == ["packed", "packed", "onnx", "onnx"]


def test_weights_that_are_not_finite_are_not_exported(capsys, trained, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    weights = load_file(copy / "model.safetensors")
    weights["head.capsules.weight"][0] = torch.nan
    save_file(weights, copy / "model.safetensors")
    for form in ("packed", "onnx"):
        out = tmp_path / form
        status, _, err = call(capsys, "export", copy, "--format", form, "--out", out)
        assert status == 1
        assert "holds numbers that are not finite, in 'head.capsules.weight'" in err
        assert err.count("\n") == 1
        assert not out.exists()
    Image.fromarray(digit()).save(tmp_path / "digit.png")
    status, out, err = call(capsys, "predict", copy, tmp_path / "digit.png", "--json")
    assert status == 1
    assert json.loads(out)["predictions"] == []
    assert err == f"xncaps: {copy}: gives scores that are not finite numbers.\n"
    status, out, _ = call(capsys, "evaluate", copy, "--json")
    assert status == 0
    assert json.loads(out)["loss"] is None


def test_images_of_odd_kinds(capsys, packed, tmp_path):
    strange = Image.merge("LAB", [Image.new("L", (9, 9))] * 3)
    strange.save(tmp_path / "lab.tif")
    status, _, err = call(capsys, "predict", packed, tmp_path / "lab.tif")
    assert (status, err) == (0, "")
    predictor = xncaps.Predictor(packed)
    for mode in ("LAB", "HSV", "YCbCr", "CMYK", "1", "P", "PA", "LA", "RGBA", "RGBX", "F", "I"):
        assert len(predictor(Image.new(mode, (9, 9))).classes) == 1
    assert predictor(strange).classes == predictor(tmp_path / "lab.tif").classes
    with pytest.raises(xncaps.InputError, match="size must be of at least one pixel; got "):
        predictor(Image.new("L", (0, 5)))
    with pytest.raises(RunError, match="cannot be read as an image"):
        predictor(tmp_path / "none.png")


def test_predict_goes_on_after_a_bad_one(capsys, packed, tmp_path):
    (tmp_path / "empty").mkdir()
    Image.fromarray(digit()).save(tmp_path / "digit.png")
    args = [tmp_path / "empty", tmp_path / "not\nhere.png", tmp_path / "digit.png"]
    status, out, err = call(capsys, "predict", packed, *args, "--json")
    assert status == 1
    assert len(json.loads(out)["predictions"]) == 1
    assert err.count("\n") == 2
    assert "empty: holds no image" in err


def test_names_that_are_not_text(capsys, packed, tmp_path):
    path = tmp_path / "\udcff.png"
    Image.fromarray(digit()).save(path)
    status, out, _ = call(capsys, "predict", packed, path, "--json")
    assert status == 0
    assert out.isascii()
    assert json.loads(out)["predictions"][0]["image"] == str(path)
    for name in ("a", "b\n", "\udcff"):
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True)
        for number in range(3):
            Image.fromarray(digit()).save(folder / f"{number}.png")
    config = small(data=f"folder:{tmp_path / 'data'}", train_count=None, epochs=1, batch_size=2)
    assert run(command(config, "--out", tmp_path / "run"), tmp_path / "log") == 0
    for args in (["evaluate", tmp_path / "run"], ["predict", tmp_path / "run", path]):
        status, out, err = call(capsys, *args)
        assert (status, err) == (0, "")
        assert out.encode()
        assert "b\\n" in out
    args = ["--format", "onnx", "--out", tmp_path / "x.onnx"]
    status, _, err = call(capsys, "export", tmp_path / "run", *args)
    assert status == 2
    assert "classes must have names that can be shown; got 'b\\n'." in err


def test_tensors_with_their_channels_first(packed):
    pixels = torch.from_numpy(digit())
    predictor = xncaps.Predictor(packed)
    wanted = predictor(pixels)
    for one in (pixels[None], pixels.expand(3, -1, -1), (pixels / 255).bfloat16().float()):
        assert predictor(one).classes == wanted.classes
    assert len(predictor(pixels.expand(2, 3, -1, -1))) == 2
    assert len(predictor(pixels.expand(5, -1, -1))) == 5
    assert predictor((pixels / 255).bfloat16()).path is None
    for odd in (pixels.to("meta"), pixels.to_sparse()):
        with pytest.raises(xncaps.InputError, match="image must be a dense tensor; got"):
            predictor(odd)


@pytest.mark.parametrize("path", [None, 123, b"x"])
def test_what_is_no_path(path):
    for use in (xncaps.load, xncaps.Predictor):
        with pytest.raises(TypeError, match="open: MODEL must be a path; got"):
            use(path)


def test_a_network_of_large_images_is_not_exported(tmp_path):
    """It could not be read again: who reads a file trusts it with no more than 1,024 px."""
    network = xncaps.create_model("convnet", "linear", image_size=1025, width=0.1)
    card = card_for(network, "convnet", "linear", options={"width": 0.1})
    with pytest.raises(xncaps.InputError, match="images must be at most 1024 px wide; got 1025"):
        write_packed(tmp_path / "x", network, card.portable())
    assert not (tmp_path / "x").exists()
