"""Load beside a run: threads that keep the cores and the interpreter lock busy now and then; a busy second stream."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
    content, drawn = bytes(1 << 18), random.Random()  # the model's own generator stays as it is
    while not done.wait(drawn.uniform(0, 2 * _PAUSE_SECONDS)):
        for _ in range(5):
            hashlib.sha256(content)  # 0.2 ms on a core, without the interpreter lock
            sum(range(5_000))  # 0.1 ms with it


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
