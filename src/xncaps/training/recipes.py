"""Named recipes: the paper's, and quick ones for a laptop."""

from typing import Any

from xncaps.errors import look_up

# Section 4.3 of the paper. It does not say the batch size (ours is 128), nor what the augmentation
# of CIFAR-10 is (the released code: rotation by 20 degrees, shifts by a tenth, mirroring).
_PAPER: dict[str, Any] = {
    "model": "mobilenetv2",
    "head": "xnidr",
    "loss": "margin",
    "optimizer": "adam",
    "schedule": "triangular2",
    "lr": 1e-3,
    "min_lr": 1e-9,
    "step_size": 6000,
    "batch_size": 128,
}
_QUICK: dict[str, Any] = {"model": "convnet", "head": "xnidr", "attach": "features"}
_DIGITS = {"shift": 2.0, "rotate": 10.0, "scale": 0.1}

RECIPES: dict[str, dict[str, Any]] = {
    "paper-mnist": {**_PAPER, "data": "mnist", "epochs": 30},
    "paper-cifar10": {
        **_PAPER,
        "data": "cifar10",
        "epochs": 80,
        "augment": {"rotate": 20.0, "shift": 3.2, "flip": True},
    },
    "paper-multimnist": {**_PAPER, "data": "multimnist", "epochs": 20},
    "quick": {**_QUICK, "data": "sample", "epochs": 20, "augment": _DIGITS},
    "quick-mnist": {**_QUICK, "data": "mnist", "epochs": 5, "augment": _DIGITS},
    "quick-cifar10": {
        **_QUICK,
        "data": "cifar10",
        "epochs": 10,
        "options": {"width": 2.0},
        "augment": {"crop": 2, "flip": True},
    },
    "quick-multimnist": {
        **_QUICK,
        "data": "multimnist",
        "train_count": 60_000,
        "epochs": 5,
        "options": {"width": 2.0},
    },
}


def recipe(name: str, model: str | None = None) -> dict[str, Any]:
    """The settings of a recipe, to be changed at will before a ``Config`` is made of them.

    Args:
        name: of the recipe.
        model: the network, if another one is wanted; options of the recipe's own are left out.
    """
    settings = dict(look_up("train", "recipe", name, RECIPES))
    if model is not None and model != settings["model"]:
        settings.pop("options", None)
        settings["model"] = model
    return settings
