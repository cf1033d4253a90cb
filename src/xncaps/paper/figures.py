"""Published figures as numbers, and when ours agree with them."""


def parse(figure: str) -> tuple[float, float]:
    """A published figure as a number, and the size of its last digit.

    >>> parse("3.05M"), parse("41K"), parse("75.52%")
    ((3050000.0, 10000.0), (41000.0, 1000.0), (75.52, 0.01))
    """
    scale = {"K": 1e3, "M": 1e6, "B": 1e9}.get(figure[-1], 1.0)
    digits = figure.rstrip("KMB%")
    decimals = len(digits.partition(".")[2])
    return float(digits) * scale, scale / 10**decimals


def matches(figure: str, ours: float) -> bool:
    """Whether our number, rounded to the digits of the published one, is the published one.

    >>> matches("3.05M", 3045258), matches("23.85M", 23862320)
    (True, False)
    """
    value, step = parse(figure)
    return round(value / step) == round(ours / step)
