"""Generate load beside a run: threads that keep cores and the GIL busy, evenly or in bursts; a busy second stream."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

import torch

BUSY_SECONDS = 0.05
"""Minimum time that the second stream is busy: several times any launch, and longer than most kernels."""
MOST_BUSY_SECONDS = 1.0
_PAUSE_SECONDS = 0.005
"""Average pause of a thread after 1.5 ms of work: intermittent load disturbs as much as constant load, and costs less.
"""
_WIDTH = 2048
"""Rows of the multiplied matrices: enough blocks for a large GPU, 16 MiB each."""
_MOST_PRODUCTS = 20_000


@contextmanager
def busy_threads(count: int | None = None) -> Iterator[None]:
    """Load the cores and contend for the GIL with ``count`` threads (default: one per core)."""
    done = threading.Event()
    threads = [
        threading.Thread(target=_work_until, args=(done,), name=f"hashbench load {number}", daemon=True)
        for number in range(count if count is not None else os.cpu_count() or 2)
    ]
    with _running(threads, until=done):
        yield


@contextmanager
def _running(threads: Sequence[threading.Thread], *, until: threading.Event) -> Iterator[None]:
    """Start the threads; on exit, set ``until`` and join those that started."""
    try:
        for thread in threads:
            thread.start()
        yield
    finally:
        until.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def _work_until(done: threading.Event) -> None:
    drawn = random.Random()  # the model's own generator stays as it is
    while not done.wait(drawn.uniform(0, 2 * _PAUSE_SECONDS)):
        _work()


def _work() -> None:
    for _ in range(5):
        hashlib.sha256(_CONTENT)  # 0.2 ms on a core, without the interpreter lock
        sum(range(5_000))  # 0.1 ms with it


_CONTENT = bytes(1 << 18)

SHORTEST, LONGEST = 0.004, 0.06
"""Range of seconds of an episode of :func:`uneven_load`."""


class Episode(Enum):
    """Load pattern for a short time."""

    QUIET = "none works"
    STEADY = "each works now and then"
    BURST = "all work without a pause"
    STARVED = "all work without a pause on one core, which the program gets little of"


_SHARES = {Episode.QUIET: 4, Episode.STEADY: 3, Episode.BURST: 2, Episode.STARVED: 1}
"""Relative frequency of each episode."""


def episodes(variation: int) -> Iterator[tuple[Episode, float, int]]:
    """Yield an endless sequence of (pattern, seconds, number that selects a core), different in each variation.

    A burst is always first, since some runs are short.
    """
    drawn = random.Random(variation)
    kind = Episode.BURST if variation % 2 else Episode.STARVED
    while True:
        yield kind, math.exp(drawn.uniform(math.log(SHORTEST), math.log(LONGEST))), drawn.randrange(1 << 16)
        (kind,) = drawn.choices(list(_SHARES), list(_SHARES.values()))


@contextmanager
def uneven_load(variation: int) -> Iterator[None]:
    """Load the cores with two threads per core, in bursts, on a single core, or not at all.

    The pattern changes many times per second, in a different sequence in each variation.
    """
    done, now = threading.Event(), _CurrentEpisode()
    count = 2 * (os.cpu_count() or 2)
    threads = [
        threading.Thread(target=_load_by_episode, args=(done, now), name=f"hashbench load {number}", daemon=True)
        for number in range(count)
    ]
    threads.append(
        threading.Thread(target=_change_episodes, args=(done, now, variation), name="hashbench load", daemon=True)
    )
    with _running(threads, until=done):
        yield


class _CurrentEpisode:
    """The current episode, written by one thread and read by the others."""

    def __init__(self) -> None:
        self.episode, self.core = Episode.QUIET, 0


def _change_episodes(done: threading.Event, now: _CurrentEpisode, variation: int) -> None:
    for episode, seconds, core in episodes(variation):
        now.episode, now.core = episode, core
        if done.wait(seconds):
            return


def _load_by_episode(done: threading.Event, now: _CurrentEpisode) -> None:
    drawn = random.Random()
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    pinned = False
    while not done.is_set():
        starved = now.episode is Episode.STARVED and len(cores) > 1
        if starved != pinned:
            os.sched_setaffinity(0, {cores[now.core % len(cores)]} if starved else cores)  # of this thread alone
            pinned = starved
        if now.episode is Episode.QUIET:
            done.wait(SHORTEST / 2)
        elif now.episode is Episode.STEADY:
            done.wait(drawn.uniform(0, 2 * _PAUSE_SECONDS))
            _work()
        else:
            _work()


@contextmanager
def second_stream(device: torch.device, seconds: float) -> Iterator[None]:
    """Keep a second stream of ``device`` busy with matrix products; wait for them on exit.

    They start before the body and last twice its ``seconds``, at most one second.
    """
    wanted = min(MOST_BUSY_SECONDS, max(BUSY_SECONDS, 2 * seconds))
    count = min(_MOST_PRODUCTS, math.ceil(wanted / _seconds_of_a_product(device)))
    stream = torch.Stream(device)
    with stream:
        matrices = _matrices(device)  # held until the stream is done
        _multiply(*matrices, count=count)
    try:
        yield
    finally:
        stream.synchronize()


@functools.cache
def _seconds_of_a_product(device: torch.device) -> float:
    """Measure one warm matrix product with device events; constant for the life of the process."""
    stream, begin, end = torch.Stream(device), *(torch.Event(device, enable_timing=True) for _ in range(2))
    with stream:
        matrices = _matrices(device)
        _multiply(*matrices, count=5)  # loads the kernel, and the library's memory for this stream
        begin.record(stream)
        _multiply(*matrices, count=10)
        end.record(stream)
    stream.synchronize()
    return max(begin.elapsed_time(end) / 10 / 1000, 1e-6)


def _matrices(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an idempotent matrix and an output buffer."""
    matrix = torch.full((_WIDTH, _WIDTH), 1 / _WIDTH, dtype=torch.float32, device=device)
    return matrix, torch.zeros_like(matrix)


def _multiply(matrix: torch.Tensor, product: torch.Tensor, *, count: int) -> None:
    for _ in range(count):
        torch.mm(matrix, matrix, out=product)
