"""The stopwatch: its peers compute the same, and its arithmetic is right."""

import re
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bench_cases import facts, read
from kernel_cases import threads
from xncaps import CapsFC, XnIDR, XnODR, kernels, system
from xncaps.bench import machine, ort, plan, steps
from xncaps.bench.baselines import (
    FC_STACKS,
    LAYERS,
    Bmm,
    broadcast,
    fc_stack,
    tiled,
    tiled_bytes,
)
from xncaps.bench.goals import GOALS, Goal, ratios
from xncaps.bench.machine import Level, Rates, Shape, capsule_work
from xncaps.bench.report import goal_markdown
from xncaps.bench.rows import COLUMNS, FACTS, Comparison, Row, append_csv, read_newest
from xncaps.bench.timing import Task, best_times
from xncaps.binarizers import sign
from xncaps.errors import InputError, RunError

# The peers.


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("sizes", [(13, 5, 7, 9), (1, 1, 1, 1), (33, 8, 10, 16)])
@pytest.mark.parametrize("iterations", [1, 3])
def test_peers_equal_the_layer(
    layer: str, sizes: tuple[int, int, int, int], iterations: int
) -> None:
    torch.manual_seed(0)
    module = LAYERS[layer](*sizes, iterations)
    x = torch.randn(3, *sizes[:2])
    with torch.no_grad(), kernels.disabled():
        wanted = module(x)
        for got in (
            tiled(x, module.weight, layer, iterations),
            tiled(x, module.weight, layer, iterations, sign=sign),
            broadcast(x, module.weight, layer, iterations),
            Bmm(module.weight, layer, iterations)(x),
        ):
            torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("peer", [tiled, broadcast])
def test_gradients_of_peers_are_those_of_the_layer(layer: str, peer: object) -> None:
    torch.manual_seed(1)
    module = LAYERS[layer](6, 3, 4, 5)
    x = torch.randn(2, 6, 3, requires_grad=True)
    with kernels.disabled():
        wanted = torch.autograd.grad(module(x).square().sum(), [x, module.weight])
    got = torch.autograd.grad(peer(x, module.weight, layer).square().sum(), [x, module.weight])
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=1e-4)


def test_peers_refuse_what_does_not_fit() -> None:
    weight = torch.randn(3, 2, 4, 5)
    with pytest.raises(InputError, match=r"^tiled: x must have shape \(batch, caps_in=3, dim_in=4"):
        tiled(torch.randn(1, 3, 5), weight, "CapsFC")
    with pytest.raises(InputError, match=r"^broadcast: layer must be one of CapsFC, XnODR, XnIDR;"):
        broadcast(torch.randn(1, 3, 4), weight, "XnDR")
    with pytest.raises(InputError, match=r"^broadcast: weight must have shape \(caps_in, caps_out"):
        broadcast(torch.randn(1, 3, 4), weight[0], "XnODR")
    assert tiled_bytes(2, 3, 4, 5, 6) == 2 * 4 * 2 * 3 * 4 * 5 * 6


def test_fc_stacks_are_those_of_the_paper() -> None:
    sizes = {
        shape: [module.weight.shape for module in fc_stack(shape).layers if hasattr(module, "bias")]
        for shape in FC_STACKS
    }
    assert sizes["mb"] == [(512, 1280), (256, 512), (128, 256), (10, 128)]
    assert sizes["rn"] == [(1024, 2048), (512, 1024), (10, 512)]


def test_graphs_compute_what_torch_does() -> None:
    pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
    torch.manual_seed(0)
    with torch.no_grad():
        stack = fc_stack("mb").eval()
        x = torch.randn(3, 1280)
        near(ort.fc_stack(stack.layers, x), stack(x), 1e-5)

        weight, x = torch.randn(24, 40), torch.randn(3, 40)
        near(ort.matmul(weight, x), x @ weight.t(), 1e-5)
        for dynamic in (False, True):
            near(ort.matmul_int8(weight, x, dynamic=dynamic), x @ weight.t(), 0.05)

        weight, x = torch.randn(6, 4, 3, 3), torch.randn(1, 4, 7, 7)
        wanted = torch.nn.functional.conv2d(x, weight, padding=1)
        near(ort.conv(weight, x), wanted, 1e-5)
        for dynamic in (False, True):
            near(ort.conv_int8(weight, x, dynamic=dynamic), wanted, 0.05)


def near(graph: ort.Call, wanted: torch.Tensor, share: float) -> None:
    assert np.abs(graph() - wanted.numpy()).max() < share * wanted.abs().max().item()


# The clock.


def test_best_times_gives_each_its_turns() -> None:
    calls = {"quick": 0, "slow": 0}
    inside: list[str] = []

    class Around:
        def __enter__(self) -> None:
            inside.append("in")

        def __exit__(self, *args: object) -> None:
            inside.append("out")

    def work(name: str) -> None:
        calls[name] += 1
        if name == "slow":
            threading.Event().wait(0.002)

    tasks = {
        "quick": Task(lambda: work("quick")),
        "slow": Task(lambda: work("slow"), Around),
    }
    times = best_times(tasks, 0.05)
    assert times["quick"] < 0.001 < 0.002 <= times["slow"]
    assert tasks["slow"].loops == 1 < tasks["quick"].loops
    assert calls["slow"] == 2 + tasks["slow"].turns >= 5
    assert inside == ["in", "out"] * calls["slow"]


def test_a_slow_task_runs_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xncaps.bench.timing.SLOW_SECONDS", 1e-9)
    calls = []
    task = Task(lambda: calls.append(threading.Event().wait(0.002)))
    assert best_times({"slow": task}, 0.0)["slow"] >= 0.002
    assert len(calls) == 3


# The bound.


def test_work_of_a_layer_by_hand() -> None:
    """mb at batch 1: 20,480 predictions, 1,280 couplings."""
    mb = Shape(128, 8, 10, 16)
    data = 4 * (128 * 8 + 10 * 16)
    softmax = 16 * 2 * 1280
    assert capsule_work("CapsFC", mb, 1) == (
        2 * 20480 * (8 + 3 + 2) + softmax,
        4 * 163840 + data,
    )
    assert capsule_work("XnODR", mb, 1) == (
        2 * 20480 * (8 / 32 + 1 + 3 + 2) + softmax,
        163840 / 8 + 4 * 20480 + data,
    )
    assert capsule_work("XnIDR", mb, 1) == (
        2 * 20480 * (8 + 3 + 2 / 32 + 1) + softmax,
        4 * 163840 + data,
    )
    one, many = capsule_work("XnODR", mb, 1), capsule_work("XnODR", mb, 7)
    assert many[0] == 7 * one[0]
    assert many[1] == one[1] + 6 * data


def test_bound_is_the_longer_time() -> None:
    rates = Rates(
        100e9,
        (Level("L1", 1 << 15, 200e9), Level("L2", 1 << 20, 100e9), Level("DRAM", None, 20e9)),
    )
    assert rates.bound(1e6, 100) == 1e-5  # the arithmetic
    assert rates.bound(0, 1 << 15) == (1 << 15) / 200e9
    assert rates.bound(0, 1 << 20) == (1 << 20) / 100e9
    assert rates.bound(0, 1 << 21) == (1 << 21) / 20e9
    row = Row("inference", "mb", "XnODR", 1, "packed", us_per_sample=20.0, bound_us=5.0)
    assert row.share == 0.25
    assert replace(row, us_per_sample=None).share is None


def test_cache_sizes(tmp_path: Path) -> None:
    assert machine.cache_sizes(tmp_path) == machine.CACHE_BYTES
    for number, (kind, level, size) in enumerate(
        [("Data", "1", "48K"), ("Instruction", "1", "64K"), ("Unified", "2", "oops")]
    ):
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        for name, text in (("type", kind), ("level", level), ("size", size)):
            (folder / name).write_text(text + "\n")
    assert machine.cache_sizes(tmp_path) == {**machine.CACHE_BYTES, "L1": 48 << 10}


def test_commit_is_that_of_this_code_only(tmp_path: Path) -> None:
    assert system.commit.__wrapped__(tmp_path) == ""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "site").mkdir()
    assert system.commit.__wrapped__(tmp_path / "site") == ""  # a package that git knows nothing of
    (tmp_path / "a.py").write_text("1")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["add", "a.py"], [*who, "commit", "-qm", "one"]):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    assert re.fullmatch(r"[0-9a-f]{7,}", system.commit.__wrapped__(tmp_path))
    (tmp_path / "a.py").write_text("2")
    assert system.commit.__wrapped__(tmp_path).endswith("-dirty")


# Memory.


def test_memory_of_a_step_is_its_peak() -> None:
    def step() -> None:
        a = torch.empty(1 << 20)  # 4 MiB
        b = a + 1
        del a
        b.sum()

    assert 2 << 22 <= steps.step_bytes(step) < (2 << 22) + 4096


@pytest.mark.skipif(not kernels.available(), reason="the native kernels were not built")
@pytest.mark.parametrize("layer", [CapsFC, XnODR, XnIDR])
@pytest.mark.parametrize("caps_in", [256, 250])
def test_a_training_step_needs_at_most_ten_megabytes(layer: type[nn.Module], caps_in: int) -> None:
    """At ResNet-50's shape, 128 samples; with capsules that do not fill their blocks as well."""
    module, x = layer(caps_in, 8, 10, 16), torch.randn(128, caps_in, 8, requires_grad=True)

    def step() -> None:
        module(x).square().sum().backward()

    with threads(1):
        assert steps.step_bytes(step) < 10e6


# Rows and files.


def row(**changes: object) -> Row:
    return replace(Row("xnor", "24x24", "XnorLinear", 1, "packed", us_per_sample=1 / 3), **changes)


def test_csv_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "bench.csv"
    append_csv(path, facts(), [row(), row(what="torch fp32", note="too big, says it")])
    append_csv(path, facts(), [row(memory_bytes=7)])
    found = read(path)
    assert [each["what"] for each in found] == ["packed", "torch fp32", "packed"]
    assert tuple(found[0]) == COLUMNS
    assert found[0]["cpu"] == 'A "fast", one'
    assert found[0]["us_per_sample"] == "0.333333"
    assert found[0]["ratio"] == ""
    assert found[1]["note"] == "too big, says it"
    assert found[2]["memory_bytes"] == "7"
    assert path.read_text().count("date,commit") == 1
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644


def test_csv_of_many_writers_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "bench.csv"
    writers = [
        threading.Thread(
            target=append_csv, args=(path, facts(), [row(what=f"w{number}") for _ in range(50)])
        )
        for number in range(8)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = read(path)
    assert len(found) == 400
    assert all(each["group"] == "xnor" and each["share_of_bound"] == "" for each in found)
    assert path.read_text().count("date,commit") == 1


def test_csv_after_a_crash_and_of_another_version(tmp_path: Path) -> None:
    path = tmp_path / "bench.csv"
    append_csv(path, facts(), [row()])
    with path.open("a") as file:
        file.write("2026,cut")
    append_csv(path, facts(), [row(what="after")])
    assert read(path)[-1]["what"] == "after"
    path.write_text("date,figure\n")
    with pytest.raises(RunError, match=r"bench\.csv: has other columns than this version writes"):
        append_csv(path, facts(), [row()])


def test_ratios_are_of_ours() -> None:
    comparison = Comparison("xnor", "s", "l", 4, "ours")
    comparison.add("ours", lambda: None, memory_bytes=3)
    comparison.add("theirs", lambda: sum(range(2000)))
    comparison.skip("huge", "too big")
    ours, theirs, huge = comparison.rows(0.01)
    assert (ours.ratio, ours.memory_bytes) == (1.0, 3)
    assert theirs.ratio == pytest.approx(theirs.us_per_sample / ours.us_per_sample)
    assert theirs.ratio > 1
    assert (huge.us_per_sample, huge.ratio, huge.note) == (None, None, "too big")


# Goals.


def test_a_goal_is_judged_by_the_worst_and_the_fastest_peer() -> None:
    goal = Goal("g", 5, 6, 3, ratios("inference", "XnODR", ["a", "b"], ["mb"]))
    rows = [
        Row("inference", "mb", "XnODR", 1, "a", 1.0, ratio=9.0),
        Row("inference", "mb", "XnODR", 1, "b", 1.0, ratio=7.0),
        Row("inference", "mb", "XnODR", 32, "a", 1.0, ratio=5.96),
        Row("inference", "rn", "XnODR", 1, "a", 1.0, ratio=1.0),
        Row("inference", "mb", "CapsFC", 1, "a", 1.0, ratio=1.0),
        Row("inference", "mb", "XnODR", 256, "a", note="too big"),
    ]
    verdict = goal.judge(rows)
    assert verdict.reached == (5.96, 7.0)
    assert verdict.cells() == ["g", "5.0x", "6.0x", "6.0x to 7.0x", True, True]
    verdict = replace(goal, goal=6.1).judge(rows)
    assert (verdict.floor_met, verdict.goal_met) == (True, False)
    verdict = replace(goal, at_most=True, floor=7, goal=6).judge(rows)
    assert (verdict.worst, verdict.floor_met, verdict.goal_met) == (7.0, True, False)
    assert goal.judge([]).cells()[3:] == ["not measured", None, None]
    part = replace(goal, rows=4, goal=6.1).judge(rows)  # more might be worse, not better
    assert part.cells()[3:] == ["6.0x to 7.0x (a part)", None, False]


def test_each_kind_of_machine_shows_its_newest_run(tmp_path: Path) -> None:
    path = tmp_path / "bench.csv"
    for day, kernel, ratio in (("01", "b", 9.0), ("03", "a", 7.0), ("02", "b", 8.0)):
        known = {
            **dict.fromkeys(FACTS, "x"),
            "date": f"2026-01-{day}",
            "kernel": kernel,
            "cpu": "c",
        }
        append_csv(path, known, [Row("inference", "mb", "XnODR", 1, "FC ORT", 1.0, ratio)])
    lines = goal_markdown(read_newest(path)).splitlines()
    assert lines[0] == "|  | floor | goal | a | b |"
    assert lines[2].endswith("| 8.0x | 12.0x | **7.0x** | 8.0x |")
    assert lines[-1] == "a: c, 2026-01-03; b: c, 2026-01-02"
    # A later run of other groups only does not take its place.
    known = {**dict.fromkeys(FACTS, "x"), "date": "2026-01-04", "kernel": "a", "cpu": "c"}
    append_csv(path, known, [Row("calls", "1x1", "XnODR", 1, "packed", 1.0, 1.0)])
    assert goal_markdown(read_newest(path)).splitlines() == lines
    # Two processors with the same kernel.
    known = {**known, "date": "2026-01-05", "cpu": "d"}
    append_csv(path, known, [Row("inference", "mb", "XnODR", 1, "FC ORT", 1.0, 9.0)])
    lines = goal_markdown(read_newest(path)).splitlines()
    assert lines[0] == "|  | floor | goal | a (1) | a (2) | b |"
    assert lines[2].endswith("| 8.0x | 12.0x | **7.0x** | 9.0x | 8.0x |")
    assert lines[-1] == "a (1): c, 2026-01-03; a (2): d, 2026-01-05; b: c, 2026-01-02"


def test_goals_find_their_rows() -> None:
    """Rows such as a full run has: every goal finds some."""
    rows = [
        Row("inference", shape, layer, batch, what, 1.0, 20.0, None, size, 1e-4)
        for shape in ("mb", "rn")
        for layer in LAYERS
        for batch in (1, 32, 256)
        for what, size in {**dict.fromkeys(plan.FULL.peers, 3200), "packed fp16": 300}.items()
    ]
    rows += [
        Row("training", shape, layer, 128, what, 1.0, 20.0, None, 5_000_000)
        for shape in plan.FULL.train_shapes
        for layer in LAYERS
        for what in ("native", *plan.FULL.train_peers)
    ]
    rows += [
        Row("xnor", "s", layer, batch, what, 1.0, 20.0)
        for layer, batch in (*(("XnorLinear", rows) for rows in (1, 16, 256)), ("XnorConv2d", 1))
        for what in ("torch fp32", "ORT fp32", "ORT int8 dynamic", "ORT int8 static")
    ]
    rows += [
        Row("calls", "1x1", "XnODR", 1, what, 2.5, 2.0) for what in ("torch.add", "packed", "op")
    ]
    verdicts = {goal.what: goal.judge(rows) for goal in GOALS}
    assert all(verdict.reached is not None for verdict in verdicts.values())
    assert verdicts["Call of a packed layer with nothing to compute"].floor_met is False
    assert verdicts["Call of the op with nothing to compute"].floor_met
    assert all(goal.figures(rows)[1] == goal.rows for goal in GOALS)
    assert verdicts["XnODR weights, packed with fp16 scales, smaller"].goal_met  # 10.67
    assert verdicts["XnODR training step, memory above the inputs"].worst == 5.0
    assert all(goal.at_most or goal.goal >= goal.floor for goal in GOALS)
