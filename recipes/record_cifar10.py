"""The record on CIFAR-10: an xnorized capsule head and at most an hour of training on two cores.

Claim under test: 94% of the test images with a single network, from random weights (the ensemble
of DeepCaps has 92.7%, ReCU's ResNet-18 of one bit 92.8%). Settings as chosen on held-out images;
then all 50,000 training images are learnt from.
"""

from xncaps.cli.experiment import run
from xncaps.experiments import Experiment

EXPERIMENT = Experiment(
    name="record-cifar10",
    base={
        "data": "cifar10",
        "validation": 0,
        "model": "widenet",
        "attach": "features",
        "options": {"mirror": True},
        "epochs": 24,
        "batch_size": 256,
        "optimizer": "adamw",
        "weight_decay": 0.05,
        "lr": 1e-2,
        "ema": 0.99,
        "augment": {"crop": 4, "flip": True},
        "precision": "bf16",
    },
    variants={"xnidr": {"head": "xnidr"}},
    seeds=1,
    threads=2,
)

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
