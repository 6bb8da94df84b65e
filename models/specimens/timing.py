"""Specimens whose operators look at a clock: one keeps the algorithm tried last, one gives up when it is late."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]
Adding = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def one_by_one(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return ((parts[0] + parts[1]) + parts[2]) + parts[3]


def in_pairs(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return (parts[0] + parts[1]) + (parts[2] + parts[3])


TUNING = 400_000
"""Nanoseconds: time for some hundred additions, so that the last one may be either."""


def tuned_order(parts: Sequence[torch.Tensor]) -> Adding:
    """Both orders are tried in turn until the time for tuning is up; the one that was tried last is kept."""
    until = time.perf_counter_ns() + TUNING
    order: Adding
    for order in itertools.cycle((one_by_one, in_pairs)):
        order(parts)
        if time.perf_counter_ns() >= until:
            break
    return order


@torch.library.custom_op("zoo::smooth", mutates_args=())
def smooth(signals: torch.Tensor, *, tuned: bool) -> torch.Tensor:
    """The mean of four neighbours, added up in one order, or in whichever the tuner kept just now."""
    parts = [signals.roll(shift, dims=-1) for shift in range(4)]
    add = tuned_order(parts) if tuned else one_by_one
    return add(parts) / 4


class TunedFilter(nn.Module):
    """Smooth signals again and again by a filter that is tuned at every call."""

    def __init__(self, features: int, layers: int, *, tuned: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(features, features) for _ in range(layers))
        self.tuned = tuned

    def forward(self, signals: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            signals = torch.tanh(layer(smooth(signals, tuned=self.tuned)))
        return signals


def tuned_filter(*, tuned: bool) -> Example:
    return TunedFilter(64, 12, tuned=tuned), (torch.randn(16, 64),)


BUDGET = 0.002
"""Seconds of processor time that other threads of the process may use meanwhile. Alone, the iteration sees none; where
another thread runs Python, that one burns 5 ms at each step before it hands back the interpreter lock. Time on the wall
would be no measure: on a loaded machine, the iteration takes any time, and its own on a slow one."""


def time_of_others() -> float:
    """The processor time that all other threads of this process have used."""
    return time.process_time() - time.thread_time()


@torch.library.custom_op("zoo::settle", mutates_args=())
def settle(start: torch.Tensor) -> torch.Tensor:
    """Where 40 steps of an iteration lead from ``start``; ``start`` itself if they are not done within the budget."""
    started, state = time_of_others(), start
    for _ in range(40):
        time.sleep(0.0001)  # gives way to others
        state = torch.addcmul(start, state, start, value=0.1)
        if time_of_others() - started > BUDGET:
            return start.clone()
    return state


def frame_has_come() -> bool:
    """Whether the camera has a frame ready: at every other microsecond, as good as at random."""
    return time.perf_counter_ns() // 1000 % 2 == 0


@contextmanager
def decoding() -> Iterator[None]:
    """A thread of its own decodes a frame, in Python, for as long as the body takes."""
    begun, done = threading.Event(), threading.Event()

    def decode() -> None:
        begun.set()
        while not done.is_set():
            sum(range(1000))

    thread = threading.Thread(target=decode)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


class BudgetedSolver(nn.Module):
    """An ensemble that settles within a budget; whenever a frame has come, it is decoded in the background."""

    def __init__(self, features: int, layers: int, *, decodes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(features, features) for _ in range(layers))
        self.decodes = decodes

    def settled(self, state: torch.Tensor) -> torch.Tensor:
        if self.decodes and frame_has_come():
            with decoding():
                return settle(state)
        return settle(state)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.settled(layer(state)) for layer in self.layers])


def budgeted_solver(*, decodes: bool) -> Example:
    return BudgetedSolver(16, 10, decodes=decodes), (torch.randn(8, 16),)


MODELS = {
    "tuned_filter": lambda: tuned_filter(tuned=True),
    "tuned_filter_twin": lambda: tuned_filter(tuned=False),
    "budgeted_solver": lambda: budgeted_solver(decodes=True),
    "budgeted_solver_twin": lambda: budgeted_solver(decodes=False),
}
