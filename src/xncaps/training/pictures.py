"""The pictures of a report, as PNG: learning curves, confusion matrix, mistakes, couplings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray
from torch import Tensor

DPI = 160
RIGHT, WRONG, INK, REST, FAINT = "#0072b2", "#d55e00", "#333333", "#b8b8b8", "#e4e4e4"
LINES = (RIGHT, WRONG, "#009e73", "#cc79a7", "#56b4e9", "#e69f00", INK)
CAPSULES = 64
"""How many input capsules a coupling map shows at most."""
NAMED = 20
"""Up to so many classes have their names and numbers written into pictures."""
FLIPS = "signs flipped in an epoch"


def png(figure: Figure) -> bytes:
    """The picture as bytes that depend on nothing but what is in it."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    return file.getvalue()


def short_names(classes: Sequence[str], most: int = 12) -> list[str]:
    """Class names cut to a length; ``#3`` stands for class 3 if the font lacks its letters.

    >>> short_names(["cat", "a rather long name", chr(0x732B)])
    ['cat', 'a rath… name', '#2']
    """
    return [_short(name, number, most) for number, name in enumerate(classes)]


def _short(name: str, number: int, most: int) -> str:
    if not name.strip() or not name.isprintable() or not _glyphs().issuperset(map(ord, name)):
        return f"#{number}"
    cut = name if len(name) <= most else f"{name[: most // 2]}…{name[1 + most // 2 - most :]}"
    return cut.replace("$", r"\$")  # a pair of bare ones would be a formula


@cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont(FontProperties())).get_charmap())


def draw_curves(rows: Sequence[dict[str, Any]]) -> bytes:
    """Loss, accuracy and learning rate over the epochs; coupling entropy and sign flips, if any."""
    drawn = {title: lines for title, lines in _panels(rows).items() if lines or title == "loss"}
    columns = 2 if len(drawn) == 4 else min(3, len(drawn))
    high = math.ceil(len(drawn) / columns)
    figure = Figure((max(10 * columns / 3, 6), 2.7 * high), layout="constrained")
    epochs = [row["epoch"] for row in rows]
    for place, (title, lines) in enumerate(drawn.items(), 1):
        _curve(figure.add_subplot(high, columns, place), title, epochs, lines)
    return png(figure)


def _panels(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, NDArray[np.float64]]]:
    """The lines of each panel, without those that have no values."""
    panels = {
        name: {"training": _series(rows, name), "validation": _series(rows, f"validation_{name}")}
        for name in ("loss", "accuracy")
    }
    panels["learning rate"] = {"": _series(rows, "lr")}
    panels["coupling entropy"] = {"": _series(rows, "coupling_entropy")}
    panels[FLIPS] = _flips(rows)
    return {
        title: {label: values for label, values in lines.items() if not np.isnan(values).all()}
        for title, lines in panels.items()
    }


def _series(rows: Sequence[dict[str, Any]], name: str) -> NDArray[np.float64]:
    values = [row.get(name) for row in rows]
    finite = [v if v is not None and math.isfinite(v) else math.nan for v in values]
    return np.array(finite, dtype=np.float64)


def _flips(rows: Sequence[dict[str, Any]]) -> dict[str, NDArray[np.float64]]:
    """A line for each binary layer, or their mean if there are many."""
    flips = [row.get("flips") or {} for row in rows]
    lines = {layer: _series(flips, layer) for layer in dict.fromkeys(x for f in flips for x in f)}
    if len(lines) <= 7:
        return lines
    return {f"mean of {len(lines)} layers": np.mean(list(lines.values()), axis=0)}


def _curve(axes: Axes, title: str, epochs: list[int], lines: dict[str, Any]) -> None:
    marker = "o" if len(epochs) <= 30 else ""
    for (label, values), colour in zip(lines.items(), LINES, strict=False):
        style = "--" if label == "validation" else "-"
        axes.plot(epochs, values, style, color=colour, label=label, marker=marker, markersize=3)
    axes.set_title(title, fontsize=10, loc="left", color=INK)
    axes.set_xlabel("epoch", fontsize=8, color=INK)
    axes.set_xlim(min(epochs) - 0.5, max(epochs) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if title in ("accuracy", FLIPS):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if title in ("learning rate", FLIPS):
        axes.set_ylim(0, 1.25 * max(map(np.nanmax, lines.values())) or 1)
    if any(lines):
        axes.legend(fontsize=8, frameon=False)
    axes.grid(color=FAINT, linewidth=0.6)
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.tick_params(labelsize=8, color=REST, labelcolor=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(REST)


def draw_confusion(confusion: Sequence[Sequence[int]], classes: Sequence[str]) -> bytes:
    """Rows shown, columns seen; colour is a mistake's share of its row, right answers are grey."""
    counts = np.array(confusion, dtype=np.float64)
    size = len(counts)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    mistakes = shares * (1 - np.eye(size))
    scale = Normalize(0, float(mistakes.max()) or 1.0)
    colours = colormaps["YlOrRd"](scale(mistakes))
    colours[mistakes == 0] = 1
    colours[np.eye(size, dtype=bool)] = (0.92, 0.92, 0.92, 1)
    side = min(max(2.6 + 0.34 * size, 4.4), 10.0)
    figure = Figure((side, side * 0.92), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(colours, interpolation="nearest")
    _name_axes(axes, short_names(classes), font=min(9.0, max(4.5, 190 / size)))
    if size <= NAMED:
        _write_counts(axes, counts, scale(mistakes), font=min(10.0, 110 / size))
    if mistakes.any():
        bar, form = ScalarMappable(scale, "YlOrRd"), PercentFormatter(1.0)
        legend = figure.colorbar(bar, ax=axes, shrink=0.5, pad=0.02, format=form)
        _finish_legend(legend, "share of the images of a row")
    return png(figure)


def _name_axes(axes: Axes, names: list[str], font: float) -> None:
    ticks = range(0, len(names), math.ceil(len(names) / 100))
    wide = len(names) * max(map(len, names)) > 30
    chosen = [names[i] for i in ticks]
    axes.set_xticks(list(ticks), chosen, rotation=90 if wide else 0, fontsize=font, color=INK)
    axes.set_yticks(list(ticks), chosen, fontsize=font, color=INK)
    axes.set_xlabel("seen by the network", fontsize=9, color=INK)
    axes.set_ylabel("shown", fontsize=9, color=INK)
    axes.tick_params(length=0)
    axes.spines[:].set_color(REST)


def _write_counts(axes: Axes, counts: NDArray[Any], shade: NDArray[Any], font: float) -> None:
    for (row, column), count in np.ndenumerate(counts):
        if count:
            dark = shade[row, column] > 0.6
            colour = "#777777" if row == column else "white" if dark else "black"
            style: dict[str, Any] = {"fontsize": font, "color": colour}
            axes.text(column, row, f"{count:.0f}", ha="center", va="center", **style)


def _finish_legend(legend: Colorbar, label: str) -> None:
    legend.set_label(label, fontsize=8, color=INK)
    legend.ax.tick_params(labelsize=8, labelcolor=INK, color=REST)
    legend.outline.set_visible(False)


def draw_mistakes(images: Sequence[Tensor], captions: Sequence[str]) -> bytes:
    """A sheet of images of six in a line, each with a caption of two lines."""
    columns, cell, height = min(6, max(3, len(images))), 1.66, 1.95
    lines = math.ceil(len(images) / columns)
    figure = Figure((columns * cell, lines * height))
    for place, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = place % columns * cell, (lines - place // columns) * height
        axes = _place(figure, left + 0.15, top - 1.46, cell - 0.3, cell - 0.3)
        _show(axes, image)
        x, y = (left + cell / 2) / figure.get_figwidth(), (top - 1.52) / figure.get_figheight()
        figure.text(x, y, caption, ha="center", va="top", fontsize=8, color=INK, linespacing=1.3)
    return png(figure)


def _place(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes at a place given in inches."""
    wide, high = figure.get_size_inches()
    return figure.add_axes((left / wide, bottom / high, width / wide, height / high))


def _show(axes: Axes, image: Tensor) -> None:
    """An image of bytes, (channels, height, width): in colour if it has three channels."""
    pixels = image.permute(1, 2, 0).numpy() if len(image) == 3 else image[0].numpy()
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=255)
    axes.set(xticks=[], yticks=[], anchor="S")
    axes.spines[:].set_color(REST)


@dataclass(frozen=True)
class Routed:
    """An image and what routing did with it; couplings are by iteration, (caps_in, classes)."""

    image: Tensor
    title: str
    shown: list[int]
    seen: list[int]
    couplings: dict[int, Tensor]
    lengths: Tensor

    def colours(self) -> list[str]:
        """Of each class: what was shown, what was wrongly seen, the rest."""
        kinds = {**dict.fromkeys(self.seen, WRONG), **dict.fromkeys(self.shown, RIGHT)}
        return [kinds.get(number, REST) for number in range(len(self.lengths))]

    def shares(self) -> dict[int, NDArray[np.float64]]:
        """Couplings over the even share; capsules that vary most, sorted by what the answer got."""
        last = self.couplings[max(self.couplings)].double().numpy()
        most = np.argsort(-last.var(axis=1), kind="stable")[:CAPSULES]
        order = most[np.argsort(-last[most][:, self.seen].sum(axis=1), kind="stable")]
        return {t: c.double().numpy()[order] * c.shape[1] for t, c in self.couplings.items()}


def draw_couplings(routed: Sequence[Routed], classes: Sequence[str]) -> bytes:
    """A line for each image: itself, its couplings iteration by iteration, the final lengths."""
    names = short_names(classes, 8) if len(classes) <= NAMED else []
    foot = 0.75 if _turn(names) else 0.3
    height, steps = 2.75 + foot, len(routed[0].couplings)
    figure = Figure((1.7 + 1.9 * steps + 2.5, height * len(routed) + 0.85))
    scale = Normalize(-(end := _end_of_scale(routed)), end)
    for line, one in enumerate(routed):
        bottom = 0.85 + (len(routed) - 1 - line) * height + foot
        _draw_routed(figure, one, names, scale, bottom)
    bar, below = ScalarMappable(scale, "BrBG"), _place(figure, 1.7, 0.55, 1.9 * steps - 0.25, 0.1)
    ticks = [-end, -end / 2, 0.0, end / 2, end]
    legend = figure.colorbar(bar, cax=below, orientation="horizontal", ticks=ticks)
    labels = [f"{2.0**tick:.2g}x" for tick in ticks]
    legend.ax.set_xticklabels([f"{labels[0]} or less", *labels[1:-1], f"{labels[-1]} or more"])
    _finish_legend(legend, f"coupling, as a multiple of the even share 1/{len(classes)}")
    return png(figure)


def _end_of_scale(routed: Sequence[Routed]) -> float:
    """The power of 2 at which colours end: a fiftieth of the strongest couplings may pass it."""
    last = np.concatenate([one.shares()[max(one.couplings)].ravel() for one in routed])
    reached = math.log2(max(float(np.quantile(last, 0.98)), 1e-12))
    return next((end for end in (0.25, 0.5, 1.0, 2.0) if reached <= end), 4.0)


def _draw_routed(
    figure: Figure, one: Routed, names: list[str], scale: Normalize, bottom: float
) -> None:
    y = (bottom + 2.5) / figure.get_figheight()
    figure.text(0.1 / figure.get_figwidth(), y, one.title, fontsize=10, weight="bold", color=INK)
    _show(_place(figure, 0.1, bottom + 0.85, 1.3, 1.3), one.image)
    peak = max(float(c.mean(dim=0).max()) for c in one.couplings.values())
    for place, (iteration, shares) in enumerate(one.shares().items()):
        left = 1.7 + 1.9 * place
        axes = _place(figure, left, bottom + 0.7, 1.65, 1.5)
        style: dict[str, Any] = {"cmap": "BrBG", "norm": scale, "interpolation": "nearest"}
        axes.imshow(np.log2(np.maximum(shares, 1e-12)), aspect="auto", **style)
        axes.set_title(f"iteration {iteration}", fontsize=9, color=INK, pad=4)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_color(REST)
        low, means = _place(figure, left, bottom, 1.65, 0.6), one.couplings[iteration].mean(dim=0)
        _bars(low, means, one, names, top=1.3 * peak or 1.0)
        low.axhline(1 / len(means), color=INK, linewidth=0.7, linestyle=":")
        if place == 0:
            axes.set_ylabel(f"{len(shares)} capsules", fontsize=8, color=INK)
            low.set_ylabel("mean", fontsize=8, color=INK)
    axes = _place(figure, 2.0 + 1.9 * len(one.couplings), bottom, 2.0, 2.2)
    axes.set_title("length of each class's capsule", fontsize=9, color=INK, pad=4)
    _bars(axes, one.lengths, one, names, top=1.12 * max(1.0, float(one.lengths.max())))


def _turn(names: list[str]) -> int:
    return 90 if len(names) * max(map(len, names), default=0) > 20 else 0


def _bars(axes: Axes, values: Tensor, one: Routed, names: list[str], top: float) -> None:
    """A bar for each class, with figures on those that were shown or seen."""
    axes.bar(range(len(values)), values.tolist(), color=one.colours(), width=0.8)
    marked, places = {*one.shown, *one.seen}, 2 if names else 3
    for number in marked:
        value = float(values[number])
        beside = [other for other in marked if 0 < abs(other - number) < 0.14 * len(values)]
        side = "center" if not beside else "right" if min(beside) > number else "left"
        axes.text(number, value, f"{value:.{places}f}", ha=side, va="bottom", fontsize=7, color=INK)
    axes.set(ylim=(0, top), xlim=(-0.6, len(values) - 0.4), yticks=[])
    axes.set_xticks(range(len(names)), names, rotation=_turn(names))
    _tidy(axes)
    axes.spines["left"].set_visible(False)
    axes.tick_params(length=0, labelsize=7)
