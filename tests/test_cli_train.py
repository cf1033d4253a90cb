"""``xncaps train``, ``evaluate``, ``predict`` and ``bench`` from the command line, end to end."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import xncaps
from runs import command, run, small
from xncaps.cli.main import main
from xncaps.data import load_data
from xncaps.deploy.predictor import Predictor

DIGITS = small(train_count=1500, epochs=4, head="xnodr", options={"width": 0.5}, lr=0.01)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("trained")
    assert run(command(DIGITS, "--out", base / "run"), base / "log") == 0
    said = (base / "log").read_text()
    assert re.search(r"^epoch 4/4  loss 0\.\d+  accuracy [\d.]+%  validation [\d.]+%", said, re.M)
    assert re.search(
        rf"^test accuracy [\d.]+%, peak memory [\d,]+ MB\nreport: {base}/run/report.html$",
        said,
        re.M,
    )
    return base / "run"


def call(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    status = main([str(arg) for arg in args])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_the_folder_holds_all_there_is(trained: Path) -> None:
    names = {str(path.relative_to(trained)) for path in trained.rglob("*") if path.is_file()}
    assert {
        *("config.json", "data.json", "metrics.jsonl", "model.safetensors", "result.json"),
        *("report.html", "pictures/curves.png", "pictures/confusion.png", "pictures/mistakes.png"),
        "pictures/couplings.png",
    } <= names
    result = json.loads((trained / "result.json").read_bytes())
    assert result["test"]["top1"] > 0.85
    assert result["test"]["count"] == 1000
    assert result["peak_memory_bytes"] > 10**8
    assert json.loads((trained / "data.json").read_bytes())["counts"] == [1350, 150, 1000]


def test_tensorboard_has_what_people_ask_for(trained: Path) -> None:
    events = EventAccumulator(str(trained / "tensorboard")).Reload()
    tags = set(events.Tags()["scalars"])
    assert {
        *("step/loss", "step/lr", "epoch/validation_accuracy", "epoch/coupling_entropy"),
        "sign_flips/head.capsules",
    } <= tags
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    flips = [event.value for event in events.Scalars("sign_flips/head.capsules")]
    assert flips == pytest.approx([row["flips"]["head.capsules"] for row in rows])


def test_evaluate_gives_the_figure_of_the_run(
    capsys: pytest.CaptureFixture[str], trained: Path
) -> None:
    status, out, err = call(capsys, "evaluate", trained, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    result = json.loads((trained / "result.json").read_bytes())
    assert found["top1"] == result["test"]["top1"]
    assert found["confusion"] == result["test"]["confusion"]
    assert found["loss"] == pytest.approx(result["test"]["loss"])
    status, out, _ = call(capsys, "evaluate", trained)
    assert status == 0
    assert f"accuracy {found['top1']:.2%}" in out
    assert out.count("%") >= 21


def test_evaluate_other_splits_and_data(capsys: pytest.CaptureFixture[str], trained: Path) -> None:
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    _, out, _ = call(capsys, "evaluate", trained, "--split", "validation", "--json")
    assert json.loads(out)["top1"] == pytest.approx(rows[-1]["validation_accuracy"])


def test_evaluate_a_folder_of_colour_images(
    capsys: pytest.CaptureFixture[str], trained: Path, tmp_path: Path
) -> None:
    """Three of the classes, in colour and twice as large."""
    digits = load_data("sample").test
    for number in (3, 5, 8):
        for index in (digits.labels == number).nonzero().squeeze(1)[:20].tolist():
            path = tmp_path / "digits" / "test" / str(number) / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(digits.images[index, 0].numpy()).convert("RGB")
            image.resize((56, 56), Image.Resampling.NEAREST).save(path)
            learn = tmp_path / "digits" / "train" / str(number) / f"{index}.png"
            learn.parent.mkdir(parents=True, exist_ok=True)
            image.save(learn)
    status, out, _ = call(
        capsys, "evaluate", trained, "--data", f"folder:{tmp_path / 'digits'}", "--json"
    )
    assert status == 0
    found = json.loads(out)
    assert found["count"] == 60
    assert found["top1"] > 0.8
    assert [row["count"] for row in found["per_class"]] == [0, 0, 0, 20, 0, 20, 0, 0, 20, 0]


def test_evaluate_refuses_strange_classes(
    capsys: pytest.CaptureFixture[str], trained: Path, tmp_path: Path
) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for index in range(3):
            Image.new("L", (28, 28), index).save(tmp_path / name / f"{index}.png")
    status, out, err = call(capsys, "evaluate", trained, "--data", f"folder:{tmp_path}")
    assert (status, out) == (2, "")
    assert err == (
        "xncaps: evaluate: data must have the network's classes (0, 1, 2, 3, 4, 5, 6, 7, 8, 9); "
        "got 'cat'.\n"
    )


@pytest.fixture
def drawn(tmp_path: Path) -> tuple[Path, np.ndarray, int]:
    """A test digit that the network recognises without doubt."""
    digits = load_data("sample").test
    pixels = digits.images[1, 0].numpy()
    return tmp_path, pixels, int(digits.labels[1])


def variants(pixels: np.ndarray) -> dict[str, Image.Image]:
    """The same digit as people have it: dark on light, large, in colour, see-through."""
    image = Image.fromarray(pixels)
    ink = Image.new("RGBA", image.size, (10, 20, 90, 0))
    ink.putalpha(image)
    light = Image.new("RGBA", image.size, (255, 250, 240, 0))
    light.putalpha(image)
    large = image.resize((140, 140), Image.Resampling.BICUBIC)
    tall = Image.new("L", (140, 200), 0)
    tall.paste(large, (0, 30))
    return {
        "plain.png": image,
        "negative.png": Image.fromarray(255 - pixels),
        "large.jpg": large,
        "tall.png": tall,
        "colour.webp": Image.fromarray(255 - pixels).convert("RGB"),
        "ink.png": ink,
        "light.png": light,
        "palette.png": image.convert("P"),
        "bits.png": image.point(lambda v: 255 * (v > 100)).convert("1"),
        "deep.png": Image.fromarray(pixels.astype(np.uint16) * 257),
    }


def test_predict_takes_images_as_people_have_them(
    capsys: pytest.CaptureFixture[str], trained: Path, drawn: tuple[Path, np.ndarray, int]
) -> None:
    folder, pixels, label = drawn
    images = variants(pixels)
    for name, image in images.items():
        image.save(folder / name)
    status, out, err = call(capsys, "predict", trained, folder, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["scores"] == "lengths"
    assert len(found["predictions"]) == len(images)
    for each in found["predictions"]:
        assert each["classes"] == [str(label)], each["image"]
        assert list(each["scores"].values()) == sorted(each["scores"].values(), reverse=True)
        assert each["inverted"] == (Path(each["image"]).stem in ("negative", "colour", "ink"))
    plain, turned = Predictor(trained)([folder / "plain.png", folder / "negative.png"])
    assert plain.scores == turned.scores
    kept = Predictor(trained, invert=False)(folder / "negative.png")
    assert not kept.inverted
    assert kept.scores != plain.scores


def test_predict_says_which_image_is_bad_and_goes_on(
    capsys: pytest.CaptureFixture[str], trained: Path, drawn: tuple[Path, np.ndarray, int]
) -> None:
    folder, pixels, label = drawn
    (folder / "bad.png").write_bytes(b"nothing")
    Image.fromarray(pixels).save(folder / "good.png")
    args = [folder / "bad.png", folder / "gone.png", folder / "good.png"]
    status, out, err = call(capsys, "predict", trained, *args)
    assert status == 1
    assert out.startswith(f"{folder / 'good.png'}: {label}   {label} 0.")
    assert err.count("\n") == 2
    assert err.startswith(f"xncaps: {folder / 'bad.png'}: cannot be read as an image: ")


def test_load_gives_the_network(trained: Path) -> None:
    network = xncaps.load(trained)
    assert not network.training
    scores = network(torch.zeros(2, 1, 28, 28))
    assert scores.shape == (2, 10)


@pytest.mark.parametrize("what", ["evaluate", "predict"])
@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            lambda folder: None,
            "open: MODEL must be the folder of a run, a packed file or an ONNX file; got '{}', "
            "which is not there.",
        ),
        (
            lambda folder: folder.mkdir(),
            "run: RUN must be the folder of a run; got '{}', which has no config.json.",
        ),
    ],
)
def test_what_is_no_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, what: str, make: object, line: str
) -> None:
    folder = tmp_path / "run"
    make(folder)
    image = [] if what == "evaluate" else [tmp_path / "a.png"]
    status, out, err = call(capsys, what, folder, *image)
    assert (status, out) == (2, "")
    assert err == f"xncaps: {line.format(folder)}\n"


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("model.safetensors", b"\xff" * 64, "cannot be read as safetensors"),
        ("model.safetensors", b"", "cannot be read as safetensors"),
        ("config.json", b"{", "not JSON"),
        ("config.json", b"[]", "must hold a JSON object; got list."),
        ("config.json", b'{"epoch": 3}', "option must be one a run takes"),
        ("data.json", b"{}", "not what a run writes"),
        ("data.json", b'{"shape": [1, 28]}', "not what a run writes"),
        ("data.json", b"@shape=[1, 28]", "not what a run writes"),
        ("data.json", b"@shape=[1, 1000000000, 1000000000]", "not what a run writes"),
        ("data.json", b"@mean=[NaN]", "not what a run writes"),
        ("data.json", b'@mean=["x"]', "not what a run writes"),
        ("data.json", b"@mean=0.1", "not what a run writes"),
        ("data.json", b"@std=[-1.0]", "not what a run writes"),
        ("data.json", b"@classes=[1, 2]", "not what a run writes"),
        ("data.json", b"@classes=[]", "not what a run writes"),
    ],
)
def test_a_damaged_run_is_one_line(
    capsys: pytest.CaptureFixture[str],
    trained: Path,
    tmp_path: Path,
    name: str,
    content: bytes,
    line: str,
) -> None:
    for path in trained.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    if content.startswith(b"@"):  # one value of a good file changed
        key, _, value = content[1:].decode().partition("=")
        values = json.loads((tmp_path / name).read_bytes())
        content = json.dumps({**values, key: json.loads(value)}).encode()
    (tmp_path / name).write_bytes(content)
    status, out, err = call(capsys, "evaluate", tmp_path)
    assert (status, out) == (1, "")
    assert err.startswith(f"xncaps: {tmp_path / name}: ")
    assert line in err
    assert err.count("\n") == 1


def test_other_networks_and_losses_train(tmp_path: Path) -> None:
    """Whatever can be built can be trained."""
    log = tmp_path / "log"
    tiny = {"train_count": 60, "epochs": 1, "batch_size": 16, "augment": {}}
    for number, config in enumerate(
        [
            small(**tiny, head="fc", options={"hidden": [8]}, loss="cross_entropy"),
            small(**tiny, head="xnboth", options={"routing_bias": True}, attach="features"),
            small(**tiny, model="mobilenetv2", head="dr", options={"caps_in": 4}, image_size=32),
            small(**tiny, model="xnornet", head=None, options={"width": 0.1}),
            small(**tiny, precision="bf16", attach="append"),
            small(**tiny, validation=0),
        ]
    ):
        assert run(command(config, "--out", tmp_path / str(number)), log) == 0, log.read_text()
    hints = log.read_text().count("precision bf16: this processor has no instructions for it")
    assert hints == (not torch.cpu._is_avx512_supported())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--epochs 0", "Config: epochs must be at least 1; got 0."),
        ("--data mnits", "load_data: data must be one of sample, mnist, cifar10, "),
        ("--data folder:", "load_data: data must name a folder, as folder:PATH; got 'folder:'."),
        ("--data folder:no-such", "folder: PATH must be a folder; got 'no-such'."),
        ("--data-dir no-such --data mnist", "data: data_dir must be a folder; got 'no-such'."),
        ("--recipe quik", "train: recipe must be one of paper-mnist, paper-cifar10, "),
        ("--augment shift", "train: augment must look like name=value; got 'shift'."),
        ("--augment spin=3", "Config: option must be one augment takes (shift, "),
        ("--set ema", "train: set must look like name=value; got 'ema'."),
        ("--set bogus=1", "create_model: option must be one the xnidr head takes ("),
        ("--seed 1 --seeds 0-2", "train: seeds must stand alone; got both --seed and --seeds."),
        ("--resume no-such", "run: RUN must be the folder of a run; got 'no-such'."),
        (
            "--width 0.5 --set width=0.25",
            "train: set must name what no other flag sets; got 'width'.",
        ),
        ("--lr 1e38", "Config: lr must be a number above 0 and up to 1e6; got 1e+38."),
        ("--image-size 100000", "Config: image_size must be at most 4096 px; got 100000."),
        ("--epoch 3", "No such option: --epoch"),
        ("--train-count 999999", "load_data: train_count must be at most the 4,000 training"),
    ],
)
def test_bad_usage_is_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    line: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = call(capsys, "train", *words.split())
    assert (status, out) == (2, "")
    assert err.startswith(f"xncaps: {line}")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_missing_data_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No network: every address is refused at once."""
    from xncaps.data import idx

    monkeypatch.delenv("XNCAPS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(idx, "_MIRRORS", ("http://127.0.0.1:9/",))
    monkeypatch.chdir(tmp_path)
    status, _, err = call(capsys, "train", "--data", "mnist", "--out", tmp_path / "run")
    assert status == 1
    assert err.startswith("xncaps: train-images-idx3-ubyte.gz: not found in ")
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_terminal_gets_a_live_line(tmp_path: Path) -> None:
    """On a terminal the display moves: it is drawn over again."""
    args = [sys.executable, "-m", "xncaps", *command(small(), "--out", tmp_path / "run")]
    mine, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(args, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(mine, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        said += part
    os.close(mine)
    assert process.wait() == 0
    text = said.decode()
    assert "\x1b[" in text
    assert re.search(r"epoch \d/5.*step \d+/40 .*images/s .*left", text)
    assert "epoch 5/5  loss" in text
    assert "report: " in text


def test_bench_input_and_train(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    status, out, _ = call(capsys, "bench", "input", "--seconds", 0.1, "--batch-size", 32, "--json")
    assert status == 0
    found = json.loads(out)
    assert min(found["ratio"], found["median_ratio"]) > 2
    assert 0 < found["share_of_step"] < 0.5
    assert torch.get_num_threads() == threads
    status, out, _ = call(capsys, "bench", "train", "--seconds", 0.1, "--batch-size", 32, "--json")
    assert status == 0
    found = json.loads(out)
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert set(found["shares"]) == {"data", "backbone", "head", "optimizer"}
    assert found["images_per_second"] == pytest.approx(32 / sum(found["seconds"].values()))
    _, out, _ = call(capsys, "bench", "train", "--seconds", 0, "--batch-size", 32)
    assert re.search(r"^optimizer +[\d.]+ +[\d.]+%$", out, re.M)
