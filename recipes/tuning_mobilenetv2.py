"""The learning rate of the MobileNetV2 experiment, chosen on held-out training images.

One rate for all heads: the one with the best mean, and of rates within 0.1 points of it the
smallest. The test images have no say.
"""

from xncaps.cli.experiment import run
from xncaps.experiments import Experiment, by_head

EXPERIMENT = Experiment(
    name="tuning-mobilenetv2",
    base={
        "data": "mnist",
        "train_count": 35_000,
        "validation": 5_000,
        "model": "mobilenetv2",
        "attach": "features",
        "epochs": 2,
        "augment": {"shift": 2.0, "rotate": 10.0, "scale": 0.1},
    },
    variants={
        f"{head}-{rate}": {**settings, "lr": rate}
        for rate in (3e-3, 1e-2, 3e-2)
        for head, settings in by_head("fc", "xnidr").items()
    },
    seeds=1,
    tuning=True,
)

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
