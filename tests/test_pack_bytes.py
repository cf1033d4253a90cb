"""summary().packed_bytes is what the packed copy holds, and a packed copy is counted like it."""

import itertools

import pytest
import torch
from torch import nn

import xncaps
from pack_cases import bytes_of, create
from xncaps.deploy.pack import packed_sizes
from xncaps.heads import CAPSULE_HEADS, HEADS

ALL = [
    *itertools.product(
        ["convnet", "mobilenetv2", "resnet50"], HEADS, ["replace", "append", "features"]
    ),
    *itertools.product(["capsnet"], CAPSULE_HEADS, ["replace"]),
    ("xnornet", "linear", "replace"),
]


@pytest.mark.parametrize("backbone", ["convnet", "mobilenetv2", "resnet50", "capsnet", "xnornet"])
def test_packed_bytes_are_what_the_copy_holds(backbone):
    for name, head, attach in ALL:
        if name == backbone:
            with torch.device("meta"):
                model = create(name, head, attach, 32)
            packed = xncaps.pack(model)
            assert sum(size for _, size in packed_sizes(model).values()) == bytes_of(packed)
            if head in ("fc", "xnboth") and attach != "features":
                assert xncaps.summary(model, (1, 32, 32)).packed_bytes == bytes_of(packed)
                counts = xncaps.summary(packed, (1, 32, 32))
                assert counts.packed_bytes == counts.bytes == bytes_of(packed)


def test_packed_networks_are_counted_as_the_original():
    for model, size in (
        (create("convnet", "xnboth", "append", 28, scale="learned", routing_bias=True), 28),
        (xncaps.XnorNet(10, 1, 16, width=1 / 16), 16),
        (xncaps.XnorNet(10, 1, 16, width=1 / 16, scale="learned"), 16),
    ):
        before = {row.name: row for row in xncaps.summary(model, (1, size, size)).rows}
        counts = xncaps.summary(xncaps.pack(model), (1, size, size))
        assert counts.trainable_params == 0
        for row in counts.rows:
            old = before[row.name]
            assert (row.macs, row.binary_ops) == (old.macs, old.binary_ops), row.name
            assert (row.output, row.routing_bytes) == (old.output, old.routing_bytes)
            assert row.packed_bytes == row.bytes == old.packed_bytes, row.name
            if row.type.startswith("Packed"):
                assert row.params == old.params, row.name


def test_what_stays_is_counted_with_its_buffers():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3, bias=False)
            self.tied = nn.Linear(3, 3)
            self.tied.weight = self.linear.weight
            self.norms = nn.Sequential(
                nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4, track_running_stats=False)
            )
            self.watched = nn.BatchNorm1d(4)
            self.watched.register_forward_hook(lambda *_: None)
            self.register_buffer("order", torch.arange(4))

        def forward(self, x):
            return self.watched(self.norms(self.tied(self.linear(x[:, self.order]))))

    model = Keeps().eval()
    packed = xncaps.pack(model)
    linear, affine, untracked, watched, order = 36 + 12, 32, 32, 4 * 16 + 8, 32
    assert bytes_of(packed) == linear + affine + untracked + watched + order
    assert xncaps.summary(model, (4, 3)).packed_bytes == bytes_of(packed)
    counts = xncaps.summary(packed, (4, 3))
    assert counts.packed_bytes == counts.bytes == bytes_of(packed)
