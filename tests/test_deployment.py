"""docs/deployment.md: its walk, block by block, in an empty folder; and its tables."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from xncaps.bench.agreement import read_agreements
from xncaps.bench.model import read_model_bench

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
ALONE = "import sys; sys.modules['xncaps'] = sys.modules['torch'] = None\n"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What all blocks print, one after the other."""
    folder = tmp_path_factory.mktemp("walk")
    blocks = re.findall(r"^```(.+?)\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in blocks].count("python alone") == 1
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    printed = ""
    for kind, code in blocks:
        if kind == "sh":
            lines = [shlex.split(line) for line in code.splitlines()]
            assert all(words[0] == "xncaps" for words in lines)
            calls = [[sys.executable, "-m", *words] for words in lines]
        else:
            # As where neither xncaps nor torch is installed.
            calls = [[sys.executable, "-c", (ALONE if kind == "python alone" else "") + code]]
        for call in calls:
            done = subprocess.run(
                call, cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{call}\n{done.stderr}"
            printed += done.stdout
    return printed


@pytest.mark.slow
def test_the_walk_ends_where_it_says(said: str) -> None:
    label = re.search(r"digit\.png shows a (\d)", said).group(1)
    assert f"digit.png: {label}   {label} 0." in said
    assert f"('{label}',)" in said
    assert f"ONNX Runtime sees a {label}\n" in said
    assert said.count("\n1,000 test images of sample\n") == 2
    assert re.search(r"largest difference \d\.\d+e-\d+ over", said)
    assert re.search(r"in float32, [\d.]+% in int8\n", said)
    assert "ONNX Runtime int8" in said


def test_alone_means_alone() -> None:
    for name in ("xncaps", "torch"):
        done = subprocess.run(
            [sys.executable, "-c", f"{ALONE}import {name}"], capture_output=True, check=False
        )
        assert b"ModuleNotFoundError" in done.stderr


def table(name: str) -> str:
    return PAGE.partition(f"<!-- table: {name} -->\n")[2].partition("<!-- end -->")[0]


def test_the_agreement_table_is_that_of_the_newest_run() -> None:
    found = read_agreements(ROOT / "results" / "agreement.csv")
    where = f"({found.facts['cpu']}, {found.facts['date'][:10]}, onnxruntime "
    where += f"{found.facts['onnxruntime']})"
    assert table("agreement") == f"{found.to_markdown()}\n\n{where}\n"
    heads = {row.network for row in found.rows}
    assert len(heads) == 6
    assert {row.count for row in found.rows} == {10000}
    assert {row.data for row in found.rows} == {"mnist"}


def test_the_table_of_speeds_is_that_of_the_newest_run() -> None:
    facts, bench = read_model_bench(ROOT / "results" / "model.csv")
    where = f"({bench.network}, one thread of an {facts['cpu']}, {facts['date'][:10]})"
    assert table("model") == f"{bench.to_markdown()}\n\n{where}\n"
    assert len(bench.forms) == 4
