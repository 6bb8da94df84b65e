"""Perturbations apply in the variations that they should, and everything is restored afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from hashbench.core.diagnose.replay.controls.perturbations import (
    FEWEST_THREADS,
    WITHIN_A_RUN,
    _heap,
    no_collector,
    oversubscribed,
    provoked,
)
from hashbench.core.run.settings import settings

CPU = torch.device("cpu")


def state() -> tuple[object, ...]:
    return torch.get_num_threads(), gc.isenabled(), gc.get_threshold(), threading.active_count()


@pytest.mark.parametrize("variation", range(5))
@pytest.mark.parametrize("name", WITHIN_A_RUN)
def test_everything_is_restored(name: str, variation: int) -> None:
    before = settings(), state()
    with pytest.raises(ZeroDivisionError), provoked([name], variation, device=CPU):
        raise ZeroDivisionError
    assert (settings(), state()) == before


def test_variation_0_applies_threads_only() -> None:
    before = state()
    with provoked(WITHIN_A_RUN, 0, device=CPU):
        inside = state()
    assert inside == (oversubscribed(), *before[1:])


def test_threads_are_oversubscribed() -> None:
    with provoked(["threads"], 1, device=CPU):
        assert torch.get_num_threads() == oversubscribed() >= FEWEST_THREADS


@pytest.mark.parametrize(("variation", "enabled", "threshold"), [(1, True, 10), (2, False, None)])
def test_collector_runs_often_or_never(variation: int, enabled: bool, threshold: int | None) -> None:
    usual = gc.get_threshold()
    with provoked(["collector"], variation, device=CPU):
        assert gc.isenabled() is enabled
        assert gc.get_threshold() == ((threshold, *usual[1:]) if threshold else usual)


def test_disabled_collector_stays_disabled() -> None:
    with no_collector():
        gc.enable()
        gc.set_threshold(1)
        assert not gc.isenabled()
        assert gc.collect() == 0
    assert gc.isenabled()


def test_unnamed_perturbations_do_not_apply() -> None:
    before = state()
    with provoked(["address"], 1, device=CPU):
        assert state() == before


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("enabled", [True, False])
def test_without_the_collector_objects_in_cycles_stay(*, enabled: bool) -> None:
    before = gc.isenabled(), gc.get_threshold()
    functions = gc.enable, gc.collect, gc.set_threshold
    (gc.enable if enabled else gc.disable)()
    try:
        with no_collector():
            gc.enable()
            gc.set_threshold(1)
            kept = weakref.ref(Cycle())
            made = [[] for _ in range(100)]
            assert not gc.collect()
            assert kept() is not None, len(made)
        assert (gc.isenabled(), gc.get_threshold()) == (enabled, before[1])
        assert (gc.enable, gc.collect, gc.set_threshold) == functions
    finally:
        (gc.enable if before[0] else gc.disable)()


def test_both_sides_of_a_pair_have_the_same_number_of_threads() -> None:
    counts = set()
    for variation in range(4):
        with provoked(WITHIN_A_RUN, variation, device=CPU):
            counts.add(torch.get_num_threads())
    assert counts == {max(oversubscribed(), torch.get_num_threads())}


ALIGNMENTS = """
import numpy as np, torch
from hashbench.core.diagnose.replay.controls import provoked
foreign, own = set(), set()
for variation in range(1, 13):
    with provoked(("address",), variation, device=torch.device("cpu")):
        foreign.add(np.empty(3000, dtype=np.float32).ctypes.data % 64)
        own.add(torch.empty(3000).data_ptr() % 64)
print(sorted(foreign), sorted(own))
"""


@pytest.mark.slow
@pytest.mark.skipif(_heap() is None, reason="needs the C library of Linux")
def test_foreign_memory_has_every_alignment() -> None:
    # In a process of its own: what comes from the end of the heap is moved, and here much of it has holes.
    done = subprocess.run([sys.executable, "-c", ALIGNMENTS], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "[0, 16, 32, 48] [0]\n"
