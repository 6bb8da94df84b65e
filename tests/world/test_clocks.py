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
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import pytest
import torch

from hashbench.replay.controls import clocks
from hashbench.replay.controls.clocks import ticking_clocks
from hashbench.trace.api import HashDebugTrace

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


class InInstance:
    def __init__(self, now: Now) -> None:
        self.now = now


class InSlot:
    __slots__ = ("now",)

    def __init__(self, now: Now) -> None:
        self.now = now


@dataclass(frozen=True)
class Frozen:
    now: Now


class Pair(NamedTuple):
    now: Now
    other: int


class InModel(torch.nn.Module):
    def __init__(self, now: Now) -> None:
        super().__init__()
        self.now = now


def in_default(now: Now) -> Now:
    def ask(now: Now = now) -> Any:
        return now()

    return ask


def in_keyword_default(now: Now) -> Now:
    def ask(*, now: Now = now) -> Any:
        return now()

    return ask


def on_class(now: Now) -> type:
    return type("OnClass", (), {"now": now, "static": staticmethod(now)})


def in_closure(now: Now) -> Now:
    return lambda: now()


def materialised(now: Now) -> InInstance:
    held = InInstance(now)
    assert held.__dict__
    return held


def as_module(now: Now) -> types.ModuleType:
    module = types.ModuleType("somebodys")
    module.now = now
    return module


HOLDERS: dict[str, Callable[[Now], Any]] = {
    "instance": lambda now: InInstance(now),
    "instance with a dict": materialised,
    "slot": lambda now: InSlot(now),
    "frozen dataclass": lambda now: Frozen(now),
    "model": lambda now: InModel(now),
    "module": as_module,
    "namespace": lambda now: types.SimpleNamespace(now=now),
}
CALLS: dict[str, Callable[[Now], Now]] = {
    **{name: (lambda now, make=make: functools.partial(_call, make(now))) for name, make in HOLDERS.items()},
    "list": lambda now: functools.partial(_call_item, [now], 0),
    "dict": lambda now: functools.partial(_call_item, {"now": now}, "now"),
    "dict in a list": lambda now: functools.partial(_call_item, [{"now": now}][0], "now"),
    "tuple": lambda now: functools.partial(_call_item, (now,), 0),
    "tuple in a tuple": lambda now: (lambda held: lambda: held[0][0]())(((now,),)),
    "named tuple": lambda now: functools.partial(_call, Pair(now, 1)),
    "deque": lambda now: functools.partial(_call_item, collections.deque([now]), 0),
    "default dict": lambda now: functools.partial(_call_missing, collections.defaultdict(now)),
    "closure": in_closure,
    "default argument": in_default,
    "keyword default": in_keyword_default,
    "class attribute": lambda now: functools.partial(_call, on_class(now)),
    "class attribute through an instance": lambda now: functools.partial(_call, on_class(now)()),
    "static method": lambda now: functools.partial(_call_static, on_class(now)),
    "from-import": lambda _: lambda: perf_counter(),
    "partial": lambda now: functools.partial(now),
    "argument of a partial": lambda now: functools.partial(_apply, now),
}


def _call(held: Any) -> Any:
    return held.now()


def _call_static(held: Any) -> Any:
    return held.static()


def _call_item(held: Any, place: Any) -> Any:
    return held[place]()


def _call_missing(held: Any) -> Any:
    held.clear()
    return held["now"]


def _apply(now: Now) -> Any:
    return now()


@pytest.mark.parametrize("how", CALLS)
def test_a_clock_is_reached_however_it_is_held(how: str) -> None:
    now = CALLS[how](time.perf_counter)
    first = readings(now)
    assert readings(now) == first
    assert len(set(first)) == 3
    before = perf_counter()
    assert before <= now() <= perf_counter(), "afterwards it is the real clock"


@pytest.mark.parametrize("how", ["instance", "list", "model", "closure", "tuple", "partial"])
@pytest.mark.parametrize("name", ["now", "utcnow", "today"])
def test_a_method_of_datetime_is_reached_where_it_is_stored(name: str, how: str) -> None:
    now = CALLS[how](getattr(datetime.datetime, name))
    assert readings(now) == readings(now)
    assert now() > datetime.datetime(2026, 1, 1), "afterwards it can still be called"


# ------------------------------------------------------------------------------------------------ put back again

REAL = {name: getattr(time, name) for name in dir(time) if callable(getattr(time, name))}
"""Right outside the contexts alone: inside, this dictionary holds substitutes, too."""


@pytest.mark.parametrize("error", [False, True], ids=["at the end", "on error"])
def test_everything_is_put_back(error: bool) -> None:
    held, ask = InInstance(time.monotonic), in_default(time.time)
    defaults, originals = ask.__defaults__, {id(function) for function in REAL.values()}
    with suppress(ZeroDivisionError), ticking_clocks():
        assert id(held.now) not in originals
        assert ask.__defaults__ is not defaults
        if error:
            raise ZeroDivisionError
    assert {name: id(getattr(time, name)) for name in REAL} == {name: id(one) for name, one in REAL.items()}
    assert {id(function) for function in REAL.values()} == originals
    assert held.now is time.monotonic
    assert ask.__defaults__ is defaults
    assert isinstance(datetime.datetime.__dict__["now"], types.ClassMethodDescriptorType)


def test_a_clock_that_was_stored_inside_is_real_afterwards() -> None:
    held = InInstance(len)
    with ticking_clocks():
        held.now = time.monotonic
    assert held.now is time.monotonic


def test_what_a_program_puts_elsewhere_inside_stays_there() -> None:
    held = InInstance(time.monotonic)
    with ticking_clocks():
        del held.now
    assert not hasattr(held, "now")


def test_one_context_in_another_leaves_the_outer_one_in_force() -> None:
    with ticking_clocks():
        before = time.time()
        with ticking_clocks():
            time.time()
        assert time.time() - before == pytest.approx(clocks.STEP / 1e9, abs=1e-6)
    assert time.time is REAL["time"]


# --------------------------------------------------------------------------------------------- what stays as it is


def test_a_loop_that_waits_for_a_clock_ends() -> None:
    with ticking_clocks():
        end = time.monotonic() + 5
        while time.monotonic() < end:
            pass


def test_sleep_is_real_and_advances_the_clocks() -> None:
    began = time.perf_counter()
    with ticking_clocks():
        before = time.time()
        time.sleep(0.02)
        assert time.time() - before == pytest.approx(0.02 + clocks.STEP / 1e9, abs=1e-6)
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


def test_hashbench_itself_keeps_real_time() -> None:
    with ticking_clocks():
        with HashDebugTrace(show_exec_time=True):
            torch.ones(2)
        assert isinstance(clocks._localtime, types.BuiltinFunctionType)


def test_a_clock_can_be_copied_and_pickled() -> None:
    with ticking_clocks():
        model = copy.deepcopy(InModel(time.time))
        assert model.now() < model.now()
        assert pickle.loads(pickle.dumps(time.time)) is time.time


def test_clocks_can_be_started_anew_without_another_entry() -> None:
    with ticking_clocks() as restart:
        first = [time.perf_counter(), time.time()]
        restart()
        assert [time.perf_counter(), time.time()] == first
        assert time.perf_counter() > first[0]


def test_sleep_right_after_a_new_start_advances_the_clocks() -> None:
    with ticking_clocks() as restart:
        began = time.perf_counter()
        restart()
        time.sleep(0.01)
        assert time.perf_counter() - began == pytest.approx(0.01)
