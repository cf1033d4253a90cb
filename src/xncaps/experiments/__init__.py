"""Experiments: runs under one protocol, their rows, and what the rows say."""

from xncaps.experiments.experiment import Experiment, Planned, by_head
from xncaps.experiments.rows import Row, known_rows, read_accuracy

__all__ = ["Experiment", "Planned", "Row", "by_head", "known_rows", "read_accuracy"]
