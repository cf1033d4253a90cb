"""Training: configuration, the loop, checkpoints, evaluation, reports."""
