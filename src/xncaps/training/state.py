"""What a run carries from step to step, and how it is put away and taken up again."""

import hashlib
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from xncaps.backbones import WideNet
from xncaps.data import Dataset, Facts
from xncaps.errors import RunError
from xncaps.networks import Classifier
from xncaps.training.checkpoint import Checkpoint
from xncaps.training.config import Config
from xncaps.training.monitors import weight_signs
from xncaps.training.objective import Average, Objective, make_optimizer
from xncaps.training.run import build_network

SEEN = 1 << 20
"""Pixels of the images that a network sees before it begins, about."""


class State:
    """The network, its optimizer, its average, and how far they are.

    Args:
        config: of the run.
        facts: of its data.
        fabric: the processes.
        train: the training images; some networks see a few of them before they begin.
    """

    def __init__(self, config: Config, facts: Facts, fabric: Fabric, train: Dataset) -> None:
        torch.manual_seed(config.seed)
        network = build_network(config, facts)
        if isinstance(network.backbone, WideNet):
            count = max(1, SEEN // network.image_size**2)
            network.backbone.prepare(facts.preprocess(config.image_size)(train.images[:count]))
        self.objective = Objective(network, config.loss, config.smoothing).to(fabric.device)
        if config.channels_last:
            for module in self.objective.modules():
                if isinstance(module, nn.Conv2d):
                    # Also where one channel makes both formats the same: gradients come in it.
                    shape = torch.empty_like(module.weight, memory_format=torch.channels_last)
                    module.weight.data = shape.copy_(module.weight).detach()
        self.average = None
        if config.ema:
            copy = build_network(config, facts).to(fabric.device)
            self.average = Average(self.objective.network, copy, config.ema)
        self.optimizer = make_optimizer(config, self.objective.parameters())
        wrapped: Any = torch.compile(self.objective) if config.compile else self.objective
        # What takes the steps: the same weights, shared between the processes.
        self.model, self.stepper = fabric.setup(wrapped, self.optimizer)

        self.step = 0
        self.seconds = self.cpu_seconds = 0.0
        self.loss_sum = self.hit_sum = 0.0
        """Over the images of this epoch so far."""
        self.signs = weight_signs(self.objective.network)
        """At the start of this epoch."""

    @property
    def network(self) -> Classifier:
        """The network that is judged and kept."""
        return self.average.network if self.average else self.objective.network

    def buffers(self) -> list[Tensor]:
        """Statistics that each process gathers by itself."""
        return [*self.objective.buffers(), *self.network.buffers()]

    def digest(self) -> str:
        """SHA-256 over the weights and statistics of the network that is kept."""
        digest = hashlib.sha256()
        for tensor in self.network.state_dict().values():
            digest.update(
                tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            )
        return digest.hexdigest()

    def checkpoint(self, more: dict[str, Any]) -> Checkpoint:
        """All that the next step depends on, and ``more`` to be checked when the run goes on."""
        tensors = {f"objective.{k}": v for k, v in self.objective.state_dict().items()}
        for number, values in self.optimizer.state_dict()["state"].items():
            for name, value in values.items():
                if value is not None:
                    tensors[f"optimizer.{number}.{name}"] = torch.as_tensor(value)
        if self.average:
            tensors |= {f"average.{k}": v for k, v in self.average.network.state_dict().items()}
        tensors |= {f"signs.{name}": signs for name, signs in self.signs.items()}
        numbers = {
            "step": self.step,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "loss_sum": self.loss_sum,
            "hit_sum": self.hit_sum,
        }
        tensors = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        return Checkpoint(tensors, {**numbers, **more})

    def restore(self, checkpoint: Checkpoint) -> None:
        """Be as the checkpoint was."""
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in checkpoint.tensors.items():
            kind, _, rest = name.partition(".")
            parts.setdefault(kind, {})[rest] = tensor
        try:
            self.objective.load_state_dict(parts["objective"])
            if self.average:
                self.average.network.load_state_dict(parts["average"])
        except (RuntimeError, KeyError) as error:
            detail = " ".join(str(error).split())[:200]
            raise RunError(f"train: the checkpoint is of another network ({detail}).") from None
        self._restore_optimizer(parts.get("optimizer", {}))
        device = next(self.objective.parameters()).device
        self.signs = {name: signs.to(device) for name, signs in parts.get("signs", {}).items()}
        self.step, self.seconds = checkpoint.state["step"], checkpoint.state["seconds"]
        self.cpu_seconds = checkpoint.state.get("cpu_seconds", 0.0)
        self.loss_sum = checkpoint.state["loss_sum"]
        self.hit_sum = checkpoint.state["hit_sum"]

    def _restore_optimizer(self, tensors: dict[str, Tensor]) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        values: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            number, _, key = name.partition(".")
            like = parameters[int(number)]
            # In the memory format it had: another one may round otherwise.
            same = tensor.dim() > 0 and tensor.shape == like.shape
            values.setdefault(int(number), {})[key] = (
                torch.empty_like(like).copy_(tensor) if same else tensor
            )
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": values})
