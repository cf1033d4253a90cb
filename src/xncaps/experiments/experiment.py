"""What an experiment is: runs that differ in what is asked about, and in nothing else."""

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from xncaps.data import DATASETS
from xncaps.errors import (
    InputError,
    InputTypeError,
    brief,
    check_choice,
    check_size,
    message,
)
from xncaps.models import create_model
from xncaps.training import Config

NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""What experiments and variants may be called: both become folders."""
LOSS = {"linear": "cross_entropy", "fc": "cross_entropy"}
"""Of heads that give logits; capsule heads have the margin loss, as in the paper."""


def by_head(*heads: str, **settings: Any) -> dict[str, dict[str, Any]]:
    """Variants that differ in their head, each with the loss it was made for.

    >>> by_head("fc", "xnidr")["fc"]
    {'head': 'fc', 'loss': 'cross_entropy'}
    """
    return {head: {"head": head, "loss": LOSS.get(head, "margin"), **settings} for head in heads}


@dataclass(frozen=True)
class Planned:
    """One run of an experiment."""

    experiment: str
    variant: str
    config: Config

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells it from all others."""
        return self.experiment, self.variant, self.seed

    def __str__(self) -> str:
        return f"{self.experiment}, {self.variant}, seed {self.seed}"


@dataclass(frozen=True)
class Experiment:
    """Variants of a run, each with several seeds.

    Args:
        name: of the experiment; its rows and runs go by it.
        base: the settings that all runs share, as in :class:`xncaps.training.Config`.
        variants: by name, what each sets otherwise; ``options`` are added to those of the base.
        seeds: how many seeds each variant is run with.
        more_seeds: how many, for variants that differ in it.
        tuning: whether the runs choose the settings of others. They are judged on the held-out
            training images then, and do not look at the test images.
        threads: of each run, unless the command says otherwise; they change its last digits.

    >>> heads = Experiment("heads", {"epochs": 2}, {"fc": {"head": "fc"}, "dr": {"head": "dr"}}, 2)
    >>> [str(run) for run in heads.runs()]
    ['heads, fc, seed 0', 'heads, dr, seed 0', 'heads, fc, seed 1', 'heads, dr, seed 1']
    """

    name: str
    base: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]]
    seeds: int = 3
    more_seeds: Mapping[str, int] = field(default_factory=dict)
    tuning: bool = False
    threads: int = 1

    def __post_init__(self) -> None:
        where = f"experiment {self.name}"
        if not self.variants:
            raise InputError(message(where, "variants", "be at least one", "none"))
        for name in (self.name, *self.variants):
            if not NAMES.fullmatch(name):
                requirement = "have a name of letters, digits, dots and dashes"
                raise InputError(message(where, "everything", requirement, brief(name)))
        check_size(where, "threads", self.threads)
        for variant in (*self.variants, *self.more_seeds):
            check_choice(where, "variant", variant, tuple(self.variants))
            check_size(where, "seeds", self.seeds_of(variant))
        for settings in (self.base, *self.variants.values()):
            if "seed" in settings:
                raise InputError(message(where, "seed", "be left to the experiment", "one"))
            if not isinstance(settings.get("options", {}), Mapping):
                got = brief(settings["options"])
                raise InputTypeError(message(where, "options", "be a mapping", got))
        self.runs()  # a wrong setting is found before anything is trained

    def check(self) -> None:
        """Refuse data and networks that there are not, before anything is trained."""
        for variant in self.variants:
            config = self.config(variant, 0)
            kind = config.data.partition(":")[0]
            check_choice(f"experiment {self.name}", "data", kind, tuple(DATASETS))
            options = {"image_size": config.image_size, **config.options}
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                create_model(config.model, config.head, attach=config.attach, **options)

    def seeds_of(self, variant: str) -> int:
        """How many seeds a variant is run with."""
        return self.more_seeds.get(variant, self.seeds)

    def config(self, variant: str, seed: int) -> Config:
        """The configuration of one run."""
        changes = self.variants[variant]
        options = {**self.base.get("options", {}), **changes.get("options", {})}
        return Config.from_dict({**self.base, **changes, "options": options, "seed": seed})

    def runs(self) -> list[Planned]:
        """All runs, seed by seed: wherever it is cut off, the variants have had the same."""
        most = max(map(self.seeds_of, self.variants))
        return [
            Planned(self.name, variant, self.config(variant, seed))
            for seed in range(most)
            for variant in self.variants
            if seed < self.seeds_of(variant)
        ]

    def chosen(self, variants: list[str] | None, seeds: list[int] | None) -> list[Planned]:
        """The runs of these variants and seeds; all if not given."""
        for variant in variants or []:
            check_choice(f"experiment {self.name}", "variant", variant, tuple(self.variants))
        runs = [run for run in self.runs() if variants is None or run.variant in variants]
        known = {run.seed for run in runs}
        for seed in seeds or []:
            if seed not in known:
                where = f"experiment {self.name}"
                raise InputError(message(where, "seeds", f"be from 0 to {max(known)}", seed))
        return [run for run in runs if seeds is None or run.seed in seeds]
