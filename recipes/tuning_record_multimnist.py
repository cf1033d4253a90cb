"""What learns to tell two digits apart fastest, chosen on held-out training images.

For the record: a million images of two digits. Here an eighth of them, seen once, one seed for each
choice; a network of half the width sees three times as many, in about the same time.
"""

from xncaps.cli.experiment import run
from xncaps.experiments import Experiment

EXPERIMENT = Experiment(
    name="tuning-record-multimnist",
    base={
        "data": "multimnist",
        "train_count": 125_000,
        "model": "widenet",
        "head": "xnidr",
        "attach": "features",
        "epochs": 1,
        "lr": 1e-2,
        "ema": 0.99,
        "precision": "bf16",
    },
    variants={
        "widenet-margin": {},
        "widenet-cross-entropy": {"loss": "cross_entropy"},
        "half-width-margin": {"train_count": 365_000, "options": {"width": 0.5}},
        "convnet-margin": {"model": "convnet", "options": {"width": 2.0}},
    },
    seeds=1,
    tuning=True,
)

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
