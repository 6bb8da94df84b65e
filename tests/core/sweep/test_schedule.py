"""Which model starts when: decided on numbers alone."""

from __future__ import annotations

import random

import pytest

from hashbench.core.sweep.schedule import PATIENCE, Job, Schedule, estimated_memory_mib, longest_first


def job(key, memory=None, **fields):
    return Job(key, memory_mib=memory, **fields)


def started(schedule, *, capacity=100):
    """The keys of all jobs that may start now, in order."""
    keys = []
    while (start := schedule.next(capacity=capacity)) is not None:
        keys.append(start.job.key)
    return keys


def drained(schedule, *, capacity=100, choose=min):
    """All jobs in rounds: what starts, whenever the running job that ``choose`` picks has ended."""
    running, rounds = set(), []
    while schedule.unfinished:
        new = started(schedule, capacity=capacity)
        rounds.append(new)
        running |= set(new)
        ended = choose(running)
        running.remove(ended)
        schedule.end(ended)
    return rounds


# ------------------------------------------------------------------------------------------------ order


@pytest.mark.parametrize(
    ("jobs", "order"),
    [
        pytest.param([Job("a", 1.0), Job("b", 3.0), Job("c", 2.0)], "bca", id="the longest first"),
        pytest.param([Job("a", 9.0), Job("b"), Job("c", 8.0)], "bac", id="an unknown one could be longer"),
        pytest.param(
            [Job("a", parameters=1), Job("b"), Job("c", parameters=7)], "cab", id="of unknown ones the largest first"
        ),
        pytest.param([Job("b", 1.0), Job("a", 1.0), Job("c", 1.0)], "bac", id="equals stay as they are"),
        pytest.param([Job("b"), Job("a")], "ba", id="nothing known: as they are"),
    ],
)
def test_the_order(jobs, order):
    assert [job.key for job in longest_first(jobs)] == list(order)


# ----------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("jobs", "capacity", "now"),
    [
        pytest.param([job("a", 60), job("b", 60)], 4, ["a"], id="two large ones never run together"),
        pytest.param([job("a", 60), job("b", 40)], 4, ["a", "b"], id="what fits exactly fits"),
        pytest.param([job("a", 60), job("b", 60), job("c", 30)], 4, ["a", "c"], id="a smaller one fills the gap"),
        pytest.param([job("a", 10), job("b", 10), job("c", 10)], 2, ["a", "b"], id="never more than were asked for"),
        pytest.param([job("a", 10), job("b", 101), job("c", 10)], 4, ["b"], id="one larger than all there is, first"),
        pytest.param([job(f"u{i}") for i in range(9)], 9, [f"u{i}" for i in range(4)], id="unknown: an equal share"),
        pytest.param([job("a", 80), job("u"), job("b", 20)], 4, ["a", "b"], id="unknown: not beside a large one"),
        pytest.param([job("a", 100), job("u")], 4, ["a"], id="what takes all there is has it for itself"),
    ],
)
def test_what_starts_with_100_mib_for_4_workers(jobs, capacity, now):
    assert started(Schedule(jobs, memory_mib=100, workers=4), capacity=capacity) == now


@pytest.mark.parametrize("workers", [2, 3, 7, 10, 49])
@pytest.mark.parametrize("budget", [0.1, 1.1, 100.0, 21165.37])
def test_as_many_unknown_ones_run_as_were_asked_for(workers, budget):
    schedule = Schedule([job(str(i)) for i in range(100)], memory_mib=budget, workers=workers)
    assert len(started(schedule)) == workers


def test_without_a_budget_memory_is_not_looked_at():
    assert started(Schedule([job("a", 1e9), job("b", 1e9)])) == ["a", "b"]


def test_memory_is_free_again_when_a_job_ends():
    schedule = Schedule([job("a", 60), job("b", 60)], memory_mib=100)
    assert started(schedule) == ["a"]
    schedule.end("a")
    assert started(schedule) == ["b"]


def test_what_is_larger_than_everything_runs_alone_and_the_others_after_it():
    schedule = Schedule([job("a", 10), job("big", 300), job("huge", 200), job("b", 10)], memory_mib=100)
    assert drained(schedule) == [["big"], ["huge"], ["a", "b"], []]


def test_a_large_one_is_overtaken_only_so_often():
    small = [job(f"s{i:02}", 30) for i in range(40)]
    schedule = Schedule([job("s", 50), job("large", 90), *small], memory_mib=100, workers=4)
    order = [key for keys in drained(schedule, choose=max) for key in keys]
    assert order.index("large") == 1 + PATIENCE
    assert len(order) == 42


@pytest.mark.parametrize("seed", range(20))
def test_everything_starts_once_and_never_beyond_the_budget(seed):
    """Any jobs, any ends, some repeated: nothing starves, nothing runs twice at once."""
    generator = random.Random(seed)
    jobs = [job(str(i), generator.choice([None, 1.0, 30.0, 60.0, 99.0, 150.0])) for i in range(60)]
    expected = {job.key: 25.0 if job.memory_mib is None else job.memory_mib for job in jobs}
    schedule = Schedule(jobs, memory_mib=100, workers=4)
    running, seen, repeated = {}, [], set()
    while schedule.unfinished:
        while (start := schedule.next(capacity=4)) is not None:
            assert not {*start.slots} & {slot for other in running.values() for slot in other.slots}
            assert max(start.slots) < 4
            running[start.job.key] = start
            seen.append(start.job.key)
        assert running, "it waits for nothing"
        assert len(running) == 1 or sum(expected[key] for key in running) <= 100 + 1e-6
        assert len(running) == 1 or not any(start.alone for start in running.values())
        key = generator.choice(sorted(running))
        del running[key]
        ended, _ = schedule.end(key)
        if generator.random() < 0.1 and key not in repeated:
            repeated.add(key)
            schedule.repeat(ended)
    assert sorted(seen) == sorted([job.key for job in jobs] + list(repeated))


@pytest.mark.parametrize(
    ("parameters", "mode", "mib"),
    [
        pytest.param(None, "training", None, id="not known"),
        pytest.param(0, "training", None, id="none"),
        pytest.param(2**20, "training", 1040.0, id="training"),
        pytest.param(2**20, "inference", 616.0, id="inference"),
    ],
)
def test_the_estimate_from_parameters(parameters, mode, mib):
    assert estimated_memory_mib(parameters, mode=mode) == mib


# ---------------------------------------------------------------------------------------------- devices


def placed(schedule, *, capacity=100):
    """The device of every job that may start now."""
    devices = {}
    while (start := schedule.next(capacity=capacity)) is not None:
        devices[start.job.key] = start.device
    return devices


def on(key, device_memory=None, **fields):
    return Job(key, device_memory_mib=device_memory, **fields)


@pytest.mark.parametrize(
    ("devices", "jobs", "workers", "now"),
    [
        pytest.param([], [on("a", 500), on("b", 500)], 2, {"a": None, "b": None}, id="none"),
        pytest.param([None], [on("a"), on("b")], 2, {"a": 0, "b": 0}, id="one, of unknown size"),
        pytest.param([100] * 2, [on("a"), on("b")], 2, {"a": 0, "b": 1}, id="one each"),
        pytest.param([100] * 3, [on("a"), on("b")], 2, {"a": 0, "b": 1}, id="more than workers"),
        pytest.param(
            [100] * 2,
            [on(key) for key in "abcde"],
            5,
            {"a": 0, "b": 1, "c": 0, "d": 1, "e": 0},
            id="fewer than workers",
        ),
        pytest.param([100] * 2, [on("a", 60), on("b", 60), on("c", 60)], 3, {"a": 0, "b": 1}, id="no room for a third"),
        pytest.param(
            [100] * 2,
            [on("a", 60), on("b", 60), on("c", 60), on("d", 40)],
            4,
            {"a": 0, "b": 1, "d": 0},
            id="a small one",
        ),
        pytest.param(
            [100] * 2,
            [on("a", 300), on("b", 30), on("c", 30), on("d", 30)],
            4,
            {"a": 0, "b": 1, "c": 1, "d": 1},
            id="one too large for any has a device to itself",
        ),
        pytest.param(
            [100] * 2,
            [on("a", 60), on("b"), on("c"), on("d")],
            4,
            {"a": 0, "b": 1, "c": 1},
            id="of unknown size: a share",
        ),
        pytest.param(
            [100],
            [on("a", 60, memory_mib=9), on("b", 60, memory_mib=9), on("c", 40, memory_mib=9)],
            3,
            {"a": 0, "c": 0},
            id="a small one, where the machine's memory is not looked at",
        ),
        pytest.param(
            [50, 100], [on("a", 60), on("b", 60), on("c", 40)], 3, {"a": 0, "b": 1, "c": 1}, id="unequal ones"
        ),
    ],
)
def test_who_starts_now_on_which_device(devices, jobs, workers, now):
    assert placed(Schedule(jobs, devices=devices, workers=workers), capacity=workers) == now


def test_the_machines_memory_counts_beside_a_devices():
    jobs = [on("a", 10, memory_mib=80), on("b", 10, memory_mib=80), on("c", 10, memory_mib=20)]
    assert placed(Schedule(jobs, memory_mib=100, devices=[100] * 3, workers=3)) == {"a": 0, "c": 1}


def test_the_device_that_is_free_again_is_used_next():
    schedule = Schedule([on(key) for key in "abcde"], devices=[100] * 2, workers=3)
    assert placed(schedule, capacity=3) == {"a": 0, "b": 1, "c": 0}
    schedule.end("b")
    assert placed(schedule, capacity=3) == {"d": 1}
    schedule.end("a")
    schedule.end("c")
    assert placed(schedule, capacity=2) == {"e": 0}


def test_what_is_repeated_alone_gets_a_device_too():
    schedule = Schedule([on("a", 10)], again=[on("b", 999)], devices=[100] * 2, workers=2)
    assert placed(schedule) == {"a": 0}
    schedule.end("a")
    assert placed(schedule) == {"b": 0}


@pytest.mark.parametrize("seed", range(20))
def test_no_device_ever_holds_more_than_its_budget(seed):
    """Any jobs, any ends: nothing starves, and only one that is alone on its device may be too large."""
    generator = random.Random(seed)
    jobs = [on(str(i), generator.choice([1.0, 30.0, 60.0, 99.0, 150.0])) for i in range(60)]
    expected = {job.key: job.device_memory_mib for job in jobs}
    schedule = Schedule(jobs, devices=[100, 70, 100], workers=6)
    running, seen = {}, []
    while schedule.unfinished:
        for key, device in placed(schedule, capacity=6).items():
            running[key] = device
            seen.append(key)
        assert running, "it waits for nothing"
        for device, budget in enumerate([100, 70, 100]):
            here = [key for key in running if running[key] == device]
            assert len(here) < 2 or sum(expected[key] for key in here) <= budget + 1e-6
        key = generator.choice(sorted(running))
        del running[key]
        schedule.end(key)
    assert sorted(seen) == sorted(expected)


# ------------------------------------------------------------------------------------------ beside others


def test_who_ran_beside_others():
    schedule = Schedule([job("a"), job("b"), job("c")])
    schedule.next(capacity=1)
    assert schedule.end("a") == (job("a"), False)
    started(schedule)
    assert [schedule.end(key)[1] for key in "bc"] == [True, True]


def test_one_that_another_joined_later_did_not_run_alone():
    schedule = Schedule([job("a"), job("b")])
    schedule.next(capacity=1)
    schedule.next(capacity=2)
    schedule.end("b")
    assert schedule.end("a")[1]


def test_what_is_repeated_comes_last_and_alone():
    schedule = Schedule([job("a"), job("b"), job("c"), job("d")])
    assert started(schedule, capacity=2) == ["a", "b"]
    schedule.repeat(schedule.end("a")[0])
    assert started(schedule, capacity=3) == ["c", "d"]
    schedule.repeat(schedule.end("b")[0])
    schedule.end("c")
    assert started(schedule) == []
    schedule.end("d")
    assert started(schedule) == ["a"]
    assert not schedule.end("a")[1]
    assert started(schedule) == ["b"]


def test_where_the_executor_isolates_nobody_waits():
    schedule = Schedule([job("a"), job("b")], again=[job("c")], isolates=True)
    starts = [schedule.next(capacity=3) for _ in range(3)]
    assert [(start.job.key, start.alone) for start in starts] == [("a", False), ("b", False), ("c", True)]
    assert not schedule.end("c")[1], "the executor kept it alone"


def test_slots_are_used_again():
    schedule = Schedule([job(name) for name in "abcd"])
    assert [schedule.next(capacity=3).slots for _ in range(3)] == [(0,), (1,), (2,)]
    schedule.end("b")
    assert schedule.next(capacity=3).slots == (1,)


def test_a_model_of_two_ranks_takes_two_slots():
    schedule = Schedule([Job("pair", ranks=2), Job("first"), Job("second")], workers=3)

    assert [schedule.next(capacity=3).slots for _ in range(2)] == [(0, 1), (2,)]
    assert schedule.next(capacity=3) is None
    schedule.end("pair")
    assert schedule.next(capacity=3).slots == (0,)


def test_a_model_of_several_ranks_waits_until_there_are_slots_and_is_overtaken():
    schedule = Schedule([Job("one"), Job("pair", ranks=2), Job("two")], workers=2)

    assert [schedule.next(capacity=2).job.key for _ in range(2)] == ["one", "two"]
    assert schedule.next(capacity=2) is None
    schedule.end("one")
    assert schedule.next(capacity=2) is None
    schedule.end("two")
    assert schedule.next(capacity=2).slots == (0, 1)


def test_a_model_of_more_ranks_than_slots_has_all_of_them():
    schedule = Schedule([Job("four", ranks=4), Job("one")], workers=2)

    assert schedule.next(capacity=2).slots == (0, 1)
    assert schedule.next(capacity=2) is None


def test_the_ranks_of_a_model_of_unknown_size_are_expected_to_take_a_share_of_the_memory_each():
    schedule = Schedule([Job("pair", ranks=2), Job("large", memory_mib=60.0)], memory_mib=100.0, workers=4)

    assert schedule.next(capacity=4).job.key == "pair"
    assert schedule.next(capacity=4) is None
