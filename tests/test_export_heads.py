"""``torch.export``: every head, with the native kernels and without."""

import contextlib

import pytest
import torch

import xncaps
from xncaps import kernels

SIZES = {"caps_in": 6, "dim_in": 4, "dim_out": 5}


@pytest.mark.parametrize("path", ["native", "reference"])
@pytest.mark.parametrize("head", xncaps.HEADS)
def test_every_head_is_exported_at_any_batch_size(head, path, tmp_path):
    torch.manual_seed(5)
    has_capsules = head not in ("linear", "fc")
    layer = xncaps.HEADS[head](16, 3, **(SIZES if has_capsules else {})).eval()
    batch = {0: torch.export.Dim("batch")}
    without = contextlib.nullcontext() if path == "native" else kernels.disabled()
    with without, torch.no_grad():
        program = torch.export.export(
            layer, (torch.randn(3, 16, 4, 4),), dynamic_shapes=(batch,), strict=False
        )
        for size in (1, 2, 7):
            x = torch.randn(size, 16, 4, 4)
            torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-5, atol=1e-6)
    ours = {
        str(node.target) for node in program.graph.nodes if str(node.target).startswith("xncaps.")
    }
    is_native = path == "native" and kernels.available() and has_capsules
    assert ours == ({"xncaps.capsules.default"} if is_native else set())
    # As a file, for who has xncaps: what was exported natively calls its op.
    torch.export.save(program, tmp_path / "head.pt2")
    again = torch.export.load(tmp_path / "head.pt2").module()
    with torch.no_grad():
        torch.testing.assert_close(again(x), layer(x), rtol=1e-5, atol=1e-6)
