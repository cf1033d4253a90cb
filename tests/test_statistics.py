"""Means, spreads and intervals against closed forms, tables and plain integration."""

import math
from itertools import pairwise

import pytest

from xncaps.errors import InputError
from xncaps.experiments.statistics import (
    Comparison,
    Spread,
    compare,
    student_cdf,
    student_quantile,
)

# Two-sided 95% and 99% points of Student's t, as every table prints them.
PRINTED = {
    1: (12.706, 63.657),
    2: (4.303, 9.925),
    3: (3.182, 5.841),
    4: (2.776, 4.604),
    5: (2.571, 4.032),
    7: (2.365, 3.499),
    10: (2.228, 3.169),
    29: (2.045, 2.756),
    30: (2.042, 2.750),
    120: (1.980, 2.617),
}


@pytest.mark.parametrize("degrees", PRINTED)
def test_quantiles_as_printed(degrees: int) -> None:
    found = [round(student_quantile(p, degrees), 3) for p in (0.975, 0.995)]
    assert tuple(found) == PRINTED[degrees]


@pytest.mark.parametrize("p", [1e-6, 0.01, 0.2, 0.5, 0.7, 0.975, 0.999999])
def test_quantiles_in_closed_form(p: float) -> None:
    a = 4 * p * (1 - p)
    sign = math.copysign(1, p - 0.5)
    # With 1, 2 and 4 degrees the distribution can be turned round on paper.
    one = math.tan(math.pi * (p - 0.5))
    two = 2 * (p - 0.5) * math.sqrt(2 / a)
    root = math.sqrt(a)
    four = sign * 2 * math.sqrt(math.cos(math.acos(root) / 3) / root - 1)
    for degrees, expected in ((1, one), (2, two), (4, four)):
        assert student_quantile(p, degrees) == pytest.approx(expected, rel=1e-9, abs=1e-8)


def density(t: float, n: int) -> float:
    constant = math.exp(math.lgamma((n + 1) / 2) - math.lgamma(n / 2)) / math.sqrt(n * math.pi)
    return constant * (1 + t * t / n) ** (-(n + 1) / 2)


@pytest.mark.parametrize("degrees", [1, 2, 3, 5, 6, 9, 16, 41])
@pytest.mark.parametrize("t", [-2.5, -0.3, 0.0, 0.8, 4.0])
def test_distribution_is_the_integral_of_its_density(t: float, degrees: int) -> None:
    steps = 2000
    places = [t * i / steps for i in range(steps + 1)]
    area = sum(
        (b - a)
        / 6
        * (density(a, degrees) + 4 * density((a + b) / 2, degrees) + density(b, degrees))
        for a, b in pairwise(places)
    )
    assert student_cdf(t, degrees) == pytest.approx(0.5 + area, abs=1e-10)


def test_many_degrees_are_the_normal_distribution() -> None:
    assert student_quantile(0.975, 100_000) == pytest.approx(1.959964, abs=1e-4)


@pytest.mark.parametrize(("p", "degrees"), [(0.0, 3), (1.0, 3), (math.nan, 3), (0.5, 0)])
def test_bad_quantiles(p: float, degrees: int) -> None:
    with pytest.raises(InputError, match="student_quantile: "):
        student_quantile(p, degrees)


def test_a_comparison_by_hand() -> None:
    """Differences 1, 2, 3, 6: mean 3, deviation sqrt(14/3), t with 3 degrees 3.182446."""
    first = {0: 11.0, 1: 22.0, 2: 33.0, 3: 46.0, 9: 5.0}
    second = {3: 40.0, 2: 30.0, 1: 20.0, 0: 10.0, 8: 7.0}
    found = compare(first, second)
    assert found is not None
    half = 3.18244630528 * math.sqrt(14 / 3) / 2
    assert found.difference == pytest.approx(3)
    assert found.low == pytest.approx(3 - half, rel=1e-9)
    assert found.high == pytest.approx(3 + half, rel=1e-9)
    assert (found.count, found.verdict) == (4, "open")
    back = compare(second, first)
    assert back is not None
    assert back.difference == -found.difference
    assert compare({0: 1.0}, {1: 1.0}) is None
    assert compare({0: 3.0}, {0: 1.0}) == Comparison(2.0, None, None, 1)


def test_the_interval_holds_what_it_promises() -> None:
    """Of 4,000 comparisons of equals with 3 seeds, about one in twenty comes out otherwise."""
    import torch

    draws = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    verdicts = [
        compare(dict(enumerate(row)), dict.fromkeys(range(3), 0.0)) for row in draws.tolist()
    ]
    wrong = sum(each is not None and each.verdict != "open" for each in verdicts)
    assert 150 < wrong < 250  # 200 expected, deviation 14


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.1, 0.2, "better"), (-0.2, -0.1, "worse"), (-0.1, 0.1, "open"), (None, None, "open")],
)
def test_verdicts(low: float | None, high: float | None, verdict: str) -> None:
    assert Comparison(0.0, low, high, 3).verdict == verdict


def test_spread() -> None:
    assert Spread.of([3.0]) == Spread(3.0, None, 1)
    found = Spread.of([1.0, 2.0, 6.0])
    assert found.mean == pytest.approx(3)
    assert found.deviation == pytest.approx(math.sqrt(14 / 2))
    with pytest.raises(InputError):
        Spread.of([])
