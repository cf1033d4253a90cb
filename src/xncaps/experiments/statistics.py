"""Means, spreads, and when a difference means something."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from xncaps.errors import InputError, check_size, message

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """The mean of some figures and their sample standard deviation; None for a single one.

    >>> Spread.of([0.97, 0.99])
    Spread(mean=0.98, deviation=0.0141..., count=2)
    """

    mean: float
    deviation: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if not values:
            raise InputError(message("Spread", "values", "be at least one", "none"))
        deviation = stdev(values) if len(values) > 1 else None
        return cls(fmean(values), deviation, len(values))


@dataclass(frozen=True)
class Comparison:
    """The mean difference of paired figures, and the interval that holds it with 95% confidence.

    Attributes:
        difference: the mean of first - second over the pairs.
        low, high: the ends of Student's interval; None for a single pair.
        count: of pairs.
    """

    difference: float
    low: float | None
    high: float | None
    count: int

    @property
    def verdict(self) -> str:
        """``better``, ``worse``, or ``open`` where the interval holds 0 or there is none."""
        if self.low is None or self.high is None:
            return "open"
        return "better" if self.low > 0 else "worse" if self.high < 0 else "open"


def compare(
    first: Mapping[int, float], second: Mapping[int, float], confidence: float = CONFIDENCE
) -> Comparison | None:
    """Compare two variants seed by seed.

    Runs with the same seed have the same backbone at the start, and see the same images in the same
    order and augmentation; what that does to both is gone from their differences ``d``. The
    interval is that of the paired t-test::

        mean(d) +- t * stdev(d) / sqrt(n),  t = quantile of Student's t with n - 1 degrees

    Args:
        first, second: accuracies by seed; seeds that only one has are left out.
        confidence: of the interval.

    Returns:
        None if no seed is in both.

    >>> compare({0: 0.98, 1: 0.97}, {0: 0.96, 1: 0.96, 2: 0.99}).verdict
    'open'
    """
    differences = [first[seed] - second[seed] for seed in first if seed in second]
    if not differences:
        return None
    spread = Spread.of(differences)
    if spread.deviation is None:
        return Comparison(spread.mean, None, None, 1)
    t = student_quantile((1 + confidence) / 2, spread.count - 1)
    half = t * spread.deviation / math.sqrt(spread.count)
    return Comparison(spread.mean, spread.mean - half, spread.mean + half, spread.count)


def student_quantile(probability: float, degrees: int) -> float:
    """The value below which Student's t lies with this probability.

    >>> round(student_quantile(0.975, 4), 4)
    2.7764
    """
    where = "student_quantile"
    check_size(where, "degrees", degrees)
    if not 0 < probability < 1:
        raise InputError(message(where, "probability", "lie between 0 and 1", probability))
    if probability < 0.5:
        return -student_quantile(1 - probability, degrees)
    low, high = 0.0, 1.0
    while student_cdf(high, degrees) < probability:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:  # down to neighbouring floats
        if student_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return high


def student_cdf(t: float, degrees: int) -> float:
    """The probability that Student's t lies below ``t``: a finite sum for whole degrees.

    With the angle ``a = atan(t / sqrt(degrees))``, half of it beyond 1/2 is

        odd:   (a + sin a (cos a + 2/3 cos^3 a + 2/3 4/5 cos^5 a + ...)) / pi
        even:  sin a (1 + 1/2 cos^2 a + 1/2 3/4 cos^4 a + ...) / 2

    each with ``degrees // 2`` terms in the sum.
    """
    angle = math.atan2(t, math.sqrt(degrees))
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for i in range(degrees // 2):
        total += term
        top = 2 * i + 1 + odd
        term *= top / (top + 1) * math.cos(angle) ** 2
    if odd:
        return 0.5 + (angle + math.sin(angle) * total) / math.pi
    return 0.5 + math.sin(angle) * total / 2
