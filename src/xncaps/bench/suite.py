"""All groups in one run: what ``xncaps bench`` measures."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from xncaps.bench import calls, heads, inference, network, steps, xnor
from xncaps.bench.inference import Tell
from xncaps.bench.machine import Rates, facts, measure_rates
from xncaps.bench.plan import PLANS, Plan
from xncaps.bench.report import Report
from xncaps.bench.rows import Row, append_csv
from xncaps.errors import check_choice

GROUPS: dict[str, Callable[[Plan, Rates | None, Tell], Iterable[Row]]] = {
    "inference": inference.measure,
    "training": steps.measure,
    "xnor": xnor.measure,
    "primary": heads.measure,
    "network": network.measure,
    "calls": calls.measure,
}

CSV_NAME = "bench.csv"


def run_bench(
    plan: str,
    only: Sequence[str] = (),
    seconds: float | None = None,
    out: Path | None = None,
    tell: Tell = lambda line: None,
) -> Report:
    """Measure on one thread; the random numbers and threads of the caller stay as they are.

    Args:
        plan: a name in ``PLANS``.
        only: names in ``GROUPS``; all if empty.
        seconds: how long a comparison is timed, if not as the plan says.
        out: a folder for the CSV file; it is made if it is not there.
        tell: is told what is measured next.
    """
    check_choice("bench", "plan", plan, PLANS)
    for name in only:
        check_choice("bench", "only", name, GROUPS)
    chosen = PLANS[plan] if seconds is None else replace(PLANS[plan], seconds=seconds)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # before the work, which takes minutes
    start = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            known = facts()
            rates = measure_rates() if not only or "inference" in only else None
            rows: list[Row] = []
            for name, measure in GROUPS.items():
                if only and name not in only:
                    continue
                for row in measure(chosen, rates, tell):
                    rows.append(row)
                    if out is not None:  # as they come: a run that is stopped has not been in vain
                        append_csv(out / CSV_NAME, known, [row])
    finally:
        torch.set_num_threads(threads)
    return Report(known, rates, tuple(rows), time.perf_counter() - start)
