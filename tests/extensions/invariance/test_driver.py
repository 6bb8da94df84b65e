"""The driver of experiments: what is kept, prices of remedies, and settings that come too late."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from hashbench.core.diagnose.replay.methods import ReplayChange
from hashbench.core.records import NO_TIME
from hashbench.extensions.invariance import driver
from hashbench.extensions.invariance.driver import Experiments, out_of_reach
from hashbench.extensions.invariance.item_call import ItemCall
from hashbench.extensions.invariance.layout import ItemAxis, NotItemwiseError


class Planted(Experiments):
    """Content decides nothing; the number of items differs unless one thread computes."""

    def run_all(self) -> None:
        self.run("other_content", lambda: iter([False]))
        self.run("other_number", lambda: iter([True, False]))
        rows = ItemCall(torch.neg, (torch.ones(2, 3),), {}, 2, (ItemAxis(0),), (ItemAxis(0),))
        self.run_under({"one_thread": ReplayChange(), "exact_values": ReplayChange()}, rows)

    def differs(self, change: ReplayChange) -> Iterator[bool]:
        del change
        yield len(self.found.arms) > 2


def test_what_is_compared_with_comes_first_and_remedies_are_those_that_are_advised() -> None:
    found = Planted(2, 20.0).evidence()
    names = ["other_number", "other_content", "one_thread", "exact_values"]
    assert [arm.name for arm in found.arms] == names
    assert [(arm.trials, arm.differing) for arm in found.arms] == [(2, 1), (1, 0), (1, 0), (1, 1)]
    (remedy,) = found.remedies
    assert (remedy.works, remedy.words) == (True, "compute with one thread")


def test_an_experiment_ends_with_the_budget_and_says_why_it_cannot_be_made() -> None:
    planted = Planted(2, 0.0)
    assert planted.run("other_number", lambda: iter([True] * 9)).note == NO_TIME
    assert planted.found.arm("other_number").trials == 1

    def refuses() -> Iterator[bool]:
        yield False
        raise NotItemwiseError("the items have an order")

    assert Planted(2, 20.0).run("other_places", refuses).note == "the items have an order"


# ------------------------------------------------------------------------------------------- prices of remedies


class Timed:
    """A call that takes these seconds, one after the other, and notes by which clock and in which order it is run."""

    def __init__(self, name: str, seconds: list[float], runs: list[tuple[str, Any]], *, device: str = "cpu") -> None:
        self.name, self.seconds, self.runs, self.device = name, iter(seconds), runs, torch.device(device)

    def run(self, *, clock: Any) -> tuple[list[torch.Tensor], float]:
        self.runs.append((self.name, clock))
        return [], next(self.seconds)


def priced(before: list[float], after: list[float], **more: Any) -> tuple[float | None, list[tuple[str, Any]]]:
    """The price of a call that takes the seconds ``after`` in place of ``before``, and the runs that it took."""
    runs: list[tuple[str, Any]] = []
    calls: list[Any] = [Timed(name, times, runs, **more) for name, times in (("before", before), ("after", after))]
    return driver.price(*calls), runs


def test_a_price_is_the_median_of_ratios_of_cpu_time_in_turns() -> None:
    busy = [1.0, 1.0, 9.0, 1.0, 9.0, 1.0, 9.0]  # while something else runs, for both
    cost, runs = priced([1.0, *busy], [3 * busy[0], *(2 * one for one in busy[1:])])
    assert cost == 2.0
    assert runs == [(name, time.process_time) for name in ("before", *("before", "after") * driver.TIMED)]


def test_short_calls_are_timed_several_at_once() -> None:
    times = [driver.BLOCK_SECONDS / 4] * 99
    cost, runs = priced(times, times)
    assert (cost, [name for name, _ in runs[1:9]]) == (1.0, ["before"] * 4 + ["after"] * 4)
    assert priced([0.0] * 999, [0.0] * 999)[0] is None, "a clock that does not resolve them"


def test_price_with_other_threads_is_minimal_wall_time() -> None:
    seconds = [4.0, 4.0, 2.0, *[5.0] * 5], [6.0, 6.0, 9.0, 3.0, *[7.0] * 3]
    assert priced(*seconds, device="cuda")[0] == 1.5
    assert {clock for _, clock in priced(*seconds, device="cuda")[1]} == {time.perf_counter}
    threads = torch.get_num_threads()

    @contextlib.contextmanager
    def more_threads() -> Iterator[None]:
        torch.set_num_threads(threads + 1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    runs: list[tuple[str, Any]] = []
    calls: list[Any] = [Timed(name, [*times], runs) for name, times in zip(("", ""), seconds, strict=True)]
    assert driver.price(*calls, more_threads) == 1.5
    assert {clock for _, clock in runs} == {time.perf_counter}


def test_attention_settings_out_of_reach_are_said() -> None:
    x, first = torch.rand(4, 2, 5, 8), ItemAxis(0)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    attention = ItemCall(fused, (x, x, x), {}, 4, (first,) * 3, (first, None))
    (arm,) = out_of_reach(attention)
    assert (arm.name, arm.ran) == ("sdpa_math", False)
    assert arm.note == "this call is one implementation of attention, chosen before it"
    assert not [*out_of_reach(ItemCall(torch.ops.aten.neg.default, (x,), {}, 4, (first,), (first,)))]
    chooses = ItemCall(torch.nn.functional.scaled_dot_product_attention, (x, x, x), {}, 4, (first,) * 3, (first,))
    assert not [*out_of_reach(chooses)]
