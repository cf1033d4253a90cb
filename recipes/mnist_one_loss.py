"""All heads on MNIST with one and the same loss.

Claim under test: what sets the heads apart in the MNIST experiment is the head and not its loss.
Here all have the margin loss; on logits it takes their sigmoid.
"""

from xncaps.cli.experiment import run
from xncaps.experiments import Experiment

HEADS = ("linear", "fc", "dr", "xnodr", "xnidr", "xnboth")

EXPERIMENT = Experiment(
    name="mnist-one-loss",
    base={
        "data": "mnist",
        "model": "convnet",
        "attach": "features",
        "epochs": 8,
        "lr": 1e-2,
        "augment": {"shift": 2.0, "rotate": 10.0, "scale": 0.1},
        "loss": "margin",
    },
    variants={head: {"head": head} for head in HEADS},
    seeds=3,
)

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
