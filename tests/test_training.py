"""The parts of training: configuration, recipes, schedules, losses, averages, monitors, figures."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import xncaps
from xncaps.data import Augment, Preprocess, facts_of, load_data
from xncaps.errors import InputError
from xncaps.evaluation import answers, evaluate_scores, scores_of
from xncaps.training import RECIPES, Config, recipe
from xncaps.training.config import differences
from xncaps.training.monitors import coupling_entropy, flip_ratios, weight_signs
from xncaps.training.objective import Average, Objective, make_optimizer
from xncaps.training.processes import start_fabric
from xncaps.training.schedule import make_schedule, onecycle, triangular2
from xncaps.training.state import State
from xncaps.training.train import train


def test_configuration_survives_json() -> None:
    config = Config(
        head="fc", options={"hidden": (64, 32)}, augment=Augment(shift=2, flip=True), clip=1.0
    )
    again = Config.from_dict(json.loads(config.to_json()))
    assert again.to_dict() == config.to_dict()
    assert again.augment == config.augment


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"epoch": 3}, "Config: option must be one a run takes (data, train_count, "),
        ({"epochs": 0}, "Config: epochs must be at least 1; got 0."),
        ({"epochs": 2.5}, "Config: epochs must be a whole number; got 2.5."),
        ({"batch_size": 0}, "Config: batch_size must be at least 1; got 0."),
        ({"seed": -1}, "Config: seed must be at least 0; got -1."),
        ({"lr": 0}, "Config: lr must be a number above 0 and up to 1e6; got 0."),
        ({"lr": math.nan}, "Config: lr must be a number above 0 and up to 1e6; got nan."),
        ({"lr": True}, "Config: lr must be a number above 0 and up to 1e6; got True."),
        ({"lr": 1e38}, "Config: lr must be a number above 0 and up to 1e6; got 1e+38."),
        ({"image_size": 5000}, "Config: image_size must be at most 4096 px; got 5000."),
        ({"min_lr": 1}, "Config: min_lr must be at most lr, 0.003; got 1."),
        ({"ema": 1}, "Config: ema must be a number from 0 to below 1; got 1."),
        ({"smoothing": 1}, "Config: smoothing must be a number from 0 to below 1; got 1."),
        ({"clip": 0}, "Config: clip must be a number above 0; got 0."),
        ({"warmup": 2}, "Config: warmup must be a number from 0 to 1; got 2."),
        ({"compile": 1}, "Config: compile must be true or false; got 1."),
        ({"head": "xnord"}, "Config: head must be one of linear, fc, dr, xnodr, xnidr, xnboth; "),
        ({"loss": "mse"}, "Config: loss must be one of margin, cross_entropy; got 'mse'."),
        ({"options": 3}, "Config: options must be a mapping; got 3."),
        ({"augment": {"shear": 1}}, "Config: option must be one augment takes (shift, rotate, "),
        ({"augment": {"shift": -1}}, "Augment: shift must be "),
        ({"augment": 3}, "Config: augment must be an Augment or a mapping; got 3."),
        ({"data": 3}, "Config: data must be a name; got 3."),
    ],
)
def test_a_bad_configuration_is_refused(values: dict[str, object], line: str) -> None:
    with pytest.raises(InputError) as caught:
        Config.from_dict(values)
    assert str(caught.value).startswith(line)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Config().epochs = 3  # type: ignore[misc]


def test_differences_are_named() -> None:
    old = Config(augment=Augment(shift=1)).to_dict()
    new = Config(epochs=3, augment=Augment(shift=2)).to_dict()
    assert differences(old, new) == ["epochs: 10 -> 3", "augment.shift: 1 -> 2"]
    assert differences(old, old) == []


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_configurations(name: str) -> None:
    Config.from_dict(recipe(name))


@pytest.mark.parametrize(("data", "epochs"), [("mnist", 30), ("cifar10", 80), ("multimnist", 20)])
def test_the_paper_recipes_are_as_its_text(data: str, epochs: int) -> None:
    config = Config.from_dict(recipe(f"paper-{data}"))
    assert (config.data, config.epochs) == (data, epochs)
    assert (config.optimizer, config.loss, config.schedule) == ("adam", "margin", "triangular2")
    assert (config.min_lr, config.lr, config.step_size) == (1e-9, 1e-3, 6000)
    assert config.image_size is None
    assert (config.augment != Augment()) == (data == "cifar10")


def test_triangular2_by_hand() -> None:
    """Straight lines between the corners 0, 1, 0, 1/2, 0, 1/4, ..."""
    low, high, half = 1e-9, 1e-3, 6000
    corners = {0: 0.0, 1: 1.0, 2: 0.0, 3: 0.5, 4: 0.0, 5: 0.25, 6: 0.0, 7: 0.125}
    for step in range(0, 7 * half, 371):
        corner, rest = divmod(step, half)
        share = rest / half
        height = corners[corner] * (1 - share) + corners[corner + 1] * share
        assert triangular2(step, low, high, half) == pytest.approx(
            low + (high - low) * height, rel=1e-9, abs=1e-18
        )


@pytest.mark.parametrize(("steps", "warmup"), [(100, 0.3), (7, 0.5), (1000, 0.1), (40, 0.25)])
def test_onecycle_is_that_of_torch(steps: int, warmup: float) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1)
    theirs = OneCycleLR(optimizer, 0.7, total_steps=steps, pct_start=warmup, cycle_momentum=False)
    for step in range(steps):
        assert onecycle(step, 0.7, steps, warmup) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        if step < steps - 1:
            theirs.step()


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("warmup", [0.0, 0.3, 1.0])
def test_short_runs_have_a_rate(steps: int, warmup: float) -> None:
    rate = make_schedule(Config(warmup=warmup, lr=1.0), steps)
    assert all(0 < rate(step) <= 1 for step in range(steps))
    assert make_schedule(Config(schedule="constant", lr=0.5), steps)(0) == 0.5


class Fixed(nn.Module):
    """Stands for a network: gives the scores it was told."""

    def __init__(self, scores: torch.Tensor, kind: str) -> None:
        super().__init__()
        self.values = nn.Parameter(scores)
        self.scores = kind

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.values


SCORES = torch.tensor([[0.9, 0.2, 0.4], [0.1, 0.7, 0.3]])


def test_losses_by_hand() -> None:
    labels, images = torch.tensor([0, 2]), torch.zeros(2, 1, 4, 4)

    def loss(kind: str, name: str, target: torch.Tensor) -> float:
        return Objective(Fixed(SCORES.clone(), kind), name)(images, target)[0].item()  # type: ignore[arg-type]

    def margin(lengths: list[list[float]], present: list[list[int]]) -> float:
        total = 0.0
        for row, marks in zip(lengths, present, strict=True):
            for length, mark in zip(row, marks, strict=True):
                total += max(0, 0.9 - length) ** 2 if mark else 0.5 * max(0, length - 0.1) ** 2
        return total / len(lengths)

    def entropy(logits: list[list[float]], shares: list[list[float]]) -> float:
        total = 0.0
        for row, parts in zip(logits, shares, strict=True):
            log_sum = math.log(sum(map(math.exp, row)))
            total += sum(part * (log_sum - x) for x, part in zip(row, parts, strict=True))
        return total / len(logits)

    one_hot, rows = [[1, 0, 0], [0, 0, 1]], SCORES.tolist()
    squeezed = [[1 / (1 + math.exp(-x)) for x in row] for row in rows]
    assert loss("lengths", "margin", labels) == pytest.approx(margin(rows, one_hot), rel=1e-5)
    assert loss("logits", "margin", labels) == pytest.approx(margin(squeezed, one_hot), rel=1e-5)
    tenfold = [[10 * x for x in row] for row in rows]
    assert loss("lengths", "cross_entropy", labels) == pytest.approx(
        entropy(tenfold, one_hot), rel=1e-5
    )
    assert loss("logits", "cross_entropy", labels) == pytest.approx(
        entropy(rows, one_hot), rel=1e-5
    )
    pairs = torch.tensor([[1, 1, 0], [0, 1, 1]], dtype=torch.uint8)
    halves = [[0.5, 0.5, 0], [0, 0.5, 0.5]]
    assert loss("logits", "cross_entropy", pairs) == pytest.approx(entropy(rows, halves), rel=1e-5)


def test_smoothing_by_hand() -> None:
    """A target keeps 0.7 of itself and has 0.1 more for each class, of pairs twice as much."""
    images = torch.zeros(2, 1, 4, 4)
    single, pairs = torch.tensor([0, 2]), torch.tensor([[1, 1, 0], [0, 1, 1]])
    logits = Objective(Fixed(SCORES.clone(), "logits"), "cross_entropy", 0.3)  # type: ignore[arg-type]
    logs = SCORES.log_softmax(dim=1).tolist()
    targets = {
        single: [[0.8, 0.1, 0.1], [0.1, 0.1, 0.8]],
        pairs: [[0.45, 0.45, 0.1], [0.1, 0.45, 0.45]],
    }
    for labels, shares in targets.items():
        rows = zip(logs, shares, strict=True)
        expected = -sum(x * t for row, part in rows for x, t in zip(row, part, strict=True)) / 2
        assert logits(images, labels)[0].item() == pytest.approx(expected, rel=1e-5)
    plain = Objective(Fixed(SCORES.clone(), "logits"), "cross_entropy")  # type: ignore[arg-type]
    judged = plain(images, single)[0].item()
    assert logits.of_scores(SCORES, single).item() == pytest.approx(judged, rel=1e-5)

    lengths = Objective(Fixed(SCORES.clone(), "lengths"), "margin", 0.3)  # type: ignore[arg-type]
    total = 0.0
    for row, part in zip(SCORES.tolist(), targets[single], strict=True):
        for x, t in zip(row, part, strict=True):
            total += t * max(0, 0.9 - x) ** 2 + (1 - t) * 0.5 * max(0, x - 0.1) ** 2
    assert lengths(images, single)[0].item() == pytest.approx(total / 2, rel=1e-5)

    digits = load_data("sample")
    config = Config(head="linear", smoothing=0.3)
    state = State(config, facts_of(digits), start_fabric("32"), digits.train)
    assert state.objective.smoothing == 0.3


def test_the_factor_of_lengths_is_learned() -> None:
    lengths = Objective(Fixed(SCORES.clone(), "lengths"), "cross_entropy")  # type: ignore[arg-type]
    loss, _ = lengths(torch.zeros(2, 1, 4, 4), torch.tensor([0, 1]))
    loss.backward()
    assert lengths.factor is not None
    assert lengths.factor.item() == 10
    assert lengths.factor.grad is not None
    assert lengths.factor.grad.item() < 0
    for kind, name in (("logits", "cross_entropy"), ("lengths", "margin")):
        assert Objective(Fixed(SCORES, kind), name).factor is None  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_decay_spares_biases(name: str) -> None:
    layer = nn.Linear(3, 2)
    layer.register_parameter("fixed", nn.Parameter(torch.ones(2), requires_grad=False))
    groups = make_optimizer(
        Config(optimizer=name, weight_decay=0.1), layer.parameters()
    ).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0]
    assert groups[0]["params"] == [layer.weight]
    assert groups[1]["params"] == [layer.bias]


def test_the_average_by_hand() -> None:
    make = lambda: nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))  # noqa: E731
    network = make()
    average = Average(network, make(), 0.6)  # type: ignore[arg-type]
    expected = network[0].weight.detach().clone()
    for step in range(1, 6):
        with torch.no_grad():
            network[0].weight += 1
        network[1].num_batches_tracked += 1
        average.update(network, step)
        decay = min(0.6, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * network[0].weight.detach()
    torch.testing.assert_close(average.network[0].weight.detach(), expected)
    assert average.network[1].num_batches_tracked == 5
    assert not average.network.training


def test_signs_and_flips() -> None:
    model = xncaps.create_model("convnet", head="xnboth", width=0.25, caps_in=4)
    net = xncaps.create_model("xnornet", width=0.05)
    assert list(weight_signs(model)) == ["head.capsules"]
    assert len(weight_signs(net)) == 7
    assert weight_signs(xncaps.create_model("convnet", head="xnidr")) == {}
    before = weight_signs(model)
    weight = model.head.capsules.weight
    torch.testing.assert_close(before["head.capsules"], weight > 0)
    with torch.no_grad():
        weight[0] *= -1
    share = (weight[0] != 0).sum().item() / weight.numel()
    assert flip_ratios(before, weight_signs(model)) == {"head.capsules": pytest.approx(share)}


def test_coupling_entropy() -> None:
    model = xncaps.create_model("convnet", head="dr", width=0.25, caps_in=4, iterations=1).eval()
    images = torch.randn(3, 1, 28, 28)
    assert coupling_entropy(model, images) == pytest.approx(1)  # the first couplings are even
    model = xncaps.create_model("convnet", head="dr", width=0.25, caps_in=4, iterations=4).eval()
    _, couplings = model(images, return_couplings=True)
    total = 0.0
    for c in couplings.flatten(0, 1).tolist():
        total -= sum(x * math.log(x) for x in c)
    expected = total / (3 * 4) / math.log(10)
    assert coupling_entropy(model, images) == pytest.approx(expected, rel=1e-5)
    assert coupling_entropy(xncaps.create_model("convnet", head="fc"), images) is None


def test_watching_a_network_does_not_change_it() -> None:
    """BatchNorm must not learn from the validation images."""
    model = xncaps.create_model("convnet", head="xnodr", width=0.25, caps_in=4).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images = torch.randn(8, 1, 28, 28)
    watched = coupling_entropy(model, images)
    weight_signs(model)
    scores_of(model, images.byte(), Preprocess((0.1,), (0.3,)))
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert coupling_entropy(model.eval(), images) == watched


def test_evaluation_of_single_classes() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.8, 0.1], [0.1, 0.7, 0.2], [0.0, 0.1, 0.9]])
    labels = torch.tensor([0, 0, 1, 2])
    found = evaluate_scores(scores, labels, ("a", "b", "c"), 0.5)
    assert found.metrics == {"top1": 0.75}
    assert found.confusion == [[1, 1, 0], [0, 1, 0], [0, 0, 1]]
    assert [row["recall"] for row in found.per_class] == [0.5, 1, 1]
    assert [row["precision"] for row in found.per_class] == [1, 0.5, 1]
    assert found.to_dict()["loss"] == 0.5


def test_evaluation_of_pairs_against_a_plain_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(200, 5, generator=generator)
    labels = torch.zeros(200, 5, dtype=torch.uint8)
    for row in labels:
        row[torch.randperm(5, generator=generator)[:2]] = 1
    expected = [[0] * 5 for _ in range(5)]
    exact = hits = lower = 0
    for row, marks in zip(scores.tolist(), labels.tolist(), strict=True):
        seen = sorted(sorted(range(5), key=lambda k: -row[k])[:2])
        shown = [k for k in range(5) if marks[k]]
        exact += seen == shown
        hits += len(set(seen) & set(shown))
        lower += shown[0] in seen
        for k in set(seen) & set(shown):
            expected[k][k] += 1
        missed = [k for k in shown if k not in seen]
        wrong = [k for k in seen if k not in shown]
        for one, other in zip(missed, wrong, strict=True):
            expected[one][other] += 1
    found = evaluate_scores(scores, labels, tuple("abcde"))
    assert found.confusion == expected
    assert found.metrics == {
        "exact_pair": exact / 200,
        "per_digit": hits / 400,
        "paper_top2": lower / 200,
    }
    assert sum(row["count"] for row in found.per_class) == 400
    assert "loss" not in found.to_dict()


def test_a_class_that_is_never_shown_or_seen_has_no_figure() -> None:
    found = evaluate_scores(torch.tensor([[0.9, 0.1, 0.0]]), torch.tensor([0]), ("a", "b", "c"))
    assert found.per_class[1] == {"class": "b", "count": 0, "recall": None, "precision": None}


def test_answers_of_pairs_are_in_order() -> None:
    assert answers(torch.tensor([[0.1, 0.9, 0.2, 0.8]]), pairs=True).tolist() == [[1, 3]]


def test_scores_do_not_depend_on_the_batch_and_leave_the_mode() -> None:
    model = xncaps.create_model("convnet", head="linear", width=0.25).train()
    images = torch.randint(0, 256, (300, 1, 28, 28), dtype=torch.uint8)
    preprocess = Preprocess((0.1,), (0.3,))
    scores = scores_of(model, images, preprocess)
    assert model.training
    one = scores_of(model, images[290:291], preprocess)
    torch.testing.assert_close(scores[290:291], one)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"data": "mnits"}, "load_data: data must be one of sample, mnist, "),
        ({"options": {"hidden": [3]}}, "create_model: option must be one the xnidr head takes"),
        ({"image_size": 4}, "create_model: image_size must be at least 8 px for convnet; got 4."),
    ],
)
def test_nothing_is_written_for_a_run_that_cannot_begin(
    tmp_path: Path, values: dict[str, object], line: str
) -> None:
    with pytest.raises(InputError) as caught:
        train(Config.from_dict(values), tmp_path / "run")
    assert str(caught.value).startswith(line)
    assert not (tmp_path / "run").exists()
