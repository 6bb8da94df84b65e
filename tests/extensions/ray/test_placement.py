"""What a task asks for against what machines have."""

from __future__ import annotations

import pytest

from hashbench.extensions.ray.executor import Demand, Node, able, capacity, settled, tasks_at_once

SMALL = Node("s", "10.0.0.1", {"CPU": 2, "memory": 1000})
LARGE = Node("l", "10.0.0.2", {"CPU": 8, "memory": 4000, "GPU": 2, "hashbench_cuda": 1})


@pytest.mark.parametrize(
    ("demand", "times"),
    [
        pytest.param(Demand(cpus=1), 8, id="as many as it has CPUs"),
        pytest.param(Demand(cpus=3), 2, id="a CPU that is left over runs nothing"),
        pytest.param(Demand(cpus=1, gpus=1), 2, id="what is scarcest decides"),
        pytest.param(Demand(cpus=1, gpus=0.5), 4, id="two share an accelerator"),
        pytest.param(Demand(cpus=1, memory=3000), 1, id="memory"),
        pytest.param(Demand(cpus=1, custom={"hashbench_cuda": 1}), 1, id="its own resource"),
        pytest.param(Demand(cpus=1, custom={"hashbench_xpu": 1}), 0, id="a resource that it lacks"),
        pytest.param(Demand(cpus=9), 0, id="too few CPUs"),
        pytest.param(Demand(cpus=0), 1, id="nothing"),
    ],
)
def test_a_machine_runs_at_once(demand, times):
    assert tasks_at_once(LARGE, demand) == times


def test_only_machines_that_have_everything_are_able():
    assert able([SMALL, LARGE], Demand(gpus=1)) == [LARGE]
    assert able([SMALL, LARGE], Demand()) == [SMALL, LARGE]


def test_the_capacity_is_that_of_all_machines_together_and_never_nothing():
    assert capacity([SMALL, LARGE], Demand(cpus=2)) == 5
    assert capacity([SMALL], Demand(gpus=1)) == capacity([], Demand()) == 1


def test_nobody_asks_for_more_memory_than_the_largest_machine_has():
    assert settled(Demand(), [SMALL, LARGE], memory=9999, alone=False).memory == 4000
    assert settled(Demand(), [SMALL], memory=9999, alone=False).memory == 1000
    assert settled(Demand(), [SMALL, LARGE], memory=500, alone=False).memory == 500


def test_memory_of_a_machine_that_cannot_run_the_task_does_not_count():
    giant = Node("g", "10.0.0.3", {"CPU": 1, "memory": 9000})
    assert settled(Demand(gpus=1), [giant, LARGE], memory=9999, alone=False).memory == 4000


def test_a_task_that_must_be_alone_takes_all_of_one_machine():
    alone = settled(Demand(cpus=2), [SMALL, LARGE], memory=0, alone=True)
    assert alone.cpus == 8
    assert tasks_at_once(LARGE, alone) == 1
    assert settled(Demand(cpus=2), [SMALL], memory=0, alone=True).cpus == 2


def test_without_any_machine_the_demand_stays():
    assert settled(Demand(cpus=2), [], memory=7, alone=True) == Demand(cpus=2, memory=7)


def test_a_demand_in_words():
    assert Demand(cpus=1, gpus=0.5, memory=3 << 20, custom={"a": 2}).text() == "CPU 1, GPU 0.5, a 2, memory 3 MiB"
    assert Demand(cpus=0).text() == "nothing"
