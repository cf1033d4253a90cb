"""The training loop.

A step is a function of the configuration, the data and the step's number, given the weights and the
optimizer's state. So a checkpoint of these, at any step, is enough to go on as if nothing had
happened.
"""

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from lightning_fabric import Fabric
from torch import Tensor

from xncaps import __version__, kernels
from xncaps.data import Batches, Dataset, Facts, Splits
from xncaps.errors import InputError, RunError
from xncaps.evaluation import main_metric, scores_of
from xncaps.metrics import METRICS
from xncaps.system import commit, cpu_name
from xncaps.training.checkpoint import parse_checkpoint, read_checkpoint, save_checkpoint
from xncaps.training.config import Config, differences
from xncaps.training.display import Display, Moment
from xncaps.training.finish import Result, finish
from xncaps.training.log import Log
from xncaps.training.monitors import IMAGES, coupling_entropy, flip_ratios, weight_signs
from xncaps.training.processes import (
    BUSY,
    EMULATED,
    add_up,
    add_up_tensor,
    busy_machine,
    check_same,
    emulates_bf16,
    share_bytes,
    share_tensors,
)
from xncaps.training.run import Folder
from xncaps.training.schedule import make_schedule
from xncaps.training.state import State
from xncaps.training.stopping import StoppedError, StopRequests

LOG_STEPS = 10
SOFT = ("threads:", "processes:", "cpu:", "kernel:")
"""What may be another when a run goes on: it changes the last digits."""


class DivergedError(RunError):
    """The numbers of a run are no longer any."""


class Loop:
    """A run in progress.

    Args:
        config: of the run.
        data, facts: the data, and what is noted of them.
        folder: of the run.
        fabric: the processes.
        display: told how the run goes.
        go_on: the command that goes on with it.
    """

    def __init__(
        self,
        config: Config,
        data: Splits,
        facts: Facts,
        folder: Folder,
        fabric: Fabric,
        display: Display,
        go_on: str,
    ) -> None:
        self.config, self.data, self.facts, self.folder = config, data, facts, folder
        self.fabric, self.display, self.go_on = fabric, display, go_on
        self.preprocess = facts.preprocess(config.image_size)
        self.batches = Batches(
            data.train,
            config.batch_size,
            self.preprocess,
            config.augment,
            seed=config.seed,
            rank=fabric.global_rank,
            world=fabric.world_size,
        )
        self.steps = config.epochs * self.batches.steps
        self.rate = make_schedule(config, self.steps)
        self.hits = METRICS[main_metric(facts.pairs)]
        self.state = State(config, facts, fabric, data.train)
        self.saved_step: int | None = None
        self.log: Log | None = None
        self.commits = [commit()]

    def run(self, stops: StopRequests, save_seconds: float) -> None:
        """Take all steps that are left."""
        state = self.state
        self.display.begin(self.headlines())
        state.model.train()
        begun = saved_at = speed_from = time.perf_counter()
        seconds_before, step_before = state.seconds, state.step
        cpu_before = state.cpu_seconds - time.process_time()
        while state.step < self.steps:
            stop = self.take_step(stops.asked)
            now = time.perf_counter()
            state.seconds = seconds_before + now - begun
            state.cpu_seconds = cpu_before + time.process_time()
            images = (state.step - step_before) * self.batches.batch_size
            speed = images / (now - speed_from)
            self.tell(speed)
            if state.step % self.batches.steps == 0:
                self.end_epoch(speed)
                self.save()
                saved_at = speed_from = time.perf_counter()
                step_before = state.step
            elif stop or now - saved_at > save_seconds:
                self.save()
                saved_at = time.perf_counter()
            if stop and state.step < self.steps:
                raise StoppedError(
                    f"stopped after step {state.step} of {self.steps}, and saved. "
                    f"Go on with: {self.go_on}"
                )

    def take_step(self, stop: bool) -> bool:
        """One step of gradient descent; returns whether any process wants to stop."""
        state, fabric = self.state, self.fabric
        rate = self.rate(state.step)
        for group in state.optimizer.param_groups:
            group["lr"] = rate
        images, labels = self.batches(state.step)
        if self.config.channels_last:
            images = images.to(memory_format=torch.channels_last)
        labels = labels.to(fabric.device)
        loss, scores = state.model(images.to(fabric.device), labels)

        count = len(labels)
        hits = self.hits(scores.detach().float(), labels).sum().item()
        loss_sum, hit_sum, asked = add_up(fabric, [loss.item() * count, hits, float(stop)])
        mean = loss_sum / self.batches.batch_size
        if not math.isfinite(mean):
            self.refuse(f"the loss is {mean}")

        # Each process' part of the batch weighs as much as it has images.
        fabric.backward(loss * (count * fabric.world_size / self.batches.batch_size))
        if self.config.clip is not None:
            fabric.clip_gradients(state.model, state.stepper, max_norm=self.config.clip)
        state.stepper.step()
        state.stepper.zero_grad()
        state.step += 1
        state.loss_sum += loss_sum
        state.hit_sum += hit_sum
        if state.average:
            state.average.update(state.objective.network, state.step)
        if self.log and state.step % LOG_STEPS == 0:
            self.log.step(state.step, loss=mean, lr=rate)
        return asked > 0

    def end_epoch(self, speed: float) -> None:
        """Judge the network on the validation images and write the epoch's row."""
        state, held = self.state, self.data.validation
        share_tensors(self.fabric, state.buffers())
        loss = accuracy = entropy = None
        if len(held):
            scores = self.scores(held)
            with torch.no_grad():
                device = self.fabric.device
                loss = state.objective.of_scores(scores.to(device), held.labels.to(device)).item()
            accuracy = self.hits(scores, held.labels).double().mean().item()
            pixels = self.preprocess(held.images[:IMAGES]).to(self.fabric.device)
            entropy = coupling_entropy(state.network, pixels)
        signs = weight_signs(state.objective.network)
        seen = self.batches.steps * self.batches.batch_size
        row = {
            "epoch": state.step // self.batches.steps,
            "step": state.step,
            "lr": self.rate(state.step - 1),
            "loss": state.loss_sum / seen,
            "accuracy": state.hit_sum / seen,
            "validation_loss": loss,
            "validation_accuracy": accuracy,
            "images_per_second": speed,
            "seconds": state.seconds,
            "coupling_entropy": entropy,
            "flips": flip_ratios(state.signs, signs),
        }
        state.loss_sum = state.hit_sum = 0.0
        state.signs = signs
        if self.log:
            self.log.epoch(row)
        self.display.epoch(row)

    def scores(self, data: Dataset) -> Tensor:
        """The scores of all images of a data set; each process works on its share of them."""
        mine = torch.arange(len(data))[self.fabric.global_rank :: self.fabric.world_size]
        scores = torch.zeros(len(data), len(data.classes))
        if len(mine):
            scores[mine] = scores_of(
                self.state.network,
                data.images[mine],
                self.preprocess,
                self.fabric.device,
                channels_last=self.config.channels_last,
            )
        return add_up_tensor(self.fabric, scores)

    def finish(self) -> Result:
        """Judge the network on the test images, once, and write all that stays of the run."""
        check_same(self.fabric, "the network", self.state.digest())
        scores = self.scores(self.data.test)
        result = None
        if self.fabric.is_global_zero:
            rows = self.log.rows if self.log else []
            result = finish(
                self.folder,
                self.config,
                self.facts,
                self.state,
                self.data.test,
                scores,
                rows,
                {**self.surroundings(), "commit": " ".join(filter(None, self.commits))},
                self.display,
            )
        shared = share_result(self.fabric, self.folder, result)
        if shared is None:
            raise RunError("train: the first process wrote no result.")
        return shared

    def save(self) -> None:
        """Write a checkpoint, if this process is the one that writes."""
        if not self.fabric.is_global_zero:
            return
        more = {"config": self.config.to_dict(), **self.surroundings(), "commits": self.commits}
        checkpoint = self.state.checkpoint(more)
        for name, tensor in checkpoint.tensors.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                self.refuse(f"{name} is not finite")
        save_checkpoint(self.folder.checkpoints, checkpoint)
        self.saved_step = self.state.step

    def take_up(self, exact: bool = False) -> None:
        """Go on from the newest good checkpoint, if there is one."""
        pair = None
        if self.fabric.is_global_zero:
            pair = read_checkpoint(self.folder.checkpoints, self.display.say)
        text = share_bytes(self.fabric, pair and pair[0])
        content = share_bytes(self.fabric, pair and pair[1])
        if text is None or content is None:
            return
        checkpoint = parse_checkpoint(text, content)
        now = {"config": self.config.to_dict(), **self.surroundings()}
        begun = {name: checkpoint.state.get(name) for name in now}
        # A setting that has come since then had its default.
        begun["config"] = Config.from_dict(checkpoint.state["config"]).to_dict()
        lines = differences(begun, now)
        soft = [line for line in lines if line.startswith(SOFT)]
        hard = lines if exact else [line for line in lines if line not in soft]
        if hard:
            raise began_otherwise(self.folder, hard)
        for line in soft:
            self.display.say(f"{line} since it began: it will not be bit by bit what it would be")
        self.state.restore(checkpoint)
        self.commits = [*dict.fromkeys([*checkpoint.state.get("commits", []), *self.commits])]
        self.saved_step = self.state.step
        self.display.say(f"going on after step {self.state.step} of {self.steps}")

    def surroundings(self) -> dict[str, Any]:
        """What a run should find unchanged when it goes on."""
        return {
            "data": self.facts.fingerprint,
            "xncaps": __version__,
            "torch": torch.__version__.split("+")[0],
            "threads": torch.get_num_threads(),
            "processes": self.fabric.world_size,
            "cpu": cpu_name(),
            "kernel": kernels.selected(),
        }

    def refuse(self, what: str) -> NoReturn:
        """End the run because its numbers are no longer any."""
        step = self.state.step
        raise DivergedError(
            f"train: {what} at step {step + 1}, in epoch {step // self.batches.steps + 1} "
            f"(learning rate {self.rate(min(step, self.steps - 1)):.3g}). {self.kept()} "
            "Try a smaller --lr, or --set clip=1."
        )

    def kept(self) -> str:
        """What there is to go on from."""
        if self.saved_step is None:
            return "There is no checkpoint yet."
        return f"The last good checkpoint, of step {self.saved_step}, is kept."

    @contextmanager
    def unwritable(self) -> Iterator[None]:
        """Say what cannot be written, a full disk for example, and how to go on."""
        try:
            yield
        except OSError as error:
            where = error.filename or self.folder.path
            raise RunError(
                f"{where}: cannot be written: {error.strerror or error}. {self.kept()} "
                f"Mend this, and go on with: {self.go_on}"
            ) from None

    def tell(self, speed: float) -> None:
        """Tell the display where the run is."""
        step = self.state.step
        seen = ((step - 1) % self.batches.steps + 1) * self.batches.batch_size
        self.display.step(
            Moment(
                epoch=(step - 1) // self.batches.steps + 1,
                epochs=self.config.epochs,
                step=step,
                steps=self.steps,
                loss=self.state.loss_sum / seen,
                accuracy=self.state.hit_sum / seen,
                lr=self.rate(step - 1),
                images_per_second=speed,
                seconds_left=(self.steps - step) * self.batches.batch_size / speed,
            )
        )

    def headlines(self) -> list[str]:
        """What this run is, in a few lines."""
        config, facts = self.config, self.facts
        learnt, checked, tested = facts.counts
        weights = sum(p.numel() for p in self.state.objective.network.parameters())
        head = f" with {config.head}" if config.head else ""
        processes = f"{self.fabric.world_size} processes of " if self.fabric.world_size > 1 else ""
        on_cpu = self.fabric.device.type == "cpu"
        hints = [BUSY] if on_cpu and busy_machine() else []
        if on_cpu and config.precision == "bf16" and emulates_bf16():
            hints.append(EMULATED)
        if config.attach == "append":
            hints.append("attach=append: the backbone's last block stays frozen at random weights")
        return [
            f"{config.model}{head}, {weights:,} parameters, on {facts.name}: {learnt:,} images to "
            f"learn from, {checked:,} for validation, {tested:,} to test on",
            f"{config.epochs} epochs of {self.batches.steps} steps of {self.batches.batch_size} "
            f"images; {config.loss} loss, {config.optimizer}, {config.schedule} up to "
            f"{config.lr:g}; seed {config.seed}; {processes}{torch.get_num_threads()} threads, "
            f"{self.fabric.device.type}",
            *hints,
        ]


def began_otherwise(folder: Folder, lines: list[str]) -> InputError:
    """The refusal to go on with something else than the run began with."""
    return InputError(
        f"train: {folder.path} cannot go on with something else than it began with: "
        f"{'; '.join(lines)}. Go on as it began, or start anew with another --out."
    )


def share_result(fabric: Fabric, folder: Folder, result: Result | None) -> Result | None:
    """The first process' result, in all of them."""
    content = share_bytes(fabric, json.dumps(result.values).encode() if result else None)
    return None if content is None else Result(folder, json.loads(content))
