"""The report of a run: whole, right, harmless, and for every kind of run."""

import base64
import json
import re
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from xncaps.data import Dataset, Facts
from xncaps.evaluation import evaluate_scores, scores_of
from xncaps.training import pictures, report
from xncaps.training.config import Config
from xncaps.training.run import Folder, Run, build_network

RESULT = {"params": 12345, "seconds": 83.4, "threads": 2, "world": 1, "torch": "2.9"}
RESULT |= {"xncaps": "0.1 <b>", "cpu": "A & B", "date": "2026", "top1": 0.5, "confusion": [[]]}
VOID = {"meta", "link", "img"}


class Page(HTMLParser):
    """A strict reader: what is opened must be closed, in order."""

    def __init__(self, path):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.raw = path.read_bytes()
        self.feed(self.raw.decode())
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(autouse=True)
def _coarse(monkeypatch):
    """Pictures of few pixels are drawn sooner."""
    monkeypatch.setattr(pictures, "DPI", 40)


@pytest.fixture
def undrawn(monkeypatch):
    """Reports without the time that drawing takes; gives what would have been drawn."""
    drawn = {}
    for name in ("curves", "confusion", "mistakes", "couplings"):

        def draw(*arguments, name=name):
            drawn[name] = arguments
            return bytes(24)

        monkeypatch.setattr(pictures, f"draw_{name}", draw)
    return drawn


@dataclass
class Case:
    run: Run
    rows: list
    test: Dataset
    scores: torch.Tensor
    result: dict

    def write(self):
        evaluation = evaluate_scores(self.scores, self.test.labels, self.test.classes)
        path = report.write_report(
            self.run, self.rows, evaluation, self.test, self.scores, self.result
        )
        assert path == self.run.folder.report
        return Page(path)

    @property
    def names(self):
        return {path.name for path in self.run.folder.pictures.iterdir()}


def row(epoch, **changes):
    values = {"epoch": epoch, "step": 9 * epoch, "lr": 0.003, "loss": 1 / epoch, "accuracy": 0.5}
    values |= {"validation_loss": 0.4, "validation_accuracy": 0.6, "images_per_second": 100.0}
    values |= {"seconds": 2.0, "coupling_entropy": 0.9, "flips": {"head.capsules": 0.01}}
    return values | changes


def make_case(
    tmp_path, classes=4, shape=(1, 12, 12), pairs=False, count=3, epochs=2, random=True, **config
):
    """A run with new weights on noise; ``random`` scores instead of the network's."""
    generator = torch.Generator().manual_seed(0)
    names = tuple(str(k) for k in range(classes)) if isinstance(classes, int) else tuple(classes)
    images = torch.randint(0, 256, (count, *shape), generator=generator, dtype=torch.uint8)
    if pairs:
        labels = torch.rand(count, len(names), generator=generator).topk(2, dim=1).indices
        labels = torch.zeros(count, len(names), dtype=torch.uint8).scatter_(1, labels, 1)
    else:
        labels = torch.randint(0, len(names), (count,), generator=generator)
    settings = {"model": "convnet", "attach": "features", "options": {"width": 0.25, "caps_in": 6}}
    config = Config(**(settings | config))
    each = (0.5,) * shape[0]
    facts = Facts("noise", names, shape, pairs, each, each, "dark", (100, 10, count), {})
    torch.manual_seed(0)
    run = Run(Folder(tmp_path), config, facts, build_network(config, facts).eval())
    test = Dataset(images, labels, names)
    scores = torch.rand(count, len(names), generator=generator)
    if not random:
        scores = scores_of(run.network, images, run.preprocess)
    return Case(run, [row(e + 1) for e in range(epochs)], test, scores, dict(RESULT))


LINEAR = {"head": "linear", "options": {"width": 0.25}}
CAPSNET = {"model": "capsnet", "attach": "replace", "options": {"caps_in": 4, "iterations": 2}}
CASES = {
    "grey": {"random": False},
    "colour, not square": {"shape": (3, 10, 17), "head": "dr", "random": False},
    "not square, fixed size": {"shape": (1, 19, 17), "random": False, **CAPSNET},
    "two classes": {"classes": 2, "head": "xnodr", "count": 20},
    "a hundred classes": {"classes": 100, "count": 30},
    "linear": LINEAR,
    "pairs": {"pairs": True, "classes": 5},
    "no epoch": {"epochs": 0, **LINEAR},
    "one test image": {"count": 1},
    "no test images": {"count": 0},
    "many capsules": {"head": "xnboth", "options": {"caps_in": 70, "iterations": 6}},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_every_kind_of_run_has_a_whole_report(tmp_path, options):
    case = make_case(tmp_path, **options)
    page = case.write()
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("title")) == len(page.all("h1")) == 1
    assert page.all("script") == []
    assert not re.search(rb"https?://|url\(|@import", page.raw)
    for _, attributes in page.tags:
        for name in ("src", "href"):
            assert attributes.get(name, "#")[:5] in ("#", "data:")
    images = page.all("img")
    assert len(page.all("figcaption")) == len(images)
    assert all(len(image["alt"]) > 20 for image in images)
    embedded = [base64.b64decode(image["src"].partition(",")[2]) for image in images]
    kept = [path.read_bytes() for path in case.run.folder.pictures.iterdir()]
    assert sorted(embedded) == sorted(kept)
    for content in kept:
        with Image.open(BytesIO(content)) as picture:
            assert set(picture.info) == {"dpi"}  # nothing of software or date
            assert max(picture.size) < 2600
    shown = {"confusion.png"} | ({"curves.png"} if case.rows else set())
    wrong = report.judge(case.scores, case.test.labels).sorted(right=False)
    shown |= {"mistakes.png"} if wrong else set()
    capsules = case.run.config.head != "linear" and len(case.test)
    assert case.names == shown | ({"couplings.png"} if capsules else set())
    assert ("Couplings" in page.text) == bool(capsules)


def test_the_headline_of_single_classes(tmp_path, undrawn):
    case = make_case(tmp_path, count=7, **LINEAR)
    case.scores = torch.nn.functional.one_hot(case.test.labels, 4).float()
    case.scores[:2] = case.scores[:2].roll(1, dims=1)
    text = case.write().text
    assert "71.43% of 7 test images are recognised." in text
    assert "The network (12,345 parameters) learned 4 classes from 100 grey images of noise" in text
    assert "12 x 12 pixels, in 2 epochs and 1 min 23 s; 10 more were held out" in text
    assert f"xncaps evaluate {tmp_path} xncaps predict {tmp_path} image.png" in text
    assert "made with parameters 12,345 seconds of training 83.400 threads 2 processes 1" in text
    assert "xncaps 0.1 <b> cpu A & B date 2026" in text
    assert "options.width 0.25" in text
    assert "augment.flip false" in text


def test_the_headline_of_pairs(tmp_path, undrawn):
    case = make_case(tmp_path, count=4, pairs=True, **LINEAR)
    case.test = replace(case.test, labels=torch.tensor([[1, 1, 0, 0]] * 4, dtype=torch.uint8))
    rows = [[0.9, 0.8, 0, 0], [0.9, 0, 0.8, 0], [0, 0.9, 0.8, 0], [0.9, 0.8, 0, 0]]
    case.scores = torch.tensor(rows)
    text = case.write().text
    assert "50.00% of 4 test images have both of their classes recognised." in text
    assert "75.00% of the single classes in them are recognised." in text
    assert "75.00% by the paper's top-2" in text


def test_only_what_is_whole_is_shown_as_100_percent():
    texts = [report._percent(share) for share in (1.0, 0.99999, 0.99994, 0.5, 0.0, None)]
    assert texts == ["100%", "99.99%", "99.99%", "50.00%", "0.00%", "-"]


def worst_by_loops(scores, labels, pairs):
    """Plain loops: wrong images, the one whose best wrong class leads by most first."""
    leads = []
    for number, (row, label) in enumerate(zip(scores.tolist(), labels.tolist(), strict=True)):
        shown = [k for k, mark in enumerate(label) if mark] if pairs else [label]
        ranked = sorted(range(len(row)), key=lambda k, row=row: -row[k])
        if set(ranked[: len(shown)]) != set(shown):
            best = max(row[k] for k in range(len(row)) if k not in shown)
            leads.append((min(row[k] for k in shown) - best, number))
    return [number for _, number in sorted(leads)]


@pytest.mark.parametrize("pairs", [False, True])
def test_the_worst_mistakes_equal_the_oracle(tmp_path, pairs, undrawn):
    case = make_case(tmp_path, classes=5, pairs=pairs, count=90, **LINEAR)
    expected = worst_by_loops(case.scores, case.test.labels, pairs)
    judged = report.judge(case.scores, case.test.labels)
    assert judged.sorted(right=False) == expected
    assert set(judged.sorted(right=True)) == set(range(90)) - set(expected)
    text = case.write().text
    assert f"24 of {len(expected)} images that were seen wrong" in text
    table = text.partition("In words")[2].partition("Configuration")[0]
    numbers = re.findall(r"(\d+) \d \(\d\.\d\d\)(?:, \d \(\d\.\d\d\))? \d \(", table)
    assert [int(n) for n in numbers] == expected[:24]


def test_captions_of_mistakes_tell_shown_seen_and_scores(tmp_path, undrawn):
    case = make_case(tmp_path, classes=["cat", "a long class name"], count=2, **LINEAR)
    case.test = replace(case.test, labels=torch.tensor([0, 1]))
    case.scores = torch.tensor([[0.2, 0.75], [0.1, 0.9]])
    page = case.write()
    images, captions = undrawn["mistakes"]
    assert captions == ["shown cat (0.20)\nseen a lon…name (0.75)"]
    assert torch.equal(images[0], case.test.images[0])
    assert "shown cat (0.20), seen a long class name (0.75)" in page.all("img")[2]["alt"]


def test_perfect_results_say_so_and_remove_an_old_picture(tmp_path, undrawn):
    case = make_case(tmp_path)
    case.write()
    assert "mistakes.png" in case.names
    case.scores = torch.nn.functional.one_hot(case.test.labels, 4).float()
    page = case.write()
    assert "mistakes.png" not in case.names
    assert "There are none: no test image was seen wrong." in page.text
    assert "100% of 3 test images" in page.text
    assert "What was confused most often" not in page.text


def test_scores_that_are_no_numbers_are_mistakes_first(tmp_path):
    case = make_case(tmp_path, epochs=1)
    case.scores[1] = torch.nan
    case.test.labels[1] = 3
    case.write()
    assert report.judge(case.scores, case.test.labels).sorted(right=False)[0] == 1


HOSTILE = ['"><script>0</script>', "\"'><img src=x>", '\u732b">\U0001f408', '">$x$ & \\frac', "\n"]


def test_hostile_names_stay_text(tmp_path):
    case = make_case(tmp_path, classes=[*HOSTILE, "\udcff"], count=6, data='folder:/a"<b>&')
    case.test = replace(case.test, labels=torch.arange(6))
    case.scores = torch.eye(6).roll(1, dims=0)  # all wrong
    facts = replace(case.run.facts, name="</title><script>$")
    case.run = replace(case.run, facts=facts, folder=Folder(tmp_path / "<i>it's"))
    page = case.write()
    assert not {tag for tag, _ in page.tags} & {"script", "i", "b"}
    assert [image["src"][:14] for image in page.all("img")] == ["data:image/png"] * 4
    assert all(set(image) == {"src", "width", "height", "alt"} for image in page.all("img"))
    for text in (*HOSTILE[:4], r"\udcff", json.dumps('folder:/a"<b>&'), "</title><script>$"):
        assert text in page.text


def test_names_in_pictures_are_drawable_and_short():
    names = ["cat", "", "a\nb", "\u732b", "\u202eabc", "$a$", "x" * 12, "x" * 13, "né Ω", "\udcff"]
    assert pictures.short_names(names) == [
        *("cat", "#1", "#2", "#3", "#4", r"\$a\$", "x" * 12, "x" * 6 + "…" + "x" * 5, "né Ω", "#9")
    ]


def test_the_same_inputs_give_the_same_bytes(tmp_path):
    case = make_case(tmp_path)
    state = {name: value.clone() for name, value in case.run.network.state_dict().items()}
    assert case.write().raw == case.write().raw  # pictures are in it
    after = case.run.network.state_dict()
    assert all(torch.equal(after[name], value) for name, value in state.items())


def test_couplings_are_those_of_each_iteration(tmp_path):
    case = make_case(tmp_path, head="dr")
    routing = case.run.network.head.capsules.routing
    found = report.couplings_of(case.run, case.test.images[:3])
    assert list(found) == [1, 2, 3]
    assert routing.iterations == 3
    assert torch.allclose(found[1], torch.full((3, 6, 4), 0.25))
    pixels = case.run.preprocess(case.test.images[:3])
    with torch.no_grad():
        assert torch.equal(found[3], case.run.network(pixels, return_couplings=True)[1])
    routing.iterations = 9
    assert list(report.couplings_of(case.run, case.test.images[:1])) == [1, 3, 5, 7, 9]
    assert routing.iterations == 9


def test_iterations_are_restored_after_an_error(tmp_path, monkeypatch):
    case = make_case(tmp_path)
    routing = case.run.network.head.capsules.routing
    monkeypatch.setattr(routing, "weighted_sum", lambda u, logits: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        report.couplings_of(case.run, case.test.images)
    assert routing.iterations == 3


def test_telling_images_are_chosen_for_the_couplings(tmp_path, undrawn):
    case = make_case(tmp_path, count=4, classes=3)
    case.test = replace(case.test, labels=torch.tensor([0, 1, 2, 0]))
    case.scores = torch.tensor([[0.5, 0.4, 0], [0, 0.9, 0], [0.2, 0, 0.7], [0.1, 0.8, 0]])
    case.write()
    drawn, _ = undrawn["couplings"]
    assert [one.title for one in drawn] == [
        "the surest right one: shown 1, seen 1",
        "a middling one: shown 2, seen 2",
        "the most hesitant right one: shown 0, seen 0",
        "the worst mistake: shown 0, seen 1",
    ]
    assert [one.shown for one in drawn] == [[1], [2], [0], [0]]
    assert torch.equal(drawn[3].lengths, case.scores[3])
    assert drawn[3].colours() == [pictures.RIGHT, pictures.WRONG, pictures.REST]


def test_maps_show_the_capsules_that_vary_most():
    couplings = torch.full((100, 4), 0.25)
    couplings[30], couplings[90] = torch.tensor([[0.1, 0.7, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7]])
    image, even = torch.zeros(1, 4, 4, dtype=torch.uint8), torch.full((100, 4), 0.25)
    one = pictures.Routed(image, "", [1], [1], {1: even, 2: couplings}, torch.zeros(4))
    shares = one.shares()
    assert shares[1].shape == shares[2].shape == (64, 4)
    assert (shares[1] == 1).all()
    assert np.allclose(shares[2][0], [0.4, 2.8, 0.4, 0.4])
    assert np.allclose(shares[2][-1], [0.4, 0.4, 0.4, 2.8])


@pytest.mark.parametrize("size", [2, 20, 21])
def test_the_confusion_matrix_colours_mistakes_and_mutes_the_rest(monkeypatch, size):
    monkeypatch.setattr(pictures, "png", lambda figure: figure)
    confusion = np.eye(size, dtype=int) * 8
    confusion[0, 1] = 2
    confusion[-1] = 0
    figure = pictures.draw_confusion(confusion.tolist(), [f"class {k}" for k in range(size)])
    axes = figure.axes[0]
    colours = axes.images[0].get_array()
    assert np.allclose(colours[0, 0], (0.92, 0.92, 0.92, 1))
    assert np.allclose(colours[1, 0], 1)
    assert colours[0, 1, 0] > 2 * colours[0, 1, 1]  # red
    assert [text.get_text() for text in axes.texts] == (
        ["8", "2", *["8"] * (size - 2)] if size <= 20 else []
    )
    assert [t.get_text() for t in axes.get_yticklabels()] == [f"class {k}" for k in range(size)]


BOTH, SIGNS = ["training", "validation"], ["head.capsules"]
MANY = {f"layer{k}": 0.0 for k in range(9)}
NONE = {"validation_loss": None, "validation_accuracy": None}
ROWS = {
    "no validation": (NONE, [["training"], ["training"], [""], [""], SIGNS]),
    "no capsules": ({"coupling_entropy": None, "flips": {}}, [BOTH, BOTH, [""]]),
    "no numbers": ({"loss": np.nan, "validation_loss": np.inf}, [[], BOTH, [""], [""], SIGNS]),
    "many layers": ({"flips": MANY}, [BOTH, BOTH, [""], [""], ["mean of 9 layers"]]),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("epochs", [1, 3])
def test_curves_show_what_there_is(monkeypatch, name, epochs):
    changes, panels = ROWS[name]
    rows = [row(epoch + 1, **changes) for epoch in range(epochs)]
    assert pictures.draw_curves(rows).startswith(b"\x89PNG")
    monkeypatch.setattr(pictures, "png", lambda figure: figure)
    axes = pictures.draw_curves(rows).axes
    labels = [[line.get_label() for line in one.get_lines()] for one in axes]
    assert [[re.sub("^_.*", "", label) for label in one] for one in labels] == panels
    assert axes[1].get_lines()[0].get_ydata().tolist() == [0.5] * epochs


def test_classes_without_a_test_image_have_no_recall(tmp_path, undrawn):
    case = make_case(tmp_path, classes=["a", "b", "nobody"], count=4, **LINEAR)
    case.test = replace(case.test, labels=torch.tensor([0, 0, 1, 1]))
    case.scores = torch.eye(3)[[0, 1, 1, 1]]
    text = case.write().text
    assert "0 a 2 50.00% 100% 1 b 2 100% 66.67% 2 nobody 0 - -" in text
    assert "a b 1 50.00%" in text.partition("What was confused most often")[2]


def test_a_result_of_nothing_is_enough(tmp_path, undrawn):
    case = make_case(tmp_path, **LINEAR)
    case.result = {}
    assert "The network learned 4 classes" in case.write().text
