"""What the rows say, as tables: generated, never typed."""

import re
from collections.abc import Sequence

from xncaps.data.dataset import validation_size
from xncaps.errors import InputError, look_up, message
from xncaps.experiments.rows import Row
from xncaps.experiments.statistics import Comparison, Spread, compare
from xncaps.heads import HEADS
from xncaps.text import Table

BASELINES = ("fc", "linear")
BLOCK = re.compile(
    r"(?P<mark><!-- table: (?P<name>\S+) -->)[ \t]*\r?\n"
    r"(?P<inside>.*?)(?:(?P<end><!-- end -->)|\Z)",
    re.DOTALL,
)
OTHERS = ("bench", "params", "model", "agreement")
"""Blocks that other commands make."""
DATA = {"sample": "sample", "mnist": "MNIST", "cifar10": "CIFAR-10", "multimnist": "MultiMNIST"}
COMPARED = (
    "Test accuracy in percent: mean over the seeds ± their sample standard deviation. Against "
    "another head: the mean difference in points over the seeds that both have, and its 95% "
    "interval (paired t); better and worse where it does not hold 0. Each comparison stands for "
    "itself: of twenty without any true difference, one would come out so by chance. Minutes: "
    "processor time of a run's training, mean and deviation."
)
ONE_SEED = (
    "One seed each, so a difference below the spread of the seeds in the main table says nothing. "
    "Accuracy and differences in percent points on the test images."
)

MAIN = (
    *("mnist", "multimnist", "cifar10", "mobilenetv2", "resnet50"),
    *("own-rates-multimnist", "mnist-one-loss", "cifar10-one-loss"),
)
"""The experiments in which the paper's claims are put to the test."""
CLAIMS = (
    ("XnODR - FC", "above 0", "xnodr", "fc"),
    ("XnIDR - FC", "above 0", "xnidr", "fc"),
    ("XnIDR - XnODR", "above 0", "xnidr", "xnodr"),
    ("XnODR - DR", "above 0", "xnodr", "dr"),
    ("XnIDR - DR", "above 0", "xnidr", "dr"),
    ("DR - FC", "not always above 0", "dr", "fc"),
    ("both xnorized - DR", "far below 0", "xnboth", "dr"),
)
"""What the paper says of one head against another."""
CLAIMED = (
    "The first head minus the second: the mean difference in test accuracy in points over the "
    "seeds that both have, and its 95% interval (paired t); better and worse where it does not "
    "hold 0."
)
SPENT = (
    "Minutes of processor time in training; a run that stands in two experiments counts in the "
    "first."
)
CHOSEN = "Accuracy in percent on held-out training images. Minutes: processor time of the training."


def tables_of(rows: Sequence[Row]) -> dict[str, Table]:
    """All tables that the rows give, by name."""
    tables: dict[str, Table] = {}
    rates: list[Row] = []
    for name in dict.fromkeys(row.experiment for row in rows):
        mine = [row for row in rows if row.experiment == name]
        if all(row.accuracy is not None for row in mine):
            tables[name] = experiment_table(name, mine)
        elif all(row.variant == f"{row.config.head}-{row.config.lr}" for row in mine):
            rates += mine
        else:
            tables[name] = choice_table(name, mine)
    if rates:
        tables["tuning"] = tuning_table(rates)
    if set(MAIN) & tables.keys():
        tables["claims"] = claims_table(rows)
    if rows:
        tables["computing"] = computing_table(rows)
    return tables


def table_of(rows: Sequence[Row], name: str) -> Table:
    """One table; a name that no row gives is refused."""
    return look_up("results", "table", name, tables_of(rows))


def accuracies(rows: Sequence[Row], metric: str = "accuracy") -> dict[str, dict[int, float]]:
    """The test figures of each variant by seed; heads come in the order of the documents."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        value = getattr(row, metric)
        if value is not None:
            found.setdefault(row.variant, {})[row.seed] = value
    if found.keys() <= HEADS.keys():
        found = {head: found[head] for head in HEADS if head in found}
    return found


def experiment_table(name: str, rows: Sequence[Row]) -> Table:
    """One experiment: a line for each variant, compared with the baselines that it has."""
    figures = accuracies(rows)
    pairs = any(row.per_digit is not None for row in rows)
    baselines = [each for each in BASELINES if each in figures]
    several = any(len(values) > 1 for values in figures.values())
    # Of a head that was changed, the variant is called after it: xnidr-bias.
    heads = {variant: variant.partition("-")[0] for variant in figures}
    changed = any(head != variant and head in figures for variant, head in heads.items())
    threads = max(row.threads for row in rows)
    columns = ["variant", "loss", "parameters", "in the head", "seeds", "accuracy"]
    columns += ["per digit", "top-2"] if pairs else []
    columns += [f"against {each}" for each in baselines]
    columns += ["against the head as it is"] if changed else []
    columns += ["minutes"] if threads == 1 else ["minutes", f"by the clock, {threads} threads"]
    lines: list[tuple[object, ...]] = []
    for variant, values in figures.items():
        mine = [row for row in rows if row.variant == variant]
        first = mine[0]
        cells: list[object] = [variant, first.config.loss.replace("_", "-")]
        cells += [first.params, first.head_params, len(values)]
        cells.append(percent(Spread.of(list(values.values()))))
        if pairs:
            cells.append(
                percent(Spread.of([row.per_digit for row in mine if row.per_digit is not None]))
            )
            cells.append(percent(Spread.of([row.top2 for row in mine if row.top2 is not None])))
        for each in baselines:
            cells.append("" if each == variant else points(compare(values, figures[each])))
        if changed:
            plain = figures.get(heads[variant], {})
            cells.append("" if heads[variant] == variant else points(compare(values, plain)))
        cells.append(_around(Spread.of([row.cpu_minutes for row in mine]), 1))
        if threads > 1:
            cells.append(_around(Spread.of([row.minutes for row in mine]), 1))
        lines.append(tuple(cells))
    return Table(name, described(rows), tuple(columns), lines, COMPARED if several else ONE_SEED)


def claims_table(rows: Sequence[Row]) -> Table:
    """What the paper claims of the heads, one against another, in each experiment."""
    figures: dict[str, dict[str, dict[int, float]]] = {}
    for name in MAIN:
        mine = [row for row in rows if row.experiment == name]
        figures[name] = accuracies(mine)
        figures[f"{name}, top-2"] = accuracies(mine, "top2")
    shown = {name: values for name, values in figures.items() if values}
    lines = [
        (what, claim, *(points(compare(v.get(one, {}), v.get(other, {}))) for v in shown.values()))
        for what, claim, one, other in CLAIMS
    ]
    title = "The paper's claims about heads, in our experiments"
    return Table("claims", title, ("difference", "claimed", *shown), lines, CLAIMED)


def described(rows: Sequence[Row]) -> str:
    """What all runs of an experiment share, in a line."""
    config = rows[0].config
    rates = " or ".join(f"{rate:g}" for rate in sorted({row.config.lr for row in rows}))
    images = DATA.get(config.data, config.data)
    if config.train_count:
        held = config.validation
        held = validation_size(config.train_count) if held is None else held
        images = f"{config.train_count - held:,} images of {images}"
    size = f" at {config.image_size} px" if config.image_size else ""
    width = config.options.get("width")
    model = f"{config.model}{f' (width {width})' if isinstance(width, int | float) else ''}"
    epochs = f"{config.epochs} epoch{'s' * (config.epochs != 1)}"
    more = [
        *([f"weight decay {config.weight_decay:g}"] if config.weight_decay else []),
        *([f"averaged weights ({config.ema:g})"] if config.ema else []),
        *([config.precision] if config.precision != "32" else []),
        *(["judged with mirror images"] if config.options.get("mirror") else []),
    ]
    moved = [
        name if value is True else f"{name} {value:g}"
        for name, value in vars(config.augment).items()
        if value
    ]
    rest = f"; {', '.join(more)}" if more else ""
    return (
        f"{images}{size}, {model}, {epochs} in batches of {config.batch_size}, "
        f"{config.optimizer}, {config.schedule} up to {rates}; augmented by "
        f"{', '.join(moved) or 'nothing'}{rest}"
    )


def computing_table(rows: Sequence[Row]) -> Table:
    """What the experiments took, each on each kind of processor."""
    spent: dict[tuple[str, str], list[float]] = {}
    for row in {(row.date, str(row.config)): row for row in reversed(rows)}.values():
        spent.setdefault((row.experiment, row.cpu), []).append(row.cpu_minutes)
    order = list(dict.fromkeys(row.experiment for row in rows))
    lines: list[tuple[object, ...]] = [
        (name, cpu, len(values), round(sum(values)))
        for (name, cpu), values in sorted(spent.items(), key=lambda item: order.index(item[0][0]))
    ]
    every = [minutes for values in spent.values() for minutes in values]
    lines.append(("all", "", len(every), round(sum(every))))
    columns = ("experiment", "processor", "runs", "minutes")
    return Table("computing", "What the experiments took", columns, lines, SPENT)


def tuning_table(rows: Sequence[Row]) -> Table:
    """Accuracy on held-out training images for each learning rate that was tried."""
    rates = sorted({row.config.lr for row in rows})
    lines: list[tuple[object, ...]] = []
    for experiment in dict.fromkeys(row.experiment for row in rows):
        mine = [row for row in rows if row.experiment == experiment]
        config = mine[0].config
        what = f"{DATA.get(config.data, config.data)}, {config.model}"
        heads: dict[str, dict[float, float | None]] = {}
        for row in mine:
            heads.setdefault(str(row.config.head), {})[row.config.lr] = row.validation
        for head, values in heads.items():
            lines.append((what, head, *(_percent(values.get(rate)) for rate in rates)))
        means = [_mean([values.get(rate) for values in heads.values()]) for rate in rates]
        lines.append((what, "mean", *map(_percent, means)))
    return Table(
        "tuning",
        "Learning rates, judged on held-out training images",
        ("data, network", "head", *(f"{rate:g}" for rate in rates)),
        lines,
        CHOSEN,
    )


def choice_table(name: str, rows: Sequence[Row]) -> Table:
    """Accuracy on held-out training images for each variant that was tried."""
    lines = [
        (row.variant, row.seed, row.params, _percent(row.validation), f"{row.cpu_minutes:.1f}")
        for row in rows
    ]
    columns = ("variant", "seed", "parameters", "validation", "minutes")
    return Table(name, name, columns, lines, CHOSEN)


def percent(spread: Spread) -> str:
    """A spread of shares in percent.

    >>> percent(Spread(0.9948, 0.0005, 5)), percent(Spread(0.9948, None, 1))
    ('99.48 ± 0.05', '99.48')
    """
    deviation = None if spread.deviation is None else 100 * spread.deviation
    return _around(Spread(100 * spread.mean, deviation, spread.count), 2)


def points(comparison: Comparison | None) -> str:
    """A difference of shares in points, its interval, and what it means.

    >>> points(Comparison(0.0012, 0.0005, 0.0019, 5))
    '+0.12 [+0.05, +0.19] better'
    """
    if comparison is None:
        return ""
    text = f"{100 * comparison.difference:+.2f}"
    if comparison.low is None or comparison.high is None:
        return text
    text += f" [{100 * comparison.low:+.2f}, {100 * comparison.high:+.2f}]"
    return text if comparison.verdict == "open" else f"{text} {comparison.verdict}"


def fill_in(text: str, tables: dict[str, Table]) -> str:
    """A document with the blocks ``<!-- table: NAME -->`` ... ``<!-- end -->`` made anew.

    Each gets its table, under a line that says what it shows. Blocks that other commands make, and
    empty ones that no row fills yet, are left alone.
    """
    newline = "\r\n" if "\r\n" in text else "\n"

    def made(match: re.Match[str]) -> str:
        name, inside = match["name"], match["inside"]
        if not match["end"] or "<!-- table:" in inside:
            raise InputError(message("results", f"table {name}", "end in <!-- end -->", "no end"))
        if name in OTHERS or (name not in tables and not inside.strip()):
            return match[0]
        table = look_up("results", "table", name, tables)
        lines = [f"{table.title}:", "", *table.to_markdown().splitlines()]
        return newline.join([match["mark"], *lines, match["end"]])

    return BLOCK.sub(made, text)


def _around(spread: Spread, digits: int) -> str:
    text = f"{spread.mean:.{digits}f}"
    return text if spread.deviation is None else f"{text} ± {spread.deviation:.{digits}f}"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.2f}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return Spread.of(known).mean if len(known) == len(values) else None
