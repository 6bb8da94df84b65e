"""Load beside a run: threads that keep the cores and the interpreter lock busy, evenly or not; a busy second stream."""

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
"""For so long the other stream is busy at least: several times the launch of any op, and longer than most kernels."""
MOST_BUSY_SECONDS = 1.0
_PAUSE_SECONDS = 0.005
"""Of a thread on average, after 1.5 ms of work: what comes and goes disturbs as well as what stays, and costs less."""
_WIDTH = 2048
"""Rows of the matrices that are multiplied: enough blocks to fill a large GPU, 16 MiB each."""
_MOST_PRODUCTS = 20_000


@contextmanager
def busy_threads(count: int | None = None) -> Iterator[None]:
    """So many other threads (default: one a core) load the cores and compete for the interpreter lock."""
    done = threading.Event()
    threads = [
        threading.Thread(target=_work_until, args=(done,), name=f"hashbench load {number}", daemon=True)
        for number in range(count if count is not None else os.cpu_count() or 2)
    ]
    with _running(threads, until=done):
        yield


@contextmanager
def _running(threads: Sequence[threading.Thread], *, until: threading.Event) -> Iterator[None]:
    """Start the threads, and at the end set ``until`` and join those that started."""
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
"""Seconds of an episode of :func:`uneven_load`."""


class Episode(Enum):
    """How much threads load the cores for a while."""

    QUIET = "none works"
    STEADY = "each works now and then"
    BURST = "all work without a pause"
    STARVED = "all work without a pause on one core, which the program gets little of"


_SHARES = {Episode.QUIET: 4, Episode.STEADY: 3, Episode.BURST: 2, Episode.STARVED: 1}
"""Of episodes, out of the sum."""


def episodes(variation: int) -> Iterator[tuple[Episode, float, int]]:
    """Yield what threads do, for how many seconds, and a number that chooses a core: without end, and in each
    variation otherwise. A burst is first, since some runs are short."""
    drawn = random.Random(variation)
    kind = Episode.BURST if variation % 2 else Episode.STARVED
    while True:
        yield kind, math.exp(drawn.uniform(math.log(SHORTEST), math.log(LONGEST))), drawn.randrange(1 << 16)
        (kind,) = drawn.choices(list(_SHARES), list(_SHARES.values()))


@contextmanager
def uneven_load(variation: int) -> Iterator[None]:
    """Two other threads a core load the cores in bursts, or one core alone, and rest in between: what they do changes
    many times in a second, and is another sequence in each variation."""
    done, now = threading.Event(), _Now()
    count = 2 * (os.cpu_count() or 2)
    threads = [
        threading.Thread(target=_follow, args=(done, now), name=f"hashbench load {number}", daemon=True)
        for number in range(count)
    ]
    threads.append(threading.Thread(target=_conduct, args=(done, now, variation), name="hashbench load", daemon=True))
    with _running(threads, until=done):
        yield


class _Now:
    """The episode of this moment, which one thread writes and others read."""

    def __init__(self) -> None:
        self.episode, self.core = Episode.QUIET, 0


def _conduct(done: threading.Event, now: _Now, variation: int) -> None:
    for episode, seconds, core in episodes(variation):
        now.episode, now.core = episode, core
        if done.wait(seconds):
            return


def _follow(done: threading.Event, now: _Now) -> None:
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
    """Matrix products keep a second stream of ``device`` busy, from before the body begins and for twice the
    ``seconds`` that it takes, up to a second; waits for them on leaving."""
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
    """The time of one, warm, measured by the device itself; it does not change while a process lives."""
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
    """A matrix that is its own square, and room for the product."""
    matrix = torch.full((_WIDTH, _WIDTH), 1 / _WIDTH, dtype=torch.float32, device=device)
    return matrix, torch.zeros_like(matrix)


def _multiply(matrix: torch.Tensor, product: torch.Tensor, *, count: int) -> None:
    for _ in range(count):
        torch.mm(matrix, matrix, out=product)
