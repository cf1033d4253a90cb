"""The native objects behind packed layers, called as Python may call them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import xncaps


def native_object():
    packed = xncaps.pack(xncaps.XnODR(7, 5, 3, 4))
    x = torch.randn(2, 7, 5)
    with torch.no_grad():
        expected = packed(x)
    return packed, x, expected


def test_the_layer_and_one_tensor_are_what_they_are_called_with():
    packed, x, expected = native_object()
    native = packed._native
    with torch.no_grad():
        assert torch.equal(native(packed, x), expected)
        assert torch.equal(native(packed, x, **{}), expected)
        for args in [(), (x,), (packed, x, x)]:
            with pytest.raises(TypeError, match="called with itself and one tensor"):
                native(*args)
        with pytest.raises(TypeError, match="called with itself and one tensor"):
            native(packed, x, x=x)
        for other in (None, 3, torch.nn.Linear(1, 1)):
            with pytest.raises(AttributeError, match="forward"):
                native(other, x)


def test_batches_of_other_sizes_get_outputs_of_their_own():
    packed, x, expected = native_object()
    with torch.no_grad():
        outputs = [packed(x[:rows].clone()) for rows in (2, 1, 1, 2)]
    assert [len(v) for v in outputs] == [2, 1, 1, 2]
    assert len({v.data_ptr() for v in outputs}) == 4
    for v in outputs:
        assert torch.equal(v, expected[: len(v)])


@pytest.mark.parametrize("wrong", [None, 3, "x", [[1.0]], torch.zeros(2, 7, 5).double()])
def test_what_they_cannot_take_is_left_to_the_layer(wrong):
    packed, _, _ = native_object()
    assert packed._native(packed, wrong) is None


def test_objects_that_were_never_made_are_refused():
    packed, x, _ = native_object()
    kind = type(packed._native)
    with pytest.raises(TypeError):
        kind.__new__(kind)(packed, x)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux' /proc")
def test_too_little_memory_is_a_memory_error():
    """A real limit, below what the predictions of a sample need: 64 MB."""
    program = """
import resource, torch, xncaps
packed = xncaps.pack(xncaps.XnODR(4096, 1, 64, 64))
x = torch.randn(1, 4096, 1)
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + 30 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (most, most))
with torch.inference_mode():
    for _ in range(2):  # by the layer, which makes the native object, and by that alone
        try:
            packed(x)
        except MemoryError:
            print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "refused\nrefused\n", "")
