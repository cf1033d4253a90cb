"""create_model: every count of the paper, every attachment, any sizes, and refusals."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import xncaps
from xncaps.errors import InputError
from xncaps.heads import CAPSULE_HEADS
from xncaps.models import ATTACH, MODELS
from xncaps.networks import Classifier


def count(module: nn.Module, trainable: bool = False) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trainable)


def build(*args: object, device: str = "meta", **options: object) -> Classifier:
    with torch.device(device), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*attach='append'")
        return xncaps.create_model(*args, **options)


@pytest.mark.parametrize("head", CAPSULE_HEADS)
@pytest.mark.parametrize(
    ("backbone", "attach", "trainable", "executed"),
    [
        ("mobilenetv2", "replace", 2_304_256, 2_304_256),
        ("mobilenetv2", "append", 2_994_864, 3_714_864),
        ("mobilenetv2", "features", 3_699_456, 3_699_456),
        ("resnet50", "replace", 23_862_272, 23_862_272),
        ("resnet50", "append", 23_862_320, 28_327_984),
        ("resnet50", "features", 28_058_624, 28_058_624),
    ],
)
def test_parameters(backbone: str, head: str, attach: str, trainable: int, executed: int) -> None:
    model = build(backbone, head, attach=attach)
    assert (count(model, trainable=True), count(model)) == (trainable, executed)


@pytest.mark.parametrize("attach", ATTACH)
@pytest.mark.parametrize(
    ("backbone", "fc", "linear"),
    [("mobilenetv2", 3_045_258, 2_236_682), ("resnet50", 26_162_698, 23_555_082)],
)
def test_baselines_keep_the_whole_backbone(
    backbone: str, fc: int, linear: int, attach: str
) -> None:
    for head, total in (("fc", fc), ("linear", linear)):
        model = build(backbone, head, attach=attach)
        assert count(model, trainable=True) == count(model) == total


def test_one_channel_mobilenetv2() -> None:
    assert count(build("mobilenetv2", "fc", in_channels=1)) == 3_044_682


def test_capsnet_is_sabours() -> None:
    model = build("capsnet", in_channels=1, image_size=28)
    assert count(model) == 6_804_224
    assert model.head.capsules.caps_in == 1152
    assert model.head.capsules.binarizer is None
    assert build("capsnet", image_size=36).head.capsules.caps_in == 3200


def test_capsnet_computes_what_sabour_et_al_write() -> None:
    model = build("capsnet", device="cpu").eval()
    images = torch.randn(2, 1, 28, 28)
    stem, conv = model.backbone[0], model.head.primary.conv
    maps = F.conv2d(F.relu(F.conv2d(images, stem.weight, stem.bias)), conv.weight, conv.bias, 2)
    capsules = maps.view(2, 32, 8, 36).permute(0, 1, 3, 2).reshape(2, 1152, 8)
    v = model.head.capsules(xncaps.squash(capsules))
    assert torch.allclose(model(images), v.square().sum(2).sqrt(), atol=1e-6)


def test_xnornet_is_binarynets_vgg_with_norms_before_the_xnor_layers() -> None:
    xnor, pool = ["BatchNorm2d", "XnorConv2d"], ["MaxPool2d"]
    assert [type(m).__name__ for m in build("xnornet").backbone] == [
        *("Conv2d", "BatchNorm2d", "ReLU"),
        *(*xnor, *pool),
        *(*xnor, *xnor, *pool),
        *(*xnor, *xnor, *pool),
        *("Flatten", *["BatchNorm1d", "XnorLinear"] * 2),
        *("BatchNorm1d", "ReLU"),
    ]


def test_xnornet_is_float_at_both_ends_only() -> None:
    model = build("xnornet")
    kinds = (nn.Conv2d, nn.Linear, xncaps.XnorConv2d, xncaps.XnorLinear)
    layers = [type(m).__name__ for m in model.modules() if isinstance(m, kinds)]
    assert layers == ["Conv2d", *["XnorConv2d"] * 5, "XnorLinear", "XnorLinear", "Linear"]
    widths = [
        m.out_channels if hasattr(m, "out_channels") else m.out_features
        for m in model.modules()
        if isinstance(m, kinds)
    ]
    assert widths == [128, 128, 256, 256, 512, 512, 1024, 1024, 10]


@pytest.mark.parametrize("head", CAPSULE_HEADS)
@pytest.mark.parametrize("attach", ["replace", "features"])
def test_convnet_is_small(head: str, attach: str) -> None:
    counts = xncaps.summary(build("convnet", head, attach=attach), (1, 28, 28))
    assert counts.params < 160_000
    assert counts.macs + counts.binary_ops < 8_000_000


@pytest.mark.parametrize(
    ("backbone", "caps"),
    [("convnet", 32), ("mobilenetv2", 128), ("resnet50", 256), ("widenet", 32)],
)
def test_default_capsules(backbone: str, caps: int) -> None:
    layer = build(backbone).head.capsules
    assert (layer.caps_in, layer.dim_in, layer.dim_out) == (caps, 8, 16)


def cases() -> list[tuple[str, str, str]]:
    heads = {"capsnet": CAPSULE_HEADS, "xnornet": ("linear",)}
    places = {"capsnet": ("replace",), "xnornet": ("replace",)}
    return [
        (model, head, attach)
        for model in MODELS
        for head in heads.get(model, xncaps.HEADS)
        for attach in places.get(model, ATTACH)
    ]


@pytest.mark.parametrize(("name", "head", "attach"), cases())
def test_any_classes_channels_and_capsules(name: str, head: str, attach: str) -> None:
    options: dict[str, object] = {"dim_in": 3, "dim_out": 5} if head in CAPSULE_HEADS else {}
    if name != "capsnet" and options:
        options["caps_in"] = 7
    model = build(name, head, 3, 2, 29, attach, device="meta", **options)
    scores = model.eval()(torch.zeros(2, 2, 29, 29, device="meta"))
    assert scores.shape == (2, 3)
    assert model.scores == ("lengths" if head in CAPSULE_HEADS else "logits")
    assert model.num_classes == 3


@pytest.mark.parametrize(("name", "head"), [("convnet", "xnidr"), ("mobilenetv2", "xnodr")])
@pytest.mark.parametrize("attach", ATTACH)
def test_real_forward_and_backward(name: str, head: str, attach: str) -> None:
    model = build(name, head, 10, 1, 28, attach, device="cpu")
    lengths = model(torch.randn(4, 1, 28, 28))
    xncaps.margin_loss(lengths, torch.arange(4)).backward()
    for key, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, key
        assert parameter.grad is None or parameter.grad.isfinite().all(), key
    if attach != "append":
        assert lengths.max() < 1


@pytest.mark.parametrize("name", ["convnet", "mobilenetv2"])
def test_one_sample_does_not_see_the_others(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, "xnodr", 10, 1, 28, device="cpu").eval()
    images = torch.randn(5, 1, 28, 28)
    alone = torch.cat([model(image[None]) for image in images])
    assert torch.allclose(model(images), alone, atol=1e-5)


def test_couplings_come_through_the_network() -> None:
    model = build("convnet", "xnidr", device="cpu").eval()
    lengths, couplings = model(torch.randn(2, 1, 28, 28), return_couplings=True)
    assert (lengths.shape, couplings.shape) == ((2, 10), (2, 32, 10))


def test_images_of_another_size_pass_where_the_network_pools() -> None:
    model = build("convnet", device="cpu").eval()
    assert model(torch.randn(2, 1, 20, 41)).shape == (2, 10)


def test_height_and_width_can_stay_dynamic_in_an_export() -> None:
    model = build("convnet", device="cpu").eval()
    sides = {2: torch.export.Dim("height", min=8), 3: torch.export.Dim("width", min=8)}
    example = torch.randn(2, 1, 32, 36)
    exported = torch.export.export(model, (example,), dynamic_shapes=(sides,)).module()
    small = torch.randn(2, 1, 12, 20)
    assert torch.allclose(exported(small), model(small), atol=1e-5)


def test_append_warns_that_the_frozen_block_is_random() -> None:
    with torch.device("meta"), pytest.warns(UserWarning, match="append") as caught:
        xncaps.create_model("convnet", "xnidr", attach="append")
    assert [str(w.message) for w in caught] == [
        "convnet with attach='append' freezes its last block, whose weights are random until"
        " pretrained ones are loaded."
    ]
    assert caught[0].filename == __file__


def test_append_keeps_the_frozen_norms_in_eval_mode() -> None:
    model = build("convnet", "xnidr", attach="append", device="cpu").train()
    norm = model.backbone.top[1]
    before = norm.running_mean.clone()
    model(torch.randn(4, 1, 28, 28))
    assert torch.equal(norm.running_mean, before)
    assert model.head.primary_norm.norm.training


@pytest.mark.parametrize(
    ("name", "head"),
    [
        *(("convnet", head) for head in xncaps.HEADS),
        ("widenet", "xnidr"),
        ("capsnet", "xnidr"),
        ("xnornet", "linear"),
        ("convnet-append", "xnidr"),
        pytest.param("mobilenetv2", "xnodr", marks=pytest.mark.slow),
        pytest.param("resnet50", "xnidr", marks=pytest.mark.slow),
    ],
)
def test_compile_and_export(name: str, head: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    size = 32 if name == "xnornet" else 28
    width = {"width": 0.25} if name in ("convnet", "widenet", "xnornet") else {}
    name, _, attach = name.partition("-")
    model = build(name, head, 3, 1, size, attach or "replace", device="cpu", **width).eval()
    x = torch.randn(3, 1, size, size)
    expected = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert torch.allclose(compiled, expected, atol=1e-5)
    parameters = [p for p in model.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(expected.square().sum(), parameters)
    for got, want in zip(
        torch.autograd.grad(compiled.square().sum(), parameters), wanted, strict=True
    ):
        assert torch.allclose(got, want, rtol=1e-3, atol=1e-4)
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: batch},), strict=False)
    assert torch.allclose(exported.module()(x[:2]), expected[:2], atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"backbone": "mobilenet_v2"},
            "create_model: backbone must be one of convnet, mobilenetv2, resnet50, widenet,"
            " capsnet, xnornet; got 'mobilenet_v2'. Did you mean 'mobilenetv2'?",
        ),
        (
            {"head": "caps"},
            "create_model: head must be one of linear, fc, dr, xnodr, xnidr, xnboth; got 'caps'.",
        ),
        (
            {"attach": "prepend"},
            "create_model: attach must be one of replace, append, features; got 'prepend'."
            " Did you mean 'append'?",
        ),
        ({"num_classes": 0}, "create_model: num_classes must be at least 1; got 0."),
        ({"in_channels": -1}, "create_model: in_channels must be at least 1; got -1."),
        (
            {"image_size": 7},
            "create_model: image_size must be at least 8 px for convnet; got 7.",
        ),
        (
            {"backbone": "mobilenetv2", "image_size": 27},
            "create_model: image_size must be at least 28 px for mobilenetv2; got 27.",
        ),
        (
            {"backbone": "resnet50", "image_size": 8},
            "create_model: image_size must be at least 28 px for resnet50; got 8.",
        ),
        (
            {"backbone": "capsnet", "image_size": 16},
            "create_model: image_size must be at least 17 px for capsnet; got 16.",
        ),
        ({"image_size": 28.0}, "create_model: image_size must be a whole number; got 28.0."),
        ({"caps_in": 0}, "create_model: caps_in must be at least 1; got 0."),
        ({"dim_in": 0}, "create_model: dim_in must be at least 1; got 0."),
        ({"dim_out": 0}, "CapsuleHead: dim_out must be at least 1; got 0."),
        ({"iterations": 0}, "XnIDR: iterations must be at least 1; got 0."),
        (
            {"head": "dr", "binarizer": "sign"},
            "create_model: option must be one the dr head takes (caps_in, dim_in, dim_out,"
            " iterations, routing, routing_bias, detach_routing); got 'binarizer'.",
        ),
        (
            {"head": "linear", "caps_in": 3},
            "create_model: option must be one the linear head takes (it takes none);"
            " got 'caps_in'.",
        ),
        (
            {"backbone": "resnet50", "width": 2},
            "create_model: width must go with convnet, widenet or xnornet; got resnet50.",
        ),
        (
            {"backbone": "xnornet", "caps_in": 3},
            "create_model: option must be one xnornet takes (width, binarizer, scale,"
            " detach_scale); got 'caps_in'.",
        ),
        (
            {"head": "fc", "hidden": 512},
            "FCHead: hidden must be a sequence of sizes, such as (1024, 512); got 512.",
        ),
        ({"width": 0}, "create_model: width must be a number above 0, 10,000 at most; got 0."),
        (
            {"backbone": "capsnet", "attach": "features"},
            "create_model: attach must be replace with capsnet; got features."
            " A whole network has one place for its head.",
        ),
        (
            {"backbone": "capsnet", "head": "fc"},
            "CapsNet: head must be one of dr, xnodr, xnidr, xnboth; got 'fc'.",
        ),
        (
            {"backbone": "capsnet", "caps_in": 100},
            "CapsNet: caps_in must be a multiple of 36, the places of the primary capsules;"
            " got 100.",
        ),
        (
            {"backbone": "xnornet", "head": "xnidr"},
            "create_model: head must be linear with xnornet; got xnidr."
            " Its last layer is a float linear one.",
        ),
    ],
)
def test_refusals(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(InputError) as caught:
        build(**{"backbone": "convnet", **arguments})
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("name", "images", "text"),
    [
        (
            "convnet",
            torch.zeros(2, 3, 28, 28),
            "Classifier: images must have shape (batch, channels=1, height, width);"
            " got (2, 3, 28, 28).",
        ),
        (
            "convnet",
            torch.zeros(1, 28, 28),
            "Classifier: images must have shape (batch, channels=1, height, width);"
            " got (1, 28, 28).",
        ),
        (
            "convnet",
            torch.zeros(2, 1, 28, 28, dtype=torch.uint8),
            "Classifier: images must be a floating-point tensor; got torch.uint8."
            " Convert it first, for example with .float().",
        ),
        (
            "convnet",
            torch.zeros(2, 1, 28, 7),
            "Classifier: images must have sides of at least 8 px; got 28x7.",
        ),
        (
            "capsnet",
            torch.zeros(2, 1, 32, 32),
            "CapsNet: images must have shape (batch, channels=1, height=28, width=28);"
            " got (2, 1, 32, 32).",
        ),
        (
            "convnet",
            torch.zeros(2, 1, 28, 28, device="meta"),
            "Classifier: images must be on the layer's device cpu; got meta."
            " Move one of them with .to(device).",
        ),
    ],
)
def test_bad_images(name: str, images: torch.Tensor, text: str) -> None:
    model = build(name, device="cpu")
    with pytest.raises(InputError) as caught:
        model(images)
    assert str(caught.value) == text


def test_couplings_need_a_capsule_head() -> None:
    with pytest.raises(InputError) as caught:
        build("convnet", "fc", device="cpu")(torch.zeros(1, 1, 28, 28), return_couplings=True)
    assert str(caught.value) == (
        "Classifier: return_couplings must be false without a capsule head; got True."
    )
