"""``xncaps bench`` as a command."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench_cases import facts, read
from xncaps import kernels
from xncaps.bench import inference, machine, ort, plan, steps, suite
from xncaps.bench.baselines import (
    LAYERS,
)
from xncaps.bench.goals import GOALS
from xncaps.bench.machine import Level, Rates, Shape
from xncaps.bench.report import Report
from xncaps.bench.rows import Row
from xncaps.cli.main import main

TINY = plan.Plan(
    seconds=0.0,
    shapes={"mb": Shape(9, 3, 4, 5), "odd": Shape(3, 2, 2, 3)},
    batches=(1, 2),
    layers=tuple(LAYERS),
    peers=tuple(inference.PEERS),
    compile_shapes=("odd",),
    train_shapes=("odd",),
    train_layers=tuple(LAYERS),
    train_batch=2,
    train_peers=("layer eager", "compile layer", "tiled"),
    gemm=24,
    gemm_rows=(1, 3),
    conv=(4, 5),
    primary={"mb": 7},
    network=("convnet", 28),
    heads=("linear", "xnodr"),
    network_batches=(1,),
)


def call(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    status = main([str(arg) for arg in args])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Both plans tiny, nothing compiled for real (that takes seconds), in an empty folder."""
    for name in plan.PLANS:
        monkeypatch.setitem(plan.PLANS, name, TINY)
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    monkeypatch.setattr(machine, "RATE_SECONDS", 1e-4)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_plain_bench_runs_all_groups(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    status, out, err = call(capsys, "bench")
    assert status == 0
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    for title in ("Inference", "Training step", "XNOR product", "The whole network", "A call that"):
        assert title in out
    assert re.search(r"^packed +[\d.,]+ +[\d.]+x$", out, re.M)
    assert re.search(
        r"^Call of the op with nothing to compute +8.0 us +8.0 us +[\d.]+ us ", out, re.M
    )
    assert re.search(r"^mb +XnODR +2 +[\d.,]+ ", out, re.M)
    assert re.search(r"^XnODR against torch.compile +7.4x +12.0x +not measured", out, re.M)
    assert "inference: odd XnIDR, batch 2\n" in err
    found = read(tiny / "results" / "bench.csv")
    assert {each["group"] for each in found} == set(suite.GROUPS)
    assert {each["what"] for each in found if each["group"] == "inference"} == {
        "packed",
        *inference.PEERS,
    }
    assert {each["threads"] for each in found} == {"1"}
    assert {each["kernel"] for each in found} == {kernels.selected()}
    packed = [each for each in found if each["what"] == "packed" and each["difference"]]
    assert packed
    assert max(float(each["difference"]) for each in packed) < 1e-5


def test_bench_as_json(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    words = ("--quick", "--json", "--seconds", 0, "--only", "xnor", "--only", "training")
    status, out, _ = call(capsys, "bench", *words)
    assert status == 0
    found = json.loads(out)
    assert {each["group"] for each in found["rows"]} == {"xnor", "training"}
    assert found["rates"] is None
    assert found["facts"]["threads"] == 1
    assert len(found["goals"]) == len(GOALS)
    steps_taken = [each for each in found["rows"] if each["what"] == "layer eager"]
    assert all(each["memory_bytes"] > 0 for each in steps_taken)
    assert list(tiny.iterdir()) == []  # a quick run is not saved


def test_where_figures_go(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    words = ("bench", "--only", "xnor")
    assert call(capsys, *words, "--no-save")[0] == 0
    assert list(tiny.iterdir()) == []
    assert call(capsys, *words, "--quick", "--out", tiny / "a" / "b")[0] == 0
    assert len(read(tiny / "a" / "b" / "bench.csv")) == 15


def test_without_onnxruntime(
    capsys: pytest.CaptureFixture[str], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort, "find_spec", lambda name: None)
    status, out, _ = call(capsys, "bench", "--no-save", "--only", "xnor", "--only", "inference")
    assert status == 0
    assert re.search(r"^24x24 .*x +not installed +not installed +not installed$", out, re.M)
    note = "not installed (in xncaps' folder: pip install -c constraints.txt '.[export]')"
    assert f"ORT fp32, ORT int8 dynamic, ORT int8 static: {note}\n" in out
    assert f"\nFC ORT: {note}\n" in out


def test_without_kernels_or_compiler(
    capsys: pytest.CaptureFixture[str], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(module: torch.nn.Module, **options: object) -> object:
        def forward(x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no compiler")

        return forward

    monkeypatch.setattr(torch, "compile", refuse)
    monkeypatch.setattr(kernels, "native", lambda: None)
    words = ("--no-save", "--only", "inference", "--only", "training")
    status, out, _ = call(capsys, "bench", *words)
    assert status == 0
    assert "does not compile (RuntimeError)" in out
    assert re.search(r"^odd +CapsFC +2 +native +- +not built +-$", out, re.M)
    assert "FMA peak" not in out


def test_too_big_is_said(
    capsys: pytest.CaptureFixture[str], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "MOST_BYTES", 700)
    monkeypatch.setattr(steps, "MOST_BYTES", 700)
    words = ("--no-save", "--only", "inference", "--only", "training")
    status, out, _ = call(capsys, "bench", *words)
    assert status == 0
    assert re.search(r"^odd +CapsFC +2 +tiled +- +too big +-$", out, re.M)
    assert re.search(r"^mb +CapsFC +2 .* too big +too big +too big +too big", out, re.M)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--only xnro", "bench: only must be one of inference, training, xnor, primary, network, "),
        ("--out a --no-save", "bench: out must stand alone; got both --out and --no-save."),
        ("--seconds -1", "Invalid value for '--seconds': "),
        ("--seconds x", "Invalid value for '--seconds': "),
        ("--quik", "No such option: --quik"),
        ("inptu", "No such command 'inptu'"),
        ("--quick input", "bench: options must follow the command; got some before 'input'."),
        ("--out file", "Invalid value for '--out': "),
    ],
)
def test_bad_usage_is_one_line(
    capsys: pytest.CaptureFixture[str], tiny: Path, words: str, line: str
) -> None:
    (tiny / "file").write_text("")
    status, out, err = call(capsys, "bench", *words.split())
    assert (status, out) == (2, "")
    assert err.startswith(f"xncaps: {line}")
    assert err.count("\n") == 1
    assert [path.name for path in tiny.iterdir()] == ["file"]


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "bench", "--help")
    assert status == 0
    assert "Example: xncaps bench --quick" in out
    for word in ("input", "train", "--json", "--only", "--out", "--no-save", "--seconds"):
        assert word in out
    *first, last = suite.GROUPS
    assert f"A group: {', '.join(first)} or {last}." in " ".join(out.split())


def test_plans_name_what_there_is() -> None:
    for each in plan.PLANS.values():
        assert set(each.peers) <= set(inference.PEERS)
        assert {*each.compile_shapes, *each.train_shapes, *each.primary} <= set(each.shapes)
        assert set(each.layers) <= set(LAYERS)
    assert str(plan.MB) == "128x8->10x16"


def test_report_shows_the_bound() -> None:
    rates = Rates(1e11, (Level("L1", 1 << 15, 2e11), Level("DRAM", None, 2e10)))
    known = facts(kernel="avx2", torch="2", python="3", xncaps="0", onnxruntime="")
    ours = Row("inference", "mb", "XnODR", 1, "packed", us_per_sample=8.0, ratio=1.0, bound_us=4.0)
    text = str(Report(known, rates, (ours, replace(ours, what="tiled", ratio=0.5)), 1.0))
    assert "FMA peak 100 GFLOP/s, L1 200 GB/s, DRAM 20 GB/s (measured, 1 thread)" in text
    assert re.search(r"^mb +XnODR +1 +8.00 +50% +0.5x$", text, re.M)
