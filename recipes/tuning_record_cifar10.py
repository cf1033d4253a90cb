"""How widenet learns CIFAR-10 fastest with an xnorized head, chosen on held-out training images.

For the record: at most an hour of training on two cores. Here a sixth of the epochs, one seed for
each choice.
"""

from xncaps.cli.experiment import run
from xncaps.experiments import Experiment

EXPERIMENT = Experiment(
    name="tuning-record-cifar10",
    base={
        "data": "cifar10",
        "model": "widenet",
        "head": "xnidr",
        "attach": "features",
        "options": {"mirror": True},
        "epochs": 5,
        "batch_size": 256,
        "optimizer": "adamw",
        "weight_decay": 0.05,
        "lr": 1e-2,
        "ema": 0.99,
        "augment": {"crop": 4, "flip": True},
        "precision": "bf16",
    },
    variants={
        "adamw-margin": {},
        "adamw-cross-entropy": {"loss": "cross_entropy", "smoothing": 0.2},
        "sgd-cross-entropy": {
            "loss": "cross_entropy",
            "smoothing": 0.2,
            "optimizer": "sgd",
            "weight_decay": 5e-4,
            "lr": 0.2,
        },
    },
    seeds=1,
    tuning=True,
)

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
