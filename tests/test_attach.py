"""attach_head: guests in the manner of timm, torchvision and plain Sequential, and refusals."""

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn

import xncaps
from xncaps.errors import InputError


class Body(nn.Module):
    """A small network with its classifier under any name, on pooled features or maps."""

    def __init__(self, name: str, classifier: nn.Module, pool: bool = True) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 24, 3)
        self.pool = nn.AdaptiveAvgPool2d(1) if pool else nn.Identity()
        self.flatten = nn.Flatten() if pool else nn.Identity()
        self.add_module(name, classifier)
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(self.name)(self.flatten(self.pool(self.features(x)))).flatten(1)


class TimmLike(nn.Module):
    """timm's contract: num_features, get_classifier, reset_classifier."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.num_features = 24
        self.num_classes = num_classes
        self.conv = nn.Conv2d(3, 24, 3)
        self.top = nn.Module()
        self.reset_classifier(num_classes)

    def reset_classifier(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.top.fc = nn.Linear(24, num_classes) if num_classes else nn.Identity()

    def get_classifier(self) -> nn.Module:
        return self.top.fc

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top.fc(self.conv(x).mean(dim=(2, 3)))


def vgg_like() -> nn.Module:
    layers = [nn.Linear(24, 40), nn.ReLU(), nn.Dropout(), nn.Linear(40, 1000)]
    return Body("classifier", nn.Sequential(*layers))


def convnext_like() -> nn.Module:
    classifier = nn.Sequential(nn.BatchNorm2d(24), nn.Flatten(1), nn.Linear(24 * 36, 1000))
    return Body("classifier", classifier, pool=False)


GUESTS = {
    "resnet": lambda: Body("fc", nn.Linear(24, 1000)),
    "mobilenet": lambda: Body("classifier", nn.Sequential(nn.Dropout(), nn.Linear(24, 1000))),
    "densenet": lambda: Body("classifier", nn.Linear(24, 1000)),
    "vgg": vgg_like,
    "convnext": convnext_like,
    "swin": lambda: Body("head", nn.Linear(24, 1000)),
    "vit": lambda: Body("heads", nn.Sequential(OrderedDict(head=nn.Linear(24, 1000)))),
    "squeezenet": lambda: Body(
        "classifier",
        nn.Sequential(nn.Dropout(), nn.Conv2d(24, 1000, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        pool=False,
    ),
    "timm": TimmLike,
    "timm without classifier": lambda: TimmLike(num_classes=0),
}


@pytest.mark.parametrize("guest", GUESTS)
@pytest.mark.parametrize("head", xncaps.HEADS)
def test_guests_get_the_head(guest: str, head: str) -> None:
    model = GUESTS[guest]()
    returned = xncaps.attach_head(model, head, num_classes=7)
    assert returned is model
    scores = model.eval()(torch.randn(2, 3, 8, 8))
    assert scores.shape == (2, 7)
    assert model.num_classes == 7
    assert model.scores == ("logits" if head in ("linear", "fc") else "lengths")
    scores.sum().backward()
    assert model.get_submodule("conv" if "timm" in guest else "features").weight.grad.any()


def test_layers_before_the_first_linear_one_stay_with_their_names() -> None:
    model = xncaps.attach_head(GUESTS["mobilenet"](), "xnodr", 5)
    kinds = [(name, type(m).__name__) for name, m in model.classifier.named_children()]
    assert kinds == [("0", "Dropout"), ("1", "CapsuleHead")]


def test_fully_connected_stacks_go_whole() -> None:
    model = xncaps.attach_head(GUESTS["vgg"](), "xnodr", 5)
    assert isinstance(model.classifier, xncaps.CapsuleHead)
    assert model.classifier.in_features == 24


def test_maps_reach_the_head_through_a_kept_flatten() -> None:
    model = Body("classifier", nn.Sequential(nn.Flatten(), nn.Linear(24 * 36, 9)), pool=False)
    xncaps.attach_head(model, "linear", 5)
    assert model.classifier[1].in_features == 24 * 36
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 5)


def test_norms_of_a_classifier_stay() -> None:
    model = xncaps.attach_head(GUESTS["convnext"](), "xnidr", 5)
    assert [type(m).__name__ for m in model.classifier] == ["BatchNorm2d", "Flatten", "CapsuleHead"]


def test_kept_layers_may_have_any_name() -> None:
    layers = OrderedDict(head=nn.LayerNorm(24), out=nn.Linear(24, 9))
    model = xncaps.attach_head(Body("classifier", nn.Sequential(layers)), "xnidr", 5)
    assert [name for name, _ in model.classifier.named_children()] == ["head", "out"]
    assert isinstance(model.classifier.head, nn.LayerNorm)


def test_nested_sequences_are_cut_at_their_first_layer() -> None:
    inner = nn.Sequential(nn.Dropout(), nn.Linear(24, 8), nn.ReLU())
    outer = nn.Sequential(nn.Sequential(nn.LayerNorm(24), nn.ReLU()), inner, nn.Linear(8, 9))
    model = Body("classifier", outer).eval()
    xncaps.attach_head(model, "xnidr", 5)
    kinds = [(name, type(m).__name__) for name, m in model.classifier.named_modules()][1:6]
    assert kinds == [
        ("0", "Sequential"),
        ("0.0", "LayerNorm"),
        ("0.1", "ReLU"),
        ("1", "Sequential"),
        ("1.0", "Dropout"),
    ]
    assert isinstance(model.classifier[1][1], xncaps.CapsuleHead)
    assert len(model.classifier) == 2
    assert not any(m.training for m in model.modules())
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 5)


def test_a_classifier_under_two_names_is_replaced_under_both() -> None:
    model = Body("head", nn.Linear(24, 9))
    model.fc = model.head
    xncaps.attach_head(model, "xnidr", 5)
    assert model.fc is model.head
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 5)


def test_timm_models_stay_timm_models() -> None:
    model = xncaps.attach_head(TimmLike(), "xnidr", 5)
    assert isinstance(model.get_classifier(), xncaps.CapsuleHead)
    model.reset_classifier(3)
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 3)


def test_a_name_picks_any_module() -> None:
    body = [nn.Conv2d(1, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10)]
    model = xncaps.attach_head(nn.Sequential(*body), "xnidr", 4, name="3", caps_in=5, dim_out=3)
    assert model(torch.randn(2, 1, 9, 9)).shape == (2, 4)
    nested = nn.ModuleDict({"a": nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 2))})
    xncaps.attach_head(nested, "linear", 4, name="a.1")
    assert nested["a"](torch.randn(3, 6)).shape == (3, 4)


def test_the_backbone_is_left_alone() -> None:
    model = GUESTS["resnet"]()
    before = copy.deepcopy(model.features.state_dict())
    xncaps.attach_head(model, "xnidr", 5)
    after = model.features.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_device_dtype_and_mode_are_taken_over() -> None:
    model = GUESTS["resnet"]().to(torch.float64).eval()
    xncaps.attach_head(model, "xnidr", 5)
    assert model.fc.capsules.weight.dtype == torch.float64
    assert not model.fc.training
    assert model(torch.randn(2, 3, 8, 8, dtype=torch.float64)).dtype == torch.float64
    on_meta = xncaps.attach_head(GUESTS["timm"]().to("meta"), "xnidr", 5)
    assert on_meta.get_classifier().capsules.weight.device.type == "meta"


def test_our_own_models_take_another_head() -> None:
    model = xncaps.create_model("convnet", "fc", num_classes=10)
    xncaps.attach_head(model, "xnodr", 4)
    assert (model.num_classes, model.scores) == (4, "lengths")
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 4)


def test_in_features_can_be_given() -> None:
    model = Body("fc", nn.Identity())
    xncaps.attach_head(model, "linear", 4, in_features=24)
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 4)


class Twins(TimmLike):
    """A distilled network of timm: the mean of two classifiers."""

    def reset_classifier(self, num_classes: int) -> None:
        super().reset_classifier(num_classes)
        self.top.other = nn.Linear(24, num_classes)

    def get_classifier(self) -> tuple[nn.Module, nn.Module]:
        return self.top.fc, self.top.other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.conv(x).mean(dim=(2, 3))
        return (self.top.fc(features) + self.top.other(features)) / 2


def test_each_of_several_classifiers_gets_a_head() -> None:
    model = xncaps.attach_head(Twins(), "xnidr", 5)
    heads = model.get_classifier()
    assert all(isinstance(head, xncaps.CapsuleHead) for head in heads)
    assert heads[0] is not heads[1]
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 5)


class Listed(Twins):
    """Several classifiers in a list."""

    def reset_classifier(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.top.list = nn.ModuleList(nn.Linear(24, num_classes) for _ in range(2))

    def get_classifier(self) -> nn.ModuleList:
        return self.top.list

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.conv(x).mean(dim=(2, 3))
        return sum(classifier(features) for classifier in self.top.list) / 2


def test_a_list_of_classifiers_stays_a_list() -> None:
    model = xncaps.attach_head(Listed(), "xnidr", 5)
    assert [type(head).__name__ for head in model.get_classifier()] == ["CapsuleHead"] * 2
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 5)


class Wrapped(nn.Module):
    """A linear layer in a module of somebody's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(24)
        self.linear = nn.Linear(24, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def test_a_module_of_unknown_kind_goes_whole() -> None:
    model = xncaps.attach_head(Body("fc", Wrapped()), "xnidr", 5)
    assert isinstance(model.fc, xncaps.CapsuleHead)
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 5)


class PooledHead(nn.Module):
    """A ClassifierHead of timm: it pools, and has a classifier of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features = 24
        self.reset(9)

    def reset(self, num_classes: int) -> None:
        self.fc = nn.Linear(self.in_features, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # channels last, as in timm's Sequencer
        return self.fc(x.mean(dim=(1, 2)))


class ChannelsLast(TimmLike):
    def reset_classifier(self, num_classes: int) -> None:
        if not isinstance(self.top, PooledHead):
            self.top = PooledHead()
        self.top.reset(num_classes)

    def get_classifier(self) -> nn.Module:
        return self.top

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.conv(x).permute(0, 2, 3, 1))


def test_a_head_of_timm_keeps_its_pooling() -> None:
    model = xncaps.attach_head(ChannelsLast(), "xnidr", 5)
    assert isinstance(model.get_classifier().fc, xncaps.CapsuleHead)
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 5)
    model.reset_classifier(3)
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 3)


class Forgetful(TimmLike):
    """Asks for a layer of its classifier, and fails without classifier, as timm's SHViT."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__(num_classes)
        self.head = Wrapped() if num_classes else nn.Identity()

    def get_classifier(self) -> nn.Module:
        return self.head.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).mean(dim=(2, 3)))


def test_a_get_classifier_that_fails_is_passed_over() -> None:
    model = xncaps.attach_head(Forgetful(), "xnidr", 5)
    assert isinstance(model.head.linear, xncaps.CapsuleHead)
    model = xncaps.attach_head(Forgetful(num_classes=0), "xnidr", 5)
    assert isinstance(model.head, xncaps.CapsuleHead)
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 5)


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_reset_takes_the_scores_of_its_own_copy_away(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    model = xncaps.attach_head(TimmLike(), "xnidr", 5)
    other = copied(model)
    other.reset_classifier(3)
    assert not hasattr(other, "scores")
    assert other.num_classes == 3
    assert vars(other).keys() == vars(TimmLike()).keys()
    assert (model.scores, model.num_classes) == ("lengths", 5)
    assert isinstance(model.get_classifier(), xncaps.CapsuleHead)


@pytest.mark.parametrize(
    ("model", "arguments", "text"),
    [
        (
            nn.Sequential(nn.Linear(3, 4)),
            {},
            "attach_head: model must have a get_classifier() or a child named classifier, fc, head,"
            " heads; got Sequential with children 0. Name its classifier with name=...",
        ),
        (
            nn.Sequential(nn.Linear(3, 4)),
            {"name": "1"},
            "attach_head: name must be a module of Sequential; got '1'. Its children are: 0.",
        ),
        (
            Body("fc", nn.Identity()),
            {},
            "attach_head: classifier 'fc' must be a linear layer, a convolution, or have one;"
            " got Identity. Give the size of its features with in_features=...",
        ),
        ("resnet", {}, "attach_head: model must be an nn.Module; got str."),
        (
            TimmLike(),
            {"head": "xnid"},
            "attach_head: head must be one of linear, fc, dr, xnodr, xnidr, xnboth; got 'xnid'."
            " Did you mean 'xnidr'?",
        ),
        (
            TimmLike(),
            {"num_classes": 0},
            "attach_head: num_classes must be at least 1; got 0.",
        ),
        (
            TimmLike(),
            {"head": "fc", "iterations": 2},
            "attach_head: option must be one the fc head takes (hidden); got 'iterations'.",
        ),
        (
            TimmLike(),
            {"head": "linear", "hidden": ()},
            "attach_head: option must be one the linear head takes (it takes none); got 'hidden'.",
        ),
    ],
)
def test_refusals_say_why_and_change_nothing(
    model: nn.Module, arguments: dict[str, object], text: str
) -> None:
    before = str(model)
    with pytest.raises(InputError) as caught:
        xncaps.attach_head(model, **{"head": "xnidr", "num_classes": 5, **arguments})
    assert str(caught.value) == text
    assert str(model) == before
