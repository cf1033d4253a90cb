"""Recipes, rows and the Makefile go together, and what was chosen is what tuning says."""

import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from xncaps.experiments import Experiment, read_accuracy

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.py"))
ROWS = read_accuracy(ROOT / "results")


def experiment_of(path: Path) -> Experiment:
    found = runpy.run_path(str(path))["EXPERIMENT"]
    assert isinstance(found, Experiment)
    return found


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_states_its_claim_and_its_rows_are_its_own(path: Path) -> None:
    experiment = experiment_of(path)
    text = path.read_text(encoding="utf-8")
    assert experiment.name == path.stem.replace("_", "-")
    assert experiment.tuning == path.stem.startswith("tuning")
    assert text.startswith('"""')
    assert experiment.tuning or "laim" in text.partition('"""\n\n')[0]
    planned = {run.key: run.config for run in experiment.runs()}
    for config in planned.values():
        held = config.validation
        if held is None:
            held = min(5000, (config.train_count or 50_000) // 10)
        # Records learn from all images, with settings that were chosen before.
        assert config.data == "sample" or held == (0 if path.stem.startswith("record") else 5000)
    for row in ROWS:
        if row.experiment == experiment.name:
            assert planned[row.key] == row.config, row.key
            assert (row.accuracy is None) == experiment.tuning
            assert not row.commit.endswith("-dirty")


@pytest.mark.parametrize("name", ["mnist", "multimnist", "cifar10", "mobilenetv2", "resnet50"])
def test_the_rate_is_the_one_that_tuning_chose(name: str) -> None:
    """The best mean over the heads, and of rates within 0.1 points of it the smallest."""
    tuning = experiment_of(ROOT / "recipes" / f"tuning_{name}.py")
    found = {row.variant: row.validation for row in ROWS if row.experiment == tuning.name}
    if set(found) < set(tuning.variants):  # not all of it has been run yet
        assert not [row for row in ROWS if row.experiment == name and row.seed > 0]
        return
    means: dict[float, list[float]] = {}
    for variant in tuning.variants:
        means.setdefault(tuning.config(variant, 0).lr, []).append(found[variant] or 0.0)
    best = max(map(fmean, means.values()))
    chosen = min(rate for rate, values in means.items() if fmean(values) >= best - 0.001)
    for path in (ROOT / "recipes").glob(f"{name}*.py"):
        experiment = experiment_of(path)
        for variant in experiment.variants:  # another rate stands in the name
            assert experiment.config(variant, 0).lr == float(variant.partition("-lr-")[2] or chosen)


def test_own_rates_are_those_that_suit_each_head() -> None:
    """Capsule heads go by xnidr; all else is as in the experiment with one rate."""
    experiment = experiment_of(ROOT / "recipes" / "own_rates_multimnist.py")
    tuned = [row for row in ROWS if row.experiment == "tuning-multimnist"]
    shared = experiment_of(ROOT / "recipes" / "multimnist.py")
    for variant in experiment.variants:
        head = variant if variant == "fc" else "xnidr"
        found = {row.config.lr: row.validation or 0.0 for row in tuned if row.config.head == head}
        best = max(found.values())
        config = experiment.config(variant, 0)
        assert config.lr == min(rate for rate, value in found.items() if value >= best - 0.001)
        assert replace(config, lr=1.0) == replace(shared.config(variant, 0), lr=1.0)


def test_the_makefile_knows_every_recipe() -> None:
    words = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    lists = [line.partition(":=")[2] for line in words if line.startswith(("CAMPAIGN", "RECORDS"))]
    known = re.sub(r"\$\(addprefix (\w+),([\w ]+)\)", prefixed, " ".join(lists)).split()
    assert sorted(known) == sorted(path.stem for path in RECIPES)


def prefixed(match: re.Match[str]) -> str:
    return " ".join(match[1] + name for name in match[2].split())


def test_every_row_has_a_recipe() -> None:
    names = {experiment_of(path).name for path in RECIPES}
    assert {row.experiment for row in ROWS} <= names


@pytest.mark.slow
def test_the_row_that_readers_train_again_comes_out_again() -> None:
    """As ``make reproduce-quick``; on another kind of machine whatever comes out is taken."""
    command = [sys.executable, "recipes/sample.py", "--only", "xnidr", "--seeds", "0", "--again"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
