"""How far ONNX Runtime and PyTorch are apart, on real images and on degenerate ones.

Two correct implementations round differently. Where a network takes signs, a value that sits on
their threshold may then fall on either side, and the scores jump. Such an input is told from a
wrong one by PyTorch itself: if its own scores jump as well when the input is moved by a millionth,
or when it computes in float64, then the input sits on a threshold. It is counted, not compared.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from xncaps.deploy.card import Card
from xncaps.errors import InputError, RunError, check_tensor, message
from xncaps.kernels import disabled
from xncaps.networks import Classifier

Run = Callable[[Tensor], Tensor]

TOLERANCE = 1e-4
REAL, LARGE = 64, 8
"""Real images, and how many of them are tried with large values as well."""
GREYS = (0, 1, 77, 128, 255)
LARGE_FACTOR = 1e4
BATCHES = (1, 7)
NOISE, DRAWS = 1e-6, 8


@dataclass(frozen=True)
class Difference:
    """What comparing ONNX Runtime with PyTorch gave.

    Args:
        largest: of the differences between two scores; of scores above 1, relative to the largest
            score of the same input.
        compared: inputs that were compared.
        on_threshold: further inputs, on which PyTorch disagrees with itself.
    """

    largest: float
    compared: int
    on_threshold: int

    def __str__(self) -> str:
        line = f"largest difference {self.largest:.1e} over {self.compared} inputs"
        if not self.on_threshold:
            return line
        verb = "sits" if self.on_threshold == 1 else "sit"
        return f"{line}; {self.on_threshold} more {verb} on the threshold of a sign"


@torch.no_grad()
def compare(run: Run, network: Classifier, card: Card, images: Tensor) -> Difference:
    """Compare; RunError if the two differ.

    Args:
        run: scores by ONNX Runtime, of what ``card.preprocess`` gives.
        network: the network in PyTorch, in evaluation mode.
        card: what it is; with ``normalised`` if ``run`` takes pixels from 0 to 255.
        images: uint8 images of real data, of which the first are used.
    """
    peer = _Peer(network, card)
    largest, compared, left_out = 0.0, 0, 0
    for name, pixels in _inputs(card, images):
        ours, wanted = run(pixels), peer.scores(pixels)
        if ours.shape != wanted[0].shape:
            shapes = f"{tuple(ours.shape)} in place of {tuple(wanted[0].shape)}"
            raise RunError(f"ONNX Runtime gives scores of another shape: {shapes}.")
        gaps = torch.stack([distance(ours, scores) for scores in wanted]).amax(dim=0)
        agrees = gaps <= TOLERANCE  # a NaN does not
        unsure = torch.zeros_like(agrees)
        if not agrees.all():
            unsure[~agrees] = peer.is_unsure(pixels[~agrees])
        wrong = ~agrees & ~unsure
        if wrong.any():
            place = int(wrong.nonzero()[0])
            raise RunError(
                f"ONNX Runtime and PyTorch differ by {gaps[place].item():.1e} on {name} "
                f"{place + 1} of {len(pixels)} (up to {TOLERANCE:.0e} is allowed)."
            )
        if name == "real image" and 2 * int(unsure.sum()) > len(pixels):
            raise RunError(
                f"ONNX Runtime and PyTorch differ on {int(unsure.sum())} of {len(pixels)} real "
                "images that sit on the threshold of a sign: too many to tell that they agree."
            )
        largest = max(largest, gaps[agrees].max().item() if agrees.any() else 0.0)
        compared += int(agrees.sum())
        left_out += int(unsure.sum())
    return Difference(largest, compared, left_out)


def distance(ours: Tensor, wanted: Tensor) -> Tensor:
    """The largest difference of each row, relative to its largest score if that is above 1.

    NaN and infinity are equal to themselves and infinitely far from all else.

    Shape:
        ``(n, classes)``, twice -> ``(n,)``.

    >>> distance(torch.tensor([[1.0, 2.5]]), torch.tensor([[1.0, 2.0]]))
    tensor([0.2500])
    """
    ours, wanted = ours.double(), wanted.double()
    gaps = (ours - wanted).abs()
    gaps[(ours == wanted) | (ours.isnan() & wanted.isnan())] = 0.0
    gaps = gaps.nan_to_num(nan=float("inf"))
    finite = torch.where(wanted.isfinite(), wanted.abs(), 0.0)
    relative: Tensor = gaps.amax(dim=1) / finite.amax(dim=1).clamp(min=1)
    return relative.float()


class _Peer:
    """The network in PyTorch, in the several ways in which it can compute."""

    def __init__(self, network: Classifier, card: Card) -> None:
        self.network, self.card = network, card
        self.noise = torch.Generator().manual_seed(0)
        self.precise: Classifier | None = None

    def scores(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """By the reference, and as the network runs natively."""
        images = self._normalised(pixels)
        with disabled():
            reference = self.network(images)
        return reference, self.network(images)

    def is_unsure(self, pixels: Tensor) -> Tensor:
        """Whether scores jump when an input moves by a millionth, or with the precision.

        Shape:
            ``(n, channels, side, side)`` -> ``(n,)``.
        """
        images = self._normalised(pixels)
        reference, native = self.scores(pixels)
        if self.precise is None:
            self.precise = deepcopy(self.network).double()
        others = [native]
        with disabled():
            others.append(self.precise(images.double()))
            for _ in range(DRAWS):
                noise = torch.randn(images.shape, generator=self.noise)
                # What is 0 moves as well, by a millionth of an ordinary pixel.
                others.append(self.network(images + NOISE * images.abs().clamp(min=1) * noise))
        gaps = torch.stack([distance(scores, reference) for scores in others])
        return ~(gaps <= TOLERANCE).all(dim=0)

    def _normalised(self, pixels: Tensor) -> Tensor:
        facts = self.card.facts
        return facts.preprocess().normalise(pixels) if self.card.normalised else pixels


def _inputs(card: Card, images: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What is compared: batches with the name of an input, as the network takes them."""
    where = "export"
    check_tensor(where, "images", images)
    if images.dim() != 4 or images.shape[1] != card.facts.shape[0] or not len(images):
        requirement = f"be uint8 images (n, {card.facts.shape[0]}, height, width)"
        raise InputError(message(where, "images", requirement, tuple(images.shape)))
    real = card.preprocess(images[:REAL])
    yield "real image", real
    for count in BATCHES:
        batch = real[torch.arange(count) % len(real)]
        yield f"real image in a batch of {count},", batch
    yield "image of zeros,", torch.zeros_like(real[:1])
    greys = torch.tensor(GREYS, dtype=torch.uint8).view(-1, 1, 1, 1)
    yield "constant image", card.preprocess(greys.expand(-1, *images.shape[1:]))
    yield "image of large values,", LARGE_FACTOR * real[:LARGE]
