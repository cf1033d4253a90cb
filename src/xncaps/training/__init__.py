"""Training: configuration, the loop, checkpoints, evaluation, reports.

``xncaps.training.train.train`` runs it; that needs the ``train`` extra. What is needed to use a
trained network (``load_run``) works without.
"""

from importlib.util import find_spec

from xncaps.errors import RunError
from xncaps.training.config import Config
from xncaps.training.recipes import RECIPES, recipe
from xncaps.training.run import Run, load_run

__all__ = ["RECIPES", "Config", "Run", "check_extra", "load_run", "recipe"]

NEEDED = ("lightning_fabric", "matplotlib", "tensorboard")


def check_extra() -> None:
    """Refuse to go on without what the loop needs."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise RunError(
            f"training needs {', '.join(missing)}: in the folder of xncaps, "
            "pip install -c constraints.txt '.[train]'."
        )
