"""Control one influence on a run at a time: clocks, entropy, generators, thread pools, uninitialised memory, load.

Each context manager fixes or disturbs one of them, to find out whether a difference depends on it. It restarts its
stream at every entry, restores what it changed on exit (also after an exception), and does not affect hashbench itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hashbench.core.diagnose.replay.controls.generators import Generators
from hashbench.core.diagnose.replay.controls.load import busy_threads, second_stream
from hashbench.core.diagnose.replay.controls.memory import (
    POISONS,
    fill_bytes,
    poison_reach,
    poisoned_memory,
    reserve_for_a_run,
)
from hashbench.core.diagnose.replay.controls.messages import FixedSources
from hashbench.core.diagnose.replay.controls.perturbations import (
    CONDITIONS,
    WITHIN_A_RUN,
    no_collector,
    oversubscribed,
    provoked,
)
from hashbench.core.diagnose.replay.controls.system import constant_entropy, single_worker_pools, ticking_clocks
from hashbench.core.run.settings import applied

__all__ = [
    "CONDITIONS",
    "POISONS",
    "WITHIN_A_RUN",
    "FixedSources",
    "Generators",
    "busy_threads",
    "constant_entropy",
    "fill_bytes",
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
    """Run CPU kernels on a single thread."""
    with applied({"num_threads": "1"}):
        yield
