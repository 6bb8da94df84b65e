"""Stalls delay threads and pool work in an order given by the variation, up to a limit per run."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import pytest

from hashbench.replay.controls import stalls
from hashbench.replay.controls.stalls import MOST_SECONDS, SECONDS, stalled_threads


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that threads were stalled; none waits."""
    seconds: list[float] = []
    monkeypatch.setattr(stalls.time, "sleep", seconds.append)
    return seconds


@pytest.mark.parametrize("variation", [1, 2, 3, 4, 5])
def test_variation_selects_the_stalled_threads(variation: int, slept: list[float]) -> None:
    ran: list[int] = []
    with stalled_threads(variation):
        for number in range(len(SECONDS)):
            thread = threading.Thread(target=ran.append, args=(number,))
            thread.start()
            thread.join()
    place = (1 - variation) % len(SECONDS)
    assert slept == [seconds for seconds in (*SECONDS[place:], *SECONDS[:place]) if seconds]
    assert ran == list(range(len(SECONDS)))


def test_total_stall_is_limited(slept: list[float]) -> None:
    with stalled_threads(1):
        for _ in range(40):
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()
    assert sum(slept) == pytest.approx(MOST_SECONDS)


def test_pool_work_is_stalled_item_by_item(slept: list[float]) -> None:
    with stalled_threads(1), ThreadPoolExecutor(2) as pool:
        assert list(pool.map(abs, [-1, -2, -3, -4])) == [1, 2, 3, 4]
    assert sorted(slept) == sorted(filter(None, SECONDS))


def test_thread_pool_items_are_stalled(slept: list[float]) -> None:
    with ThreadPool(2) as pool:
        with stalled_threads(1):
            assert pool.map(abs, [-1, -2, -3, -4]) == [1, 2, 3, 4]
        pool.map(abs, [-5])
    assert sorted(slept) == sorted(SECONDS)


def test_threads_start_undelayed_afterwards(slept: list[float]) -> None:
    started = threading.Thread.start
    with pytest.raises(ZeroDivisionError), stalled_threads(1):
        raise ZeroDivisionError
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert threading.Thread.start is started
    assert slept == []
