"""Small training runs in processes of their own, so that they can be killed."""

import json
import multiprocessing
import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from xncaps.training import Config

# Forked from a process that has imported everything: a child starts in milliseconds.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["xncaps.training.train", "xncaps.cli.main", "xncaps.experiments.campaign"]
)

TIMES = ("images_per_second", "seconds")


def small(**changes: Any) -> Config:
    """A run of a second or two, with everything in it that has a state."""
    values = {
        "data": "sample",
        "train_count": 300,
        "model": "convnet",
        "head": "xnodr",
        "options": {"width": 0.25, "caps_in": 8},
        "epochs": 5,
        "batch_size": 32,
        "augment": {"shift": 2, "rotate": 10, "cutout": 4},
    }
    return Config.from_dict({**values, **changes})


def flags(config: Config) -> list[str]:
    """The command line that says the same."""
    words = []
    for name, value in config.to_dict().items():
        if name == "augment":
            texts = [f"{key}={json.dumps(item)}" for key, item in value.items()]
            words += ["--augment", ",".join(texts)]
        elif name == "options":
            words += [f"--set={key}={json.dumps(item)}" for key, item in value.items()]
        elif value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            words += [f"--set={name}={json.dumps(text) if isinstance(value, str) else text}"]
    return words


def command(config: Config | None, *more: object) -> list[str]:
    """Arguments of ``xncaps`` that train this configuration."""
    return ["train", *(flags(config) if config else []), *map(str, more)]


def _child(args: list[str], log: str) -> None:
    with Path(log).open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    from xncaps.cli.main import main

    sys.exit(main(args))


def start(args: list[str], log: Path) -> BaseProcess:
    """Start ``xncaps`` with these arguments; what it prints goes to the end of ``log``."""
    process = FORKS.Process(target=_child, args=(args, str(log)))
    process.start()
    return process


def run(args: list[str], log: Path) -> int:
    """Run ``xncaps`` to its end; returns its exit code."""
    process = start(args, log)
    process.join()
    return process.exitcode or 0


def rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without what a clock measured."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()
