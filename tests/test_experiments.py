"""Experiments: every run has its row, whatever happens in between."""

import json
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import FORKS
from xncaps.cli.experiment import run as run_command
from xncaps.errors import InputError
from xncaps.experiments import Experiment, by_head, read_accuracy
from xncaps.experiments.rows import append_row
from xncaps.training.checkpoint import parse_checkpoint, read_checkpoint, save_checkpoint
from xncaps.training.stopping import StoppedError, StopRequests
from xncaps.training.train import train

TINY: dict[str, Any] = {
    "data": "sample",
    "train_count": 200,
    "model": "convnet",
    "attach": "features",
    "options": {"width": 0.25},
    "epochs": 2,
    "batch_size": 32,
}
HEADS = Experiment("heads", TINY, by_head("linear", "xnidr"), seeds=2, more_seeds={"linear": 1})


def _recipe(experiment: Experiment, args: list[str], log: str) -> None:
    with Path(log).open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["heads.py", *args]
    from xncaps.cli.experiment import run

    run(experiment, "A claim.")


def begin(experiment: Experiment, folder: Path, *more: str) -> Any:
    """Start the command of an experiment in a process of its own."""
    folder.mkdir(exist_ok=True)
    args = ["--results", str(folder / "results"), "--runs", str(folder / "runs"), *more]
    process = FORKS.Process(target=_recipe, args=(experiment, args, str(folder / "log")))
    process.start()
    return process


def finish(experiment: Experiment, folder: Path, *more: str) -> tuple[int, str]:
    """Run the command of an experiment; returns its status, and what it printed."""
    (folder / "log").unlink(missing_ok=True)
    process = begin(experiment, folder, *more)
    process.join()
    return process.exitcode, (folder / "log").read_text()


def figures(folder: Path) -> dict[tuple[str, str, int], tuple[object, ...]]:
    rows = read_accuracy(folder / "results")
    return {row.key: (row.accuracy, row.validation, row.curve, row.params) for row in rows}


def lines(folder: Path) -> int:
    return len((folder / "results" / "accuracy.csv").read_text().splitlines()) - 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The experiment without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    status, said = finish(HEADS, folder)
    assert status == 0, said
    assert "3 runs trained" in said
    return folder


def test_rows_say_what_was_trained_and_where(whole: Path) -> None:
    rows = read_accuracy(whole / "results")
    assert [row.key for row in rows] == [run.key for run in HEADS.runs()]
    for run, row in zip(HEADS.runs(), rows, strict=True):
        result = json.loads(
            (whole / "runs" / "heads" / row.variant / f"seed-{row.seed}/result.json").read_text()
        )
        assert row.config == run.config
        assert row.accuracy == pytest.approx(result["test"]["top1"], rel=1e-6)
        assert row.validation == row.curve[-1]
        assert len(row.curve) == 2
        assert row.params == result["params"]
        assert row.head_params == result["head_params"]
        assert row.minutes == pytest.approx(result["seconds"] / 60, rel=1e-4)
        assert 0 < row.cpu_minutes == pytest.approx(result["cpu_seconds"] / 60, rel=1e-4)
        assert (row.threads, row.torch) == (1, torch.__version__)
        assert row.per_digit is row.top2 is None
    linear, capsules = rows[:2]
    assert linear.head_params == 32 * 10 + 10
    assert linear.params - linear.head_params == capsules.params - capsules.head_params
    assert (linear.config.loss, capsules.config.loss) == ("cross_entropy", "margin")


def test_nothing_is_run_twice(whole: Path) -> None:
    before = (whole / "results" / "accuracy.csv").read_bytes()
    status, said = finish(HEADS, whole)
    assert (status, said.strip()) == (0, "0 runs trained, 3 had a row")
    assert (whole / "results" / "accuracy.csv").read_bytes() == before
    status, said = finish(HEADS, whole, "--plan")
    assert status == 0
    assert said.count("% of the test images") == 3


def test_a_row_comes_out_again(whole: Path) -> None:
    before = (whole / "results" / "accuracy.csv").read_bytes()
    status, said = finish(HEADS, whole, "--only", "xnidr", "--seeds", "1", "--again")
    assert status == 0, said
    assert said.rstrip().endswith(": the same")
    assert (whole / "results" / "accuracy.csv").read_bytes() == before


def test_another_figure_is_told(whole: Path, tmp_path: Path) -> None:
    """A row that was touched up does not come out again; one of another machine need not."""
    row = next(row for row in read_accuracy(whole / "results") if row.variant == "linear")
    append_row(tmp_path / "results", replace(row, accuracy=0.999))
    status, said = finish(HEADS, tmp_path, "--only", "linear", "--again")
    assert status == 1
    assert "row 99.90% of the test images" in said
    assert ": OTHER" in said
    append_row(tmp_path / "results", replace(row, accuracy=0.999, cpu="abacus"))
    status, said = finish(HEADS, tmp_path, "--only", "linear", "--again")
    assert status == 0
    assert "it may differ: cpu abacus -> " in said


def test_killed_at_any_moment(whole: Path, tmp_path: Path) -> None:
    """Killed again and again, it ends with the rows it would have had, each once."""
    kills = 0
    for wait in (0.4, 1.6, 0.9):
        process = begin(HEADS, tmp_path)
        process.join(wait)
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.join()
    status, said = finish(HEADS, tmp_path)
    assert status == 0, said
    assert kills >= 1
    assert figures(tmp_path) == figures(whole)
    assert lines(tmp_path) == 3


def test_two_at_once_share_the_work(whole: Path, tmp_path: Path) -> None:
    first, second = begin(HEADS, tmp_path), begin(HEADS, tmp_path)
    first.join()
    second.join()
    assert (first.exitcode, second.exitcode) == (0, 0)
    assert figures(tmp_path) == figures(whole)
    assert lines(tmp_path) == 3


def test_a_run_goes_on_though_a_setting_has_come_since(tmp_path: Path) -> None:
    """A campaign lasts for days; a default that was not there when a run began changes nothing."""
    config, folder = HEADS.config("linear", 0), tmp_path / "run"
    stops = StopRequests()
    stops.asked = True
    with pytest.raises(StoppedError):
        train(config, folder, stops=stops)
    text, content = read_checkpoint(folder / "checkpoints", print) or (b"", b"")
    checkpoint = parse_checkpoint(text, content)
    del checkpoint.state["config"]["augment"]["bend"]
    save_checkpoint(folder / "checkpoints", checkpoint)
    assert train(config, folder, resume=True).accuracy > 0


def test_asked_to_stop_it_says_how_to_go_on(tmp_path: Path) -> None:
    long = Experiment("long", {**TINY, "epochs": 500}, by_head("linear"), seeds=1)
    process = begin(long, tmp_path)
    while not (tmp_path / "runs" / "long" / "linear" / "seed-0" / "config.json").exists():
        assert process.is_alive()
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGTERM)
    process.join()
    said = (tmp_path / "log").read_text()
    assert process.exitcode == 1
    assert "heads.py --results" in said.splitlines()[-1]
    assert read_accuracy(tmp_path / "results") == []


def test_a_recipe_that_was_changed_is_refused(whole: Path) -> None:
    changed = replace(HEADS, base={**TINY, "lr": 0.5})
    status, said = finish(changed, whole)
    assert status == 2
    line = said.splitlines()[-1]
    assert line.startswith("xncaps: heads, linear, seed 0: the recipe must be that of its row in ")
    assert "; got lr: 0.003 -> 0.5. Give the experiment another name" in line
    status, said = finish(replace(HEADS, tuning=True), whole)
    assert status == 2
    assert "; got tuning: False -> True. " in said


def test_a_run_that_was_begun_otherwise_is_refused(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "runs", tmp_path / "runs")
    status, said = finish(replace(HEADS, base={**TINY, "lr": 0.5}), tmp_path)
    assert status == 2
    assert "heads, linear, seed 0: the recipe must be that of " in said
    assert said.rstrip().endswith("Remove the folder, or give the experiment another name.")


def test_a_row_is_of_the_run_and_not_of_who_writes_it(whole: Path, tmp_path: Path) -> None:
    """Killed between its end and its row, and written down by a process with other threads."""
    shutil.copytree(whole / "runs", tmp_path / "runs")
    status, said = finish(HEADS, tmp_path, "--threads", "2")
    assert status == 0, said
    assert figures(tmp_path) == figures(whole)
    assert {row.threads for row in read_accuracy(tmp_path / "results")} == {1}
    result = tmp_path / "runs" / "heads" / "linear" / "seed-0" / "result.json"
    result.write_text(result.read_text().replace('"head_params"', '"heads"'))
    (tmp_path / "results" / "accuracy.csv").unlink()
    status, said = finish(HEADS, tmp_path)
    assert status == 1
    assert "xncaps: heads, linear, seed 0: its result.json lacks 'head_params'. " in said


def test_a_run_does_not_go_on_with_other_threads(tmp_path: Path) -> None:
    """Its row could never come out again."""
    process = begin(Experiment("long", {**TINY, "epochs": 500}, by_head("linear"), 1), tmp_path)
    while not list(tmp_path.glob("runs/long/linear/seed-0/checkpoints/*.json")):
        assert process.is_alive()
        time.sleep(0.02)
    process.kill()
    process.join()
    long = Experiment("long", {**TINY, "epochs": 500}, by_head("linear"), 1)
    status, said = finish(long, tmp_path, "--threads", "2")
    assert status == 2
    assert "threads: 1 -> 2" in said


def test_a_row_names_all_code_and_the_only_machine_it_came_from(tmp_path: Path) -> None:
    one = Experiment("one", {**TINY, "epochs": 30}, by_head("linear"), 1)
    process = begin(one, tmp_path)
    checkpoints = tmp_path / "runs" / "one" / "linear" / "seed-0" / "checkpoints"
    while not list(checkpoints.glob("*.json")):
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    text, content = read_checkpoint(checkpoints, print) or (b"", b"")
    checkpoint = parse_checkpoint(text, content)
    (commit,), kernel = checkpoint.state["commits"], checkpoint.state["kernel"]
    state = {**checkpoint.state, "commits": ["0ld"], "kernel": "another"}
    save_checkpoint(checkpoints, replace(checkpoint, state=state))
    status, said = finish(one, tmp_path)
    assert status == 2
    assert f"kernel: another -> {kernel}" in said
    save_checkpoint(checkpoints, replace(checkpoint, state={**state, "kernel": kernel}))
    status, said = finish(one, tmp_path)
    assert status == 0, said
    assert "going on after step" in said
    (row,) = read_accuracy(tmp_path / "results")
    assert row.commit == f"0ld {commit}".strip()
    assert row.kernel == kernel


def test_rows_that_could_not_be_written_are_found_out_first(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("")
    status, said = finish(HEADS, tmp_path)
    assert status == 1
    assert "epoch" not in said
    (tmp_path / "results").unlink()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "accuracy.csv").write_text("a,b\n")
    status, said = finish(HEADS, tmp_path)
    assert status == 1
    assert "has other columns than this version writes" in said
    assert "epoch" not in said


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--seeds", "0,9"], "experiment heads: seeds must be from 0 to 1; got 9."),
        (["--seeds", "9" * 5000], "train: seeds must look like 0-4 or 0,1,2; got '9999"),
        (["--only", "fc"], "experiment heads: variant must be one of linear, xnidr; got 'fc'."),
        (["--plan", "--again"], "heads: plan must stand alone; got both --plan and --again."),
        (["--again"], "heads: again must find rows in "),
    ],
)
def test_bad_usage_is_one_line(tmp_path: Path, args: list[str], says: str) -> None:
    status, said = finish(HEADS, tmp_path, *args)
    assert status == 2
    assert len(said.splitlines()) == 1
    assert said.startswith(f"xncaps: {says}")


def test_torchrun_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes would mix their runs."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["heads.py", "--results", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        run_command(HEADS, "A claim.")
    assert caught.value.code == 2


def test_a_run_that_diverges_does_not_stop_the_others(tmp_path: Path) -> None:
    wild = {"linear": {"head": "linear", "loss": "cross_entropy", "optimizer": "sgd", "lr": 1e6}}
    both = Experiment("both", {**TINY, "epochs": 1}, {**wild, **by_head("dr")}, seeds=1)
    status, said = finish(both, tmp_path)
    assert status == 1
    assert said.splitlines()[-1] == "xncaps: failed: both, linear, seed 0."
    assert "1 run trained, 1 failed" in said
    assert [row.variant for row in read_accuracy(tmp_path / "results")] == ["dr"]


def test_what_another_experiment_trained_is_taken_over(whole: Path, tmp_path: Path) -> None:
    (row,) = [r for r in read_accuracy(whole / "results") if r.variant == "linear"]
    append_row(tmp_path / "results", row)
    same = Experiment("same", TINY, {"plain": {"head": "linear", "loss": "cross_entropy"}}, 1)
    status, said = finish(same, tmp_path)
    assert status == 0, said
    assert "epoch" not in said
    assert said.rstrip().endswith("0 runs trained, 1 taken over")
    new = read_accuracy(tmp_path / "results")[-1]
    assert new == replace(row, experiment="same", variant="plain")
    # A run that chooses settings never sees a test figure, not even one that is there already.
    status, said = finish(replace(same, name="choice", tuning=True), tmp_path)
    assert status == 0, said
    new = read_accuracy(tmp_path / "results")[-1]
    assert (new.experiment, new.accuracy, new.validation) == ("choice", None, row.validation)
    assert "of the test images" not in said
    (result,) = (tmp_path / "runs" / "choice").rglob("result.json")
    assert json.loads(result.read_bytes())["test"]["count"] == 0


def test_a_recipe_may_ask_for_threads(tmp_path: Path) -> None:
    two = Experiment("two", {**TINY, "epochs": 1}, by_head("linear"), 1, threads=2)
    assert finish(two, tmp_path)[0] == 0
    assert [row.threads for row in read_accuracy(tmp_path / "results")] == [2]
    with pytest.raises(InputError, match="threads must be"):
        replace(two, threads=0)


def test_order_and_settings() -> None:
    experiment = Experiment(
        "x", {**TINY, "options": {"width": 0.5}}, by_head("fc", "dr", options={"width": 2.0}), 2
    )
    assert [(run.variant, run.seed) for run in experiment.runs()] == [
        *(("fc", 0), ("dr", 0), ("fc", 1), ("dr", 1)),
    ]
    assert experiment.config("dr", 1).options == {"width": 2.0}
    options = {"iterations": 1}
    more = Experiment("x", TINY, {"one": {"head": "dr", "options": options}}, 1)
    assert more.config("one", 0).options == {"width": 0.25, "iterations": 1}
    assert [str(run) for run in HEADS.chosen(["xnidr"], [1])] == ["heads, xnidr, seed 1"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Experiment("x", {"epoch": 3}, by_head("fc")), "epoch"),
        (lambda: Experiment("x", {}, by_head("fd")), "head must be one of"),
        (lambda: Experiment("x", {}, by_head("fc"), seeds=0), "seeds must be at least 1"),
        (lambda: Experiment("x", {}, by_head("fc"), more_seeds={"dr": 2}), "variant must be"),
        (lambda: HEADS.chosen(["fc"], None), "variant must be one of linear, xnidr; got 'fc'"),
        (lambda: HEADS.chosen(["linear"], [1]), "seeds must be from 0 to 0; got 1"),
        (lambda: Experiment("x", {}, {}), "variants must be at least one"),
        (lambda: Experiment("x", {}, {"../up": {}}), "letters, digits, dots and dashes"),
        (lambda: Experiment("a/b", {}, by_head("fc")), "letters, digits, dots and dashes"),
        (lambda: Experiment("x", {"seed": 3}, by_head("fc")), "seed must be left"),
        (lambda: Experiment("x", {"options": 5}, by_head("fc")), "options must be a mapping"),
        (lambda: Experiment("x", {"data": "mnst"}, by_head("fc")).check(), "data must be one of"),
        (lambda: Experiment("x", {}, by_head("fc", options={"widht": 2})).check(), "'widht'"),
    ],
)
def test_bad_experiments(make: Any, says: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert says in str(caught.value)
