"""The four metrics: hand-made cases, the oracle, and what they refuse."""

import pytest
import torch

import oracles
from xncaps import METRICS
from xncaps.errors import InputError, InputTypeError
from xncaps.metrics import exact_pair, paper_top2, per_digit, top1

PAIR_METRICS = ["exact_pair", "per_digit", "paper_top2"]


def two_hot(pairs, classes):
    return torch.tensor([[1 if k in pair else 0 for k in range(classes)] for pair in pairs])


# scores, the pair shown, then exact_pair, per_digit, paper_top2
CASES = {
    "both right": ([0.1, 0.9, 0.8, 0.2], (1, 2), 1, 1, 1),
    "only the lower right": ([0.1, 0.9, 0.2, 0.8], (1, 2), 0, 0.5, 1),
    "only the higher right": ([0.9, 0.1, 0.8, 0.2], (1, 2), 0, 0.5, 0),
    "both wrong": ([0.9, 0.1, 0.2, 0.8], (1, 2), 0, 0, 0),
    "first and last class": ([0.8, 0.1, 0.2, 0.9], (0, 3), 1, 1, 1),
    "negative logits": ([-0.1, -0.9, -0.8, -0.2], (0, 3), 1, 1, 1),
}


@pytest.mark.parametrize(
    ("scores", "pair", "exact", "digit", "paper"), CASES.values(), ids=CASES.keys()
)
def test_pair_metrics_of_hand_made_cases(scores, pair, exact, digit, paper):
    scores, target = torch.tensor([scores]), two_hot([pair], 4)
    assert exact_pair(scores, target).tolist() == [exact]
    assert per_digit(scores, target).tolist() == [digit]
    assert paper_top2(scores, target).tolist() == [paper]


@pytest.mark.parametrize("name", PAIR_METRICS)
@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_pair_metrics_equal_the_oracle(name, classes, dtype):
    generator = torch.Generator().manual_seed(classes)
    scores = torch.rand(40, classes, generator=generator)
    pairs = [torch.randperm(classes, generator=generator)[:2].tolist() for _ in range(40)]
    oracle = getattr(oracles, name)
    expected = [oracle(row, pair) for row, pair in zip(scores.tolist(), pairs, strict=True)]
    hits = METRICS[name](scores, two_hot(pairs, classes).to(dtype))
    assert hits.dtype == torch.float32
    assert hits.tolist() == expected


@pytest.mark.parametrize("classes", [1, 2, 7])
@pytest.mark.parametrize("form", ["class numbers", "multi-hot"])
def test_top1_equals_the_oracle(classes, form):
    generator = torch.Generator().manual_seed(classes)
    scores = torch.rand(30, classes, generator=generator)
    target = torch.randint(0, classes, (30,), generator=generator)
    labels = [[label] for label in target.tolist()]
    expected = [
        oracles.top1(row, label) for row, label in zip(scores.tolist(), labels, strict=True)
    ]
    target = target if form == "class numbers" else two_hot(labels, classes)
    assert top1(scores, target).tolist() == expected


def test_top1_takes_any_of_several_classes():
    scores = torch.tensor([[0.1, 0.9, 0.3], [0.5, 0.1, 0.4], [0.1, 0.2, 0.9]])
    target = torch.tensor([[0, 1, 1], [0, 1, 1], [0, 1, 1]], dtype=torch.bool)
    assert top1(scores, target).tolist() == [1, 0, 1]


def test_exact_pair_never_exceeds_the_looser_metrics():
    scores = torch.rand(500, 5)
    target = two_hot([torch.randperm(5)[:2].tolist() for _ in range(500)], 5)
    exact = exact_pair(scores, target)
    digit, paper = per_digit(scores, target), paper_top2(scores, target)
    assert (exact <= paper).all()
    assert (exact <= digit).all()
    assert (exact < paper).any()
    assert set(digit.tolist()) == {0, 0.5, 1}
    assert torch.equal(exact, (digit == 1).float())


def test_the_registry_names_the_four_metrics():
    assert list(METRICS.values()) == [top1, exact_pair, per_digit, paper_top2]
    assert list(METRICS) == ["top1", "exact_pair", "per_digit", "paper_top2"]


@pytest.mark.parametrize("name", METRICS)
def test_an_empty_batch_has_no_hits(name):
    assert METRICS[name](torch.zeros(0, 4), torch.zeros(0, 4)).shape == (0,)


@pytest.mark.parametrize("name", METRICS)
def test_scores_of_any_floating_dtype_pass(name):
    target = two_hot([(0, 2)], 3)
    for dtype in (torch.float64, torch.bfloat16):
        hits = METRICS[name](torch.tensor([[3.0, 1.0, 2.0]], dtype=dtype), target)
        assert hits.tolist() == [1]
        assert hits.dtype.is_floating_point


@pytest.mark.parametrize("name", PAIR_METRICS)
@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (
            torch.tensor([[1, 1, 0], [1, 0, 0]]),
            InputError,
            "target must mark exactly two classes in every row; got 1. "
            "Row 1 is the first that does not.",
        ),
        (
            torch.tensor([[1, 1, 1], [1, 0, 0]]),
            InputError,
            "target must mark exactly two classes in every row; got 3. "
            "Row 0 is the first that does not.",
        ),
        (
            torch.tensor([0, 1]),
            InputError,
            "target must have shape (batch=2, classes=3); got (2,).",
        ),
        (
            torch.ones(3, 3),
            InputError,
            "target must have shape (batch=2, classes=3); got (3, 3).",
        ),
        ([[1, 1, 0], [1, 0, 1]], InputTypeError, "target must be a tensor; got list."),
    ],
    ids=["one class", "three classes", "class numbers", "batch", "list"],
)
def test_bad_pairs_are_told_what_is_wrong(name, target, error, message):
    with pytest.raises(error) as caught:
        METRICS[name](torch.rand(2, 3), target)
    assert str(caught.value) == f"{name}: {message}"


@pytest.mark.parametrize("name", METRICS)
def test_bad_scores_are_told_what_is_wrong(name):
    with pytest.raises(InputError) as caught:
        METRICS[name](torch.ones(3), torch.ones(3))
    assert str(caught.value) == f"{name}: scores must have shape (batch, classes); got (3,)."
    with pytest.raises(InputTypeError) as caught:
        METRICS[name](torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3))
    assert str(caught.value) == (
        f"{name}: scores must be a floating-point tensor; got torch.int64. "
        "Convert it first, for example with .float()."
    )


@pytest.mark.parametrize("name", PAIR_METRICS)
def test_pairs_need_two_classes(name):
    with pytest.raises(InputError) as caught:
        METRICS[name](torch.ones(2, 1), torch.ones(2, 1))
    assert str(caught.value) == f"{name}: scores must have at least 2 classes; got 1."


def test_top1_refuses_classes_that_are_not_there():
    with pytest.raises(InputError) as caught:
        top1(torch.rand(2, 3), torch.tensor([0, 3]))
    assert str(caught.value) == "top1: target must hold classes 0 to 2; got 3."
