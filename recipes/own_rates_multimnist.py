"""The heads on MultiMNIST, each with the learning rate that suits it.

Claim under test: that of the MultiMNIST experiment, where one rate for all might favour a head. By
the rates' table fc is best at 0.01, as there, and xnidr at 0.03, which all capsule heads get here.
"""

from xncaps.cli.experiment import run
from xncaps.experiments import Experiment, by_head

EXPERIMENT = Experiment(
    name="own-rates-multimnist",
    base={
        "data": "multimnist",
        "train_count": 65_000,
        "model": "convnet",
        "attach": "features",
        "epochs": 5,
    },
    variants={**by_head("fc", lr=1e-2), **by_head("dr", "xnodr", "xnidr", lr=3e-2)},
    seeds=3,
)

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
