"""Pools that take one task after the other: a fixed order of completion, in the pool's own threads."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing.pool import Pool, ThreadPool
from typing import Any

import pytest
import torch

from hashbench.replay.controls import system
from hashbench.replay.controls.system import single_worker_pools

Task = Callable[[int], int]
TASKS = 24


@pytest.fixture(autouse=True)
def endless_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a task that waits for no other one may take as long as one that does."""
    monkeypatch.setattr(system, "PATIENCE", 120.0)


@pytest.fixture(scope="module")
def executor() -> Iterator[ThreadPoolExecutor]:
    """One that exists, and has all of its threads, before any context is entered."""
    with ThreadPoolExecutor(4) as made:
        barrier = threading.Barrier(4)
        list(made.map(lambda _: barrier.wait(), range(4)))
        yield made


@pytest.fixture(scope="module")
def thread_pool() -> Iterator[ThreadPool]:
    with ThreadPool(4) as made:
        yield made


def later_ones_first(done: list[int]) -> Task:
    def task(number: int) -> int:
        time.sleep(0.0001 * (number % 4 == 0))
        done.append(number)
        return number

    return task


def results(futures: Iterable[Future[int]]) -> list[int]:
    return [future.result() for future in as_completed(futures)]


def from_own_executor(task: Task) -> list[int]:
    with ThreadPoolExecutor(4) as made:
        return results({made.submit(task, number) for number in range(TASKS)})


def from_callbacks(executor: ThreadPoolExecutor, task: Task) -> list[int]:
    seen: list[int] = []
    for number in range(TASKS):
        executor.submit(task, number).add_done_callback(lambda future: seen.append(future.result()))
    executor.submit(len, ()).result()
    return seen


def from_results_left_behind(task: Task) -> list[int]:
    seen: list[int] = []
    pool = ThreadPool(4)
    for number in range(TASKS):
        pool.apply_async(task, (number,), callback=seen.append)
    pool.close()
    pool.join()
    return seen


STORED: dict[str, Callable[..., Future[int]]] = {}
WAYS: dict[str, Callable[[ThreadPoolExecutor, ThreadPool, Task], list[int]]] = {
    "a set": lambda executor, _, task: results({executor.submit(task, number) for number in range(TASKS)}),
    "a dict": lambda executor, _, task: results({executor.submit(task, number): number for number in range(TASKS)}),
    "wait": lambda executor, _, task: [
        done.result() for done in concurrent.futures.wait([executor.submit(task, n) for n in range(TASKS)])[0]
    ],
    "an executor made inside": lambda _, __, task: from_own_executor(task),
    "a stored method": lambda _, __, task: results([STORED["submit"](task, number) for number in range(TASKS)]),
    "callbacks": lambda executor, _, task: from_callbacks(executor, task),
    "imap": lambda _, pool, task: list(pool.imap(task, range(TASKS))),
    "imap_unordered": lambda _, pool, task: list(pool.imap_unordered(task, range(TASKS))),
    "chunks": lambda _, pool, task: list(pool.imap_unordered(task, range(TASKS), chunksize=3)),
    "map": lambda _, pool, task: pool.map(task, range(TASKS), chunksize=1),
    "results left behind": lambda _, __, task: from_results_left_behind(task),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_order_of_completion_is_the_same_at_every_entry(
    way: str, executor: ThreadPoolExecutor, thread_pool: ThreadPool
) -> None:
    STORED["submit"] = executor.submit
    seen = []
    for _ in range(2):
        done: list[int] = []
        with single_worker_pools():
            seen.append(WAYS[way](executor, thread_pool, later_ones_first(done)))
        assert done == [*range(TASKS)], "a task began before an earlier one had ended"
        assert sorted(seen[-1]) == done
    assert seen[0] == seen[1]


@pytest.mark.parametrize("way", ["a set", "imap_unordered"])
def test_without_it_tasks_overlap(way: str, executor: ThreadPoolExecutor, thread_pool: ThreadPool) -> None:
    barrier = threading.Barrier(4)
    WAYS[way](executor, thread_pool, lambda _: barrier.wait(timeout=120))


def test_tasks_run_in_a_thread_of_the_pool_as_torch_has_it_there(executor: ThreadPoolExecutor) -> None:
    with single_worker_pools(), torch.no_grad():
        assert executor.submit(torch.is_grad_enabled).result()
        assert executor.submit(threading.get_ident).result() != threading.get_ident()


def test_a_pool_made_inside_has_one_worker_until_the_end() -> None:
    with single_worker_pools():
        made = ThreadPoolExecutor(3)
        assert len({made.submit(threading.get_ident).result() for _ in range(20)}) == 1
    barrier = threading.Barrier(3)
    assert sorted(made.map(lambda _: barrier.wait(timeout=120), range(3))) == [0, 1, 2]
    made.shutdown()


def test_an_initializer_is_called_in_the_worker() -> None:
    local = threading.local()
    with single_worker_pools(), ThreadPool(3, lambda: setattr(local, "value", 5)) as pool:
        assert pool.map(lambda _: local.value, range(4)) == [5] * 4


def test_an_error_of_a_task_arrives_where_it_is_asked_for(
    executor: ThreadPoolExecutor, thread_pool: ThreadPool
) -> None:
    with single_worker_pools():
        future = executor.submit(int, "no number")
        with pytest.raises(ValueError, match="no number"):
            future.result()
        with pytest.raises(ValueError, match="no number"):
            thread_pool.map(int, ["no number"])


def test_a_pool_that_is_closed_takes_nothing() -> None:
    with single_worker_pools():
        made, pool = ThreadPoolExecutor(2), ThreadPool(2)
        made.shutdown()
        pool.terminate()
        with pytest.raises(RuntimeError):
            made.submit(len, ())
        with pytest.raises(ValueError, match="not running"):
            pool.apply_async(len, ((),))


def test_a_task_may_hand_over_another(thread_pool: ThreadPool) -> None:
    with single_worker_pools(), ThreadPoolExecutor(2) as made:
        assert made.submit(lambda: made.submit(lambda: 5)).result().result() == 5
        assert thread_pool.apply(lambda: thread_pool.apply_async(lambda: 6)).get() == 6


@pytest.mark.parametrize(
    "run",
    [
        lambda wait: [one.result() for one in [EXECUTORS[0].submit(wait) for _ in range(3)]],
        lambda wait: ThreadPool(3).map(lambda _: wait(), range(3), chunksize=1),
        lambda wait: list(ThreadPool(3).imap_unordered(lambda _: wait(), range(3))),
    ],
    ids=["executor", "map", "imap"],
)
def test_tasks_that_wait_for_each_other_get_their_workers_back(
    run: Callable[[Any], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "PATIENCE", 0.1)
    barrier = threading.Barrier(3)
    with single_worker_pools(), ThreadPoolExecutor(3) as made:
        EXECUTORS[:] = [made]
        assert sorted(run(lambda: barrier.wait(timeout=120))) == [0, 1, 2]


EXECUTORS: list[ThreadPoolExecutor] = []


def test_pools_of_processes_give_their_results_in_order() -> None:
    context = torch.multiprocessing.get_context("forkserver")
    with single_worker_pools():
        with ProcessPoolExecutor(2, mp_context=context) as made:
            futures = [made.submit(abs, -number) for number in range(4)]
            assert sorted(future.result() for future in as_completed(futures)) == [0, 1, 2, 3]
            assert all(future.done() for future in futures)
        with Pool(2, context=context) as pool:
            assert list(pool.imap_unordered(abs, range(9))) == [*range(9)]
            assert pool.apply_async(os.getppid).ready()


@pytest.mark.parametrize("error", [False, True], ids=["at the end", "on error"])
def test_everything_is_put_back(error: bool, executor: ThreadPoolExecutor) -> None:
    owners = ThreadPoolExecutor, ProcessPoolExecutor, ThreadPool, Pool
    before = [{name: id(value) for name, value in vars(owner).items()} for owner in owners]
    function = executor.submit.__func__
    code = function.__code__, function.__kwdefaults__
    with suppress(ZeroDivisionError), single_worker_pools():
        executor.submit(len, ())
        assert function.__code__ is not code[0]
        if error:
            raise ZeroDivisionError
    assert [{name: id(value) for name, value in vars(owner).items()} for owner in owners] == before
    assert (function.__code__, function.__kwdefaults__) == code
    assert executor._max_workers == 4


def test_a_future_from_inside_is_found_in_a_set_afterwards(executor: ThreadPoolExecutor) -> None:
    with single_worker_pools():
        futures = {executor.submit(len, ()) for _ in range(5)}
    assert all(future in futures for future in list(futures))
