"""summary: closed forms, PyTorch's own counter, and the tables it prints."""

import csv
import io
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import xncaps
from xncaps.errors import InputError
from xncaps.layers import xnorize_both


def reported_macs(model: nn.Module, *size: int) -> int:
    """MACs by torch.utils.flop_counter, which counts two operations for each."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.zeros(1, *size))
    return counter.get_total_flops() // 2


CONVOLUTIONS = [
    nn.Conv2d(6, 8, 3),
    nn.Conv2d(6, 8, 3, stride=2, padding=1),
    nn.Conv2d(6, 9, (1, 5), padding=(0, 2), dilation=2),
    nn.Conv2d(6, 6, 3, groups=6),
    nn.Conv2d(6, 9, 3, groups=3, bias=False),
    nn.ConvTranspose2d(6, 4, 3, stride=2),
]


@pytest.mark.parametrize("layer", CONVOLUTIONS, ids=str)
def test_convolutions_against_pytorch(layer: nn.Module) -> None:
    assert xncaps.summary(layer, (6, 17, 12)).macs == reported_macs(layer, 6, 17, 12) > 0


def test_grouped_transposed_convolution() -> None:
    layer = nn.ConvTranspose2d(6, 4, 3, groups=2)
    # Each of the 6 * 5 * 5 inputs is spread over 2 output channels of 3 * 3.
    assert xncaps.summary(layer, (6, 5, 5)).macs == 6 * 5 * 5 * 2 * 9


@pytest.mark.parametrize("name", ["convnet", "mobilenetv2", "resnet50"])
def test_whole_networks_against_pytorch(name: str) -> None:
    model = xncaps.create_model(name, "fc", 10, 1, 28)
    assert xncaps.summary(model, (1, 28, 28)).macs == reported_macs(model, 1, 28, 28) > 0


@pytest.mark.parametrize(
    ("name", "size", "macs"),
    [
        ("mobilenetv2", 224, 299_494_272),
        ("mobilenetv2", 108, 79_384_048),
        ("resnet50", 224, 3_855_925_248),
        ("resnet50", 108, 1_006_230_272),
    ],
)
def test_backbones_of_the_paper(name: str, size: int, macs: int) -> None:
    with torch.device("meta"):
        model = xncaps.create_model(name, "linear", image_size=size)
    rows = xncaps.summary(model, (3, size, size)).rows
    assert sum(row.macs for row in rows if row.name.startswith("backbone.")) == macs


N, J, D_IN, D_OUT = 33, 7, 5, 9  # odd, so that no two formulas agree by chance


@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("make", "macs", "binary"),
    [
        (xncaps.CapsFC, lambda p, d, r: p * d + (2 * r - 1) * p, lambda p, d, r: 0),
        (xncaps.XnODR, lambda p, d, r: (2 * r - 1) * p, lambda p, d, r: p * d),
        (xncaps.XnIDR, lambda p, d, r: p * d + r * p, lambda p, d, r: (r - 1) * p),
        (xnorize_both, lambda p, d, r: r * p, lambda p, d, r: p * d + (r - 1) * p),
    ],
)
def test_capsule_layers(make, macs, binary, rounds: int) -> None:
    counts = xncaps.summary(make(N, D_IN, J, D_OUT, rounds), (N, D_IN))
    predictions = N * J * D_OUT
    assert counts.macs == macs(predictions, D_IN, rounds)
    assert counts.binary_ops == binary(predictions, D_IN, rounds)
    assert len(counts.rows) == 1


def test_float_capsule_layer_against_pytorch() -> None:
    layer = xncaps.CapsFC(N, D_IN, J, D_OUT)
    assert xncaps.summary(layer, (N, D_IN)).macs == reported_macs(layer, N, D_IN)


def test_packed_bytes_of_the_papers_layer() -> None:
    odr = xncaps.summary(xncaps.XnODR(128, 8, 10, 16), (128, 8))
    assert (odr.bytes, odr.packed_bytes) == (655_360, 20_480 + 81_920)
    idr = xncaps.summary(xncaps.XnIDR(128, 8, 10, 16), (128, 8))
    assert (idr.bytes, idr.packed_bytes) == (655_360, 655_360)


def test_packed_rows_fill_whole_bytes_and_the_rest_stays_float() -> None:
    layer = xncaps.XnODR(3, 9, 2, 4, scale="learned", routing_bias=True)
    counts = xncaps.summary(layer, (3, 9))
    scales, bias = 3 * 2 * 4, 2 * 4
    assert counts.params == 3 * 2 * 9 * 4 + scales + bias
    assert counts.packed_bytes == scales * 2 + 4 * scales + 4 * bias
    linear = xncaps.summary(xncaps.XnorLinear(17, 5), (17,))
    assert (linear.binary_ops, linear.packed_bytes) == (85, 5 * 3 + 4 * 5 + 4 * 5)
    conv = xncaps.summary(xncaps.XnorConv2d(3, 5, 3, padding=1, bias=False), (3, 6, 4))
    assert (conv.binary_ops, conv.macs) == (5 * 24 * 27, 24 * 9)
    assert conv.packed_bytes == 5 * 9 * 1 + 4 * 5  # the channels of each pixel fill whole bytes


def test_routing_memory_of_the_papers_layer() -> None:
    u, coupling, out = 128 * 10 * 16, 128 * 10, 10 * 16
    plain = xncaps.summary(xncaps.CapsFC(128, 8, 10, 16), (128, 8))
    assert plain.routing_bytes == 4 * (u + 2 * coupling + 2 * out)
    xnor = xncaps.summary(xncaps.XnIDR(128, 8, 10, 16), (128, 8))
    assert xnor.routing_bytes == 4 * (2 * u + 3 * coupling + 3 * out)


def test_attention_and_plain_matrix_products_count() -> None:
    class Attends(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x[:, None]
            return F.scaled_dot_product_attention(x, x, x)

    tokens, size = 7, 16
    assert xncaps.summary(Attends(), (tokens, size)).macs == 2 * tokens * tokens * size

    class Multiplies(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x.transpose(1, 2) @ x[0]

    assert xncaps.summary(Multiplies(), (5, 3)).macs == 5 * 3 * 5 + 5 * 5 * 3


def test_fused_attention_counts_its_matrix_products() -> None:
    tokens, size = 7, 12
    layer = nn.TransformerEncoderLayer(size, 2, dim_feedforward=20, batch_first=True)
    projections = 4 * tokens * size * size
    products = 2 * tokens * tokens * size
    feed_forward = 2 * tokens * size * 20
    counts = xncaps.summary(layer, (tokens, size))
    assert counts.macs == projections + products + feed_forward
    assert counts.uncounted == []


def test_an_attention_module_counts_its_matrix_products() -> None:
    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(12, 2, batch_first=True)  # even: fused by torch

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    assert xncaps.summary(SelfAttention(), (7, 12)).macs == 4 * 7 * 12 * 12 + 2 * 7 * 7 * 12
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_lstm(device: str) -> None:
    layer = nn.LSTM(6, 7, num_layers=2, bidirectional=True, batch_first=True, device=device)
    steps, first, second = 5, 4 * 7 * (6 + 7), 4 * 7 * (14 + 7)
    assert xncaps.summary(layer, (steps, 6)).macs == steps * 2 * (first + second)


def test_layers_without_a_formula_are_named() -> None:
    class Bilinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.form = nn.Bilinear(4, 4, 3)
            self.norm = nn.LayerNorm(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.form(x, x))

    counts = xncaps.summary(Bilinear(), (4,))
    assert counts.uncounted == ["form (Bilinear)"]
    assert str(counts).endswith("\n\nNo work is counted in: form (Bilinear).")
    assert json.loads(counts.to_json())["uncounted"] == ["form (Bilinear)"]


def test_layers_called_by_keyword_count_too() -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = xncaps.XnIDR(3, 4, 5, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x=x, return_couplings=True)[0]

    assert xncaps.summary(Keyword(), (3, 4)).binary_ops == 2 * 3 * 5 * 6


def test_shared_weights_count_once_and_their_work_twice() -> None:
    layer = nn.Linear(4, 4)
    counts = xncaps.summary(nn.Sequential(layer, layer), (4,))
    assert (counts.params, counts.macs) == (20, 32)


def test_frozen_weights_do_not_learn() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2).requires_grad_(False))
    counts = xncaps.summary(model, (4,))
    assert (counts.params, counts.trainable_params) == (23, 15)


def test_the_model_is_left_as_it_was() -> None:
    model = xncaps.create_model("convnet", "xnidr")
    model.backbone.top.eval()
    modes = {name: m.training for name, m in model.named_modules()}
    state = {key: value.clone() for key, value in model.state_dict().items()}
    xncaps.summary(model, (1, 28, 28))
    assert {name: m.training for name, m in model.named_modules()} == modes
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_failing_model_is_left_as_it_was_too() -> None:
    model = nn.Sequential(nn.Linear(4, 3)).train()
    with pytest.raises(RuntimeError):
        xncaps.summary(model, (5,))
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_table_json_and_csv_say_the_same() -> None:
    counts = xncaps.summary(xncaps.create_model("convnet", "xnboth"), (1, 28, 28))
    data = json.loads(counts.to_json())
    table = list(csv.DictReader(io.StringIO(counts.to_csv())))
    names = ["params", "trainable_params", "macs", "binary_ops", "bytes", "packed_bytes"]
    for name in [*names, "routing_bytes"]:
        assert data[name] == int(table[-1][name]) == getattr(counts, name)
    for name in names:
        assert data[name] == sum(row[name] for row in data["rows"])
    assert table[-1]["name"] == "total"
    assert len(table) == len(counts.rows) + 1 == len(data["rows"]) + 1
    text = str(counts)
    assert f"{counts.macs:,}" in text.splitlines()[-1]
    assert text.splitlines()[2].startswith("backbone.trunk.0.0  ")


def test_lower_precision_counts_the_same() -> None:
    model = xncaps.create_model("convnet", "xnodr")
    wide = xncaps.summary(model, (1, 28, 28))
    assert str(xncaps.summary(model.bfloat16(), (1, 28, 28))) == str(wide)


@pytest.mark.parametrize(
    ("model", "size", "text"),
    [
        ("convnet", (1, 28, 28), "summary: model must be an nn.Module; got str."),
        (
            nn.Linear(4, 4),
            (),
            "summary: input_size must be the sizes of one input, such as (1, 28, 28); got ().",
        ),
        (
            nn.Linear(4, 4),
            (0,),
            "summary: input_size must be at least 1; got 0.",
        ),
        (
            nn.Linear(4, 4),
            4,
            "summary: input_size must be the sizes of one input, such as (1, 28, 28); got 4.",
        ),
    ],
)
def test_bad_input(model: object, size: object, text: str) -> None:
    with pytest.raises(InputError) as caught:
        xncaps.summary(model, size)
    assert str(caught.value) == text
