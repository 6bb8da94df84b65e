"""Stalls delay threads and pool work in an order given by the variation, up to a limit per run."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest

from hashbench.core.diagnose.replay.controls import single_worker_pools, stalls
from hashbench.core.diagnose.replay.controls.stalls import MOST_SECONDS, SECONDS, stalled_threads


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


def one_by_one(pool: Any, work: Callable[[int], int]) -> Callable[[], list[int]]:
    found = [pool.apply_async(func=work, args=(number,)) for number in (5, 6, 7)]
    return lambda: [one.get() for one in found]


ITEMS: dict[str, Callable[[Any, Callable[[int], int]], Callable[[], list[int]]]] = {
    "map": lambda pool, work: pool.map_async(work, [5, 6, 7]).get,
    "starmap": lambda pool, work: pool.starmap_async(work, [(5,), (6,), (7,)]).get,
    "imap": lambda pool, work: functools.partial(list, pool.imap(work, iterable=[5, 6, 7])),
    "imap_unordered": lambda pool, work: functools.partial(list, pool.imap_unordered(work, [5, 6, 7])),
    "apply_async": one_by_one,
}


@pytest.mark.parametrize("hand_over", ITEMS.values(), ids=ITEMS)
def test_an_item_has_its_stall_before_a_worker_begins_it(
    hand_over: Callable[[Any, Callable[[int], int]], Callable[[], list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool's only worker is busy until another thread was stalled as well."""
    stalled: list[tuple[bool, float]] = []
    other, held = threading.Thread(target=int), threading.Event()
    monkeypatch.setattr(stalls.time, "sleep", lambda one: stalled.append((threading.current_thread() is other, one)))
    with ThreadPool(1) as pool:
        pool.apply_async(held.wait)
        with stalled_threads(1):
            results = hand_over(pool, abs)
            other.start()
            other.join()
            held.set()
            assert results() == [5, 6, 7]
    assert [one for one in stalled if one[1]] == [(False, SECONDS[0]), (False, SECONDS[2])]


def test_threads_start_undelayed_afterwards(slept: list[float]) -> None:
    started = threading.Thread.start
    with pytest.raises(ZeroDivisionError), stalled_threads(1):
        raise ZeroDivisionError
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert threading.Thread.start is started
    assert slept == []


# ------------------------------------------------------------------------------------------------- threads that wait


def ended(start: Callable[[list[int], Callable[[int], None]], object]) -> list[int]:
    """The numbers of four pieces of work in the order in which they end, which ``start`` begins one after the other."""
    order: list[int] = []

    def work(number: int) -> None:
        time.sleep(0.05 * number)
        order.append(number)

    start([0, 1, 2], work)
    return order


def by_threads(numbers: list[int], work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in numbers]
    _join(threads)


def by_a_subclass(numbers: list[int], work: Callable[[int], None]) -> None:
    class Working(threading.Thread):
        def run(self) -> None:
            work(numbers[self.number])

        number = 0

    threads = [Working() for _ in numbers]
    for number, thread in enumerate(threads):
        thread.number = number
    _join(threads)
    assert all("run" not in vars(thread) for thread in threads)


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def by_an_executor(numbers: list[int], work: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, numbers))


def by_a_pool(numbers: list[int], work: Callable[[int], None]) -> None:
    with ThreadPool(3) as pool:
        pool.map(work, numbers, chunksize=1)


def by_a_pool_one_by_one(numbers: list[int], work: Callable[[int], None]) -> None:
    with ThreadPool(3) as pool:
        for result in [pool.apply_async(work, (number,)) for number in numbers]:
            result.get()


WAYS = [by_threads, by_a_subclass, by_an_executor, by_a_pool, by_a_pool_one_by_one]


@pytest.mark.parametrize("start", WAYS)
def test_variation_decides_the_order_of_stopped_threads(
    start: Callable[[list[int], Callable[[int], None]], object],
) -> None:
    code = threading.Thread.start.__code__
    orders = []
    for variation in (1, 2):
        with stalled_threads(variation):
            orders.append(ended(start))
    assert threading.Thread.start.__code__ is code
    assert orders[0][-1] == 0
    assert orders[1][-1] == 1
    assert ended(start) == [0, 1, 2]


@pytest.mark.parametrize("start", WAYS)
def test_serial_threads_stay_serial_when_stopped(
    start: Callable[[list[int], Callable[[int], None]], object],
) -> None:
    with single_worker_pools(), stalled_threads(1):
        assert ended(start) == [0, 1, 2]
