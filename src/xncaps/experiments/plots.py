"""Pictures of the experiments, as SVG: the same bytes for the same rows and matplotlib."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import offset_copy

from xncaps.experiments.rows import Row
from xncaps.experiments.statistics import Spread
from xncaps.experiments.tables import DATA, MAIN, accuracies

INK, REST, FAINT = "#333333", "#b8b8b8", "#e4e4e4"
HEADS = {
    "linear": ("#888888", "s"),
    "fc": ("#333333", "D"),
    "dr": ("#56b4e9", "v"),
    "xnodr": ("#d55e00", "o"),
    "xnidr": ("#0072b2", "o"),
    "xnboth": ("#cc79a7", "^"),
}
"""Colour and mark of each head: it is the same in every picture."""
TITLES = {
    **DATA,
    "mobilenetv2": "MNIST, MobileNetV2",
    "resnet50": "MNIST, ResNet-50",
    "own-rates-multimnist": "MultiMNIST, rates of their own",
    "mnist-one-loss": "MNIST, one loss",
    "cifar10-one-loss": "CIFAR-10, one loss",
    "sample": "Built-in digits",
}
"""What the panels of our own experiments are called; others by their names."""
ASIDE = 5
"""Points: marks that would lie on one another stand so much to the right of the one before."""
LEAST = 1e-3
"""Percent: no error at all would have no place on a logarithmic axis."""

Latencies = Mapping[tuple[str, str, int], float]
Place = Callable[[Row], float | None]


def draw_all(rows: Sequence[Row], latencies: Latencies) -> dict[str, bytes]:
    """All pictures, by the names of their files: of experiments that compare heads as they are."""
    shown = drawn(rows)
    digest = digest_of(rows, latencies)

    def latency(row: Row) -> float | None:
        return latencies.get((row.experiment, row.variant, 1))

    figures = {
        "parameters.svg": _scatter(shown, "parameters of the network", lambda row: row.params),
        "latency.svg": _scatter(shown, "µs in the packed head, one image, one thread", latency),
        "minutes.svg": _scatter(shown, "minutes of training, one core", lambda r: r.cpu_minutes),
        "curves.svg": _curves(shown),
    }
    return {name: _svg(figure, digest) for name, figure in figures.items()}


def drawn(rows: Sequence[Row]) -> list[Row]:
    """Those of the rows that the pictures show: of experiments with several heads."""
    others = {row.experiment for row in rows if row.accuracy is None or row.variant not in HEADS}
    heads: dict[str, set[str]] = {}
    for row in rows:
        heads.setdefault(row.experiment, set()).add(row.variant)
    alone = {name for name, found in heads.items() if len(found) == 1}
    return [row for row in rows if row.experiment not in others | alone]


def digest_of(rows: Sequence[Row], latencies: Latencies) -> str:
    """What stands in the pictures of these figures, so that one can see if they are stale."""
    shown = drawn(rows)
    names = {row.experiment for row in shown}
    values = [(*row.key, row.accuracy, row.curve, row.params, row.cpu_minutes) for row in shown]
    times = sorted(item for item in latencies.items() if item[0][0] in names)
    text = json.dumps([values, times])
    return f"sha256 of the figures: {hashlib.sha256(text.encode()).hexdigest()}"


def _scatter(rows: Sequence[Row], label: str, place: Place) -> Figure:
    """Accuracy against something: a panel for each experiment, a mark for each head."""
    rows = [row for row in rows if place(row)]
    figure, panels = _panels(rows)
    for name, axes in panels.items():
        mine = [row for row in rows if row.experiment == name]
        taken: list[float] = []
        for head, values in accuracies(mine).items():
            across = Spread.of([x for row in mine if row.variant == head and (x := place(row))])
            up = Spread.of([100 * value for value in values.values()])
            taken.append(across.mean)
            aside = ASIDE * (taken.count(across.mean) - 1)
            colour, mark = HEADS[head]
            marks = axes.errorbar(
                across.mean,
                up.mean,
                xerr=across.deviation or None,
                yerr=up.deviation,
                color=colour,
                marker=mark,
                markersize=6,
                capsize=2,
                linestyle="",
                label=head,
            )
            for part in marks.get_children():
                part.set_transform(offset_copy(axes.transData, figure, aside, units="points"))
        axes.set_xscale("log")
        _round_ticks(axes.xaxis)
        axes.margins(0.15, 0.15)
        axes.set_ylim(top=min(100.0, axes.get_ylim()[1]))
        _dress(axes, name, label, "test accuracy, %")
    _name_heads(figure, panels)
    return figure


def _curves(rows: Sequence[Row]) -> Figure:
    """Error on the held-out images epoch by epoch: the mean, and a band of one deviation."""
    figure, panels = _panels(rows)
    for name, axes in panels.items():
        mine = [row for row in rows if row.experiment == name]
        for head in dict.fromkeys(row.variant for row in mine):
            curves = [row.curve for row in mine if row.variant == head and row.curve]
            if not curves:
                continue
            spreads = [
                Spread.of([max(100 * (1 - value), LEAST) for value in epoch])
                for epoch in zip(*curves, strict=False)
            ]
            epochs = range(1, len(spreads) + 1)
            means = [spread.mean for spread in spreads]
            bands = [spread.deviation or 0.0 for spread in spreads]
            low = [max(m - d, 0.5 * m) for m, d in zip(means, bands, strict=True)]
            high = [m + d for m, d in zip(means, bands, strict=True)]
            colour, mark = HEADS[head]
            axes.plot(epochs, means, color=colour, marker=mark, markersize=3, label=head)
            axes.fill_between(epochs, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set_yscale("log")
        _round_ticks(axes.yaxis)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        _dress(axes, name, "epoch", "wrong on held-out images, %")
    _name_heads(figure, panels)
    return figure


def _panels(rows: Sequence[Row]) -> tuple[Figure, dict[str, Axes]]:
    found = dict.fromkeys(row.experiment for row in rows)
    names = sorted(found, key=lambda name: MAIN.index(name) if name in MAIN else len(MAIN))
    columns = min(3, max(1, len(names)))
    high = -(-len(names) // columns) or 1
    figure = Figure((3.6 * columns, 3.0 * high), layout="constrained")
    return figure, {
        name: figure.add_subplot(high, columns, place) for place, name in enumerate(names, 1)
    }


def _dress(axes: Axes, name: str, across: str, up: str) -> None:
    axes.set_title(TITLES.get(name, name), fontsize=10, loc="left", color=INK)
    axes.set_xlabel(across, fontsize=8, color=INK)
    axes.set_ylabel(up, fontsize=8, color=INK)
    axes.tick_params(labelsize=8, color=REST, labelcolor=INK)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(REST)


def _name_heads(figure: Figure, panels: Mapping[str, Axes]) -> None:
    """One legend for all panels."""
    marks: dict[str, Artist] = {}
    for axes in panels.values():
        handles, labels = axes.get_legend_handles_labels()
        marks |= dict(zip(labels, handles, strict=True))
    named = [head for head in HEADS if head in marks]
    if named:
        figure.legend(
            [marks[head] for head in named],
            named,
            loc="outside lower center",
            ncols=len(HEADS),
            fontsize=8,
            frameon=False,
        )


def _round_ticks(axis: Axis) -> None:
    """Ticks of a logarithmic axis at 1, 2, 5, 10, ...; at more where it is short."""
    low, high = axis.get_view_interval()
    subs = (1, 2, 5) if high > 8 * low else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
    axis.set_major_locator(LogLocator(subs=subs, numticks=8))
    axis.set_major_formatter(FuncFormatter(_short))
    axis.set_minor_locator(NullLocator())


def _short(value: float, _: object = None) -> str:
    """A number in a few letters.

    >>> _short(120_000), _short(2_500_000), _short(12.0), _short(0.5)
    ('120k', '2.5M', '12', '0.5')
    """
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _svg(figure: Figure, digest: str) -> bytes:
    file = BytesIO()
    metadata = {"Date": None, "Creator": None, "Description": digest}
    with rc_context({"svg.hashsalt": "xncaps", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata=metadata)
    return file.getvalue()
