"""The README's code runs as it stands there, and the example does what it says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from xncaps.bench.report import goal_markdown
from xncaps.bench.rows import read_newest
from xncaps.cli.main import COMMANDS
from xncaps.data import DATASETS
from xncaps.training import RECIPES

ROOT = Path(__file__).parent.parent


def test_readme_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block after the other, as a reader would type them."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    assert len(blocks) == 4
    guest = nn.Sequential()
    guest.features = nn.Conv2d(3, 8, 3)
    guest.pool = nn.AdaptiveAvgPool2d(1)
    guest.flatten = nn.Flatten()
    guest.fc = nn.Linear(8, 1000)
    names: dict[str, object] = {"your_timm_or_torchvision_model": guest}
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(block, names)
    assert names["v"].shape == (32, 10, 16)
    assert names["couplings"].shape == (32, 128, 10)
    assert names["lengths"].shape == (32, 10)
    assert torch.isfinite(names["loss"])
    assert names["result"].accuracy > 0.15  # one epoch; four seeds gave 0.24 to 0.61
    assert (tmp_path / "runs" / "from-python" / "report.html").exists()


def test_readme_names_every_command_and_recipe() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = {*COMMANDS} | {f"bench {name}" for name in ("input", "train", "model")}
    for name in commands:
        assert f"xncaps {name}" in readme
    for name in (*RECIPES, *DATASETS):
        assert f"`{name}" in readme


def test_the_bench_table_is_that_of_the_newest_runs() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.partition("<!-- table: bench -->\n")[2].partition("<!-- end -->")[0]
    assert shown == f"{goal_markdown(read_newest(ROOT / 'results' / 'bench.csv'))}\n"


@pytest.mark.slow
def test_the_demo_recognises_what_it_should(tmp_path: Path) -> None:
    """At least 97.5% of the 1,000 held-out digits, the same figure each time."""
    accuracies = []
    for name in ("one", "two"):
        args = ["train", "--recipe", "quick", "--seed", "0", "--out", str(tmp_path / name)]
        subprocess.run([sys.executable, "-m", "xncaps", *args], check=True)
        accuracies.append(
            json.loads((tmp_path / name / "result.json").read_bytes())["test"]["top1"]
        )
    assert accuracies[0] == accuracies[1] >= 0.975


@pytest.mark.slow
def test_the_example_learns_the_digits() -> None:
    done = subprocess.run(
        [sys.executable, "examples/first_look.py"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    accuracy = float(re.search(r"([\d.]+)% of the 1,000 test digits", done.stdout).group(1))
    assert accuracy > 95
    assert "iteration 3" in done.stdout
