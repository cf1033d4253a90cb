"""``train``: from a configuration to a folder with all there is to know about a run."""

import json
import os
import shlex
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from xncaps import kernels
from xncaps.data import facts_of, load_data
from xncaps.errors import InputError, message
from xncaps.system import write_whole
from xncaps.training.config import Config, differences
from xncaps.training.display import Display
from xncaps.training.finish import Result, read_result
from xncaps.training.log import Log
from xncaps.training.loop import Loop, began_otherwise, share_result
from xncaps.training.processes import (
    check_same,
    note_begun,
    only_writer,
    start_fabric,
    told_in_a_line,
    was_begun,
)
from xncaps.training.run import Folder, read_config, read_facts
from xncaps.training.stopping import StopRequests

SAVE_SECONDS = 60.0


def train(
    config: Config,
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    data_dir: str | os.PathLike[str] | None = None,
    display: Display | None = None,
    save_seconds: float = SAVE_SECONDS,
    stops: StopRequests | None = None,
    go_on: str | None = None,
    exact: bool = False,
    test: bool = True,
) -> Result:
    """Train a network and leave a folder with all there is to know about it.

    Args:
        config: what to train on what, and how.
        out: the folder; it must be new, unless the run in it is to go on.
        resume: go on with the run in ``out`` from its newest checkpoint. A process that torchrun
            has started again does so by itself.
        data_dir: a folder to look for data in first.
        display: told how the run goes.
        save_seconds: a checkpoint is written at the end of each epoch, and after so many seconds.
        stops: notes that the process is asked to end; the run's own if not given.
        go_on: the command that goes on with this run, named when it stops.
        exact: refuse to go on with another processor, kernel, or number of threads or processes
            than it began with, which change the last digits.
        test: judge the network on the test images at the end; a run that chooses settings must not.

    Returns:
        Where the run lies, and how the network did on the test images.
    """
    folder = Folder(Path(out))
    fabric = start_fabric(config.precision)
    go_on = go_on or how_to_go_on(folder.path, data_dir)
    display = display if display is not None and fabric.is_global_zero else Display()
    with ExitStack() as stack:
        stack.enter_context(told_in_a_line(fabric))
        stack.callback(display.end)
        kernels.selected()  # or one that cannot be used is told of before there is a folder
        if fabric.is_global_zero:
            resume = check_folder(folder, config, resume)
        ended = read_result(folder) if fabric.is_global_zero and resume else None
        result = share_result(fabric, folder, ended)
        if result is not None:
            display.say(f"{folder.path}: this run has ended; nothing is left to do.")
            return result
        with fabric.rank_zero_first(local=True):
            data = load_data(
                config.data,
                data_dir=data_dir,
                image_size=config.image_size,
                train_count=config.train_count,
                validation=config.validation,
                skip_unreadable=config.skip_unreadable,
                progress=display.progress,
                say=display.say,
            )
        if not test:
            data = replace(data, test=data.test.take(torch.arange(0)))
        facts = facts_of(data)
        check_same(fabric, "the data", json.dumps(facts.fingerprint))
        loop = Loop(config, data, facts, folder, fabric, display, go_on)
        if fabric.is_global_zero:
            folder.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(only_writer(folder.lock))
            if folder.data.exists() and read_facts(folder).fingerprint != facts.fingerprint:
                changed = differences(read_facts(folder).fingerprint, facts.fingerprint)
                raise began_otherwise(folder, [f"data: {facts.name} has changed", *changed])
        loop.take_up(exact)
        if fabric.is_global_zero:
            write_whole(folder.config, config.to_json().encode())
            write_whole(folder.data, facts.to_json().encode())
            loop.log = stack.enter_context(Log(folder, loop.state.step))
        stops = stops or stack.enter_context(StopRequests())
        with loop.unwritable():
            loop.run(stops, save_seconds)
            return loop.finish()


def how_to_go_on(path: Path, data_dir: str | os.PathLike[str] | None) -> str:
    """The command that goes on with a run, for people to copy."""
    launch = "torchrun (as before) -m xncaps" if "TORCHELASTIC_RUN_ID" in os.environ else "xncaps"
    where = "" if data_dir is None else f" --data-dir {shlex.quote(str(data_dir))}"
    return f"{launch} train --resume {shlex.quote(str(path))}{where}"


def check_folder(folder: Folder, config: Config, resume: bool) -> bool:
    """Make sure that the folder is new, or that the run in it is this one and is to go on.

    Returns whether it is to go on: as asked, or because torchrun has started this job again.
    """
    if folder.path.is_dir():
        used = any(not path.name.startswith(".") for path in folder.path.iterdir())
    else:
        used = folder.path.exists()
    resume = resume or was_begun(folder.path)
    if used and not resume:
        hint = (
            f"Go on with it by --resume {shlex.quote(str(folder.path))}, or choose another --out."
        )
        got = f"{str(folder.path)!r}, which exists"
        raise InputError(message("train", "out", "be a new folder", got, hint))
    if used:
        lines = differences(read_config(folder).to_dict(), config.to_dict())
        if lines:
            raise began_otherwise(folder, lines)
    note_begun(folder.path)
    return resume
