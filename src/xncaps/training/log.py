"""The metrics of a run: a JSON line an epoch, and TensorBoard."""

import json
import os
from pathlib import Path
from typing import Any, Self

from torch.utils.tensorboard import SummaryWriter

from xncaps.system import write_whole
from xncaps.training.run import Folder

COLUMNS = {
    *("epoch", "step", "lr", "loss", "accuracy", "validation_loss", "validation_accuracy"),
    *("images_per_second", "seconds", "coupling_entropy", "flips"),
}


def read_rows(path: Path, last_step: int | None = None) -> list[dict[str, Any]]:
    """The rows of a metrics file, up to a step; a line that was cut off when written is dropped."""
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
            if row.keys() != COLUMNS or (last_step is not None and row["step"] > last_step):
                break
        except (ValueError, AttributeError, TypeError):
            break
        rows.append(row)
    return rows


class Log:
    """Writes the metrics of a run; when it goes on, what came after the checkpoint is taken back.

    Args:
        folder: of the run.
        step: of the checkpoint the run goes on from, 0 at its start.
    """

    def __init__(self, folder: Folder, step: int) -> None:
        self.path = folder.metrics
        self.rows = read_rows(self.path, step)
        write_whole(self.path, "".join(map(_line, self.rows)).encode())
        self.writer = SummaryWriter(str(folder.tensorboard), purge_step=step + 1 if step else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.writer.close()

    def step(self, step: int, **values: float) -> None:
        """Figures of a step, for TensorBoard alone."""
        for name, value in values.items():
            self.writer.add_scalar(f"step/{name}", value, step)

    def epoch(self, row: dict[str, Any]) -> None:
        """The figures of an epoch, on the disk before the next one begins."""
        self.rows.append(row)
        with self.path.open("ab") as file:
            file.write(_line(row).encode())
            file.flush()
            os.fsync(file.fileno())
        flat = {f"epoch/{name}": value for name, value in row.items() if name != "flips"}
        flat |= {f"sign_flips/{name}": value for name, value in row["flips"].items()}
        for name, value in flat.items():
            if value is not None:
                self.writer.add_scalar(name, value, row["step"])


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"
