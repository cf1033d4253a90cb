"""The README's code runs as it stands there, and the example does what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).parent.parent


def test_readme_code_runs() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    assert blocks
    guest = nn.Sequential()
    guest.features = nn.Conv2d(3, 8, 3)
    guest.pool = nn.AdaptiveAvgPool2d(1)
    guest.flatten = nn.Flatten()
    guest.fc = nn.Linear(8, 1000)
    for block in blocks:
        names: dict[str, object] = {"your_timm_or_torchvision_model": guest}
        exec(block, names)
        assert names["v"].shape == (32, 10, 16)
        assert names["couplings"].shape == (32, 128, 10)
        assert names["lengths"].shape == (32, 10)
        assert torch.isfinite(names["loss"])


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
