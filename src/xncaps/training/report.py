"""The report of a run: pictures, and one HTML file that needs nothing else."""

import base64
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xncaps.data import Dataset
from xncaps.evaluation import Evaluation, answers
from xncaps.heads import CapsuleHead
from xncaps.system import write_whole
from xncaps.training import pictures
from xncaps.training.run import Run

Row = dict[str, Any]
MISTAKES, ITERATIONS, CONFUSIONS = 24, 5, 10
"""How many mistakes, iterations and confusions are shown at most."""

METRICS = {
    "top1": "of {} test images are recognised",
    "exact_pair": "of {} test images have both of their classes recognised",
    "per_digit": "of the single classes in them are recognised",
    "paper_top2": "by the paper's top-2, which looks only at the lower class of a pair",
}
LABELS = {"params": "parameters", "seconds": "seconds of training", "world": "processes"}
FORMS = {str: "", int: ",", float: ",.3f"}
CURVES = """Loss is what training brings down. If the validation line turns for the worse while the
training line improves, the network learns by heart."""
ENTROPY = " Coupling entropy is 1 if capsules spread evenly over the classes, 0 if each chose one."
FLIPS = " Sign flips: the share of binary weights whose sign is not what it was an epoch before."
CONFUSION = """A row is the class shown, a column the class seen. Right answers are grey; the
stronger the colour, the larger the share of a class that was taken for another."""
RECALL = """<p>Recall is the share of a class's images that was recognised, precision the share of
right ones among what was taken for it.</p>\n"""
MISTAKEN = "First come those in which a wrong class leads by most. In brackets: the scores."
COUPLINGS = """Each input capsule spreads its vote over the classes: a row of a map, a column for a
class. It begins evenly, then gives more to the classes whose capsules it agrees with. Green is more
than an even share, brown is less: watch a column gather votes. The bars below are means over all
capsules (dotted: the even share), those on the right the final scores. Blue is a class that was
shown, orange one that was wrongly seen."""
STYLE = """
:root{color-scheme:light dark;--ink:#222;--soft:#666;--line:#ddd;--ground:#fff;--mark:#0072b2}
@media(prefers-color-scheme:dark){
:root{--ink:#e4e4e4;--soft:#a0a0a0;--line:#3a3a3a;--ground:#181818;--mark:#6cb6e8}}
body{margin:0;background:var(--ground);color:var(--ink);font:1rem/1.55 system-ui,sans-serif}
main{max-width:62rem;margin:auto;padding:1.5rem 1rem 4rem;overflow-wrap:anywhere}
h1{font-size:1rem;font-weight:600;color:var(--soft);margin:0}summary{cursor:pointer}
h2{font-size:1.25rem;margin:2.5rem 0 .75rem;padding-top:1.25rem;border-top:1px solid var(--line)}
.big{font-size:clamp(3rem,12vw,5rem);line-height:1.1;font-weight:700;color:var(--mark)}
p,figcaption{max-width:44rem}.big,.big+p{margin:.25rem 0}figure,details{margin:1rem 0}
figcaption{color:var(--soft);font-size:.9rem;margin-top:.5rem}.scroll,pre{overflow-x:auto}
.picture{background:#fff;padding:.75rem;width:fit-content;max-width:100%;box-sizing:border-box}
.picture,pre{border-radius:8px}td.n,th.n{text-align:right}
img{display:block;height:auto;max-width:max(100%,38rem)}pre{padding:.75rem;background:#8881}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.25rem 1.5rem .25rem 0;border-bottom:1px solid var(--line)}
"""


def write_report(
    run: Run, rows: list[Row], evaluation: Evaluation, test: Dataset, scores: Tensor, result: Row
) -> Path:
    """Write a run's pictures and its ``report.html``; returns where that is."""
    judged = judge(scores, test.labels)
    run.folder.pictures.mkdir(parents=True, exist_ok=True)
    sections = {
        "Learning curves": _curves(run, rows),
        "Classes": _classes(run, evaluation),
        "The worst mistakes": _mistakes(run, test, judged),
        "Couplings": _couplings(run, test, judged),
        "Configuration": _configuration(run),
        "Use it": _use(run, result, evaluation),
    }
    body = "\n".join(f"<h2>{title}</h2>\n{text}" for title, text in sections.items() if text)
    head = f" with head {run.config.head}" if run.config.head else ""
    title = escape(f"{run.config.model}{head} on {run.facts.name}")
    page = (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<style>{STYLE}</style></head>\n<body><main>\n'
        f"<h1>{title}</h1>\n{_headline(evaluation)}{_sentence(run, rows, result)}"
        f"{body}</main></body>\n</html>\n"
    )
    write_whole(run.folder.report, page.encode("utf-8", "backslashreplace"))
    return run.folder.report


@dataclass(frozen=True)
class Judged:
    """What test images show, were seen as, and by how much the best wrong class leads."""

    scores: Tensor
    shown: Tensor
    seen: Tensor
    gaps: Tensor

    def sorted(self, *, right: bool) -> list[int]:
        """The numbers of the right or the wrong images; where a wrong class leads most is first."""
        numbers = ((self.shown == self.seen).all(dim=1) == right).nonzero().squeeze(1)
        order = self.gaps[numbers].argsort(descending=True, stable=True)
        return [int(number) for number in numbers[order]]

    def classes(self, number: int) -> list[list[int]]:
        """The classes that an image shows, and those it was seen as."""
        return [torch.where(marks[number])[0].tolist() for marks in (self.shown, self.seen)]

    def words(self, number: int, names: Sequence[str]) -> list[str]:
        """What an image shows and was seen as, with scores: ``4 (0.21)`` and ``9 (0.93)``."""
        scored = [f"{n} ({s:.2f})" for n, s in zip(names, self.scores[number], strict=True)]
        return [_list(scored, classes) for classes in self.classes(number)]


def _list(names: Sequence[str], classes: Sequence[int]) -> str:
    return ", ".join(names[k] for k in classes)


def judge(scores: Tensor, labels: Tensor) -> Judged:
    """Compare scores with labels, class numbers or rows of 0 and 1."""
    if len(scores) == 0:
        return Judged(scores, scores.bool(), scores.bool(), scores.sum(dim=1))
    empty, pairs = torch.zeros(scores.shape, dtype=torch.bool), labels.dim() == 2
    shown = labels.bool() if pairs else empty.scatter(1, labels.unsqueeze(1), True)
    seen = empty.scatter(1, answers(scores, pairs), True)
    other = scores.masked_fill(shown, -torch.inf).amax(dim=1)
    own = scores.masked_fill(~shown, torch.inf).amin(dim=1)
    return Judged(scores, shown, seen, (other - own).nan_to_num(torch.inf))


@torch.no_grad()
def couplings_of(run: Run, images: Tensor) -> dict[int, Tensor]:
    """Couplings by iteration, ``(n, caps_in, classes)``; of many iterations an even choice."""
    head = run.network.head
    if not isinstance(head, CapsuleHead):
        return {}
    routing, pixels = head.capsules.routing, run.preprocess(images)
    last, found = routing.iterations, {}
    steps = [1 + round(k * (last - 1) / (ITERATIONS - 1)) for k in range(ITERATIONS)]
    try:
        for step in dict.fromkeys(steps):
            routing.iterations = step
            found[step] = run.network(pixels, return_couplings=True)[1].float().nan_to_num()
    finally:
        routing.iterations = last
    return found


def _headline(evaluation: Evaluation) -> str:
    if evaluation.count == 0:
        return '<p class="big">-</p>\n<p>There were no test images.</p>\n'
    count = f"{evaluation.count:,}"
    lines = [(_percent(v), METRICS[k].format(count)) for k, v in evaluation.metrics.items()]
    more = "".join(f"<p><strong>{figure}</strong> {words}.</p>\n" for figure, words in lines[1:])
    return f'<p class="big">{lines[0][0]}</p>\n<p>{lines[0][1]}.</p>\n{more}'


def _sentence(run: Run, rows: Sequence[Row], result: Row) -> str:
    facts = run.facts
    kind = {1: "grey ", 3: "colour "}.get(facts.shape[0], "")
    weights = f" ({result['params']:,} parameters)" if "params" in result else ""
    spent = [f"{rows[-1]['epoch']} epoch{'s' * (rows[-1]['epoch'] > 1)}"] if rows else []
    spent += [_time(result["seconds"])] if "seconds" in result else []
    held = f"; {facts.counts[1]:,} more were held out for validation" if facts.counts[1] else ""
    return (
        f"<p>The network{weights} learned {len(facts.classes)} classes from {facts.counts[0]:,} "
        f"{kind}images of {escape(facts.name)}, {facts.shape[2]} x {facts.shape[1]} pixels"
        f"{', in ' if spent else ''}{' and '.join(spent)}{held}.</p>\n"
    )


def _percent(share: float | None) -> str:
    """Only what is whole is 100%."""
    return "-" if share is None else "100%" if share == 1 else f"{min(share, 0.9999):.2%}"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes:,} min {rest} s" if minutes else f"{seconds:.1f} s"


def _figure(run: Run, name: str, picture: bytes, alt: str, caption: str) -> str:
    """Keep a picture as a file, and show it with words on how to read it."""
    write_whole(run.folder.pictures / f"{name}.png", picture)
    width, height = (int.from_bytes(picture[i : i + 4]) * 96 // pictures.DPI for i in (16, 20))
    data = base64.b64encode(picture).decode()
    return (
        f'<figure><div class="scroll picture" tabindex="0" role="group" aria-label="{name}">'
        f'<img src="data:image/png;base64,{data}" width="{width}" height="{height}" '
        f'alt="{escape(alt)}"></div>\n<figcaption>{escape(caption)}</figcaption></figure>\n'
    )


def _no_figure(run: Run, name: str, words: str) -> str:
    """Say why there is no such picture, and leave no old one behind."""
    (run.folder.pictures / f"{name}.png").unlink(missing_ok=True)
    return words and f"<p>{words}</p>"


def _table(headings: Sequence[str], rows: Sequence[Sequence[object]], numbers: str = "") -> str:
    """A table; columns that ``numbers`` names by their places are set to the right."""
    sides = [' class="n"' if str(k) in numbers else "" for k in range(len(headings))]
    lines = ""
    for tag, cells in [("th", headings), *(("td", row) for row in rows)]:
        pairs = zip(sides, cells, strict=True)
        lines += f"<tr>{''.join(f'<{tag}{s}>{escape(str(c))}</{tag}>' for s, c in pairs)}</tr>\n"
    return f'<div class="scroll"><table>\n{lines}</table></div>\n'


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{summary}</summary>\n{content}</details>\n"


def _curves(run: Run, rows: Sequence[Row]) -> str:
    if not rows:
        return _no_figure(run, "curves", "No epoch has been recorded.")
    caption = CURVES
    caption += ENTROPY if any(row.get("coupling_entropy") is not None for row in rows) else ""
    caption += FLIPS if any(row.get("flips") for row in rows) else ""
    alt = f"Learning curves, up to a training accuracy of {_percent(rows[-1]['accuracy'])}."
    return _figure(run, "curves", pictures.draw_curves(rows), alt, caption)


def _classes(run: Run, evaluation: Evaluation) -> str:
    classes, cells = run.facts.classes, evaluation.confusion
    wrong = [(n, i, k) for i, row in enumerate(cells) for k, n in enumerate(row) if n and i != k]
    often = [
        (classes[i], classes[k], f"{n:,}", _percent(n / sum(cells[i])))
        for n, i, k in sorted(wrong, key=lambda cell: -cell[0])[:CONFUSIONS]
    ]
    alt = f"Confusion matrix of {len(classes)} classes."
    alt += " Most often {} was seen as {}, {} times.".format(*often[0]) if often else ""
    text = _figure(run, "confusion", pictures.draw_confusion(cells, classes), alt, CONFUSION)
    table = _table(("shown", "seen", "images", "share of the class"), often, "23")
    text += _details("What was confused most often", table) if often else ""
    rows = [
        (i, c["class"], f"{c['count']:,}", _percent(c["recall"]), _percent(c["precision"]))
        for i, c in enumerate(evaluation.per_class)
    ]
    table = _table(("#", "class", "images", "recall", "precision"), rows, "0234") + RECALL
    return text + (table if len(rows) <= pictures.NAMED else _details("All classes", table))


def _mistakes(run: Run, test: Dataset, judged: Judged) -> str:
    worst = (wrong := judged.sorted(right=False))[:MISTAKES]
    if not wrong:
        return _no_figure(run, "mistakes", "There are none: no test image was seen wrong.")
    names = pictures.short_names(test.classes, 4 if test.pairs else 10)
    captions = ["shown {}\nseen {}".format(*judged.words(i, names)) for i in worst]
    picture = pictures.draw_mistakes([test.images[i] for i in worst], captions)
    words = [(i, *judged.words(i, test.classes)) for i in worst]
    alt = f"{len(worst)} test images. The first: shown {words[0][1]}, seen {words[0][2]}."
    caption = f"{len(worst)} of {len(wrong):,} images that were seen wrong. {MISTAKEN}"
    table = _table(("test image", "shown (score)", "seen (score)"), words, "0")
    return _figure(run, "mistakes", picture, alt, caption) + _details("In words", table)


def _couplings(run: Run, test: Dataset, judged: Judged) -> str:
    right, chosen = judged.sorted(right=True), {}
    if right:
        chosen[right[-1]] = "the surest right one"
        chosen[right[(len(right) - 1) // 2]] = "a middling one"
        chosen[right[0]] = "the most hesitant right one"
    chosen |= dict.fromkeys(judged.sorted(right=False)[:1], "the worst mistake")
    if not isinstance(run.network.head, CapsuleHead) or not chosen:
        return _no_figure(run, "couplings", "")
    found, routed = couplings_of(run, test.images[list(chosen)]), []
    names = pictures.short_names(test.classes)
    for place, (i, kind) in enumerate(chosen.items()):
        shown, seen = judged.classes(i)
        title = f"{kind}: shown {_list(names, shown)}, seen {_list(names, seen)}"
        maps = {step: couplings[place] for step, couplings in found.items()}
        lengths = judged.scores[i].nan_to_num()
        routed.append(pictures.Routed(test.images[i], title, shown, seen, maps, lengths))
    caps, most = run.network.head.capsules.caps_in, pictures.CAPSULES
    few = f" The maps show the {most} of {caps:,} capsules whose couplings vary most."
    caption = COUPLINGS + few * (caps > most)
    alt = f"Couplings of {len(routed)} test images in iterations {', '.join(map(str, found))}."
    return _figure(run, "couplings", pictures.draw_couplings(routed, test.classes), alt, caption)


def _configuration(run: Run) -> str:
    rows: list[tuple[str, object]] = []
    for name, value in run.config.to_dict().items():
        inner = value if isinstance(value, dict) else {}
        rows += [(f"{name}.{key}", kept) for key, kept in inner.items()] or [(name, value)]
    cells = [(name, json.dumps(value, ensure_ascii=False)) for name, value in rows]
    return _details("Everything that decides this run", _table(("setting", "value"), cells))


def _use(run: Run, result: Row, evaluation: Evaluation) -> str:
    path, told = escape(shlex.quote(str(run.folder.path))), evaluation.to_dict()
    use = f"<pre>xncaps evaluate {path}\nxncaps predict {path} image.png</pre>\n"
    plain = {k: v for k, v in result.items() if type(v) in FORMS and k not in told}
    rows = [(LABELS.get(k, k.replace("_", " ")), f"{v:{FORMS[type(v)]}}") for k, v in plain.items()]
    return use + _table(("made with", ""), rows)
