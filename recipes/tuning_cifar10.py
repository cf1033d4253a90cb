"""The learning rate of the CIFAR-10 experiment, chosen on held-out training images.

One rate for all heads: the one with the best mean, and of rates within 0.1 points of it the
smallest. The test images have no say.
"""

from xncaps.cli.experiment import run
from xncaps.experiments import Experiment, by_head

EXPERIMENT = Experiment(
    name="tuning-cifar10",
    base={
        "data": "cifar10",
        "model": "convnet",
        "attach": "features",
        "options": {"width": 1.5},
        "epochs": 2,
        "augment": {"crop": 2, "flip": True},
    },
    variants={
        f"{head}-{rate}": {**settings, "lr": rate}
        for rate in (1e-3, 3e-3, 1e-2, 3e-2)
        for head, settings in by_head("fc", "xnidr").items()
    },
    seeds=1,
    tuning=True,
)

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
