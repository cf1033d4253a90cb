"""Training on data of one's own, and on images of two digits."""

import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from runs import command, run, small
from xncaps.cli.main import main
from xncaps.data import load_data
from xncaps.evaluation import scores_of
from xncaps.training import load_run

HAS_MNIST = (Path(os.environ.get("XNCAPS_DATA", "nowhere")) / "mnist").is_dir()


def draw(shape: str, size: tuple[int, int], seed: int) -> Image.Image:
    """A coloured shape on a coloured ground."""
    chance = np.random.default_rng(seed)
    image = Image.new("RGB", size, tuple(int(v) for v in chance.integers(0, 90, 3)))
    width, height = size
    box = [width * 0.2, height * 0.2, width * 0.8, height * 0.8]
    fill = tuple(int(v) for v in chance.integers(150, 255, 3))
    if shape == "disc":
        ImageDraw.Draw(image).ellipse(box, fill=fill)
    elif shape == "bar":
        ImageDraw.Draw(image).rectangle([box[0], height * 0.45, box[2], height * 0.55], fill=fill)
    else:
        ImageDraw.Draw(image).rectangle(box, fill=fill)
    return image


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    for shape in ("disc", "bar", "wide box"):
        (folder / shape).mkdir()
        for number in range(40):
            size = (30 + number % 7, 40) if number % 2 else (48, 48)
            kind = ("png", "jpg", "webp")[number % 3]
            draw(shape, size, number).save(folder / shape / f"{number}.{kind}")
    return folder


def test_a_folder_of_images_from_training_to_prediction(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(
        data=f"folder:{shapes}", train_count=None, image_size=24, epochs=12, batch_size=16, lr=0.01
    )
    assert run(command(config, "--out", tmp_path / "run"), tmp_path / "log") == 0
    result = json.loads((tmp_path / "run" / "result.json").read_bytes())
    assert result["test"]["count"] == 24
    assert result["test"]["top1"] > 0.7  # a third by chance; eight seeds gave 0.79 to 1
    assert [row["class"] for row in result["test"]["per_class"]] == ["bar", "disc", "wide box"]
    draw("bar", (150, 150), 999).save(tmp_path / "new.png")
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "new.png")]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'new.png'}: bar   bar ")
    # The figure of the run is that of its own data: nothing is said of other ones.
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    printed = capsys.readouterr()
    assert (json.loads(printed.out)["top1"], printed.err) == (result["test"]["top1"], "")


def idx(path: Path, array: np.ndarray) -> None:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(head + array.astype(np.uint8).tobytes())


def test_one_geometry_for_files_of_all_kinds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Digits half as wide as high, as IDX and as PNG files: the same answers."""
    data = load_data("sample")
    (tmp_path / "idx").mkdir()
    for part, prefix in ((data.train, "train"), (data.test, "t10k")):
        idx(tmp_path / "idx" / f"{prefix}-images-idx3-ubyte", part.images[:, 0, :, ::2].numpy())
        idx(tmp_path / "idx" / f"{prefix}-labels-idx1-ubyte", part.labels.numpy())
    config = small(
        data=f"idx:{tmp_path / 'idx'}", train_count=1500, epochs=4, lr=0.01, options={"width": 0.5}
    )
    assert run(command(config, "--out", tmp_path / "run"), tmp_path / "log") == 0
    result = json.loads((tmp_path / "run" / "result.json").read_bytes())["test"]
    assert result["top1"] > 0.8
    (tmp_path / "png").mkdir()
    for index in range(60):
        path = tmp_path / "png" / f"{index:03}-{int(data.test.labels[index])}.png"
        Image.fromarray(data.test.images[index, 0, :, ::2].numpy()).save(path)
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "png"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["predictions"]
    loaded = load_run(tmp_path / "run")
    own = load_data(config.data).test.images[:60]
    scores = scores_of(loaded.network, own, loaded.preprocess)
    for each, row in zip(found, scores.tolist(), strict=True):
        assert max(each["scores"].values()) == pytest.approx(max(row), abs=1e-5)
    hits = sum(each["classes"] == [Path(each["image"]).stem[-1]] for each in found)
    assert hits / 60 > 0.7


def test_images_of_another_size_are_brought_to_the_network_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(train_count=1500, epochs=4, lr=0.01, options={"width": 0.5})
    assert run(command(config, "--out", tmp_path / "run"), tmp_path / "log") == 0
    data = load_data("sample")
    (tmp_path / "idx").mkdir()
    for part, prefix in ((data.train, "train"), (data.test, "t10k")):
        doubled = part.images[:, 0].repeat_interleave(2, 1).repeat_interleave(2, 2)
        idx(tmp_path / "idx" / f"{prefix}-images-idx3-ubyte", doubled.numpy())
        idx(tmp_path / "idx" / f"{prefix}-labels-idx1-ubyte", part.labels.numpy())
    figures = []
    for more in ([], ["--data", f"idx:{tmp_path / 'idx'}"]):
        capsys.readouterr()
        assert main(["evaluate", str(tmp_path / "run"), "--json", *more]) == 0
        figures.append(json.loads(capsys.readouterr().out)["top1"])
    assert figures[1] == pytest.approx(figures[0], abs=0.03)


def test_an_unreadable_image_stops_the_run_or_is_left_out(shapes: Path, tmp_path: Path) -> None:
    config = small(data=f"folder:{shapes}", train_count=None, epochs=1, image_size=24)
    bad, log = shapes / "disc" / "broken.png", tmp_path / "log"
    bad.write_bytes((shapes / "disc" / "0.png").read_bytes()[:60])
    try:
        assert run(command(config, "--out", tmp_path / "run"), log) == 1
        assert log.read_text().startswith(f"xncaps: {bad}: cannot be read as an image: ")
        assert not (tmp_path / "run").exists()
        words = [
            w for w in command(config, "--out", tmp_path / "run") if "=skip_unreadable" not in w
        ]
        assert run([*words, "--skip-unreadable"], log) == 0
        assert f"left out: {bad}: cannot be read as an image: " in log.read_text()
    finally:
        bad.unlink()


@pytest.mark.parametrize("part", ["train", "test"])
def test_changed_data_are_refused(shapes: Path, tmp_path: Path, part: str) -> None:
    for name in ("train", "test"):
        shutil.copytree(shapes, tmp_path / "data" / name)
    shapes = tmp_path / "data"
    config = small(data=f"folder:{shapes}", train_count=None, epochs=1, image_size=24)
    assert run(command(config, "--out", tmp_path / "run"), tmp_path / "log") == 0
    (tmp_path / "run" / "result.json").unlink()
    draw("bar", (48, 48), 1234).save(shapes / part / "bar" / "extra.png")
    assert run(["train", "--resume", str(tmp_path / "run")], tmp_path / "log") == 2
    line = (tmp_path / "log").read_text().splitlines()[-1]
    assert "cannot go on with something else than it began with: data: " in line
    assert f"has changed; {part}: " in line


@pytest.mark.skipif(not HAS_MNIST, reason="XNCAPS_DATA names no folder with MNIST in it")
def test_two_digits_from_training_to_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(
        data="multimnist",
        train_count=1500,
        head="xnidr",
        options={"width": 0.5},
        epochs=3,
        lr=0.01,
        augment={},
        batch_size=64,
    )
    assert run(command(config, "--out", tmp_path / "run"), tmp_path / "log") == 0
    result = json.loads((tmp_path / "run" / "result.json").read_bytes())["test"]
    assert result["count"] == 40_000
    assert set(result) >= {"exact_pair", "per_digit", "paper_top2"}
    assert result["exact_pair"] <= result["paper_top2"]
    assert result["per_digit"] > 0.3
    pixels = load_data("multimnist", train_count=1500).test.images[0, 0].numpy()
    Image.fromarray(pixels).save(tmp_path / "two.png")
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "two.png"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["predictions"][0]
    assert len(found["classes"]) == 2
    assert set(found["classes"]) == set(list(found["scores"])[:2])
