"""One trained network in all its forms: how fast each is, how large, and how soon it is ready."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch

from xncaps.bench.machine import facts
from xncaps.bench.rows import FACTS
from xncaps.bench.timing import interleave
from xncaps.deploy.evaluate import chosen_data
from xncaps.deploy.export import CALIBRATED, real_images
from xncaps.deploy.model import Model, TorchModel, open_model
from xncaps.deploy.packed_file import write_packed
from xncaps.errors import InputError, RunError
from xncaps.results import append_rows, read_rows
from xncaps.system import cpu_name
from xncaps.text import text_table

Say = Callable[[str], None]

TORCH_START = """
import sys, torch
from xncaps.deploy.model import open_model
from xncaps.system import peak_memory
torch.set_num_threads(int(sys.argv[2]))
model = open_model(sys.argv[1], threads=int(sys.argv[2]))
model.scores(torch.zeros(1, *model.card.facts.shape, dtype=torch.uint8))
sys.stdout.write(str(peak_memory()))
"""
ONNX_START = """
import sys, numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = int(sys.argv[2])
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
shape = [1, *session.get_inputs()[0].shape[1:]]
session.run(None, {"images": numpy.zeros(shape, numpy.float32)})
try:
    status = open("/proc/self/status").read()
    peak = 1024 * int(status.partition("VmHWM:")[2].split()[0])
except OSError:
    peak = 0
sys.stdout.write(str(peak))
"""
STARTS = 3


@dataclass(frozen=True)
class Form:
    """The figures of one form.

    Args:
        name: what it is.
        size: bytes of its weights, or of its file.
        p50, p90, p99: milliseconds of an image alone: half of the calls, nine of ten and 99 of 100
            take no longer.
        throughput: images a second in batches.
        start: seconds from the start of a new process to the first answer.
        memory: bytes that this process took at most.
    """

    name: str
    size: int
    p50: float
    p90: float
    p99: float
    throughput: float
    start: float | None
    memory: int | None


@dataclass(frozen=True)
class ModelBench:
    """The figures of all forms of a network, and where they were measured."""

    network: str
    cpu: str
    threads: int
    batch: int
    calls: int
    forms: tuple[Form, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return (
            f"{self.network} on {self.cpu}, {threads}\n\n"
            f"{text_table(list(HEADS), [_cells(form) for form in self.forms])}\n\n"
            f"p50 to p99: one image, over {self.calls:,} calls each, in turns.\n"
            f"images/s: in batches of {self.batch}.\n"
            f"start, peak: a new process up to its first answer, the best of {STARTS}; ONNX "
            "Runtime without PyTorch and xncaps."
        )

    def to_markdown(self) -> str:
        """The table for a document."""
        lines = [HEADS, ("---",) * len(HEADS), *map(_cells, self.forms)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


HEADS = ("", "bytes", "p50 ms", "p90 ms", "p99 ms", "images/s", "start s", "peak MB")
KEPT = ("network", "batch", "calls")
COLUMNS = (*FACTS, *KEPT, *(field.name for field in fields(Form)))


def _cells(form: Form) -> list[str]:
    return [
        form.name,
        f"{form.size:,}",
        *(f"{value:.3f}" for value in (form.p50, form.p90, form.p99)),
        f"{form.throughput:,.0f}",
        "-" if form.start is None else f"{form.start:.2f}",
        "-" if form.memory is None else f"{form.memory / 1e6:,.0f}",
    ]


def append_model_bench(path: Path, bench: ModelBench) -> None:
    """Add the figures to a CSV file."""
    known = {**facts(), "threads": bench.threads, **{name: getattr(bench, name) for name in KEPT}}
    append_rows(path, COLUMNS, ({**known, **asdict(form)} for form in bench.forms))


def read_model_bench(path: Path) -> tuple[dict[str, str], ModelBench]:
    """The newest figures of a file, and the facts that came with them."""
    lines = read_rows(path)
    last = max(line["date"] for line in lines)
    chosen = [line for line in lines if line["date"] == last]
    kinds: dict[str, Callable[[str], Any]] = {"name": str, "size": int, "memory": int}
    forms = tuple(
        Form(**{f.name: kinds.get(f.name, float)(line[f.name]) for f in fields(Form)})
        for line in chosen
    )
    known = {name: chosen[0][name] for name in FACTS}
    first = chosen[0]
    sizes = int(first["threads"]), int(first["batch"]), int(first["calls"])
    return known, ModelBench(first["network"], first["cpu"], *sizes, forms)


def bench_model(
    path: Path,
    *,
    seconds: float = 10.0,
    batch: int = 64,
    threads: int = 1,
    data_dir: Path | None = None,
    say: Say | None = None,
) -> ModelBench:
    """Measure a trained network as it is, packed, and in ONNX Runtime in float32 and int8.

    Of a packed or an ONNX file, what can be made of it is measured.

    Args:
        path: a run's folder, a packed file or an ONNX file.
        seconds: how long to measure, in all.
        batch: images in a batch, for the throughput.
        threads: that PyTorch, the kernels and ONNX Runtime use.
        data_dir: a folder to look for the data in, on which the ranges of int8 are measured.
        say: told what is left out, and why.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with TemporaryDirectory() as folder:
            forms = make_forms(path, Path(folder), threads, data_dir, say or (lambda line: None))
            return _measure(forms, seconds, batch, threads)
    finally:
        torch.set_num_threads(before)


def make_forms(
    path: Path, folder: Path, threads: int, data_dir: Path | None, say: Say
) -> dict[str, Model]:
    """The network in every form that can be made of what is there; new files go to the folder."""
    model = open_model(path, say, threads)
    if not isinstance(model, TorchModel):
        return {"ONNX Runtime": model}
    forms: dict[str, Model] = {"PyTorch": model} if model.kind == "run" else {}
    if model.kind == "run":
        write_packed(folder / "packed.safetensors", model.network, model.card.portable())
        forms["packed"] = open_model(folder / "packed.safetensors")
    else:
        forms["packed"] = model
    try:
        forms |= _onnx_forms(model, folder, threads, data_dir, say)
    except (InputError, RunError) as error:
        say(f"without ONNX Runtime: {error}")
    return forms


def _onnx_forms(
    model: TorchModel, folder: Path, threads: int, data_dir: Path | None, say: Say
) -> dict[str, Model]:
    from xncaps.deploy.onnx_export import export_onnx
    from xncaps.deploy.onnx_int8 import quantise

    files = folder / "model.onnx", folder / "model.int8.onnx"
    images = real_images(model, data_dir, say)
    export_onnx(model.network, model.card, files[0], images=images)
    try:
        learned = chosen_data(model, split="train", data_dir=data_dir).images[:CALIBRATED]
    except (InputError, RunError, OSError):
        learned = images  # of int8 only the speed is told here, and that is the same
    quantise(files[0], files[1], learned, model.card.portable())
    plain, quantised = (open_model(file, threads=threads) for file in files)
    return {"ONNX Runtime": plain, "ONNX Runtime int8": quantised}


def _measure(forms: dict[str, Model], seconds: float, batch: int, threads: int) -> ModelBench:
    noise = torch.Generator().manual_seed(0)
    inputs: dict[str, tuple[Any, Any]] = {}
    for name, model in forms.items():
        shape = (batch, *model.card.facts.shape)
        pixels = model.card.preprocess(
            torch.randint(0, 256, shape, generator=noise, dtype=torch.uint8)
        )
        inputs[name] = pixels[:1].contiguous(), pixels

    def calls(which: int) -> dict[str, Callable[[], object]]:
        return {
            name: lambda model=model, x=inputs[name][which]: model.run(x)  # type: ignore[misc]
            for name, model in forms.items()
        }

    single = interleave(calls(0), seconds * 0.7)
    many = interleave(calls(1), seconds * 0.3)
    found = []
    for name, model in forms.items():
        steps = [1e3 * step for step in quantiles(single[name], n=100, method="inclusive")]
        start, memory = _start(model, threads)
        found.append(
            Form(
                name,
                _bytes(model),
                steps[49],
                steps[89],
                steps[98],
                batch / median(many[name]),
                start,
                memory,
            )
        )
    count = min(len(times) for times in single.values())
    network = next(iter(forms.values())).card.name
    return ModelBench(network, cpu_name(), threads, batch, count, tuple(found))


def _bytes(model: Model) -> int:
    if isinstance(model, TorchModel) and model.kind == "run":
        return 4 * sum(parameter.numel() for parameter in model.network.parameters())
    return model.path.stat().st_size


def _start(model: Model, threads: int) -> tuple[float | None, int | None]:
    """Seconds from the start of a process to its first answer, and the memory it took."""
    if sys.platform == "win32":  # pragma: no cover
        return None, None
    code = ONNX_START if model.kind == "onnx" else TORCH_START
    best, memory = float("inf"), 0
    for _ in range(STARTS):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code, str(model.path), str(threads)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return None, None
        best = min(best, time.perf_counter() - start)
        memory = int(done.stdout)
    return best, memory or None
