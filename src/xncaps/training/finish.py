"""The end of a run: its weights, its figures and its report."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from xncaps.data import Dataset, Facts
from xncaps.errors import RunError
from xncaps.evaluation import evaluate_scores, main_metric
from xncaps.system import peak_memory, write_whole
from xncaps.training.config import Config
from xncaps.training.display import Display
from xncaps.training.report import write_report
from xncaps.training.run import Folder, Run, read_json
from xncaps.training.state import State


@dataclass(frozen=True)
class Result:
    """What a run came to: its folder, and what ``result.json`` says."""

    folder: Folder
    values: dict[str, Any]

    @property
    def accuracy(self) -> float:
        """On the test images: top-1, or both classes of a pair right."""
        test = self.values["test"]
        return float(test[main_metric("exact_pair" in test)])


def finish(
    folder: Folder,
    config: Config,
    facts: Facts,
    state: State,
    test: Dataset,
    scores: Tensor,
    rows: list[dict[str, Any]],
    surroundings: dict[str, Any],
    display: Display,
) -> Result:
    """Write weights, report and result; the result comes last and says that the run has ended."""
    network = state.network.cpu()
    weights = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
    write_whole(folder.weights, save(weights))
    with torch.no_grad():
        loss = state.objective.cpu().of_scores(scores, test.labels).item()
    evaluation = evaluate_scores(scores, test.labels, test.classes, loss)
    last = rows[-1] if rows else {}
    values = {
        "test": evaluation.to_dict(),
        "validation_accuracy": last.get("validation_accuracy"),
        "params": sum(p.numel() for p in network.parameters()),
        "head_params": sum(p.numel() for p in network.head.parameters()),
        "epochs": config.epochs,
        "steps": state.step,
        "seconds": state.seconds,
        "cpu_seconds": state.cpu_seconds,
        "images_per_second": last.get("images_per_second"),
        "peak_memory_bytes": peak_memory(),
        **surroundings,
        "date": datetime.now(UTC).date().isoformat(),
    }
    display.say("writing the report")
    run = Run(folder, config, facts, network.eval())
    write_report(run, rows, evaluation, test, scores, values)
    write_whole(folder.result, (json.dumps(values, indent=2) + "\n").encode())
    return Result(folder, values)


def read_result(folder: Folder) -> Result | None:
    """The result of a run that has ended, if it has."""
    if not folder.result.is_file():
        return None
    result = Result(folder, read_json(folder.result))
    try:
        float(result.accuracy), int(result.values["peak_memory_bytes"])
    except (KeyError, TypeError, ValueError):
        raise RunError(f"{folder.result}: not what a run writes. Remove it and resume.") from None
    return result
