"""From a trained run to files and back: export, load, predict, evaluate, measure."""

import json
import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import xncaps
from runs import command, run, small
from xncaps.bench.agreement import read_agreements
from xncaps.bench.model import read_model_bench
from xncaps.cli.main import main
from xncaps.data import load_data
from xncaps.deploy.evaluate import evaluate_model
from xncaps.deploy.model import open_model
from xncaps.deploy.predictor import Prediction

RUN = small(train_count=1500, epochs=3, head="xnodr", options={"width": 0.5}, lr=0.01)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("deploy")
    assert run(command(RUN, "--out", base / "run"), base / "log") == 0
    return base / "run"


@pytest.fixture(scope="module")
def files(trained: Path) -> dict[str, Path]:
    """The same network in all its forms."""
    for args in (["packed"], ["onnx", "--int8"]):
        assert main(["export", str(trained), "--format", *args]) == 0
    return {
        "run": trained,
        "packed": trained / "packed.safetensors",
        "onnx": trained / "model.onnx",
        "int8": trained / "model.int8.onnx",
    }


def call(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    status = main([str(arg) for arg in args])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.fixture(scope="module")
def digit() -> tuple[np.ndarray, str]:
    data = load_data("sample").test
    return data.images[0, 0].numpy(), str(int(data.labels[0]))


def test_export_says_what_it_wrote(capsys, trained, tmp_path):
    out = tmp_path / "digits.safetensors"
    status, said, err = call(capsys, "export", trained, "--format", "packed", "--out", out)
    assert (status, err) == (0, "")
    parameters = 4 * sum(p.numel() for p in xncaps.load(trained).parameters())
    assert said.startswith(f"{out}: {out.stat().st_size:,} bytes, ")
    assert f"parameters as float32: {parameters:,} bytes" in said
    status, said, _ = call(capsys, "export", trained, "--format", "packed", "--out", out, "--json")
    found = json.loads(said)
    network = xncaps.load(trained)
    assert found["size"] - found["header"] == xncaps.summary(network, (1, 28, 28)).packed_bytes
    args = ["--format", "packed", "--dtype", "float16", "--out", tmp_path / "half.safetensors"]
    assert call(capsys, "export", trained, *args)[0] == 0
    assert (tmp_path / "half.safetensors").stat().st_size < 0.6 * out.stat().st_size


def test_export_to_onnx_compares(capsys, trained, tmp_path):
    out = tmp_path / "digits.onnx"
    args = ["export", trained, "--format", "onnx", "--normalise", "--opset", 20, "--out", out]
    status, said, err = call(capsys, *args)
    assert (status, err) == (0, "")
    assert f"{out}: {out.stat().st_size:,} bytes, opset 20, takes pixels from 0 to 255" in said
    assert float(re.search(r"largest difference (\S+)", said).group(1)) < 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["digits.onnx"]
    status, said, _ = call(capsys, "evaluate", out, "--json")
    _, wanted, _ = call(capsys, "evaluate", trained, "--json")
    assert json.loads(said)["top1"] == json.loads(wanted)["top1"]


def test_all_forms_are_evaluated_alike(capsys, files):
    found = {}
    for name, path in files.items():
        status, said, err = call(capsys, "evaluate", path, "--json")
        assert (status, err) == (0, "")
        found[name] = json.loads(said)
        assert found[name]["kind"] == {"int8": "onnx"}.get(name, name)
    assert found["run"].keys() == found["packed"].keys() == found["onnx"].keys()
    for name in ("packed", "onnx"):
        for metric in ("count", "top1", "confusion", "per_class"):
            assert found[name][metric] == found["run"][metric]
        assert found[name]["loss"] == pytest.approx(found["run"]["loss"], abs=1e-5)
    assert found["int8"]["top1"] > found["run"]["top1"] - 0.03
    assert found["int8"]["loss"] != found["run"]["loss"]
    _, text, _ = call(capsys, "evaluate", files["onnx"], "--split", "validation")
    assert text.startswith("150 validation images of sample\n")


def test_predict_takes_every_form(capsys, files, tmp_path, digit):
    pixels, label = digit
    Image.fromarray(pixels).save(tmp_path / "digit.png")
    lines = []
    for path in files.values():
        status, said, err = call(capsys, "predict", path, tmp_path / "digit.png")
        assert (status, err) == (0, "")
        lines.append(said)
        assert said.startswith(f"{tmp_path / 'digit.png'}: {label}   {label} 0.")
    assert lines[0] == lines[1] == lines[2]


def test_predictor_takes_images_as_they_come(files, tmp_path, digit):
    pixels, label = digit
    path = tmp_path / "digit.png"
    Image.fromarray(pixels).save(path)
    for form in ("run", "packed", "onnx"):
        predictor = xncaps.Predictor(files[form])
        assert predictor.classes == tuple("0123456789")
        wanted = predictor(path)
        assert isinstance(wanted, Prediction)
        assert (wanted.classes, wanted.path) == ((label,), path)
        assert list(wanted.scores) == sorted(wanted.scores, key=wanted.scores.get, reverse=True)
        images = (
            str(path),
            pixels,
            pixels[:, :, None],
            np.stack([pixels] * 3, axis=2),
            np.dstack([*[pixels] * 3, np.full_like(pixels, 255)]),
            pixels / np.float32(255),
            pixels.astype(np.float64) / 255,
            np.asfortranarray(pixels),
            torch.from_numpy(pixels),
            Image.fromarray(pixels),
            Image.fromarray(pixels).convert("RGB"),
        )
        for image in images:
            found = predictor(image)
            assert found.classes == (label,)
            assert found.scores == pytest.approx(wanted.scores, abs=1e-5)
        several = [
            [path, pixels, Image.fromarray(pixels)],
            (pixels, pixels),
            np.stack([pixels, pixels]),
            np.stack([pixels, pixels])[..., None],
            torch.from_numpy(np.stack([pixels, pixels])),
        ]
        for images in several:
            found = predictor(images)
            assert [each.classes for each in found] == [(label,)] * len(images)
        assert predictor([]) == []


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (3, "image must be a path, a Pillow image, an array or a tensor; got int."),
        (None, "image must be a path, a Pillow image, an array or a tensor; got NoneType."),
        (np.zeros((2, 2), np.int32), "image must hold bytes (uint8), or floats from 0 to 1; got"),
        (np.zeros((2, 2), np.complex64), "image must hold bytes (uint8), or floats"),
        (np.full((2, 2), 1.5), "image must hold floats from 0 to 1; got others."),
        (np.full((2, 2), np.nan), "image must hold floats from 0 to 1; got others."),
        (np.zeros(5, np.uint8), "image must have shape (height, width) or"),
        (np.zeros((0, 5), np.uint8), "image must have shape (height, width) or"),
        (np.zeros((1, 2, 2, 2, 1), np.uint8), "image must have shape (height, width) or"),
    ],
)
def test_predictor_refuses_in_a_line(files, image, words):
    with pytest.raises(xncaps.InputError, match=re.escape(words)):
        xncaps.Predictor(files["packed"])(image)


def test_predictor_turns_what_is_drawn_on_the_other_ground(files, digit):
    pixels, label = digit
    found = xncaps.Predictor(files["packed"])(255 - pixels)
    assert (found.classes, found.inverted) == ((label,), True)
    kept = xncaps.Predictor(files["packed"], invert=False)(255 - pixels)
    assert not kept.inverted
    assert kept.scores != found.scores


@pytest.mark.parametrize("form", ["run", "packed", "onnx"])
def test_threads_may_share_a_predictor(files, form):
    data = load_data("sample").test
    images = [image[0].numpy() for image in data.images[:40]]
    predictor = xncaps.Predictor(files[form])
    wanted = [predictor(image) for image in images]
    fresh = xncaps.Predictor(files[form])  # the first calls come at the same time
    barrier = threading.Barrier(4)

    def work(first: int) -> list[Prediction]:
        barrier.wait()
        return [fresh(images[(first + k) % len(images)]) for k in range(len(images))]

    with ThreadPoolExecutor(4) as pool:
        for first, found in zip(range(4), pool.map(work, range(4)), strict=True):
            for k, each in enumerate(found):
                other = wanted[(first + k) % len(images)]
                assert each.classes == other.classes
                assert each.scores == pytest.approx(other.scores, abs=1e-6)


def test_load_gives_the_network(files):
    images = torch.randn(3, 1, 28, 28)
    with torch.inference_mode():
        wanted = xncaps.load(files["run"])(images)
        torch.testing.assert_close(xncaps.load(files["packed"])(images), wanted)
    with pytest.raises(xncaps.InputError, match=r"load: path must hold a PyTorch network; got"):
        xncaps.load(files["onnx"])


def test_what_export_refuses(capsys, trained, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    cases = {
        ("--format", "tflite"): "'tflite' is not one of 'packed', 'onnx'",
        ("--format", "packed", "--int8"): "option must go with the format; got one that --format",
        ("--format", "onnx", "--dtype", "float16"): "option must go with the format",
        ("--format", "onnx", "--opset", "3"): "opset must be from",
        ("--format", "packed", "--out", tmp_path): "which is a folder",
        ("--format", "packed", "--out", pipe): "pipe, which is none",
        ("--format", "onnx", "--out", trained / "config.json"): "file than the run's own",
        ("--format", "packed", "--out", trained / "checkpoints" / "x"): "file than the run's own",
        ("--format", "onnx", "--int8", "--out", tmp_path / "q.onnx"): "q.int8.onnx, which is a fol",
        ("--format", "packed", "--out", tmp_path / "a" / "b"): "lie in a folder that is there",
        ("--format", "packed", "--out", trained / "model.safetensors"): "file than the run's own",
        (): "Missing option '--format'",
    }
    (tmp_path / "q.int8.onnx").mkdir()
    before = (trained / "model.safetensors").read_bytes()
    for args, words in cases.items():
        status, out, err = call(capsys, "export", trained, *args)
        assert (status, out) == (2, "")
        assert words in err
        assert err.count("\n") == 1
    assert (trained / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "q.int8.onnx"]
    status, _, err = call(capsys, "export", tmp_path / "none", "--format", "packed")
    assert status == 2
    assert "must be the folder of a run" in err


def test_a_run_whose_data_are_gone_is_exported_all_the_same(capsys, tmp_path):
    digits = load_data("sample").test
    for index in range(60):
        name = str(int(digits.labels[index]) % 2)
        path = tmp_path / "data" / name / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.images[index, 0].numpy()).save(path)
    config = small(data=f"folder:{tmp_path / 'data'}", train_count=None, epochs=1)
    assert run(command(config, "--out", tmp_path / "run"), tmp_path / "log") == 0
    assert call(capsys, "evaluate", tmp_path / "run")[0] == 0
    shutil.rmtree(tmp_path / "data")
    out = tmp_path / "x.onnx"
    status, _, err = call(capsys, "export", tmp_path / "run", "--format", "onnx", "--out", out)
    assert status == 0
    assert err.startswith("compared on noise, because the run's data cannot be read: ")
    assert str(tmp_path).encode() not in out.read_bytes()
    status, _, err = call(capsys, "evaluate", out)
    assert status == 2
    assert err == (
        f"xncaps: evaluate: data must be named; got none, and {out} names none of its own. "
        "Name data with --data.\n"
    )
    status, _, err = call(capsys, "evaluate", out, "--data", "sample")
    assert (status, err.count("\n")) == (2, 1)  # other classes


def test_a_file_knows_the_data_of_its_run(files):
    model = open_model(files["packed"])
    assert evaluate_model(model, split="train").count == 1350
    assert evaluate_model(model, split="train", train_count=None).count == 3600


def test_bench_model_measures_every_form(capsys, files, monkeypatch):
    monkeypatch.setattr("xncaps.bench.model.STARTS", 1)
    args = ["bench", "model", files["run"], "--seconds", 0.5, "--batch-size", 8]
    status, out, err = call(capsys, *args, "--json")
    assert (status, err) == (0, "")
    forms = {form["name"]: form for form in json.loads(out)["forms"]}
    assert list(forms) == ["PyTorch", "packed", "ONNX Runtime", "ONNX Runtime int8"]
    for form in forms.values():
        assert 0 < form["p50"] <= form["p90"] <= form["p99"]
        assert form["throughput"] > 0
        assert form["start"] > 0.05
        assert form["memory"] > 2e7
    # Without PyTorch a process is much smaller and sooner ready.
    assert forms["ONNX Runtime"]["memory"] < forms["packed"]["memory"] / 2
    assert forms["packed"]["size"] == files["packed"].stat().st_size


def test_bench_model_of_a_file(capsys, files, monkeypatch):
    monkeypatch.setattr("xncaps.bench.model.STARTS", 1)
    status, out, _ = call(capsys, "bench", "model", files["onnx"], "--seconds", 0.2)
    assert status == 0
    assert out.count("ONNX Runtime") == 2
    status, out, _ = call(capsys, "bench", "model", files["packed"], "--seconds", 0.2)
    assert status == 0
    assert "packed" in out
    assert "int8" in out


def test_bench_agreement_compares_with_the_network_itself(capsys, files, tmp_path):
    out = tmp_path / "results"
    status, said, err = call(capsys, "bench", "agreement", files["run"], "--out", out, "--json")
    assert (status, err) == (0, f"{files['run']}\n")
    rows = {row["form"]: row for row in json.loads(said)["rows"]}
    names = ["as trained", "packed", "ONNX Runtime", "ONNX Runtime int8", "packed, float16"]
    assert list(rows) == names
    assert (rows["as trained"]["largest"], rows["as trained"]["agree"]) == (0, 1000)
    data = load_data("sample").test
    ours, theirs = (open_model(files[form]).scores(data.images) for form in ("run", "onnx"))
    assert rows["ONNX Runtime"]["largest"] == pytest.approx((ours - theirs).abs().max(), rel=0.5)
    assert rows["ONNX Runtime"]["agree"] == (ours.argmax(1) == theirs.argmax(1)).sum()
    assert rows["ONNX Runtime"]["accuracy"] == pytest.approx(
        (theirs.argmax(1) == data.labels).float().mean()
    )
    assert rows["ONNX Runtime int8"]["largest"] > 1e-3
    kept = read_agreements(out / "agreement.csv")
    assert [row.form for row in kept.rows] == names
    assert kept.to_markdown().count("\n") == 6
    status, _, err = call(capsys, "bench", "agreement", files["packed"])
    assert status == 2
    assert "RUN must be the folder of a run" in err


def test_bench_model_keeps_its_figures(capsys, files, tmp_path, monkeypatch):
    monkeypatch.setattr("xncaps.bench.model.STARTS", 1)
    args = ["bench", "model", files["onnx"], "--seconds", 0.2, "--out", tmp_path / "results"]
    status, said, _ = call(capsys, *args, "--json")
    assert status == 0
    _, kept = read_model_bench(tmp_path / "results" / "model.csv")
    found = json.loads(said)
    assert kept.forms[0].p50 == pytest.approx(found["forms"][0]["p50"], rel=1e-4)
    assert (
        (kept.network, kept.batch) == (found["network"], found["batch"]) == ("convnet, xnodr", 64)
    )
