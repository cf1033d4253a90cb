"""What the repository says of its experiments is what their rows say."""

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
import torch

from experiment_rows import a_row
from xncaps.cli.main import main
from xncaps.errors import InputError
from xncaps.experiments import plots, read_accuracy
from xncaps.experiments.latency import Latency, append_latencies, read_latencies
from xncaps.experiments.plots import digest_of, draw_all, drawn
from xncaps.experiments.rows import append_row
from xncaps.experiments.tables import fill_in, table_of, tables_of
from xncaps.paper import paper_tables
from xncaps.text import Table
from xncaps.training import Config

ROOT = Path(__file__).parent.parent
ROWS = read_accuracy(ROOT / "results")


@pytest.mark.parametrize("name", ["README.md", "docs/results.md"])
def test_tables_in_documents_are_those_of_the_rows(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    tables = tables_of(ROWS)
    assert any(f"<!-- table: {name} -->\n{tables[name].title}:\n\n| " in text for name in tables)
    assert fill_in(text, tables) == text


def test_every_table_is_in_the_document() -> None:
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for name in tables_of(ROWS):
        assert f"<!-- table: {name} -->" in text, name


@pytest.mark.parametrize("name", ["parameters", "latency", "minutes", "curves"])
def test_pictures_in_the_document_are_those_of_the_rows(name: str) -> None:
    assert f"](plots/{name}.svg)" in (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    picture = (ROOT / "docs" / "plots" / f"{name}.svg").read_text(encoding="utf-8")
    assert digest_of(ROWS, read_latencies(ROOT / "results")) in picture


def test_every_head_in_the_pictures_was_timed() -> None:
    latencies = read_latencies(ROOT / "results")
    assert {(*row.key[:2], 1) for row in drawn(ROWS)} <= latencies.keys()


def test_pictures_are_of_experiments_with_several_heads() -> None:
    rows = spread_rows(fc=[0.9], dr=[0.8])
    alone = [replace(row, experiment="record") for row in spread_rows(xnidr=[0.9])]
    assert drawn([*rows, *alone]) == rows


def test_a_changed_head_is_compared_with_the_head_as_it_is() -> None:
    rows = [*spread_rows(dr=[0.9]), *spread_rows(**{"dr-bias": [0.95], "xnidr-bias": [0.8]})]
    table = table_of(rows, "mine")
    at = table.columns.index("against the head as it is")
    assert [line[at] for line in table.rows] == ["", "+5.00", ""]


def test_several_threads_have_minutes_by_the_clock() -> None:
    table = table_of([a_row(threads=2, minutes=30.0, cpu_minutes=55.0)], "mine")
    line = dict(zip(table.columns, table.rows[0], strict=True))
    assert (line["minutes"], line["by the clock, 2 threads"]) == ("55.0", "30.0")


def test_pairs_are_compared_by_the_paper_s_metric_too() -> None:
    rows = [
        a_row(experiment="multimnist", variant=head, accuracy=0.8, per_digit=0.9, top2=top2)
        for head, top2 in (("fc", 0.9), ("xnidr", 0.95))
    ]
    table = table_of(rows, "claims")
    assert table.columns == ("difference", "claimed", "multimnist", "multimnist, top-2")
    assert {line[0]: line[2:] for line in table.rows}["XnIDR - FC"] == ("+0.00", "+5.00")


def spread_rows(**by_variant: list[float]) -> list[Any]:
    return [
        a_row(variant=variant, seed=seed, accuracy=value, config=Config(head="dr", seed=seed))
        for variant, values in by_variant.items()
        for seed, value in enumerate(values)
    ]


def test_a_table_by_hand() -> None:
    fc, dr, linear = [0.97, 0.98, 0.96], [0.98, 0.99, 0.9725], [0.9]
    table = table_of(spread_rows(fc=fc, dr=dr, linear=linear), "mine")
    lines = {line[0]: dict(zip(table.columns, line, strict=True)) for line in table.rows}
    assert lines["fc"]["accuracy"] == f"{100 * fmean(fc):.2f} ± {100 * stdev(fc):.2f}"
    assert lines["linear"]["accuracy"] == "90.00"
    differences = [a - b for a, b in zip(dr, fc, strict=True)]
    half = 4.302653 * stdev(differences) / math.sqrt(3)
    low, high = (100 * (fmean(differences) + sign * half) for sign in (-1, 1))
    assert lines["dr"]["against fc"] == f"+1.08 [{low:+.2f}, {high:+.2f}] better"
    assert lines["dr"]["against linear"] == "+8.00"
    assert lines["fc"]["against fc"] == ""
    assert list(lines) == ["linear", "fc", "dr"]
    assert [line["seeds"] for line in lines.values()] == [1, 3, 3]
    assert [line["minutes"] for line in lines.values()] == ["1.2", "1.2 ± 0.0", "1.2 ± 0.0"]
    markdown = table.to_markdown().splitlines()
    assert markdown[1] == "|" + " --- |" * len(table.columns)
    assert len({line.count("|") for line in markdown}) == 1


def test_a_title_says_what_the_runs_share() -> None:
    config = {"data": "cifar10", "model": "widenet", "epochs": 1, "options": {"width": 0.5}}
    augment = {"flip": True, "crop": 1}
    whole = Config.from_dict({**config, "augment": augment})
    assert table_of([a_row(config=whole)], "mine").title == (
        "CIFAR-10, widenet (width 0.5), 1 epoch in batches of 128, adam, onecycle up to 0.003; "
        "augmented by flip, crop 1"
    )
    for held, count in ((None, 900), (0, 1000), (300, 700)):
        part = Config.from_dict({**config, "train_count": 1000, "validation": held})
        title = table_of([a_row(config=part)], "mine").title
        assert title.startswith(f"{count:,} images of CIFAR-10, ")
        assert title.endswith("augmented by nothing")


def test_computing_counts_each_run_once() -> None:
    rows = [
        a_row(seed=0, cpu="A", date="1", cpu_minutes=2.0),
        a_row(seed=1, cpu="B", date="2", cpu_minutes=3.0),
        a_row(seed=2, cpu="A", date="3", cpu_minutes=4.0),
        a_row(experiment="other", variant="same", cpu="A", date="1", cpu_minutes=2.0),
        a_row(experiment="other", cpu="A", date="4", cpu_minutes=8.0),
    ]
    assert list(table_of(rows, "computing").rows) == [
        *(("mine", "A", 2, 6), ("mine", "B", 1, 3), ("other", "A", 1, 8), ("all", "", 4, 17)),
    ]


def test_pairs_have_three_metrics() -> None:
    rows = [a_row(accuracy=0.8, per_digit=0.9, top2=0.95)]
    table = table_of(rows, "mine")
    line = dict(zip(table.columns, table.rows[0], strict=True))
    assert (line["accuracy"], line["per digit"], line["top-2"]) == ("80.00", "90.00", "95.00")


def test_panels_of_the_main_experiments_come_first() -> None:
    rows = [
        replace(row, experiment=name)
        for name in ("sample", "cifar10", "mnist")
        for row in spread_rows(fc=[0.8], dr=[0.9, 0.91])
    ]
    picture = draw_all(rows, {})["parameters.svg"].decode()
    places = [
        picture.index(f">{title}</text>") for title in ("MNIST", "CIFAR-10", "Built-in digits")
    ]
    assert places == sorted(places)


def test_claims_are_compared_in_every_main_experiment() -> None:
    rows = [
        *spread_rows(fc=[0.9, 0.91], xnidr=[0.95, 0.97]),
        *spread_rows(dr=[0.5], xnboth=[0.25]),
    ]
    rows = [
        replace(row, experiment="mnist" if row.variant in ("fc", "xnidr") else "cifar10")
        for row in rows
    ]
    table = tables_of(rows)["claims"]
    assert table.columns == ("difference", "claimed", "mnist", "cifar10")
    lines = {line[0]: line[2:] for line in table.rows}
    half = 12.7062 * stdev([0.05, 0.06]) / math.sqrt(2)
    low, high = (100 * (0.055 + sign * half) for sign in (-1, 1))
    assert lines["XnIDR - FC"] == (f"+5.50 [{low:+.2f}, {high:+.2f}]", "")
    assert lines["both xnorized - DR"] == ("", "-25.00")
    assert lines["XnODR - DR"] == ("", "")
    assert "claims" not in tables_of(spread_rows(fc=[0.9]))


def test_the_tuning_table_shows_validation_only() -> None:
    rows = [
        a_row(
            experiment="choice",
            variant=f"{head}-{rate}",
            accuracy=None,
            validation=value,
            config=Config(data="mnist", head=head, lr=rate),
        )
        for head, rate, value in [
            *(("fc", 0.1, 0.5), ("fc", 0.01, 0.75), ("dr", 0.01, 0.25)),
        ]
    ]
    table = tables_of(rows)["tuning"]
    assert table.columns == ("data, network", "head", "0.01", "0.1")
    assert list(table.rows) == [
        ("MNIST, convnet", "fc", "75.00", "50.00"),
        ("MNIST, convnet", "dr", "25.00", None),
        ("MNIST, convnet", "mean", "50.00", None),
    ]
    assert list(tables_of(rows)) == ["tuning", "computing"]


def test_other_choices_have_tables_of_their_own() -> None:
    rows = [
        a_row(accuracy=None, variant=f"ema-{ema}", validation=0.5 + ema / 4, config=Config(ema=ema))
        for ema in (0.0, 0.5)
    ]
    table = tables_of(rows)["mine"]
    assert [(line[0], line[3]) for line in table.rows] == [
        ("ema-0.0", "50.00"),
        ("ema-0.5", "62.50"),
    ]


def block_of(table: Table) -> str:
    return f"{table.title}:\n\n{table.to_markdown()}"


def test_blocks_are_filled_and_nothing_else_is_touched() -> None:
    tables = tables_of([a_row()])
    text = "a\n<!-- table: mine -->\nold\n<!-- end -->\nb\n<!-- table: bench -->\nx\n<!-- end -->\n"
    text += "<!-- table: later -->\n<!-- end -->\n"
    filled = fill_in(text, tables)
    assert filled == text.replace("old", block_of(tables["mine"]))
    assert fill_in(filled, tables) == filled
    with pytest.raises(InputError, match=r"^results: table must be one of mine, .*got 'later'\.$"):
        fill_in(filled.replace("later -->", "later -->\nold"), tables)


@pytest.mark.parametrize(
    "text",
    [
        "<!-- table: mine -->\nold",
        "<!-- table: mine -->\nold\nprose\n<!-- table: other -->\nkeep\n<!-- end -->\n",
    ],
)
def test_a_block_without_an_end_is_refused(text: str) -> None:
    """What follows might be prose."""
    with pytest.raises(InputError) as caught:
        fill_in(text, tables_of([a_row()]))
    assert str(caught.value) == "results: table mine must end in <!-- end -->; got no end."


def test_every_block_of_a_name_is_filled_with_the_document_s_own_line_ends() -> None:
    tables = tables_of([a_row()])
    block = "<!-- table: mine -->\n<!-- end -->\n"
    table = f"<!-- table: mine -->\n{block_of(tables['mine'])}\n<!-- end -->\n"
    assert fill_in(f"a\n{block}b\n{block}", tables) == f"a\n{table}b\n{table}"
    assert fill_in(block.replace(" -->\n", " --> \n", 1), tables) == table
    windows = f"a\n{block}".replace("\n", "\r\n")
    assert fill_in(windows, tables) == f"a\n{table}".replace("\n", "\r\n")


def test_none_right_is_a_figure() -> None:
    rows = [a_row(seed=s, accuracy=0.0, per_digit=v, top2=0.0) for s, v in enumerate((0.0, 0.5))]
    table = table_of(rows, "mine")
    line = dict(zip(table.columns, table.rows[0], strict=True))
    assert (line["per digit"], line["top-2"]) == ("25.00 ± 35.36", "0.00 ± 0.00")


def test_pictures_depend_on_the_rows_alone() -> None:
    rows = [
        a_row(variant=head, seed=seed, accuracy=0.9 + 0.01 * seed, curve=(0.5, 0.8 + 0.05 * seed))
        for head in ("fc", "xnidr")
        for seed in (0, 1)
    ]
    latencies = {("mine", "fc", 1): 3.5, ("mine", "xnidr", 1): 12.0}
    first, second = draw_all(rows, latencies), draw_all(rows, latencies)
    assert first == second
    assert set(first) == {"parameters.svg", "latency.svg", "minutes.svg", "curves.svg"}
    for picture in first.values():
        assert picture.startswith(b"<?xml")
        for head in (b"fc", b"xnidr"):
            assert b">" + head + b"<" in picture
    # A curve that is shorter, or has no error, draws all the same.
    draw_all([*rows, a_row(variant="fc", seed=2, accuracy=1.0, curve=(1.0,))], latencies)
    # A head that was not timed is left out of that picture, and of no other.
    fewer = draw_all(rows, {("mine", "fc", 1): 3.5})
    assert b">xnidr<" not in fewer["latency.svg"]
    assert b">xnidr<" in fewer["curves.svg"]


def test_marks_lie_inside_their_panel_and_side_by_side() -> None:
    rows = [
        a_row(variant=head, seed=seed, accuracy=0.9 + 0.01 * seed, params=params)
        for head, params in (("fc", 100), ("dr", 300), ("xnodr", 300), ("xnidr", 300))
        for seed in (0, 1)
    ]
    figure = plots._scatter(rows, "parameters", lambda row: row.params)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    marks = [
        line.get_transform().transform(np.column_stack(line.get_data()).astype(float))
        for line in (container.lines[0] for container in axes.containers)
    ]
    across, up = np.concatenate(marks).T
    box = axes.get_window_extent()
    assert box.x0 < across.min() < across.max() < box.x1
    assert box.y0 < up.min() <= up.max() < box.y1
    step = plots.ASIDE * figure.dpi / 72
    assert np.diff(across[1:]) == pytest.approx([step, step])
    exactly, _ = axes.transData.transform((300, 90.5))
    assert across[1] == pytest.approx(exactly)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, page = tmp_path / "results", tmp_path / "page.md"
    assert main(["results", "--results", str(results)]) == 1
    assert capsys.readouterr().err == (
        f"xncaps: {results}: holds no rows of experiments. Run one of recipes/ first.\n"
    )
    append_row(results, a_row(variant="fc"))
    words = ["results", "--results", str(results)]
    assert main([*words, "--table", "mine", "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)
    assert table["rows"][0]["accuracy"] == "50.00"
    assert main([*words, "--table", "yours"]) == 2
    assert "table must be one of mine, computing; got 'yours'" in capsys.readouterr().err
    page.write_text("<!-- table: mine -->\n<!-- end -->\n")
    assert main([*words, "--update", str(page)]) == 0
    assert "| fc | margin |" in page.read_text()
    assert main([*words, "--update", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{page}: nothing has changed"
    assert main([*words, "--plots", str(tmp_path / "plots")]) == 0
    assert len(list((tmp_path / "plots").iterdir())) == 4
    assert main([*words, "--update", str(tmp_path / "none.md")]) == 1
    page.write_bytes(b"\xff")
    assert main([*words, "--update", str(page)]) == 1
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith(f"xncaps: {page}: cannot be read as UTF-8")
    )
    assert main([*words, "--update", str(page), "--json"]) == 2
    assert capsys.readouterr().err == (
        "xncaps: results: update and plots must stand alone; got also something to print.\n"
    )


def test_the_paper_has_our_figures_beside_its_own() -> None:
    config = {"model": "mobilenetv2", "head": "xnidr", "data": "mnist"}
    rows = [
        a_row(experiment=name, seed=seed, accuracy=value, config=Config(**config, seed=seed))
        for name, seed, value in [
            *(("mobilenetv2", 0, 0.98), ("mobilenetv2", 1, 0.99), ("mnist-ablations", 0, 0.5)),
        ]
    ]
    pair = Config(model="convnet", head="fc", data="multimnist")
    rows.append(a_row(experiment="multimnist", accuracy=0.8, top2=0.95, config=pair))
    table = {row["method"]: row for row in paper_tables("accuracy", rows)[0].as_dict()["rows"]}
    assert table["MobileNetV2_XnIDR"]["MNIST measured"] == "98.50 ± 0.71"
    assert table["MobileNetV2_XnIDR"]["CIFAR-10 measured"] is None
    assert table["ours: convnet, fc"]["MultiMNIST measured"] == "95.00"
    dr = paper_tables("ablation-dr", rows)[0].as_dict()["rows"]
    assert all(row["ours"] is None for row in dr if row["quantity"] == "accuracy")


def test_heads_are_timed_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of each experiment every head, at each batch; nothing of runs that chose settings."""
    for head in ("linear", "fc", "xnidr"):
        config = Config(head=head, attach="features", options={"width": 0.25})
        append_row(tmp_path, a_row(variant=head, config=config))
    append_row(tmp_path, a_row(experiment="choice", accuracy=None))
    before = torch.get_num_threads()
    words = ["bench", "heads", "--results", str(tmp_path), "--seconds", "0.01"]
    assert main([*words, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [row["variant"] for row in table["rows"]] == ["linear", "fc", "xnidr"]
    assert all(0 < row[f"batch {batch}"] < 1e6 for row in table["rows"] for batch in (1, 32))
    assert torch.get_num_threads() == before
    found = read_latencies(tmp_path)
    assert set(found) == {("mine", h, b) for h in ("linear", "fc", "xnidr") for b in (1, 32)}
    # The newest figure counts.
    append_latencies(tmp_path, [Latency("mine", "fc", 1, 12.5)])
    assert read_latencies(tmp_path)["mine", "fc", 1] == 12.5
    assert read_latencies(tmp_path / "none") == {}
    assert main(["bench", "heads", "--results", str(tmp_path / "none")]) == 1
    assert "holds no rows of experiments" in capsys.readouterr().err
