"""The contexts as the experiments use them: all reachable from one place, one thread, and a load."""

from __future__ import annotations

import gc
import random
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hashbench.replay import controls
from hashbench.run.settings import settings

CONTEXTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "constant_entropy": controls.constant_entropy,
    "ticking_clocks": controls.ticking_clocks,
    "single_worker_pools": controls.single_worker_pools,
    "one_thread": controls.one_thread,
    "busy_threads": lambda: controls.busy_threads(2),
    "poisoned_memory": lambda: controls.poisoned_memory(controls.POISONS[0]),
}


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("error", [False, True], ids=["at the end", "on error"])
def test_nothing_global_is_left(name: str, error: bool) -> None:
    before = settings(), _get_current_dispatch_mode_stack(), gc.isenabled()
    threads = set(threading.enumerate())  # one that an earlier test left behind may end meanwhile
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    with suppress(ZeroDivisionError), CONTEXTS[name]():
        if error:
            raise ZeroDivisionError
    assert (settings(), _get_current_dispatch_mode_stack(), gc.isenabled()) == before
    assert set(threading.enumerate()) <= threads
    assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == states


def test_all_of_them_fit_into_each_other() -> None:
    def run() -> Any:
        with ThreadPoolExecutor(3) as pool:
            found = [future.result() for future in as_completed([pool.submit(time.time_ns) for _ in range(6)])]
        return len(found), uuid.uuid4(), time.time(), torch.empty(100).tolist()

    def inside(names: list[str]) -> Any:
        if not names:
            return run()
        with CONTEXTS[names[0]]():
            return inside(names[1:])

    order = [*CONTEXTS]
    assert inside(order) == inside(order)
    assert run() != run()
    assert inside(order[::-1]) == inside(order[::-1])
    assert run() != run()


def test_one_thread_is_one_inside_and_as_before_afterwards() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with controls.one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_load_keeps_other_threads_at_work_and_ends() -> None:
    with controls.busy_threads(2):
        loads = [thread for thread in threading.enumerate() if thread.name.startswith("hashbench load")]
        clocks = [time.pthread_getcpuclockid(thread.ident) for thread in loads if thread.ident]
        deadline = time.monotonic() + 120
        while any(time.clock_gettime(clock) < 0.03 for clock in clocks):  # of the processor, however busy that is
            assert time.monotonic() < deadline, "while this thread sleeps, the others work"
            time.sleep(0.01)
        assert len(clocks) == 2
    assert not any(thread.is_alive() for thread in loads)
