"""How far the forms of a network agree on a data set: scores, answers and accuracy."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from xncaps.bench.machine import facts as machine_facts
from xncaps.bench.model import make_forms
from xncaps.bench.rows import FACTS
from xncaps.deploy.evaluate import chosen_data
from xncaps.deploy.model import TorchModel, open_model
from xncaps.deploy.packed_file import write_packed
from xncaps.errors import InputError, message
from xncaps.evaluation import answers, evaluate_scores, main_metric
from xncaps.results import append_rows, read_rows
from xncaps.text import text_table

Say = Callable[[str], None]
FILE = "agreement.csv"


@dataclass(frozen=True)
class Agreement:
    """One form of a network against the network itself.

    Args:
        network: its backbone and head.
        form: what it is kept in.
        data: the images.
        count: how many of them there are.
        largest: the largest difference of a score.
        agree: images in which both see the same.
        accuracy: of the form.
    """

    network: str
    form: str
    data: str
    count: int
    largest: float
    agree: int
    accuracy: float


COLUMNS = (*FACTS, *(field.name for field in fields(Agreement)))
HEADS = ("network", "form", "largest difference", "same answer", "accuracy")


@dataclass(frozen=True)
class Agreements:
    """All that were compared in one go. Prints as a table."""

    facts: dict[str, Any]
    rows: tuple[Agreement, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {**self.facts, "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        return text_table(list(HEADS), [_cells(row) for row in self.rows])

    def to_markdown(self) -> str:
        """The table for a document."""
        lines = [HEADS, ("---",) * len(HEADS), *map(_cells, self.rows)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: Agreement) -> list[str]:
    largest = "0" if row.largest == 0 else f"{row.largest:.1e}"
    agree = f"{row.agree:,} of {row.count:,}"
    return [row.network, row.form, largest, agree, f"{row.accuracy:.2%}"]


def compare_forms(
    runs: Sequence[Path],
    data: str | None = None,
    *,
    data_dir: Path | None = None,
    out: Path | None = None,
    say: Say | None = None,
) -> Agreements:
    """Compare every form of the networks of some runs with the networks themselves.

    Args:
        runs: folders of runs.
        data: on whose test images; each run's own if not given.
        data_dir: a folder to look for data in first.
        out: a folder whose ``agreement.csv`` gets the rows.
        say: told how it goes.
    """
    tell = say or (lambda line: None)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # before the work
    facts, found = machine_facts(), []
    for path in runs:
        tell(str(path))
        with TemporaryDirectory() as folder:
            rows = _compare(path, Path(folder), data, data_dir, tell)
        found += rows
        if out is not None:
            append_rows(out / FILE, COLUMNS, ({**facts, **asdict(row)} for row in rows))
    return Agreements(facts, tuple(found))


def _compare(
    path: Path, folder: Path, data: str | None, data_dir: Path | None, say: Say
) -> list[Agreement]:
    trained = open_model(path, say)
    if not isinstance(trained, TorchModel) or trained.kind != "run":
        raise InputError(message("agreement", "RUN", "be the folder of a run", str(path)))
    forms = make_forms(path, folder, 1, data_dir, say)
    del forms["PyTorch"]
    card, half = trained.card, folder / "half.safetensors"
    write_packed(half, trained.network, card, "float16")
    forms = {"as trained": trained, **forms, "packed, float16": open_model(half)}
    images = chosen_data(trained, data, data_dir=data_dir)
    name = data or card.data["name"]
    scores = {form: model.scores(images.images) for form, model in forms.items()}
    wanted = scores["as trained"]
    rows = []
    for form, given in scores.items():
        same = answers(given, images.pairs) == answers(wanted, images.pairs)
        rows.append(
            Agreement(
                card.name,
                form,
                name,
                len(images),
                (given - wanted).abs().max().item(),
                int(same.all(dim=1).sum()),
                evaluate_scores(given, images.labels, images.classes).metrics[
                    main_metric(images.pairs)
                ],
            )
        )
    return rows


def read_agreements(path: Path) -> Agreements:
    """The newest comparison of a file."""
    lines = read_rows(path)
    last = max(line["date"] for line in lines)
    kinds = {"count": int, "agree": int, "largest": float, "accuracy": float}
    chosen = [line for line in lines if line["date"] == last]
    rows = tuple(
        Agreement(**{f.name: kinds.get(f.name, str)(line[f.name]) for f in fields(Agreement)})
        for line in chosen
    )
    return Agreements({name: chosen[0][name] for name in FACTS}, rows)
