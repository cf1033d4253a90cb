"""All heads on the digits that come with the package: small, and anyone can run it.

Claim under test: on the same features, with the same data, schedule and seeds, a capsule head is
better than the fully connected layers it replaces. 5,000 digits are few, so the figures say
little of MNIST; they show the protocol, and each takes a good minute on one core.
"""

from xncaps.cli.experiment import run
from xncaps.experiments import Experiment, by_head

EXPERIMENT = Experiment(
    name="sample",
    base={
        "data": "sample",
        "model": "convnet",
        "attach": "features",
        "epochs": 20,
        "augment": {"shift": 2.0, "rotate": 10.0, "scale": 0.1},
    },
    variants=by_head("linear", "fc", "dr", "xnodr", "xnidr", "xnboth"),
    seeds=3,
)

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
