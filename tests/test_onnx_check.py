"""ONNX Runtime against PyTorch: what is a difference, and what sits on a threshold."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cards import card_for
from checks import refused
from xncaps.binarizers import sign
from xncaps.deploy.card import Card
from xncaps.deploy.onnx_check import Difference, compare, distance
from xncaps.errors import RunError
from xncaps.networks import Classifier

INF, NAN = float("inf"), float("nan")


class Signs(nn.Module):
    """A head whose scores are an image's mean above a threshold, and the sign of that."""

    scores, num_classes = "logits", 2

    def __init__(self, threshold: float = 3.0) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, features: Tensor) -> Tensor:
        mean = features.mean(dim=(1, 2, 3)) - self.threshold
        return torch.stack([sign(mean), mean], dim=1)


def network(threshold: float = 3.0) -> tuple[Any, Card]:
    model = Classifier(nn.Identity(), Signs(threshold), 1, 8)  # type: ignore[arg-type]
    return model.eval(), card_for(model, "convnet", "linear")


def flat(*greys: int) -> Tensor:
    return torch.tensor(greys, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)


def tied(images: Tensor, place: int) -> tuple[Any, Card]:
    """A network on whose threshold one of the images sits."""
    _, card = network()
    return network(card.preprocess(images)[place].mean().item())


@pytest.mark.parametrize(
    ("ours", "wanted", "gap"),
    [
        ([0.5, 0.25], [0.5, 0.5], 0.25),
        ([100.0, 0.0], [100.0, 1.0], 0.01),
        ([NAN, 1.0], [NAN, 1.0], 0.0),
        ([NAN, 1.0], [1.0, 1.0], INF),
        ([1.0, 1.0], [NAN, 1.0], INF),
        ([INF, 1.0], [INF, 1.0], 0.0),
        ([INF, 1.0], [-INF, 1.0], INF),
        ([INF, 1.0], [NAN, 1.0], INF),
        ([3e38, 1.0], [INF, 1.0], INF),
    ],
)
def test_distance(ours: list[float], wanted: list[float], gap: float) -> None:
    assert distance(torch.tensor([ours]), torch.tensor([wanted])).tolist() == [pytest.approx(gap)]


def test_a_difference_in_words() -> None:
    assert str(Difference(2.44e-7, 87, 0)) == "largest difference 2.4e-07 over 87 inputs"
    more = "largest difference 2.4e-07 over 87 inputs; 2 more sit on the threshold of a sign"
    assert str(Difference(2.44e-7, 87, 2)) == more
    assert str(Difference(0.0, 87, 1)).endswith("; 1 more sits on the threshold of a sign")


def flipped(model: Any, pixels: Tensor) -> Tensor:
    """As another runtime would give it that rounds what sits on the threshold up."""
    scores: Tensor = model(pixels)
    scores[:, 0] = torch.where(scores[:, 1].abs() < 1e-5, 1.0, scores[:, 0])
    return scores


def test_an_input_on_a_threshold_is_counted_and_not_compared() -> None:
    images = flat(18, 41, 65, 104, 151, 190, 206, 222)
    model, card = tied(images, 3)
    found = compare(lambda pixels: flipped(model, pixels), model, card, images)
    assert found.on_threshold == 2  # once among all, once in the batch of 7
    assert found.compared == 8 + 8 + 1 + 5 + 8 - 2
    assert found.largest == 0


def test_an_input_off_the_threshold_must_agree() -> None:
    images = flat(18, 41, 65, 104, 151, 190, 206, 222)
    model, card = tied(images, 3)

    def run(pixels: Tensor) -> Tensor:
        scores = flipped(model, pixels)
        scores[2, 0] *= -1
        return scores

    line = refused(RunError, compare, run, model, card, images)
    assert line == (
        "ONNX Runtime and PyTorch differ by 2.0e+00 on real image 3 of 8 (up to 1e-04 is allowed)."
    )


def test_too_many_on_the_threshold_tell_nothing() -> None:
    images = flat(65, 104, 104, 104, 151)
    model, card = tied(images, 2)
    line = refused(RunError, compare, lambda x: flipped(model, x), model, card, images)
    assert line == (
        "ONNX Runtime and PyTorch differ on 3 of 5 real images that sit on the threshold of a "
        "sign: too many to tell that they agree."
    )


@pytest.mark.parametrize("value", [NAN, INF])
def test_what_is_not_finite_must_be_so_in_both(value: float) -> None:
    model, card = network()
    images = flat(41, 72)

    def run(pixels: Tensor) -> Tensor:
        scores: Tensor = model(pixels)
        if pixels.abs().max() > 1000:
            scores[0, 1] = value
        return scores

    line = refused(RunError, compare, run, model, card, images)
    assert line == (
        "ONNX Runtime and PyTorch differ by inf on image of large values, 1 of 2 "
        "(up to 1e-04 is allowed)."
    )


def test_scores_of_another_shape() -> None:
    model, card = network()
    images = flat(41, 72)
    line = refused(RunError, compare, lambda x: model(x)[:, :1], model, card, images)
    assert line == "ONNX Runtime gives scores of another shape: (2, 1) in place of (2, 2)."
