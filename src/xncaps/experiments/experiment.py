"""What an experiment is: runs that differ in what is asked about, and in nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xncaps.errors import InputError, check_choice, check_size, message
from xncaps.training import Config

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
            training images then, and what the test images say is not kept.

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

    def __post_init__(self) -> None:
        where = f"experiment {self.name}"
        for variant in (*self.variants, *self.more_seeds):
            check_choice(where, "variant", variant, tuple(self.variants))
            check_size(where, "seeds", self.seeds_of(variant))
        self.runs()  # a wrong setting is found before anything is trained

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
        runs = [
            run
            for run in self.runs()
            if (variants is None or run.variant in variants)
            and (seeds is None or run.seed in seeds)
        ]
        if not runs:
            got = ", ".join(map(str, seeds or []))
            raise InputError(message(self.name, "seeds", "be among those of the experiment", got))
        return runs
