"""The learning rate of the ResNet-50 experiment, chosen on held-out training images.

One rate for all heads: the one with the best mean, and of rates within 0.1 points of it the
smallest. The test images have no say.
"""

from xncaps.cli.experiment import run
from xncaps.experiments import Experiment, by_head

EXPERIMENT = Experiment(
    name="tuning-resnet50",
    base={
        "data": "mnist",
        "train_count": 15_000,
        "validation": 5_000,
        "model": "resnet50",
        "attach": "features",
        "epochs": 2,
        "batch_size": 64,
        "augment": {"shift": 2.0, "rotate": 10.0, "scale": 0.1},
    },
    variants={
        f"{head}-{rate}": {**settings, "lr": rate}
        for rate in (1e-3, 3e-3)
        for head, settings in by_head("fc", "xnidr").items()
    },
    seeds=1,
    tuning=True,
)

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
