"""Experiments on a captured call tell mechanisms apart, on torch kernels and custom ops."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from address_ops import goes_by_addresses

from hashbench.core import processes
from hashbench.core.diagnose.calls.call import CapturedCall
from hashbench.core.diagnose.calls.live import LiveCall, OutcomeDigests, captured_environment, keys_below_a_mode
from hashbench.core.diagnose.causes import stats
from hashbench.core.diagnose.replay import Replays, experiments
from hashbench.core.diagnose.replay.controls import memory as poison_module
from hashbench.core.diagnose.replay.replayer import Replayer, Tally
from hashbench.core.processes import Budget, phases_told_to
from hashbench.core.records import Evidence, TensorDigest
from hashbench.core.run.settings import settings
from tests.core.diagnose.replay.replay_helpers import DETERMINISTIC, aten, captured, numbers, overlapping, tried

pytestmark = pytest.mark.usefixtures("eight_threads")


def test_phases_count_the_experiments() -> None:
    told: list[str] = []
    with phases_told_to(told.append):
        tried(captured(aten.sort.default, numbers(10)), "repeat", "one_thread", "onednn_off", replays=2)
    assert told == ["experiments: repeat", *(f"experiments {n}/3: {told[n - 1].split()[-1]}" for n in (2, 3))]
    assert {phase.split()[-1] for phase in told} == {"repeat", "one_thread", "onednn_off"}


def counts(found: Replays, name: str) -> tuple[int, int]:
    return found.arm(name).differing, found.arm(name).trials


TARGETS = torch.randint(0, 1000, (1_000_000,), generator=torch.Generator().manual_seed(2))


def accumulated() -> CapturedCall:
    return captured(aten.index_put_.default, torch.zeros(1000), [TARGETS], numbers(1_000_000), True)


RACES: dict[str, Callable[[], CapturedCall]] = {
    "index_put": lambda: captured(aten.index_put_.default, torch.zeros(1000), [TARGETS], numbers(1_000_000)),
    "index_copy": lambda: captured(aten.index_copy_.default, torch.zeros(1000), 0, TARGETS, numbers(1_000_000)),
    "put": lambda: captured(aten.put_.default, torch.zeros(1000), TARGETS, numbers(1_000_000)),
}


@pytest.mark.slow
def test_accumulation_ends_with_one_thread_or_exact_values() -> None:
    found = tried(accumulated(), "one_thread", "exact_values", "deterministic", "moved")
    assert found.arm("repeat").differing
    for name in ("one_thread", "exact_values", "deterministic"):
        assert found.arm(name).differing == 0, name
    assert found.facts.chosen_values is False
    assert found.facts.same_values is False
    assert found.arm("moved").note == "the outcome differs in place"
    assert found.other is not None
    assert not torch.equal(found.first[0], found.other[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", RACES)
def test_write_race_persists_with_exact_values(name: str) -> None:
    found = tried(RACES[name](), "one_thread", "exact_values")
    assert found.arm("repeat").differing
    assert found.arm("one_thread").differing == 0
    assert found.facts.chosen_values is True
    assert found.facts.overlap is False


def test_missing_deterministic_kernel_is_noted() -> None:
    arm = tried(captured(aten.put_.default, torch.zeros(9), torch.tensor([1, 1]), numbers(2)), "deterministic").arm(
        "deterministic"
    )
    assert arm.note.startswith("raises: put_ does not have a deterministic implementation")
    assert not arm.ran


@pytest.mark.slow
def test_overlap_ends_with_copied_sources() -> None:
    found = tried(overlapping(), "copied_sources", "deterministic")
    assert found.facts.overlap is True
    assert found.arm("repeat").differing
    assert found.arm("copied_sources").differing == 0
    assert found.arm("deterministic").differing


def test_address_dependence_shows_only_when_moved() -> None:
    found = tried(captured(torch.ops.addressed.total.default, numbers(515)), "moved")
    assert found.arm("repeat").differing == 0
    assert found.arm("moved").differing > 0
    assert found.arm("moved").found == "all by 4, 8, 16, 32, 48 bytes"
    assert found.other is not None


ALIGNED = {
    "mv": lambda: (aten.mv.default, numbers(300, 515), numbers(515)),
    "dot": lambda: (aten.dot.default, numbers(515), numbers(515).clone()),
    "addition": lambda: (aten.add.Tensor, numbers(515), numbers(515).clone()),
}
"""Kernels of which the processor's libraries may have two for one op, and one of which there is one alone."""


@pytest.mark.parametrize("name", ALIGNED)
def test_torch_kernel_differs_when_moved_as_probed(name: str, record_property: Callable[[str, object], None]) -> None:
    func, *inputs = ALIGNED[name]()
    expected = goes_by_addresses(func, *inputs, said=record_property)
    found = tried(captured(func, *inputs), "moved")
    assert found.arm("repeat").differing == 0
    assert (found.arm("moved").differing > 0) == expected
    assert (found.other is not None) == expected
    assert expected <= (name != "addition")


def test_allocation_is_not_poisoned() -> None:
    found = tried(captured(aten.empty.memory_format, [100]), "poison")
    assert found.facts.allocation is True
    assert not found.arm("poison").ran
    assert "hands out memory" in found.arm("poison").note


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_call_never_differs(name: str) -> None:
    found = tried(DETERMINISTIC[name](), replays=2)
    assert stats.deterministic_price(Evidence("kernel", arms=found.arms)) is not None
    assert {arm.name: arm.differing for arm in found.arms if arm.differing and arm.name != "moved"} == {}
    assert found.arm("repeat").trials >= 2
    assert [arm.name for arm in found.arms if not arm.ran and (not arm.note or "raises" in arm.note)] == []
    facts = found.facts
    known = (facts.same_values, facts.chosen_values, facts.tied_places, facts.representation, facts.overlap)
    assert known == (None, None, None, "", False) or found.other


PRIVATE = np.random.default_rng(3)


@torch.library.custom_op("replayed::partly_written", mutates_args=())
def partly_written(x: torch.Tensor) -> torch.Tensor:
    output = torch.empty(x.numel() + 500)
    output[: x.numel()] = x
    return output


@torch.library.custom_op("replayed::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + float(np.random.default_rng().random())


@torch.library.custom_op("replayed::privately_drawn", mutates_args=())
def privately_drawn(x: torch.Tensor) -> torch.Tensor:
    return x + float(PRIVATE.random())


@torch.library.custom_op("replayed::timed", mutates_args=())
def timed(x: torch.Tensor) -> torch.Tensor:
    return x + time.perf_counter_ns() % 999_983  # a prime: the clock may tick in any unit


@torch.library.custom_op("replayed::as_completed", mutates_args=())
def in_order_of_completion(x: torch.Tensor) -> torch.Tensor:
    with Path("/dev/urandom").open("rb", buffering=0) as device:  # which no arm holds still
        waits = device.read(len(x))

    def task(row: int) -> torch.Tensor:
        time.sleep(0.00002 * waits[row])
        return x[row].clone()

    with ThreadPoolExecutor(4) as pool:
        return torch.stack([done.result() for done in as_completed([pool.submit(task, row) for row in range(8)])])


WORLD = ("generators", "entropy", "clocks", "one_worker")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "remover"),
    [("noisy", "entropy"), ("privately_drawn", "generators"), ("timed", "clocks"), ("as_completed", "one_worker")],
)
def test_outside_input_of_custom_op_is_named(name: str, remover: str) -> None:
    found = tried(captured(getattr(torch.ops.replayed, name).default, numbers(8, 3)), *WORLD)
    assert found.facts.custom is True
    assert found.arm("repeat").differing
    assert [name for name in WORLD if found.arm(name).ran and not found.arm(name).differing] == [remover]
    assert found.arm("generators").found.endswith("PRIVATE") == (remover == "generators")
    assert found.facts.same_values is (name == "as_completed")


def test_unwritten_memory_follows_the_poison() -> None:
    found = tried(captured(torch.ops.replayed.partly_written.default, numbers(700)), "poison")
    assert counts(found, "poison")[0] == counts(found, "poison")[1] > 0
    assert found.arm("poison").found == "500 of 1200 elements"


def test_random_output_does_not_follow_the_poison() -> None:
    found = tried(captured(torch.ops.replayed.noisy.default, numbers(7000)), "poison")
    assert counts(found, "poison") == (0, 12)


def test_torch_kernels_get_no_outside_experiments() -> None:
    found = tried(DETERMINISTIC["a sum"](), *WORLD)
    assert all("torch's own kernels" in found.arm(name).note for name in WORLD)


DIFFERS: list[Callable[[int], bool]] = []
"""Whether the outcome of a run of ``replayed::counted`` differs, by its number; an op cannot be given a function."""


RUNS: list[int] = []


@torch.library.custom_op("replayed::counted", mutates_args=())
def counted_op(x: torch.Tensor) -> torch.Tensor:
    RUNS.append(1)
    return x + DIFFERS[0](len(RUNS))


def tried_where(differs: Callable[[int], bool], name: str = "one_thread", **limits: Any) -> Replays:
    RUNS.clear()
    DIFFERS[:] = [differs]
    return tried(captured(torch.ops.replayed.counted.default, numbers(3)), name, **limits)


@pytest.fixture
def a_second_is_50_looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A clock of budgets that goes by how often it is looked at, however busy the machine is."""
    looks = itertools.count()
    monkeypatch.setattr(processes, "monotonic", lambda: 0.02 * next(looks))
    return looks


def test_rare_difference_lengthens_all_experiments() -> None:
    found = tried_where(lambda run: run % 10 == 5, replays=20)
    assert found.arm("repeat").trials > 40
    assert found.arm("one_thread").trials > 40
    assert len(RUNS) < 1000


def test_late_difference_is_seen() -> None:
    assert tried_where(lambda run: run == 50, "repeat").arm("repeat").differing == 1


@pytest.mark.usefixtures("a_second_is_50_looks")
def test_agreeing_controls_prove_nothing() -> None:
    arm = tried_where(lambda run: run < 12 and run % 2 == 0, seconds=1.0).arm("one_thread")
    assert not arm.ran
    assert "so did those of the unchanged call" in arm.note


def test_experiments_without_time_are_not_run() -> None:
    found = tried(DETERMINISTIC["a product"](), seconds=-1.0)
    assert {(arm.trials, arm.note) for arm in found.arms} == {(0, "budget")}


def test_short_budget_is_kept(a_second_is_50_looks: Iterator[int]) -> None:
    found = tried(DETERMINISTIC["a product"](), seconds=1.0)
    assert next(a_second_is_50_looks) < 2 * 50
    assert any("budget" in arm.note for arm in found.arms)


def test_raising_op_is_noted() -> None:
    call = captured(aten.mm.default, numbers(2, 3), numbers(3, 2))
    broken = replace(call, args=(call.args[0], call.args[0]))
    with pytest.raises(RuntimeError) as raised:  # some releases of torch say which op it was
        torch.mm(numbers(2, 3), numbers(2, 3))
    found = tried(broken)
    assert "mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)" in str(raised.value)
    assert [arm.note for arm in found.arms] == [f"raises: {raised.value}"]
    assert (found.first, found.other, found.facts.same_values) == ((), None, None)


def test_global_state_is_restored() -> None:
    before, state = settings(), torch.get_rng_state()
    tried(DETERMINISTIC["dropout"]())
    tried(captured(aten.put_.default, torch.zeros(9), torch.tensor([1, 1]), numbers(2)))
    assert settings() == before
    assert torch.equal(torch.get_rng_state(), state)


def digest_of(call: CapturedCall) -> tuple[TensorDigest, ...]:
    with captured_environment(call):
        live = LiveCall(call)
        return live.run().digests().written


def test_replay_matches_the_record() -> None:
    call = DETERMINISTIC["a product"]()
    recorded = digest_of(call)
    other = (recorded[0]._replace(value="0" * 16),)

    def matches(*records: tuple[TensorDigest, ...]) -> bool | None:
        budget = Budget(5)
        return experiments(call, replays=2, budget=budget, recorded=records, arms=()).facts.matches_record

    assert (matches(other, recorded), matches(other), matches()) == (True, False, None)


TIES = np.random.default_rng(5)


@torch.library.custom_op("replayed::any_largest", mutates_args=())
def any_largest(x: torch.Tensor) -> torch.Tensor:
    """As on a GPU: of several that are the largest, any may be named."""
    rows = [np.flatnonzero(row == row.max()) for row in x.numpy()]
    return torch.tensor([int(TIES.choice(row)) for row in rows])


def test_any_argmax_has_tied_places() -> None:
    found = tried(captured(torch.ops.replayed.any_largest.default, torch.ones(8, 20)), "exact_values")
    assert found.arm("repeat").differing
    assert (found.facts.tied_places, found.facts.same_values) == (True, False)
    assert found.arm("exact_values").differing


def test_poison_fills_free_blocks_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[tuple[int, torch.device]] = []
    monkeypatch.setattr(poison_module, "_fill_free_blocks", lambda value, device, _: filled.append((value, device)))
    assert tried(captured(aten.add.Tensor, numbers(3), numbers(3)), "poison", replays=2).arm("poison").ran
    assert {device for _, device in filled} == {torch.device("cpu")}
    assert {value for value, _ in filled} == set(poison_module.POISONS)
    assert len(filled) >= 12, "before each replay"


def test_poison_by_dispatch_mode_reaches_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with an accelerator, or a malloc that cannot fill: torch 2.11 asserts that a mode's keys are saved."""
    monkeypatch.setattr(poison_module, "_reaches_small_tensors", lambda _: False)
    arm = tried(captured(aten.add.Tensor, numbers(3), numbers(3)), "poison", replays=2).arm("poison")
    assert (arm.ran, arm.differing) == (True, 0), arm.note
    assert not keys_below_a_mode().has(torch._C.DispatchKey.PythonTLSSnapshot)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_clean_call_never_differs_on_gpu() -> None:
    device = torch.device("cuda")
    found = tried(captured(aten.mul.Tensor, numbers(1000).to(device), numbers(1000).to(device)), seconds=60, replays=3)
    assert {arm.name: arm.differing for arm in found.arms if arm.differing} == {}
    ran = {arm.name for arm in found.arms if arm.ran}
    assert ran >= {"repeat", "moved", "poison", "busy_stream", "cudnn_off", "tf32_on", "tf32_off", "exact_values"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_each_attention_backend_runs_alone_on_gpu() -> None:
    heads = [numbers(1, 2, 64, 64).to("cuda", torch.float16) for _ in range(3)]
    with torch.inference_mode():
        call = captured(aten.scaled_dot_product_attention.default, *heads)
    found = tried(call, "sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", seconds=60)
    assert found.arm("sdpa_math").ran
    assert all(
        found.arm(f"sdpa_{name}").ran or found.arm(f"sdpa_{name}").note.startswith("raises")
        for name in ("flash", "efficient", "cudnn")
    )


def test_tally_copies_first_and_few_differing_outcomes() -> None:
    tally = Tally()
    outcomes = [OutcomeDigests((TensorDigest("float32", (), (), str(number % 7)),), (), ()) for number in range(70)]
    for number, outcome in enumerate(outcomes):
        tally.add(outcome, seconds=1.0, copy=lambda number=number: (torch.tensor(number),))
    assert (tally.trials, tally.differing, tally.distinct) == (69, 60, 7)
    assert [int(copy[0]) for copy in tally.copies] == [0, 1, 2, 3, 4]


def test_undeclared_writes_are_seen() -> None:
    call = captured(torch.ops.replayed.writes_behind.default, numbers(3))
    with captured_environment(call):
        lab = Replayer(call, replays=2, budget=Budget(5))
        lab.repeat(Budget(5))
    assert len(lab.repeated.copies[0]) == 2
    assert lab.repeated.copies[0][1].tolist() == (numbers(3) + 1).tolist()


@torch.library.custom_op("replayed::writes_behind", mutates_args=())
def writes_behind(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x.sum()
