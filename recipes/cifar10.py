"""The heads on CIFAR-10, under one protocol.

Claim under test: XnODR and XnIDR heads are better than the fully connected layers they replace
(the paper, with MobileNetV2: 96.05% and 96.14% against 95.39%, where the capsule heads alone had
augmented images). A comparison, not a record: a small network and few epochs.
"""

from xncaps.cli.experiment import run
from xncaps.experiments import Experiment, by_head

EXPERIMENT = Experiment(
    name="cifar10",
    base={
        "data": "cifar10",
        "model": "convnet",
        "attach": "features",
        "options": {"width": 1.5},
        "epochs": 5,
        "lr": 1e-2,
        "augment": {"crop": 2, "flip": True},
    },
    variants=by_head("linear", "fc", "dr", "xnodr", "xnidr"),
    seeds=3,
)

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
