"""MobileNetV2 on MNIST, each head with the learning rate that suits it.

Claim under test: that of the MobileNetV2 experiment, where one rate for all might favour a head. By
the rates' table fc is best at 0.003 and xnidr at 0.03, which xnodr gets as well.
"""

from xncaps.cli.experiment import run
from xncaps.experiments import Experiment, by_head

EXPERIMENT = Experiment(
    name="own-rates-mobilenetv2",
    base={
        "data": "mnist",
        "train_count": 35_000,
        "validation": 5_000,
        "model": "mobilenetv2",
        "attach": "features",
        "epochs": 2,
        "augment": {"shift": 2.0, "rotate": 10.0, "scale": 0.1},
    },
    variants={**by_head("fc", lr=3e-3), **by_head("xnodr", "xnidr", lr=3e-2)},
    seeds=3,
)

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
