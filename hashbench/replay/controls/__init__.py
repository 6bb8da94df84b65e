"""Environment controls: contexts that fix or disturb one influence on a run (clocks, entropy, generators, thread pools,
uninitialised memory, load), to find out which of them its difference depends on.

Each restarts its stream at every entry, puts back what it changed on leaving, on error too, and leaves alone what
hashbench's own modules hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hashbench.replay.controls.generators import Generators
from hashbench.replay.controls.load import busy_threads, second_stream
from hashbench.replay.controls.memory import POISONS, poison_reach, poisoned_memory, reserve_for_a_run
from hashbench.replay.controls.perturbations import WITHIN_A_RUN, no_collector, oversubscribed, provoked
from hashbench.replay.controls.system import constant_entropy, single_worker_pools, ticking_clocks
from hashbench.run.settings import applied

__all__ = [
    "POISONS",
    "WITHIN_A_RUN",
    "Generators",
    "busy_threads",
    "constant_entropy",
    "no_collector",
    "one_thread",
    "oversubscribed",
    "poison_reach",
    "poisoned_memory",
    "provoked",
    "reserve_for_a_run",
    "second_stream",
    "single_worker_pools",
    "ticking_clocks",
]


@contextmanager
def one_thread() -> Iterator[None]:
    """Kernels on the CPU use one thread."""
    with applied({"num_threads": "1"}):
        yield
