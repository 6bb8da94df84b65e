"""Clocks that tick by calls: every clock, however it is held, the same at every entry, real again afterwards."""

from __future__ import annotations

import collections
import copy
import datetime
import functools
import pickle
import threading
import time
import timeit
import types
from collections.abc import Callable
from time import perf_counter
from typing import Any

import pytest
import torch

from hashbench.replay.controls.system import STEP, ticking_clocks

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
def test_a_clock_advances_and_starts_again_at_the_next_entry(name: str) -> None:
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
def test_a_method_of_datetime_is_reached_where_it_is_stored(name: str, how: str) -> None:
    now = HELD[how](getattr(datetime.datetime, name))
    assert readings(now) == readings(now)
    assert now() > datetime.datetime(2026, 1, 1), "afterwards it can still be called"


def test_a_clock_that_was_stored_inside_is_real_afterwards() -> None:
    with ticking_clocks():
        held, bound = time.monotonic, datetime.datetime.now
    before = time.monotonic()
    assert before <= held() <= time.monotonic()
    assert bound() > datetime.datetime(2026, 1, 1)


def test_one_context_in_another_leaves_the_outer_one_in_force() -> None:
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
    assert 0.05 <= time.monotonic() - began < 5


@pytest.mark.parametrize("clock", ["time.time", "datetime.datetime.now"])
@pytest.mark.parametrize(
    ("package", "ticks"),
    [
        ("asyncio.base_events", False),
        ("torch.utils.data", False),
        ("hashbench.trace.mode", False),
        ("hashbench_zoo_outside", True),
        ("somebodys.module", True),
        ("torchvision.datasets", True),
    ],
)
def test_the_time_that_a_caller_sees_depends_on_whose_code_it_is(package: str, ticks: bool, clock: str) -> None:
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


def test_clocks_can_be_started_anew_without_another_entry() -> None:
    with ticking_clocks() as restart:
        first = [time.perf_counter(), time.time()]
        restart()
        assert [time.perf_counter(), time.time()] == first
        assert time.perf_counter() > first[0]
