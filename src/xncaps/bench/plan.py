"""What a run of ``xncaps bench`` measures: the full plan and the quick one."""

from dataclasses import dataclass

from xncaps.bench.baselines import LAYERS
from xncaps.bench.machine import Shape
from xncaps.heads import HEADS

MB, RN = Shape(128, 8, 10, 16), Shape(256, 8, 10, 16)
"""The head shapes of the paper's MobileNetV2 and ResNet-50."""


@dataclass(frozen=True)
class Plan:
    """Sizes and peers of every group.

    Args:
        seconds: how long a comparison is timed, warm-up aside.
        shapes: of the capsule layers, by name; ``mb`` and ``rn`` have an FC stack as a peer.
        batches: samples in a call.
        layers: names in ``LAYERS``.
        peers: of the inference group, names in ``inference.PEERS``.
        compile_shapes: where torch.compile is among them; it takes seconds for each program.
        train_shapes, train_layers, train_batch, train_peers: of the training group.
        gemm: outputs and inputs of the XNOR matrix product.
        gemm_rows: rows of its activations.
        conv: channels and side of the image of the 3x3 convolution; None leaves it out.
        primary: shapes of the group that has heads with PrimaryCaps, with features that they take.
        network: the network to run end to end, and the side of its images.
        heads: its heads.
        network_batches: images in a call.
    """

    seconds: float
    shapes: dict[str, Shape]
    batches: tuple[int, ...]
    layers: tuple[str, ...]
    peers: tuple[str, ...]
    compile_shapes: tuple[str, ...]
    train_shapes: tuple[str, ...]
    train_layers: tuple[str, ...]
    train_batch: int
    train_peers: tuple[str, ...]
    gemm: int
    gemm_rows: tuple[int, ...]
    conv: tuple[int, int] | None
    primary: dict[str, int]
    network: tuple[str, int]
    heads: tuple[str, ...]
    network_batches: tuple[int, ...]


FULL = Plan(
    seconds=1.5,
    shapes={"mb": MB, "rn": RN, "capsnet": Shape(1152, 8, 10, 16), "big": Shape(512, 16, 100, 32)},
    batches=(1, 32, 256),
    layers=tuple(LAYERS),
    peers=(
        *("native", "packed fp16", "tiled", "tiled own signs", "broadcast", "layer eager"),
        *("bmm eager", "compile layer", "compile bmm", "FC eager", "FC ORT"),
    ),
    compile_shapes=("mb", "rn", "capsnet", "big"),
    train_shapes=("mb", "rn"),
    train_layers=tuple(LAYERS),
    train_batch=128,
    train_peers=("layer eager", "compile layer", "tiled"),
    gemm=4096,
    gemm_rows=(1, 16, 256),
    conv=(256, 14),
    primary={"mb": 320, "rn": 2048},
    network=("mobilenetv2", 224),
    heads=tuple(HEADS),
    network_batches=(1, 16),
)

QUICK = Plan(
    seconds=0.5,
    shapes={"mb": MB, "rn": RN},
    batches=(1, 32, 256),
    layers=("XnODR",),
    peers=("native", "packed fp16", "bmm eager", "compile bmm", "FC eager", "FC ORT"),
    compile_shapes=("mb",),
    train_shapes=("mb",),
    train_layers=("XnODR",),
    train_batch=128,
    train_peers=("layer eager",),
    gemm=4096,
    gemm_rows=(1, 16),
    conv=(256, 14),
    primary={"mb": 320},
    network=("mobilenetv2", 224),
    heads=("linear", "fc", "xnodr"),
    network_batches=(1,),
)

PLANS = {"full": FULL, "quick": QUICK}
