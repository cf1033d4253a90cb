"""What helps a small network to few errors on MNIST, chosen on held-out training images.

For the record: at most 160,000 parameters, an xnorized head, and many epochs. Here a quarter of
them, one seed for each choice.
"""

from xncaps.cli.experiment import run
from xncaps.experiments import Experiment

MOVED = {"shift": 2.0, "rotate": 10.0, "scale": 0.1}

EXPERIMENT = Experiment(
    name="tuning-record-mnist",
    base={
        "data": "mnist",
        "model": "convnet",
        "head": "xnidr",
        "attach": "features",
        "options": {"width": 1.2, "caps_in": 16},
        "epochs": 12,
        "lr": 1e-2,
        "ema": 0.998,
        "augment": {**MOVED, "bend": 3.0},
    },
    variants={
        "bend": {},
        "no-bend": {"augment": MOVED},
        "far": {"augment": {"shift": 4.0, "rotate": 20.0, "scale": 0.1}},
        "xnodr": {"head": "xnodr"},
        "widenet": {"model": "widenet", "options": {"width": 0.25, "caps_in": 16}},
    },
    seeds=1,
    tuning=True,
)

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
