"""Kernels in processes of their own: what the environment selects, a missing module, threads."""

import os
import subprocess
import sys

import pytest

from xncaps import kernels

ASK = """
from xncaps.errors import InputError
try:
    from xncaps import kernels
    print(kernels.selected())
except InputError as error:
    print(error)
"""
MISSING = """
import sys, torch, warnings
sys.modules["xncaps.kernels._native"] = None
from xncaps import XnODR, kernels
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    layer = XnODR(9, 8, 5, 4)
    if sys.argv[1:] == ["compiled"]:
        layer = torch.compile(layer, fullgraph=True, backend="eager")
    for _ in range(2):
        print(layer(torch.ones(3, 9, 8)).shape)
print(kernels.available(), [warning.category.__name__ for warning in caught])
"""


def printed(script, *arguments, **environment):
    """The lines that a script prints in a process of its own."""
    command = [sys.executable, "-c", script, *arguments]
    variables = os.environ | environment
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_environment_selects_a_kernel():
    assert printed(ASK, XNCAPS_KERNEL="portable") == ["portable"]
    (told,) = printed(ASK, XNCAPS_KERNEL="sse9")
    assert "XNCAPS_KERNEL" in told
    assert "'sse9'" in told
    assert all(name in told for name in kernels.available())


def test_a_misspelt_kernel_is_told_before_there_is_a_run(tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "xncaps", "train", "--recipe", "quick", "--out", str(out)]
    variables = os.environ | {"XNCAPS_KERNEL": "sse9"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (told,) = done.stderr.splitlines()
    assert "XNCAPS_KERNEL must be one that this machine runs" in told
    assert not out.exists()


@pytest.mark.parametrize("how", ["plain", "compiled"])
def test_a_missing_native_module_is_said_once_and_layers_still_work(how):
    *shapes, rest = printed(MISSING, how)
    assert shapes == ["torch.Size([3, 5, 4])"] * 2
    assert rest == "() ['RuntimeWarning']"


TASKS = """
import os, torch, xncaps
def tasks():
    return len(os.listdir("/proc/self/task"))
torch.set_num_threads(1)  # or torch opens one to fill the weights
layers = [make(1152, 8, 10, 16) for make in (xncaps.CapsFC, xncaps.XnODR, xncaps.XnIDR)]
packed = [xncaps.pack(layer) for layer in layers]
one, more = torch.randn(1, 1152, 8), torch.randn(32, 1152, 8)
torch.set_num_threads(4)
counts = [tasks()]
for layer, fast in zip(layers, packed):
    fast(one)
    v = layer(one)
    v.backward(torch.ones_like(v))
counts.append(tasks())
packed[0](more)
counts.append(tasks())
print(*counts)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="tasks are counted on Linux")
def test_one_sample_opens_no_parallel_region():
    before, after_one, after_more = map(int, printed(TASKS)[0].split())
    assert after_one == before
    assert after_more == before + 3
