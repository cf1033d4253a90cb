"""The same command under torchrun: real processes on loopback."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import IO

import pytest
import torch
from safetensors.torch import load_file

from runs import command, rows, small

# Without BatchNorm, two processes take the steps of one.
CAPSNET = small(
    model="capsnet",
    head="xnidr",
    options={"caps_in": 8, "dim_in": 4},
    train_count=120,
    image_size=20,
    epochs=2,
    batch_size=25,
)


# The command, and at the very end what threads are left: a group that outlives Python can abort.
WATCHED = """
import atexit, sys
from pathlib import Path
from xncaps.cli.main import main

def tell():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    sys.stderr.write(f"left behind: {[name for name in names if 'gloo' in name]}\\n")

atexit.register(tell)
sys.exit(main(sys.argv[1:]))
"""


def torchrun(
    args: list[str],
    processes: int = 2,
    restarts: int = 0,
    program: Sequence[str] = ("-m", "xncaps"),
) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += [f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    return [*launch, "--monitor-interval=0.1", *program, *args]


def run(args: list[str], **more: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        args, capture_output=True, text=True, check=False, env=environment, timeout=300, **more
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    done = run([sys.executable, "-m", "xncaps", *command(CAPSNET, "--out", folder)])
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_take_the_same_steps_as_one(alone: Path, tmp_path: Path, processes: int) -> None:
    """25 images over 2 or 3 processes: their parts are not even of one size."""
    folder = tmp_path / "run"
    script = tmp_path / "watched.py"
    script.write_text(WATCHED)
    words = command(CAPSNET, "--out", folder)
    done = run(torchrun(words, processes, program=[str(script)]))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("left behind: []\n") == processes
    one, many = (load_file(f / "model.safetensors") for f in (alone, folder))
    assert one.keys() == many.keys()
    for name in one:
        torch.testing.assert_close(many[name], one[name], rtol=1e-3, atol=2e-5)
    for row, reference in zip(rows(folder), rows(alone), strict=True):
        assert row["accuracy"] == pytest.approx(reference["accuracy"], abs=1e-9)
        assert row["loss"] == pytest.approx(reference["loss"], rel=1e-4)
    results = [json.loads((f / "result.json").read_bytes()) for f in (alone, folder)]
    assert results[0]["test"]["confusion"] == results[1]["test"]["confusion"]
    assert results[1]["processes"] == processes
    # One writer: the display, the report and the result come once.
    assert done.stdout.count("report: ") == 1


def children(parent: int) -> list[int]:
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(word) for word in text.split()]


def begin(args: list[str], log: IO[str], pattern: Path) -> subprocess.Popen[bytes]:
    """Start a torchrun, and wait until a file of this pattern is there."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(args, env=environment, stdout=log, stderr=log)
    while not glob(str(pattern)):
        assert process.poll() is None
        time.sleep(0.01)
    return process


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers through /proc")
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_worker_is_started_again(tmp_path: Path, victim: int) -> None:
    """With BatchNorm and an average: what goes on is what would have been, whichever was killed."""
    config = small(ema=0.9, train_count=500, epochs=6)
    reference = tmp_path / "reference"
    assert run(torchrun(command(config, "--out", reference))).returncode == 0
    folder = tmp_path / "run"
    args = torchrun(command(config, "--out", folder, "--save-seconds", 0), restarts=2)
    with (tmp_path / "log").open("w") as log:
        process = begin(args, log, folder / "checkpoints" / "00000002*.json")
        workers = sorted(children(process.pid))
        assert len(workers) == 2
        os.kill(workers[victim], signal.SIGKILL)
        assert process.wait(timeout=300) == 0
    assert "going on after step " in (tmp_path / "log").read_text()
    weights, wanted = (f / "model.safetensors" for f in (folder, reference))
    assert weights.read_bytes() == wanted.read_bytes()
    assert rows(folder) == rows(reference)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers through /proc")
def test_two_nodes_and_a_worker_that_dies_on_the_second(alone: Path, tmp_path: Path) -> None:
    """Two torchruns as on two machines; only the node of the dead worker counts a restart."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path / "run"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    launch += ["--max-restarts=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    launch += ["--rdzv-id=nodes", "--monitor-interval=0.1", "-m", "xncaps"]
    args = [*launch, *command(CAPSNET, "--out", folder, "--save-seconds", 0)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        nodes = [subprocess.Popen(args, env=environment, stdout=log, stderr=log) for _ in range(2)]
        while not list(folder.glob("checkpoints/*3.json")):
            assert all(node.poll() is None for node in nodes)
            time.sleep(0.01)
        for worker in [child for node in nodes for child in children(node.pid)]:
            if b"\0RANK=1\0" in Path(f"/proc/{worker}/environ").read_bytes():
                os.kill(worker, signal.SIGKILL)
        assert [node.wait(timeout=300) for node in nodes] == [0, 0]
    said = (tmp_path / "log").read_text()
    assert "going on after step " in said, said
    for name, tensor in load_file(folder / "model.safetensors").items():
        reference = load_file(alone / "model.safetensors")[name]
        torch.testing.assert_close(tensor, reference, rtol=1e-3, atol=2e-5)


def test_an_existing_run_is_refused_by_all(alone: Path) -> None:
    """Restarts do not make it this job's own."""
    before = {path: path.read_bytes() for path in sorted(alone.rglob("*")) if path.is_file()}
    done = run(torchrun(command(CAPSNET, "--out", alone), restarts=1))
    assert done.returncode != 0
    line = f"xncaps: train: out must be a new folder; got '{alone}', which exists."
    assert done.stderr.count(line) == 2
    assert before == {p: p.read_bytes() for p in sorted(alone.rglob("*")) if p.is_file()}


@pytest.mark.slow
def test_several_seeds_go_on_after_a_restart(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    words = [w for w in command(small(), "--out", out) if not w.startswith("--set=seed")]
    args = torchrun([*words, "--seeds", "0-1", "--save-seconds", "0"], 1, restarts=1)
    with (tmp_path / "log").open("w") as log:
        process = begin(args, log, out / "seed-1" / "checkpoints" / "*5.json")
        for worker in children(process.pid):
            os.kill(worker, signal.SIGKILL)
        assert process.wait(timeout=300) == 0, (tmp_path / "log").read_text()
    assert len(json.loads((out / "seeds.json").read_bytes())["accuracies"]) == 2
