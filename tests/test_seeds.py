"""Several seeds in one command."""

import json
import math
import os
import re
import signal
import time
from pathlib import Path

import pytest

from runs import command, run, small, start, weights
from xncaps.errors import InputError
from xncaps.training.seeds import SeedsResult, parse_seeds, train_seeds
from xncaps.training.stopping import StoppedError, StopRequests


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("0-4", [0, 1, 2, 3, 4]), ("3", [3]), ("1,5-6", [1, 5, 6]), (" 1, 2", [1, 2])],
)
def test_seeds_are_read(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "4-1", "1,,2", "-3", "0-", "1,1", "0-99999", "1.5"])
def test_bad_seeds_are_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_seeds(text)
    assert str(caught.value).startswith("train: seeds must ")


def test_mean_and_deviation() -> None:
    result = SeedsResult({0: 0.9, 1: 0.92, 2: 0.97})
    mean = (0.9 + 0.92 + 0.97) / 3
    spread = math.sqrt(sum((x - mean) ** 2 for x in (0.9, 0.92, 0.97)) / 2)
    assert result.mean == pytest.approx(mean)
    assert result.deviation == pytest.approx(spread)
    assert str(SeedsResult({4: 0.5})) == "50.00% over 1 seed (4: 50.00%)"
    assert SeedsResult({4: 0.5}).to_dict()["deviation"] is None


def test_several_seeds(tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "runs"
    config = small(epochs=1)
    words = [w for w in command(config, "--out", out) if not w.startswith("--set=seed")]
    assert run([*words, "--seeds", "0-1"], log) == 0
    found = json.loads((out / "seeds.json").read_bytes())
    each = [
        json.loads((out / f"seed-{seed}" / "result.json").read_bytes())["test"]["top1"]
        for seed in (0, 1)
    ]
    assert list(found["accuracies"].values()) == each
    assert weights(out / "seed-0") != weights(out / "seed-1")
    assert found["mean"] == pytest.approx(sum(each) / 2)
    assert " +- " in log.read_text()
    # Killed between two seeds: what has ended is not run again.
    (out / "seed-1" / "result.json").unlink()
    before = (out / "seed-0" / "result.json").stat().st_mtime_ns
    assert run(["train", "--resume", str(out)], log) == 0
    assert json.loads((out / "seeds.json").read_bytes()) == found
    assert (out / "seed-0" / "result.json").stat().st_mtime_ns == before
    assert run(["train", "--resume", str(out), "--seeds", "0-2"], log) == 2
    assert "seeds: [0, 1] -> [0, 1, 2]" in log.read_text().splitlines()[-1]


def test_asked_to_stop_between_two_seeds(tmp_path: Path) -> None:
    """Ctrl-C while the report of the first seed is written: the second is not begun."""
    words = [w for w in command(small(epochs=1)) if not w.startswith("--set=seed")]
    words += ["--seeds", "0-1", "--out"]
    whole, out, log = tmp_path / "whole", tmp_path / "runs", tmp_path / "log"
    assert run([*words, str(whole)], log) == 0
    log.unlink()
    process = start([*words, str(out)], log)
    while not (log.exists() and "writing the report" in log.read_text()):
        assert process.is_alive()
        time.sleep(0.01)
    assert process.pid
    os.kill(process.pid, signal.SIGINT)
    process.join()
    assert process.exitcode == 1
    last = log.read_text().splitlines()[-1]
    assert last == f"xncaps: stopped before seed 1. Go on with: xncaps train --resume {out}"
    assert (out / "seed-0" / "result.json").exists()
    assert not (out / "seed-1").exists()
    assert run(["train", "--resume", str(out)], log) == 0
    for seed in ("seed-0", "seed-1"):
        assert weights(out / seed) == weights(whole / seed)
    assert (out / "seeds.json").read_bytes() == (whole / "seeds.json").read_bytes()


def test_no_seed_is_begun_after_a_signal(tmp_path: Path) -> None:
    begun = []

    def one(config, folder, going_on):
        begun.append(config.seed)
        os.kill(os.getpid(), signal.SIGTERM)
        return 0.5

    with StopRequests() as stops, pytest.raises(StoppedError, match=re.escape("before seed 7. Go")):
        train_seeds(small(), [3, 7], tmp_path / "runs", one, stops=stops, go_on="the command")
    assert begun == [3]
