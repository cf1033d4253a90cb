"""attach_head and fine-tuning on real networks of timm and torchvision."""

import copy
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import guests
import xncaps
from guests import CLASSES, GUESTS, TIMM, Guest, attached, images_of, in_head, tensors, train_step
from xncaps.errors import InputError
from xncaps.networks import Classifier

ROOT = Path(__file__).parent.parent

every_guest = pytest.mark.parametrize("guest", GUESTS.values(), ids=GUESTS)
every_timm = pytest.mark.parametrize("guest", TIMM.values(), ids=TIMM)


@every_guest
@pytest.mark.parametrize("head", ["xnidr", "linear"])
def test_the_forward_pass(guest: Guest, head: str) -> None:
    model = attached(guest, head).eval()
    for name in guest.heads:
        assert isinstance(model.get_submodule(name), xncaps.CapsuleHead | xncaps.LinearHead)
    scores = model(images_of(guest))
    assert scores.shape == (4, CLASSES)
    assert torch.isfinite(scores).all()
    assert (model.num_classes, model.scores) == (
        CLASSES,
        "logits" if head == "linear" else "lengths",
    )


@every_guest
def test_a_training_step_moves_head_and_backbone(guest: Guest) -> None:
    model = attached(guest)
    before = tensors(model)
    train_step(model, images_of(guest))
    assert all(parameter.grad is not None for parameter in model.parameters())
    moved = {name for name, tensor in model.state_dict().items() if not tensor.equal(before[name])}
    stem = next(name for name, _ in model.named_parameters())
    assert stem in moved
    for name in guest.heads:
        assert {f"{name}.primary.projection.weight", f"{name}.capsules.weight"} <= moved


@every_guest
def test_the_state_dict_of_the_backbone_stays(guest: Guest) -> None:
    torch.manual_seed(0)
    model = guest.build()
    before = tensors(model)
    xncaps.attach_head(model, "xnidr", CLASSES)
    after = tensors(model)
    backbone = {key: tensor for key, tensor in before.items() if not in_head(guest, key)}
    assert [key for key in after if not in_head(guest, key)] == list(backbone)
    assert all(tensor.equal(after[key]) for key, tensor in backbone.items())


@every_guest
def test_weights_of_the_original_load(guest: Guest) -> None:
    torch.manual_seed(1)
    weights = tensors(guest.build())
    backbone = {key: tensor for key, tensor in weights.items() if not in_head(guest, key)}
    model = attached(guest)
    heads = [key for key in model.state_dict() if in_head(guest, key)]
    result = model.load_state_dict(backbone, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (heads, [])
    assert all(tensor.equal(model.state_dict()[key]) for key, tensor in backbone.items())
    result = model.load_state_dict(weights, strict=False)  # the old classifier's are left over
    assert (result.missing_keys, set(result.unexpected_keys)) == (heads, weights.keys() - backbone)


@every_guest
def test_summary_counts_what_pytorch_counts(guest: Guest) -> None:
    model = attached(guest, "linear").eval()
    counted = xncaps.summary(model, (3, guest.size, guest.size))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert counted.params == counted.trainable_params == parameters
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as flops:
            model(images_of(guest, 1))
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    assert counted.macs == flops.get_total_flops() // 2 + guest.attention


@every_guest
def test_summary_counts_binary_work_of_the_head(guest: Guest) -> None:
    counted = xncaps.summary(attached(guest, "xnodr"), (3, guest.size, guest.size))
    assert counted.binary_ops == len(guest.heads) * 128 * 8 * CLASSES * 16
    assert counted.packed_bytes < counted.bytes


@every_guest
@pytest.mark.parametrize("head", ["dr", "xnodr"])
def test_the_packed_copy_gives_the_same(guest: Guest, head: str) -> None:
    model = attached(guest, head)
    train_step(model, images_of(guest, 8))  # batch normalisation with statistics of its own
    images = images_of(guest, 8)
    model.eval()
    if head == "xnodr":
        images = guests.far_from_ties(model, images)
        assert len(images) >= 4
    fast = xncaps.pack(model)
    for name in guest.heads:
        assert type(fast.get_submodule(name).capsules).__name__ == "PackedCapsules"
    with torch.no_grad():
        torch.testing.assert_close(fast(images), model(images), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["timm resnet", "timm vit", "torchvision mobilenet_v2"])
def test_export(name: str) -> None:
    model = attached(GUESTS[name], "xnodr").eval()
    images = images_of(GUESTS[name])
    exported = torch.export.export(model, (images,)).module()
    torch.testing.assert_close(exported(images), model(images), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["timm resnet", "timm vit", "torchvision convnext"])
def test_compile(name: str) -> None:
    model = attached(GUESTS[name], "xnodr").eval()
    images = images_of(GUESTS[name])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), model(images), atol=1e-5, rtol=0)


@every_timm
def test_reset_classifier_gives_a_plain_model_back(guest: Guest) -> None:
    plain = vars(guest.build()).keys()
    model = attached(guest).eval()
    model.reset_classifier(num_classes=3)
    assert model(images_of(guest)).shape == (4, 3)
    assert model.num_classes == 3
    assert vars(model).keys() == plain  # so no `scores` either
    assert all(type(model.get_submodule(name)) is not xncaps.CapsuleHead for name in guest.heads)
    fresh = guest.build()
    fresh.reset_classifier(3)
    assert list(model.state_dict()) == list(fresh.state_dict())


@every_timm
def test_a_head_again_after_reset(guest: Guest) -> None:
    model = attached(guest).eval()
    for num_classes in (3, 0):
        model.reset_classifier(num_classes)
        xncaps.attach_head(model, "dr", 5)
        assert model(images_of(guest)).shape == (4, 5)
        assert (model.num_classes, model.scores) == (5, "lengths")


@every_timm
def test_features_before_the_head(guest: Guest) -> None:
    model = attached(guest).eval()
    found = model.get_classifier()
    heads = found if isinstance(found, tuple) else (found,)
    assert heads == tuple(model.get_submodule(name) for name in guest.heads)
    images = images_of(guest)
    features = model.forward_head(model.forward_features(images), pre_logits=True)
    assert features.shape == (4, model.head_hidden_size)
    if len(heads) == 1:
        torch.testing.assert_close(heads[0](features), model(images), atol=1e-5, rtol=0)
    model.reset_classifier(0)
    assert model(images).equal(features)


@every_timm
def test_models_without_classifier(guest: Guest) -> None:
    options = {**guest.build.keywords, "num_classes": 0}
    model = guests.timm.create_model(*guest.build.args, **options)
    xncaps.attach_head(model, "xnidr", CLASSES)
    assert model.eval()(images_of(guest)).shape == (4, CLASSES)


@pytest.mark.parametrize("pool", ["token", "avg", "max"])
def test_pools_of_tokens(pool: str) -> None:
    model = guests.timm.create_model("test_vit", img_size=32, global_pool=pool)
    xncaps.attach_head(model, "xnidr", CLASSES)
    assert model.eval()(torch.randn(2, 3, 32, 32)).shape == (2, CLASSES)


def test_pretrained_weights_of_timm(tmp_path: Path) -> None:
    """As timm loads what it downloads, but from a file."""
    torch.manual_seed(2)
    weights = guests.timm.create_model("test_resnet").state_dict()
    save_file(weights, tmp_path / "model.safetensors")
    source = {"file": str(tmp_path / "model.safetensors")}
    model = guests.timm.create_model("test_resnet", pretrained=True, pretrained_cfg_overlay=source)
    xncaps.attach_head(model, "xnidr", CLASSES)
    after = model.state_dict()
    assert all(after[key].equal(weights[key]) for key in weights if not key.startswith("fc."))
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, CLASSES)


# Fine-tuning


@every_guest
def test_a_frozen_backbone_stays_as_it_is(guest: Guest) -> None:
    model = attached(guest)
    assert xncaps.freeze_backbone(model) is model
    before = tensors(model)
    train_step(model, images_of(guest))
    after = model.state_dict()
    moved = {name for name in before if not after[name].equal(before[name])}
    assert moved
    assert all(in_head(guest, name) for name in moved)
    assert model.training


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_train_does_not_wake_frozen_norms(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = copied(xncaps.freeze_backbone(attached(GUESTS["torchvision mobilenet_v2"])))
    nn.Sequential(model).train()  # whoever calls it
    model.features.train()
    assert len(guests.norms_of(model)) == 52
    assert not any(norm.training for norm in guests.norms_of(model))
    assert model.classifier[0].training  # dropout
    assert model.classifier[1].training


def test_unfreezing_undoes_freezing() -> None:
    model = attached(GUESTS["torchvision mobilenet_v2"]).train()
    fixed = model.features[0][0].weight.requires_grad_(False)
    attributes = [list(vars(module)) for module in model.modules()]
    xncaps.freeze_backbone(xncaps.freeze_backbone(model))  # twice is once
    assert xncaps.unfreeze_backbone(model) is model
    assert [p is fixed for p in model.parameters() if not p.requires_grad] == [True]
    assert all(norm.training for norm in guests.norms_of(model))
    assert [list(vars(module)) for module in model.modules()] == attributes
    xncaps.unfreeze_backbone(xncaps.freeze_backbone(model).eval())
    assert not any(norm.training for norm in guests.norms_of(model))


def test_a_part_can_be_unfrozen() -> None:
    model = xncaps.freeze_backbone(attached(GUESTS["torchvision resnet"]).train())
    xncaps.unfreeze_backbone(model.layer4)
    learns = {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert learns == {"layer4", "fc"}
    assert all(norm.training for norm in guests.norms_of(model.layer4))
    assert not any(norm.training for norm in guests.norms_of(model.layer3))


def test_norms_of_the_head_learn() -> None:
    head = xncaps.CapsuleHead(6, CLASSES, layer=xncaps.XnIDR, norm=True)
    model = Classifier(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)), head, 3, 8)
    before = tensors(xncaps.freeze_backbone(model))
    train_step(model, torch.randn(4, 3, 8, 8))
    after = model.state_dict()
    moved = {name for name in before if not after[name].equal(before[name])}
    assert "head.primary_norm.norm.running_mean" in moved
    assert "backbone.1.running_mean" not in moved


def test_frozen_models_are_packed_and_counted_alike() -> None:
    guest = GUESTS["torchvision mobilenet_v2"]
    model = attached(guest, "dr").eval()
    packed = xncaps.pack(model)(images_of(guest))
    xncaps.freeze_backbone(model)
    assert xncaps.pack(model)(images_of(guest)).equal(packed)
    learned = sum(p.numel() for p in model.classifier[1].parameters())
    assert xncaps.summary(model, (3, 32, 32)).trainable_params == learned


@every_guest
def test_parameter_groups_hold_every_parameter_once(guest: Guest) -> None:
    model = xncaps.freeze_backbone(attached(guest))
    groups = xncaps.parameter_groups(model, lr=0.5, backbone_lr=0.1, weight_decay=0.01)
    held = [parameter for group in groups for parameter in group["params"]]
    assert sorted(map(id, held)) == sorted(map(id, model.parameters()))
    names = {parameter: name for name, parameter in model.named_parameters()}
    spared = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    for group in torch.optim.AdamW(groups).param_groups:
        for parameter in group["params"]:
            head = in_head(guest, names[parameter])
            decays = parameter.dim() > 1 and names[parameter] not in spared
            assert group["lr"] == (0.5 if head else 0.1)
            assert group["weight_decay"] == (0.01 if decays else 0.0)
            title = ("head" if head else "backbone") + ("" if decays else " without decay")
            assert group["name"] == title


def test_tokens_do_not_decay_where_timm_says_so() -> None:
    model = attached(GUESTS["timm vit"])
    groups = xncaps.parameter_groups(model, lr=0.5, weight_decay=0.01)
    group = next(g for g in groups if any(p is model.pos_embed for p in g["params"]))
    assert (group["name"], group["weight_decay"]) == ("backbone without decay", 0.0)


def test_two_groups_unless_decay_is_given() -> None:
    groups = xncaps.parameter_groups(attached(GUESTS["timm resnet"]), lr=0.5)
    assert [(g["name"], g["lr"], "weight_decay" in g) for g in groups] == [
        ("head", 0.5, False),
        ("backbone", 0.05, False),
    ]


LACKS = "model must have a head of xncaps; got Linear without one. Put one on it with attach_head."
RATE = "must be a finite number of at least 0"


@pytest.mark.parametrize(
    ("name", "model", "options", "text"),
    [
        ("freeze_backbone", nn.Linear(2, 2), {}, LACKS),
        ("parameter_groups", nn.Linear(2, 2), {"lr": 1}, LACKS),
        ("freeze_backbone", "resnet", {}, "model must be an nn.Module; got str."),
        ("unfreeze_backbone", "resnet", {}, "part must be an nn.Module; got str."),
        ("parameter_groups", None, {"lr": 1}, "model must be an nn.Module; got NoneType."),
        ("parameter_groups", nn.Linear(2, 2), {"lr": "fast"}, f"lr {RATE}; got 'fast'."),
        (
            *("parameter_groups", nn.Linear(2, 2), {"lr": 1, "backbone_lr": -1}),
            f"backbone_lr {RATE}; got -1.",
        ),
        (
            *("parameter_groups", nn.Linear(2, 2), {"lr": 1, "weight_decay": float("inf")}),
            f"weight_decay {RATE}; got inf.",
        ),
    ],
)
def test_misuse_is_told(name: str, model: object, options: dict[str, object], text: str) -> None:
    with pytest.raises(InputError) as caught:
        getattr(xncaps, name)(model, **options)
    assert str(caught.value) == f"{name}: {text}"


# The example and the page


def run_example(before: str) -> subprocess.CompletedProcess[str]:
    code = f"{before}; import runpy; runpy.run_path('examples/finetune.py', run_name='__main__')"
    paths = os.pathsep.join(filter(None, ("tests", os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_example_learns() -> None:
    done = run_example("import guests")
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"epoch \d  loss [\d.]+  accuracy ([\d.]+)%\n", done.stdout)
    assert len(lines) == 3
    assert float(lines[-1]) > 80


def test_the_example_says_what_it_needs() -> None:
    done = run_example("import sys; sys.modules['timm'] = None")
    assert done.returncode == 1
    assert done.stderr.startswith("This example needs timm: pip install -c constraints.txt timm ")
    assert done.stderr.count("\n") == 1


def test_the_code_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block after the other; what it asks of pretrained weights is not downloaded."""
    page = (ROOT / "docs" / "guests.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    timm, torchvision = guests.timm, guests.torchvision
    create_model, mobilenet_v2 = timm.create_model, torchvision.models.mobilenet_v2
    asked: list[object] = []

    def without_download(*args: object, pretrained: bool = False, **options: object) -> nn.Module:
        asked.append(pretrained)
        return create_model(*args, **options)

    def without_weights(*, weights: str) -> nn.Module:
        asked.append(torchvision.models.get_model_weights("mobilenet_v2")[weights])
        return mobilenet_v2()

    monkeypatch.setattr(timm, "create_model", without_download)
    monkeypatch.setattr(torchvision.models, "mobilenet_v2", without_weights)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert names["scores"].shape == (2, 10)
    assert names["wanted"]["input_size"] == (3, 224, 224)
    assert len(names["groups"]) == 4
    assert names["features"].shape == (8, 1280)
    weights = torchvision.models.MobileNet_V2_Weights.DEFAULT
    assert asked == [True, weights, True, False]
