"""A run that is killed at any moment goes on as if nothing had happened, bit by bit."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import runs
from runs import command, rows, run, small, start, weights
from xncaps.errors import RunError
from xncaps.training.checkpoint import Checkpoint, _encode, parse_checkpoint, save_checkpoint

KILLS = 30

CONFIGS = {
    "adam, ema, xnodr": small(ema=0.9, clip=1.0),
    "sgd, cross-entropy, xnidr": small(
        head="xnidr", optimizer="sgd", lr=0.1, loss="cross_entropy", seed=1, weight_decay=1e-4
    ),
    "adamw, triangular2, linear": small(
        head="linear",
        options={"width": 0.25},
        optimizer="adamw",
        schedule="triangular2",
        step_size=4,
        channels_last=False,
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each configuration's run without interruption."""
    base = tmp_path_factory.mktemp("whole")
    for number, config in enumerate(CONFIGS.values()):
        assert run(command(config, "--out", base / str(number)), base / "log") == 0
    return {name: base / str(number) for number, name in enumerate(CONFIGS)}


def assert_same(folder: Path, reference: Path) -> None:
    assert weights(folder) == weights(reference)
    assert rows(folder) == rows(reference)
    old, new = (json.loads((f / "result.json").read_bytes()) for f in (reference, folder))
    assert new["test"] == old["test"]
    assert (folder / "report.html").exists()
    left = [path.name for path in folder.rglob("*.tmp")]
    assert not [name for name in left if not name.startswith(".")]


def test_two_runs_of_one_configuration_are_equal(whole: dict[str, Path], tmp_path: Path) -> None:
    name = next(iter(CONFIGS))
    assert run(command(CONFIGS[name], "--out", tmp_path / "again"), tmp_path / "log") == 0
    assert_same(tmp_path / "again", whole[name])


def test_killed_at_random_moments(whole: dict[str, Path], tmp_path: Path) -> None:
    """30 kills by SIGKILL; each victim writes a checkpoint after every step."""
    begun = time.monotonic()
    assert (
        run(command(CONFIGS["adam, ema, xnodr"], "--out", tmp_path / "timed"), tmp_path / "log")
        == 0
    )
    most = (time.monotonic() - begun) / 3  # the rest of it is the report
    moments = random.Random(0)
    kills, number, steps = 0, 0, set()
    while kills < KILLS:
        name = list(CONFIGS)[number % len(CONFIGS)]
        folder = tmp_path / str(number)
        number += 1
        args = command(CONFIGS[name], "--out", folder, "--save-seconds", 0)
        while True:
            process = start(args, tmp_path / "log")
            # Mostly while it trains, now and then while it writes its report.
            trained = (folder / "model.safetensors").exists()
            spared = kills == KILLS or (trained and moments.random() < 0.8)
            process.join(None if spared else moments.uniform(0.05, most))
            if process.exitcode is not None:
                assert process.exitcode == 0, (tmp_path / "log").read_text()
                break
            process.kill()
            process.join()
            kills += 1
            saved = sorted(path.stem for path in folder.glob("checkpoints/*.json"))
            steps.update(saved[-1:])
            if (folder / "config.json").exists():
                args = command(None, "--resume", folder, "--save-seconds", 0)
        assert_same(folder, whole[name])
    assert kills == KILLS
    assert len(steps) > 5, "the kills came at different steps"


@pytest.mark.slow
def test_killed_on_the_command_line(tmp_path: Path) -> None:
    """The installed command, two threads, 30 kills, steps of a real size."""
    config = small(train_count=None, head="xnidr", options={}, epochs=2, ema=0.99, batch_size=128)
    base = [sys.executable, "-m", "xncaps"]
    subprocess.run([*base, *command(config, "--out", tmp_path / "whole")], check=True)
    moments, kills, number = random.Random(1), 0, 0
    while kills < KILLS:
        folder = tmp_path / str(number)
        number += 1
        args = command(config, "--out", folder, "--save-seconds", 1)
        while True:
            process = subprocess.Popen([*base, *args])
            try:
                assert process.wait(moments.uniform(3, 12)) == 0
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                kills += 1
            if (folder / "config.json").exists():
                args = command(None, "--resume", folder, "--save-seconds", 1)
        assert_same(folder, tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_says_how_to_go_on(
    whole: dict[str, Path], tmp_path: Path, number: signal.Signals
) -> None:
    name, folder, log = next(iter(CONFIGS)), tmp_path / "run", tmp_path / "log"
    process = start(command(CONFIGS[name], "--out", folder), log)
    while not (folder / "data.json").exists():
        time.sleep(0.005)
    time.sleep(0.2)
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == 1
    line = log.read_text().splitlines()[-1]
    assert line.startswith("xncaps: stopped after step ")
    assert line.endswith(f"Go on with: xncaps train --resume {folder}")
    assert run(command(None, "--resume", folder), log) == 0
    assert_same(folder, whole[name])


def test_tensorboard_shows_every_step_once(
    whole: dict[str, Path], half: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(half, folder)
    assert run(command(None, "--resume", folder), tmp_path / "log") == 0
    shown = []
    for each in (folder, whole[next(iter(CONFIGS))]):
        events = EventAccumulator(str(each / "tensorboard")).Reload()
        shown.append([(event.step, event.value) for event in events.Scalars("step/loss")])
    assert shown[0] == shown[1]
    assert [step for step, _ in shown[0]] == [10, 20, 30, 40]


def interrupted(tmp_path: Path, steps_before: int = 12) -> Path:
    """A run that was killed with at least two checkpoints behind it."""
    folder = tmp_path / "run"
    name = next(iter(CONFIGS))
    process = start(command(CONFIGS[name], "--out", folder, "--save-seconds", 0), tmp_path / "log")
    while not (folder / "checkpoints" / f"{steps_before:09}.json").exists():
        assert process.exitcode is None
        time.sleep(0.002)
    process.kill()
    process.join()
    return folder


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return interrupted(tmp_path_factory.mktemp("half"))


DAMAGES = [(kind, how) for kind in ("json", "safetensors") for how in ("cut", "flip", "empty")]


@pytest.mark.parametrize(("kind", "damage"), [*DAMAGES, ("safetensors", "gone")])
def test_a_damaged_checkpoint_is_passed_over(
    whole: dict[str, Path], half: Path, tmp_path: Path, kind: str, damage: str
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(half, folder)
    newest = max(folder.glob(f"checkpoints/*.{kind}"))
    content = bytearray(newest.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 4
        newest.write_bytes(content)
    elif damage == "gone":
        newest.unlink()
    else:
        newest.write_bytes(content[: 0 if damage == "empty" else len(content) - 1])
    assert run(command(None, "--resume", folder), log) == 0
    said = log.read_text()
    assert "damaged checkpoint passed over" in said
    assert newest.stem in said
    assert_same(folder, whole[next(iter(CONFIGS))])


def test_what_is_damaged_or_left_over_does_not_crowd_out_good_ones(tmp_path: Path) -> None:
    def save(step: int) -> None:
        save_checkpoint(tmp_path, Checkpoint({"x": torch.ones(3)}, {"step": step}))

    for step in (100, 200):
        save(step)
    (tmp_path / "000000200.json").write_bytes(b"{")
    for name in (".000000150.safetensors.tmp", "000000090.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "notes.txt").touch()
    for step in (120, 130):
        save(step)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("000000120.json", "000000120.safetensors", "000000130.json", "000000130.safetensors"),
        *("000000200.json.damaged", "000000200.safetensors.damaged", "notes.txt"),
    }


def test_every_flipped_bit_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    state = {"step": 7, "loss_sum": 0.125, "config": {"lr": 0.003, "head": "xnodr"}}
    save_checkpoint(tmp_path, Checkpoint({"x": torch.ones(3), "y": torch.zeros(2)}, state))
    files = [tmp_path / "000000007.json", tmp_path / "000000007.safetensors"]
    good = [path.read_bytes() for path in files]
    assert parse_checkpoint(*good).state == state
    for which, content in enumerate(good):
        for place in range(8 * len(content)):
            bad = bytearray(content)
            bad[place // 8] ^= 1 << place % 8
            with pytest.raises(RunError):
                parse_checkpoint(*(bytes(bad) if i == which else good[i] for i in range(2)))


def test_a_file_in_place_of_the_checkpoints(half: Path, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(half, folder)
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").touch()
    assert run(command(None, "--resume", folder), log) == 1
    assert log.read_text().splitlines()[-1] == (
        f"xncaps: {folder / 'checkpoints'}: must be a folder; got a file. Move it away."
    )


@pytest.mark.parametrize("content", [b"[]", b"{}", b"null", b'{"test": 1}', b'{"test": {}}'])
def test_a_damaged_result_is_one_line(half: Path, tmp_path: Path, content: bytes) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(half, folder)
    (folder / "result.json").write_bytes(content)
    assert run(command(None, "--resume", folder), log) == 1
    assert log.read_text().splitlines()[-1].startswith(f"xncaps: {folder / 'result.json'}: ")


def test_no_whole_checkpoint_is_an_error(half: Path, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(half, folder)
    for path in folder.glob("checkpoints/*.json"):
        path.write_bytes(b"{}")
    before = {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    assert run(command(None, "--resume", folder), log) == 1
    line = log.read_text().splitlines()[-1]
    assert line.startswith(f"xncaps: {folder / 'checkpoints'}: no checkpoint is whole (")
    assert "its state is not the one that was written" in line
    assert {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()} == before


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (["--epochs", "9"], "epochs: 5 -> 9"),
        (["--head", "dr", "--lr", "0.5"], "head: xnodr -> dr; lr: 0.003 -> 0.5"),
        (["--set", "caps_in=16"], "options.caps_in: 8 -> 16"),
        (["--augment", "shift=3"], "augment.shift: 2 -> 3"),
        (["--data", "mnist"], "data: sample -> mnist"),
    ],
)
def test_another_configuration_is_refused(
    half: Path, tmp_path: Path, change: list[str], line: str
) -> None:
    log = tmp_path / "log"
    config = (half / "config.json").read_bytes()
    assert run(command(None, "--resume", half, *change), log) == 2
    said = log.read_text().splitlines()[-1]
    began = f"xncaps: train: {half} cannot go on with something else than it began with: "
    assert said.startswith(began + line)
    assert (half / "config.json").read_bytes() == config


@pytest.mark.parametrize(("key", "value"), [("xncaps", "0.0.1"), ("torch", "1.0")])
def test_other_code_is_refused(half: Path, tmp_path: Path, key: str, value: str) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(half, folder)
    for path in folder.glob("checkpoints/*.json"):
        state = json.loads(path.read_bytes())["state"]
        path.write_bytes(_encode({**state, key: value}))
    assert run(command(None, "--resume", folder), log) == 2
    assert f"{key}: {value} -> " in log.read_text().splitlines()[-1]


def test_another_number_of_threads_or_kernel_is_said(half: Path, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(half, folder)
    for path in folder.glob("checkpoints/*.json"):
        state = json.loads(path.read_bytes())["state"]
        path.write_bytes(_encode({**state, "kernel": "another"}))
    assert run(command(None, "--resume", folder, "--threads", 2), log) == 0
    assert "threads: 1 -> 2" in log.read_text()
    assert "kernel: another -> " in log.read_text()


def test_a_run_that_has_ended_is_left_alone(whole: dict[str, Path], tmp_path: Path) -> None:
    folder = next(iter(whole.values()))
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if "tensorboard" not in str(p)}
    before.pop(folder / "config.json")
    assert run(command(None, "--resume", folder), tmp_path / "log") == 0
    assert "this run has ended" in (tmp_path / "log").read_text()
    after = {p: p.stat().st_mtime_ns for p in before}
    assert {p for p in before if before[p] != after[p]} <= {folder}


def test_an_existing_folder_is_refused(half: Path, tmp_path: Path) -> None:
    name, log = next(iter(CONFIGS)), tmp_path / "log"
    assert run(command(CONFIGS[name], "--out", half), log) == 2
    assert log.read_text().splitlines()[-1] == (
        f"xncaps: train: out must be a new folder; got '{half}', which exists. "
        f"Go on with it by --resume {half}, or choose another --out."
    )


def test_two_writers_are_refused(tmp_path: Path) -> None:
    config, folder, log = small(epochs=20), tmp_path / "run", tmp_path / "log"
    first = start(command(config, "--out", folder), tmp_path / "first")
    while not (folder / "data.json").exists():
        time.sleep(0.01)
    assert run(command(None, "--resume", folder), log) == 1
    first.kill()
    first.join()
    assert log.read_text().splitlines()[-1] == (
        f"xncaps: {folder}: another process is training there."
    )


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """Even root may not write there."""
    target = Path("/proc/xncaps-run")
    assert run(command(small(), "--out", target), tmp_path / "log") == 1
    line = (tmp_path / "log").read_text().splitlines()[-1]
    assert line.startswith("xncaps: could not write or read: ")
    assert str(target) in line


def _short_of_room(args: list[str], log: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    runs._child(args, log)


def test_no_room_for_a_checkpoint(half: Path, whole: dict[str, Path], tmp_path: Path) -> None:
    """No file may grow past 60 kB: a checkpoint, which is larger, cannot be written."""
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(half, folder)
    saved = {p.name: p.read_bytes() for p in (folder / "checkpoints").iterdir()}
    args = command(None, "--resume", folder, "--save-seconds", 0)
    process = runs.FORKS.Process(target=_short_of_room, args=(args, str(log)))
    process.start()
    process.join()
    assert process.exitcode == 1
    line = log.read_text().splitlines()[-1]
    assert "cannot be written: File too large. The last good checkpoint, of step " in line
    assert line.endswith(f"Mend this, and go on with: xncaps train --resume {folder}")
    assert {p.name: p.read_bytes() for p in (folder / "checkpoints").iterdir()} == saved
    assert run(command(None, "--resume", folder), log) == 0
    assert_same(folder, whole[next(iter(CONFIGS))])


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    config = small(
        optimizer="sgd",
        lr=1e6,
        schedule="constant",
        head="linear",
        loss="cross_entropy",
        options={"width": 0.25},
    )
    folder, log = tmp_path / "run", tmp_path / "log"
    assert run(command(config, "--out", folder, "--save-seconds", 0), log) == 1
    line = log.read_text().splitlines()[-1]
    assert line.startswith("xncaps: train: ")
    assert " at step " in line
    assert "in epoch 1 (learning rate 1e+06)" in line
    assert line.endswith("Try a smaller --lr, or --set clip=1.")
    saved = sorted(folder.glob("checkpoints/*.safetensors"))
    if saved:
        assert f"of step {int(saved[-1].stem)}, is kept" in line
    for path in saved:
        assert all(tensor.isfinite().all() for tensor in load_file(path).values())
