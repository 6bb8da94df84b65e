"""What the native recorder costs: microseconds a call, with and without digests, and bytes a record."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import psutil
import torch

from benchmarks.overhead import interleaved
from benchmarks.table import Table, against
from benchmarks.workloads import bert_like
from hashbench.core.native.build import Unavailable
from hashbench.core.native.library import Library
from hashbench.core.trace import native

RECORDS = 10_000_000
CALL_GOAL, MEMORY_GOAL = 0.7, 120.0
_CALLS = 2000
_TITLE = "The native recorder, µs a call on top of the untraced call"


def measure(*, seconds: float) -> list[Table]:
    """Microseconds that the recorder alone (no module paths, no Python) adds to a call, and bytes that it keeps.

    Args:
        seconds: measure each workload for about so long.
    """
    loaded = native.load()
    if isinstance(loaded, Unavailable):
        return [Table(title=_TITLE, headers=("calls",), rows=(), notes=(loaded.reason,))]
    library, _ = loaded
    torch.manual_seed(0)
    rows: list[tuple[object, ...]] = []
    for name, step in (("add_ of 8 elements, in a row", _additions), ("BERT-like step", bert_like())):
        calls, plain, bare, hashed = _microseconds(library, step, seconds=seconds)
        figure = against(bare - plain, goal=CALL_GOAL)
        rows.append((name, calls, f"{plain:.3g}", *figure, f"{hashed - plain:.3g}"))
    memory, peak = _memory(library)
    return [
        Table(
            title=_TITLE,
            headers=("calls", "records", "untraced", "without digests", "goal", "reached", "with digests"),
            rows=tuple(rows),
            notes=("Medians of differences within a repetition; the BERT-like step divided by its records.",),
        ),
        Table(
            title=f"{RECORDS:,} native records",
            headers=("what", "figure", "goal", "reached"),
            rows=(
                ("memory a record", *against(memory, goal=MEMORY_GOAL, unit=" bytes")),
                ("largest memory of the process", f"{peak:.3g} GB", "", ""),
            ),
        ),
    ]


def _additions() -> None:
    x = torch.zeros(8)
    for _ in range(_CALLS):
        x.add_(1)


@contextmanager
def _recorded(library: Library, *, hashes: bool) -> Iterator[int]:
    """Record with nothing but the recorder itself."""
    recorder = library.new(int(hashes), 0, 0, 0)
    library.begin(recorder)
    library.thread(1)
    try:
        yield recorder
    finally:
        library.thread(0)
        library.end(recorder)
        library.delete(recorder)


def _microseconds(library: Library, step: Callable[[], None], *, seconds: float) -> tuple[int, float, float, float]:
    """Records of one step; µs a record of the untraced step, without digests, and with them."""
    with _recorded(library, hashes=False) as recorder:
        step()
        calls = library.count(recorder, 0)
    arms: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
        "no mode": nullcontext,
        "bare": lambda: _recorded(library, hashes=False),
        "hashed": lambda: _recorded(library, hashes=True),
    }
    taken = interleaved(step, seconds=seconds, arms=arms)
    plain = statistics.median(taken["no mode"])
    more = {
        name: statistics.median(one - base for one, base in zip(taken[name], taken["no mode"], strict=True))
        for name in arms
    }
    each = [1e6 * (plain + more[name]) / calls for name in arms]
    return calls, each[0], each[1], each[2]


def _memory(library: Library) -> tuple[float, float]:
    """Bytes of memory for each of many records, and the GB of the process with all of them."""
    process, x = psutil.Process(), torch.zeros(8)
    gc.collect()
    with _recorded(library, hashes=True):
        for _ in range(_CALLS):
            x.add_(1)
        before = process.memory_info().rss
        for _ in range(RECORDS):
            x.add_(1)
        after = process.memory_info().rss
    return (after - before) / RECORDS, after / 1e9
