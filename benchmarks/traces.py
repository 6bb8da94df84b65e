"""What a long trace costs: memory of 20 000 records, and the time to compare two such traces."""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc

import torch

from benchmarks.table import Table, against
from hashbench import HashDebugTrace
from hashbench.core.divergence import find as find_divergence
from hashbench.core.records import Trace

RECORDS = 20_000
MEMORY_GOAL, SECONDS_GOAL = 20.0, 0.5
_OPS_A_ROUND = 5


def measure() -> list[Table]:
    """Memory while tracing and after ``finish``, then the comparison of two traces that differ in the middle."""
    tracemalloc.start()
    trace, raw, finished = _traced_memory()
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    other = _trace(differing=True).finish()
    seconds, verdict = _comparison(trace, other)
    rows = (
        ("memory of the raw records, while tracing", *against(raw, goal=MEMORY_GOAL, unit=" MB")),
        ("memory of the finished trace", *against(finished, goal=MEMORY_GOAL, unit=" MB")),
        ("largest memory, while finishing", f"{peak:.3g} MB", "", ""),
        ("comparison of two such traces", *against(seconds, goal=SECONDS_GOAL, unit=" s")),
    )
    return [
        Table(
            title=f"A trace of {len(trace.records)} records",
            headers=("what", "figure", "goal", "reached"),
            rows=rows,
            notes=(f"The second trace has {len(other.records)} records. Found: {verdict}.",),
        )
    ]


def _traced_memory() -> tuple[Trace, float, float]:
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    mode = _trace(differing=False)
    gc.collect()
    raw = tracemalloc.get_traced_memory()[0] - before
    trace = mode.finish()
    del mode
    gc.collect()
    return trace, raw / 1e6, (tracemalloc.get_traced_memory()[0] - before) / 1e6


@torch.no_grad()
def _trace(*, differing: bool) -> HashDebugTrace:
    """Rounds of five small ops. ``differing`` changes one scalar in the middle and inserts an op right after it."""
    torch.manual_seed(0)
    layer, hidden = torch.nn.Linear(16, 16), torch.randn(4, 16)
    rounds = RECORDS // _OPS_A_ROUND
    with HashDebugTrace() as trace:
        for number in range(rounds):
            other = differing and number == rounds // 2
            hidden = layer(hidden).add(hidden).mul(0.5 if not other else 0.25).tanh()
            if other:
                hidden = hidden.neg()
    trace.add_result("output", hidden)
    return trace


def _comparison(first: Trace, second: Trace) -> tuple[float, str]:
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        verdict = find_divergence(first, second)
        times.append(time.perf_counter() - begin)
    found = verdict.divergence
    return statistics.median(times), "nothing" if found is None else f"{found.origin}, {found.kernel}, {found.node}"
