"""All heads on MNIST, under one protocol.

Claim under test: XnODR and XnIDR heads are better than the fully connected layers they replace
(the paper, with MobileNetV2: 99.73% and 99.74% against 99.61%), and plain dynamic routing is not
(99.57%). Also: with both projections xnorized, a network "predicts awfully".
"""

from xncaps.cli.experiment import run
from xncaps.experiments import Experiment, by_head

EXPERIMENT = Experiment(
    name="mnist",
    base={
        "data": "mnist",
        "model": "convnet",
        "attach": "features",
        "epochs": 8,
        "lr": 1e-2,
        "augment": {"shift": 2.0, "rotate": 10.0, "scale": 0.1},
    },
    variants=by_head("linear", "fc", "dr", "xnodr", "xnidr", "xnboth"),
    seeds=5,
    more_seeds={"linear": 3, "xnboth": 3},
)

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
