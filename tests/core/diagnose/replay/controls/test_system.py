"""Clocks, entropy and pools held still, one thread and a load: the same at every entry, and as before afterwards."""

from __future__ import annotations

import _random
import collections
import concurrent.futures
import copy
import datetime
import functools
import gc
import os
import pickle
import random
import secrets
import ssl
import sys
import tempfile
import threading
import time
import timeit
import types
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, suppress
from multiprocessing.pool import Pool, ThreadPool
from os import urandom
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hashbench.core.diagnose.replay import controls
from hashbench.core.diagnose.replay.controls import system
from hashbench.core.diagnose.replay.controls.system import STEP, constant_entropy, single_worker_pools, ticking_clocks
from hashbench.core.run.settings import settings

# ----------------------------------------------------------------------------------------------------- all of them

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


def test_one_thread_inside_only() -> None:
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


# ---------------------------------------------------------------------------------------------------------- clocks

Now = Callable[[], Any]


def readings(now: Now, *, count: int = 3) -> list[Any]:
    with ticking_clocks():
        return [now() for _ in range(count)]


CLOCKS: dict[str, Now] = {
    **{
        name: (lambda name=name: getattr(time, name)())
        for base in ("time", "perf_counter", "monotonic", "process_time", "thread_time")
        for name in (base, f"{base}_ns")
    },
    "clock_gettime": lambda: time.clock_gettime(time.CLOCK_MONOTONIC),
    "clock_gettime_ns": lambda: time.clock_gettime_ns(time.CLOCK_REALTIME),
    "datetime.now": lambda: datetime.datetime.now(),
    "datetime.now in a time zone": lambda: datetime.datetime.now(datetime.UTC),
    "datetime.utcnow": lambda: datetime.datetime.utcnow(),
    "datetime.today": lambda: datetime.datetime.today(),
    "timeit.default_timer": lambda: timeit.default_timer(),
}

IN_SECONDS: dict[str, Now] = {
    "date.today": lambda: datetime.date.today(),
    "localtime": lambda: time.localtime(),
    "gmtime": lambda: time.gmtime(),
    "ctime": lambda: time.ctime(),
    "asctime": lambda: time.asctime(),
    "strftime": lambda: time.strftime("%X"),
}


@pytest.mark.parametrize("name", CLOCKS)
def test_clock_advances_and_restarts(name: str) -> None:
    first = readings(CLOCKS[name])
    assert len(set(first)) == 3
    assert sorted(first) == first
    assert readings(CLOCKS[name]) == first
    assert CLOCKS[name]() not in first


@pytest.mark.parametrize("name", IN_SECONDS)
def test_a_date_shows_the_ticking_time(name: str) -> None:
    first = readings(lambda: (time.sleep(0), IN_SECONDS[name]()), count=1500)
    assert readings(lambda: (time.sleep(0), IN_SECONDS[name]()), count=1500) == first
    if name != "date.today":
        assert first[0] != first[-1], "1500 calls are one and a half second"


def test_times_that_are_given_are_shown_as_they_are() -> None:
    with ticking_clocks():
        assert time.gmtime(0).tm_year == 1970
        assert time.strftime("%Y", time.gmtime(0)) == "1970"
        assert time.ctime(86_400 * 365).endswith("1971")
        assert time.asctime(time.gmtime(0)).endswith("1970")
        assert datetime.datetime.fromtimestamp(0, datetime.UTC).year == 1970


# ------------------------------------------------------------------------------------------------- how it is held


class Holder:
    def __init__(self, now: Now) -> None:
        self.now = now


class Slotted:
    __slots__ = ("now",)

    def __init__(self, now: Now) -> None:
        self.now = now


def in_default(now: Now) -> Now:
    def ask(now: Now = now) -> Any:
        return now()

    return ask


def in_keyword_default(now: Now) -> Now:
    def ask(*, now: Now = now) -> Any:
        return now()

    return ask


def in_running_function(now: Now) -> Now:
    def ask() -> Any:
        held = now
        while True:
            yield held()

    return functools.partial(next, ask())


HELD: dict[str, Callable[[Now], Now]] = {
    "from-import": lambda _: lambda: perf_counter(),
    "attribute": lambda now: (lambda held: lambda: held.now())(Holder(now)),
    "slot": lambda now: (lambda held: lambda: held.now())(Slotted(now)),
    "class": lambda now: (lambda held: lambda: held.now())(type("Made", (), {"now": now})()),
    "static method": lambda now: (lambda held: lambda: held.now())(type("Made", (), {"now": staticmethod(now)})),
    "namespace": lambda now: (lambda held: lambda: held.now())(types.SimpleNamespace(now=now)),
    "list": lambda now: (lambda held: lambda: held[0]())([now]),
    "dict": lambda now: (lambda held: lambda: held["now"]())({"now": now}),
    "set": lambda now: (lambda held: lambda: next(iter(held))())({now}),
    "tuple in a tuple": lambda now: (lambda held: lambda: held[0][0]())(((now,),)),
    "default dict": lambda now: (lambda held: lambda: (held.clear(), held["now"])[1])(collections.defaultdict(now)),
    "iterator": lambda now: functools.partial(next, iter(now, None)),
    "closure": lambda now: lambda: now(),
    "default argument": in_default,
    "keyword default": in_keyword_default,
    "local variable of a running function": in_running_function,
    "partial": lambda now: functools.partial(now),
    "argument of a partial": lambda now: functools.partial(lambda held: held(), now),
}


@pytest.mark.parametrize("how", HELD)
def test_a_clock_is_reached_however_it_is_held(how: str) -> None:
    now = HELD[how](time.perf_counter)
    first = readings(now)
    assert readings(now) == first
    assert len(set(first)) == 3
    before = perf_counter()
    assert before <= now() <= perf_counter(), "afterwards it is the real clock"


@pytest.mark.parametrize("how", ["attribute", "closure", "tuple in a tuple", "partial"])
@pytest.mark.parametrize("name", ["now", "utcnow", "today"])
def test_stored_datetime_method_is_reached(name: str, how: str) -> None:
    now = HELD[how](getattr(datetime.datetime, name))
    assert readings(now) == readings(now)
    assert now() > datetime.datetime(2026, 1, 1), "afterwards it can still be called"


def test_a_clock_that_was_stored_inside_is_real_afterwards() -> None:
    with ticking_clocks():
        held, bound = time.monotonic, datetime.datetime.now
    before = time.monotonic()
    assert before <= held() <= time.monotonic()
    assert bound() > datetime.datetime(2026, 1, 1)


def test_nested_context_keeps_the_outer_one() -> None:
    real = time.time()
    with ticking_clocks():
        before = time.time()
        with ticking_clocks():
            time.time()
        assert time.time() - before == pytest.approx(STEP / 1e9, abs=1e-6)
    assert time.time() >= real


# --------------------------------------------------------------------------------------------- what stays as it is


def test_a_loop_that_waits_for_a_clock_ends() -> None:
    with ticking_clocks():
        end = time.monotonic() + 5
        while time.monotonic() < end:
            pass


def test_sleep_is_real_and_advances_the_clocks() -> None:
    began = time.perf_counter()
    with ticking_clocks() as restart:
        before = time.time()
        restart()
        time.sleep(0.02)
        assert time.time() - before == pytest.approx(0.02, abs=1e-6)
        with pytest.raises(ValueError, match="non-negative"):
            time.sleep(-1)
    assert time.perf_counter() - began >= 0.02


def test_the_standard_library_waits_in_real_time() -> None:
    began = time.monotonic()
    with ticking_clocks():
        assert not threading.Event().wait(0.05)
    assert time.monotonic() - began >= 0.05


@pytest.mark.parametrize("clock", ["time.time", "datetime.datetime.now"])
@pytest.mark.parametrize(
    ("package", "ticks"),
    [
        ("asyncio.base_events", False),
        ("torch.utils.data", False),
        ("hashbench.core.trace.mode", False),
        ("hashbench_zoo_outside", True),
        ("somebodys.module", True),
        ("torchvision.datasets", True),
    ],
)
def test_fake_time_depends_on_the_caller(package: str, ticks: bool, clock: str) -> None:
    code = f"import time, datetime\ndef ask(): return [{clock}() for _ in range(2)]"
    exec(code, caller := {"__name__": package})
    seen = []
    for _ in range(2):
        with ticking_clocks():
            seen.append(caller["ask"]())
    assert (seen[0] == seen[1]) == ticks


def test_each_thread_has_its_own_time() -> None:
    seen: list[float] = []
    with ticking_clocks():
        for _ in range(2):
            thread = threading.Thread(target=lambda: seen.append(time.time()))
            thread.start()
            thread.join()
    assert seen[0] == seen[1]


def test_a_clock_can_be_copied_and_pickled() -> None:
    model = torch.nn.Module()
    model.now = time.time
    with ticking_clocks():
        model = copy.deepcopy(model)
        assert model.now() < model.now()
        assert pickle.loads(pickle.dumps(time.time)) is time.time


@pytest.mark.parametrize(
    ("context", "draw"),
    [
        pytest.param(ticking_clocks, lambda: (time.perf_counter(), time.time()), id="clocks"),
        pytest.param(constant_entropy, lambda: (os.urandom(8), np.random.default_rng().random()), id="entropy"),
    ],
)
def test_stream_restarts_without_another_entry(context: Callable[[], Any], draw: Now) -> None:
    with context() as restart:
        first = draw()
        assert all(new != old for new, old in zip(draw(), first, strict=True))
        restart()
        assert draw() == first


# --------------------------------------------------------------------------------------------------------- entropy


def draws(draw: Now) -> list[Any]:
    """Four values. The global generators start from a seed, as they do in every run."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    with constant_entropy():
        return [draw() for _ in range(4)]


def in_module() -> Now:
    module = types.ModuleType("somebodys")
    exec("from os import urandom\nfrom random import Random", vars(module))
    return lambda: (module.urandom(8), module.Random().random())


def on_model() -> Now:
    model = torch.nn.Module()
    model.entropy = os.urandom
    return lambda: model.entropy(8)


def from_seeded_globally(seed: Now, draw: Now) -> Now:
    return lambda: (seed(), draw())[1]


def sources() -> dict[str, Now]:
    """Made in a test, as a model is made in a worker: references are not looked for in what was there before."""
    return {
        "os.urandom": lambda: os.urandom(8),
        "os.urandom by from-import": lambda: urandom(8),
        "os.urandom in a default argument": lambda held=os.urandom: held(8),
        "os.urandom in a closure": (lambda held: lambda: held(8))(os.urandom),
        "os.urandom in a list": lambda held=[os.urandom]: held[0](8),
        "os.urandom on a model": on_model(),
        "os.urandom in another module": in_module(),
        "os.getrandom": lambda: os.getrandom(8),
        "ssl.RAND_bytes": lambda: ssl.RAND_bytes(8),
        "secrets.token_bytes": lambda: secrets.token_bytes(8),
        "secrets.token_hex": lambda: secrets.token_hex(8),
        "secrets.randbelow": lambda: secrets.randbelow(2**64),
        "secrets.choice": lambda: secrets.choice(range(2**60)),
        "uuid1": lambda: uuid.uuid1(),
        "uuid4": lambda: uuid.uuid4(),
        "SystemRandom": lambda: random.SystemRandom().random(),
        "random.Random()": lambda: random.Random().random(),
        "random.seed()": from_seeded_globally(random.seed, random.random),
        "random.seed(None)": lambda: (random.seed(None), random.gauss(0, 1))[1],
        "numpy default_rng()": lambda: np.random.default_rng().random(),
        "numpy SeedSequence()": lambda: np.random.SeedSequence().entropy,
        "numpy PCG64()": lambda: np.random.PCG64().random_raw(),
        "numpy MT19937()": lambda: np.random.MT19937().random_raw(),
        "numpy Philox()": lambda: np.random.Philox().random_raw(),
        "numpy RandomState()": lambda: np.random.RandomState().rand(),
        "numpy.random.seed()": from_seeded_globally(np.random.seed, np.random.rand),
        "torch.seed()": lambda: (torch.seed(), torch.rand(1).item()),
        "torch.Generator.seed()": lambda: torch.Generator().seed(),
    }


@pytest.mark.parametrize("name", sources())
def test_a_source_gives_the_same_stream_at_every_entry(name: str) -> None:
    source = sources()[name]
    first = draws(source)
    assert len(set(first)) == 4, "within a run no two values are the same"
    assert draws(source) == first
    assert len({*first, *(source() for _ in range(4))}) == 8, "afterwards it is random again"


def test_what_was_drawn_before_changes_nothing() -> None:
    first = draws(uuid.uuid4)
    for source in sources().values():
        source()
    assert draws(uuid.uuid4) == first


def test_seeds_that_are_given_count() -> None:
    expected = random.Random(5).random(), np.random.default_rng(5).random(), random.Random("text").random()
    with constant_entropy():
        assert (
            random.Random(5).random(),
            np.random.default_rng(5).random(),
            random.Random("text").random(),
        ) == expected
        generator = torch.Generator()
        seed = generator.seed()
        assert generator.initial_seed() == seed
        first = torch.rand(3, generator=generator)
        assert torch.equal(torch.rand(3, generator=torch.Generator().manual_seed(seed)), first)


def test_a_source_that_fails_still_fails() -> None:
    with constant_entropy(), pytest.raises(TypeError):
        random.Random([])


@pytest.mark.parametrize("error", [False, True], ids=["at the end", "on error"])
def test_sources_of_entropy_are_put_back(error: bool) -> None:
    attributes = ((_random.Random, "seed"), (torch.Generator, "seed"))
    before = [id(vars(owner)[name]) for owner, name in attributes]
    with suppress(ZeroDivisionError), constant_entropy():
        assert all(id(vars(owner)[name]) != old for (owner, name), old in zip(attributes, before, strict=True))
        assert os.urandom.__self__ is not sys.modules["posix"]
        if error:
            raise ZeroDivisionError
    assert [id(vars(owner)[name]) for owner, name in attributes] == before
    assert os.urandom.__self__ is sys.modules["posix"]


def test_temporary_files_do_not_collide() -> None:
    made = []
    for _ in range(2):
        with constant_entropy():
            made.append(Path(tempfile.mkdtemp()))
    for folder in made:
        folder.rmdir()
    assert made[0] != made[1]


# ----------------------------------------------------------------------------------------------------------- pools

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
def test_tasks_overlap_without_the_control(way: str, executor: ThreadPoolExecutor, thread_pool: ThreadPool) -> None:
    barrier = threading.Barrier(4)
    WAYS[way](executor, thread_pool, lambda _: barrier.wait(timeout=120))


def test_tasks_run_in_pool_threads(executor: ThreadPoolExecutor) -> None:
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


def test_task_error_is_raised_by_its_future(executor: ThreadPoolExecutor, thread_pool: ThreadPool) -> None:
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
def test_waiting_tasks_get_their_workers_back(run: Callable[[Any], list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "PATIENCE", 0.1)
    barrier = threading.Barrier(3)
    with single_worker_pools(), ThreadPoolExecutor(3) as made:
        EXECUTORS[:] = [made]
        assert sorted(run(lambda: barrier.wait(timeout=120))) == [0, 1, 2]


def test_own_threads_end_in_start_order() -> None:
    ended: list[int] = []
    waits = [threading.Event() for _ in range(3)]

    def work(number: int) -> None:
        if number < 2:  # alone, the first would end last
            waits[number].wait(0.05 * (2 - number))
        ended.append(number)

    with single_worker_pools():
        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
    assert ended == [0, 1, 2]


def test_a_thread_that_waits_for_the_program_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "THREAD_PATIENCE", 0.01)
    go = threading.Event()
    with single_worker_pools():
        threads = [threading.Thread(target=go.wait) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert all(thread.is_alive() for thread in threads)
        go.set()
    for thread in threads:
        thread.join()


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
def test_pools_are_put_back(error: bool, executor: ThreadPoolExecutor) -> None:
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


def test_future_is_found_in_a_set_afterwards(executor: ThreadPoolExecutor) -> None:
    with single_worker_pools():
        futures = {executor.submit(len, ()) for _ in range(5)}
    assert all(future in futures for future in list(futures))
