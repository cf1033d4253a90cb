"""What the parts of a capsule head do, on MNIST: one seed each, half the epochs of the main table.

Claims under test: the binarizer of the paper's text (midrange) or a better gradient (approxsign)
or learned scales change what xnorizing costs; three iterations are the right number; 8 and 16 are
the right sizes of capsules; a routing bias helps; the gradient through the iterations matters.
"""

from collections.abc import Sequence
from typing import Any

from xncaps.cli.experiment import run
from xncaps.experiments import Experiment

XNORIZED = ("xnodr", "xnidr")
HEADS = ("dr", *XNORIZED)


def changed(heads: Sequence[str], what: str, **options: Any) -> dict[str, dict[str, Any]]:
    """These heads with other options, and what is said of them in their names."""
    return {f"{head}-{what}": {"head": head, "options": options} for head in heads}


EXPERIMENT = Experiment(
    name="mnist-ablations",
    base={
        "data": "mnist",
        "model": "convnet",
        "attach": "features",
        "epochs": 4,
        "lr": 1e-2,
        "augment": {"shift": 2.0, "rotate": 10.0, "scale": 0.1},
    },
    variants={
        **{head: {"head": head} for head in HEADS},
        **changed(XNORIZED, "midrange", binarizer="midrange"),
        # Added when xnodr-midrange had fallen apart in its second epoch.
        "xnodr-midrange-lr-0.003": {
            "head": "xnodr",
            "options": {"binarizer": "midrange"},
            "lr": 3e-3,
        },
        **changed(XNORIZED, "approxsign", binarizer="approxsign"),
        **changed(XNORIZED, "learned-scale", scale="learned"),
        **changed(HEADS, "1-iteration", iterations=1),
        **changed(HEADS, "2-iterations", iterations=2),
        **changed(HEADS, "4-iterations", iterations=4),
        **changed(HEADS, "5-iterations", iterations=5),
        **changed(["xnidr"], "16-capsules", caps_in=16),
        **changed(["xnidr"], "64-capsules", caps_in=64),
        **changed(["xnidr"], "4-to-8", dim_in=4, dim_out=8),
        **changed(["xnidr"], "8-to-8", dim_out=8),
        **changed(["xnidr"], "8-to-32", dim_out=32),
        **changed(["xnidr"], "16-to-16", dim_in=16),
        **changed(HEADS, "bias", routing_bias=True),
        **changed(HEADS, "detached", detach_routing=True),
    },
    seeds=1,
)

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
