"""Environment controls: contexts that fix or disturb one influence on a run (clocks, entropy, generators, thread pools,
uninitialised memory, load), to find out which of them its difference depends on.

Each restarts its stream at every entry, puts back what it changed on leaving, on error too, and leaves alone what
hashbench's own modules hold.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hashbench.replay.controls.generators import Generators
from hashbench.replay.controls.memory import POISONS, poison_reach, poisoned_memory, reserve_for_a_run
from hashbench.replay.controls.system import constant_entropy, single_worker_pools, ticking_clocks
from hashbench.run.settings import applied

__all__ = [
    "POISONS",
    "Generators",
    "busy_threads",
    "constant_entropy",
    "one_thread",
    "poison_reach",
    "poisoned_memory",
    "reserve_for_a_run",
    "single_worker_pools",
    "ticking_clocks",
]


@contextmanager
def one_thread() -> Iterator[None]:
    """Kernels on the CPU use one thread."""
    with applied({"num_threads": "1"}):
        yield


@contextmanager
def busy_threads(count: int | None = None) -> Iterator[None]:
    """So many other threads (default: one a core) load the cores and compete for the interpreter lock."""
    done = threading.Event()
    threads = [
        threading.Thread(target=_work_until, args=(done,), name=f"hashbench load {number}", daemon=True)
        for number in range(count if count is not None else os.cpu_count() or 2)
    ]
    try:
        for thread in threads:
            thread.start()
        yield
    finally:
        done.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def _work_until(done: threading.Event) -> None:
    content = bytes(1 << 18)
    while not done.is_set():
        hashlib.sha256(content)  # 0.2 ms on a core, without the interpreter lock
        sum(range(5_000))  # 0.1 ms with it
