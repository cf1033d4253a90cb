"""The heads on CIFAR-10 with one and the same loss.

Claim under test: what sets the heads apart in the CIFAR-10 experiment is the head and not its
loss. Here all have the margin loss; on logits it takes their sigmoid.
"""

from xncaps.cli.experiment import run
from xncaps.experiments import Experiment

HEADS = ("linear", "fc", "dr", "xnodr", "xnidr")

EXPERIMENT = Experiment(
    name="cifar10-one-loss",
    base={
        "data": "cifar10",
        "model": "convnet",
        "attach": "features",
        "options": {"width": 1.5},
        "epochs": 5,
        "lr": 1e-2,
        "augment": {"crop": 2, "flip": True},
        "loss": "margin",
    },
    variants={head: {"head": head} for head in HEADS},
    seeds=3,
)

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
