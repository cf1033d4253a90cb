"""Training: configuration, the loop, checkpoints, evaluation, reports.

``xncaps.training.loop.train`` is the loop; it needs the ``train`` extra. What is needed to use a
trained network (``load_run``) works without.
"""

from xncaps.training.config import Config
from xncaps.training.recipes import RECIPES, recipe
from xncaps.training.run import Run, load_run

__all__ = ["RECIPES", "Config", "Run", "load_run", "recipe"]
