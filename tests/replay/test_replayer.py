"""The arms on a captured call tell mechanisms apart: real kernels and custom ops, each beside what it is not."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from address_ops import goes_by_addresses

from hashbench import processes
from hashbench import replay as replay_module
from hashbench.catalog import EXPERIMENTS
from hashbench.causes import stats
from hashbench.processes import Budget, phases_told_to
from hashbench.records import Evidence, TensorDigest
from hashbench.replay import Replays, experiments, methods
from hashbench.replay import call as calls_module
from hashbench.replay.call import CallOutcome, CapturedCall, TensorForm, in_force, outcome_of
from hashbench.replay.capture import capture
from hashbench.replay.controls import load
from hashbench.replay.controls import memory as poison_module
from hashbench.replay.facts import have_chosen_values, have_same_values, have_tied_places, representation_of
from hashbench.replay.methods import with_copied_sources, with_exact_values
from hashbench.replay.replayer import Replayer, Tally
from hashbench.run.settings import preserved, settings

aten = torch.ops.aten
REPLAYS = 8
AROUND = {name: method for name, method in methods.METHODS.items() if isinstance(method, methods.Around)}


@pytest.fixture(autouse=True)
def eight_threads() -> Iterator[None]:
    """Races need other threads, and calls of milliseconds, else one thread does it all before the others wake. With
    eight threads, two replays differ in at least 14 of 29 cases on any machine, also a busy one or one with a single
    core; with two threads, in none of 29 for ``put_`` on two idle cores."""
    with preserved():
        torch.set_num_threads(8)
        yield


def captured(func: Any, *args: Any, **kwargs: Any) -> CapturedCall:
    return capture(func, args, kwargs, limit_bytes=2**30)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_experiments_are_counted_for_whoever_listens() -> None:
    told: list[str] = []
    with phases_told_to(told.append):
        tried(captured(aten.sort.default, numbers(10)), "repeat", "one_thread", "onednn_off", replays=2)
    assert told == ["experiments: repeat", *(f"experiments {n}/3: {told[n - 1].split()[-1]}" for n in (2, 3))]
    assert {phase.split()[-1] for phase in told} == {"repeat", "one_thread", "onednn_off"}


def tried(call: CapturedCall, *names: str, seconds: float = 120.0, replays: int = REPLAYS) -> Replays:
    """So many seconds are no time that is waited for: a busy machine may need them."""
    return experiments(call, replays=replays, budget=Budget(seconds), arms=names or EXPERIMENTS)


def counts(found: Replays, name: str) -> tuple[int, int]:
    return found.arm(name).differing, found.arm(name).trials


# ------------------------------------------------------------------------------------------------ kernels of torch

TARGETS = torch.randint(0, 1000, (1_000_000,), generator=torch.Generator().manual_seed(2))


def accumulated() -> CapturedCall:
    return captured(aten.index_put_.default, torch.zeros(1000), [TARGETS], numbers(1_000_000), True)


RACES: dict[str, Callable[[], CapturedCall]] = {
    "index_put": lambda: captured(aten.index_put_.default, torch.zeros(1000), [TARGETS], numbers(1_000_000)),
    "index_copy": lambda: captured(aten.index_copy_.default, torch.zeros(1000), 0, TARGETS, numbers(1_000_000)),
    "put": lambda: captured(aten.put_.default, torch.zeros(1000), TARGETS, numbers(1_000_000)),
}


def test_accumulation_is_removed_by_one_thread_and_by_exact_values() -> None:
    found = tried(accumulated(), "one_thread", "exact_values", "deterministic", "moved")
    assert found.arm("repeat").differing
    for name in ("one_thread", "exact_values", "deterministic"):
        assert found.arm(name).differing == 0, name
    assert found.facts.chosen_values is False
    assert found.facts.same_values is False
    assert found.arm("moved").note == "the outcome differs in place"
    assert found.other is not None
    assert not torch.equal(found.first[0], found.other[0])


@pytest.mark.parametrize("name", RACES)
def test_a_race_of_writers_keeps_on_with_exact_values_and_chooses_among_them(name: str) -> None:
    found = tried(RACES[name](), "one_thread", "exact_values")
    assert found.arm("repeat").differing
    assert found.arm("one_thread").differing == 0
    assert found.facts.chosen_values is True
    assert found.facts.overlap is False


def test_an_op_without_a_deterministic_kernel_says_so() -> None:
    arm = tried(captured(aten.put_.default, torch.zeros(9), torch.tensor([1, 1]), numbers(2)), "deterministic").arm(
        "deterministic"
    )
    assert arm.note.startswith("raises: put_ does not have a deterministic implementation")
    assert not arm.ran


def overlapping() -> CapturedCall:
    view = numbers(1500, 1600)[:, :1500]
    return captured(aten.add_.Tensor, view, view.t())


def test_an_op_that_reads_what_it_writes_is_helped_by_copied_sources() -> None:
    found = tried(overlapping(), "copied_sources", "deterministic")
    assert found.facts.overlap is True
    assert found.arm("repeat").differing
    assert found.arm("copied_sources").differing == 0
    assert found.arm("deterministic").differing


def test_a_kernel_that_goes_by_addresses_differs_when_moved_and_in_place_never() -> None:
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
def test_a_kernel_of_torch_differs_when_moved_where_a_probe_says_so(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    func, *inputs = ALIGNED[name]()
    expected = goes_by_addresses(func, *inputs, said=record_property)
    found = tried(captured(func, *inputs), "moved")
    assert found.arm("repeat").differing == 0
    assert (found.arm("moved").differing > 0) == expected
    assert (found.other is not None) == expected
    assert expected <= (name != "addition")


def test_an_allocation_gets_no_poison() -> None:
    found = tried(captured(aten.empty.memory_format, [100]), "poison")
    assert found.facts.allocation is True
    assert not found.arm("poison").ran
    assert "hands out memory" in found.arm("poison").note


DETERMINISTIC = {
    "a product": lambda: captured(aten.mm.default, numbers(64, 64), numbers(64, 64)),
    "a sum": lambda: captured(aten.sum.default, numbers(10_000)),
    "dropout": lambda: captured(aten.native_dropout.default, numbers(1000), 0.5, True),
    "a scatter with one target each": lambda: captured(
        aten.index_put_.default, torch.zeros(99), [torch.arange(99)], numbers(99)
    ),
    "a custom op": lambda: captured(torch.ops.replayed.doubled.default, numbers(50)),
    "a sparse tensor that is written": lambda: captured(aten.mul_.Tensor, numbers(4, 4).to_sparse(), torch.tensor(2.0)),
    "a quantized tensor": lambda: captured(
        aten.dequantize.self, torch.quantize_per_tensor(numbers(9), 0.1, 0, torch.qint8)
    ),
    "an argument that grows": lambda: captured(aten.add.out, numbers(3), numbers(3), out=torch.empty(0)),
    "a foreach op": lambda: captured(aten._foreach_mul_.Scalar, [numbers(3), numbers(4)], 2.0),
}


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_nothing_differs_under_any_arm(name: str) -> None:
    found = tried(DETERMINISTIC[name](), replays=2)
    assert stats.deterministic_price(Evidence("kernel", arms=found.arms)) is not None
    assert {arm.name: arm.differing for arm in found.arms if arm.differing and arm.name != "moved"} == {}
    assert found.arm("repeat").trials >= 2
    assert [arm.name for arm in found.arms if not arm.ran and (not arm.note or "raises" in arm.note)] == []
    facts = found.facts
    known = (facts.same_values, facts.chosen_values, facts.tied_places, facts.representation, facts.overlap)
    assert known == (None, None, None, "", False) or found.other


# ---------------------------------------------------------------------------------------------------- custom ops

PRIVATE = np.random.default_rng(3)


@torch.library.custom_op("replayed::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


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


@pytest.mark.parametrize(
    ("name", "remover"),
    [("noisy", "entropy"), ("privately_drawn", "generators"), ("timed", "clocks"), ("as_completed", "one_worker")],
)
def test_what_a_custom_op_takes_from_outside_torch_is_named(name: str, remover: str) -> None:
    found = tried(captured(getattr(torch.ops.replayed, name).default, numbers(8, 3)), *WORLD)
    assert found.facts.custom is True
    assert found.arm("repeat").differing
    assert [name for name in WORLD if found.arm(name).ran and not found.arm(name).differing] == [remover]
    assert found.arm("generators").found.endswith("PRIVATE") == (remover == "generators")
    assert found.facts.same_values is (name == "as_completed")


def test_memory_that_nobody_wrote_follows_the_poison() -> None:
    found = tried(captured(torch.ops.replayed.partly_written.default, numbers(700)), "poison")
    assert counts(found, "poison")[0] == counts(found, "poison")[1] > 0
    assert found.arm("poison").found == "500 of 1200 elements"


def test_what_varies_by_itself_does_not_follow_the_poison() -> None:
    found = tried(captured(torch.ops.replayed.noisy.default, numbers(7000)), "poison")
    assert counts(found, "poison") == (0, 12)


def test_torchs_own_kernels_get_no_arms_on_the_world() -> None:
    found = tried(DETERMINISTIC["a sum"](), *WORLD)
    assert all("torch's own kernels" in found.arm(name).note for name in WORLD)


# ------------------------------------------------------------------------------------------------------- soundness


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


def test_a_rare_difference_makes_all_arms_longer() -> None:
    found = tried_where(lambda run: run % 10 == 5, replays=20)
    assert found.arm("repeat").trials > 40
    assert found.arm("one_thread").trials > 40
    assert len(RUNS) < 1000


def test_a_difference_that_first_shows_after_the_replays_asked_for_is_still_seen() -> None:
    assert tried_where(lambda run: run == 50, "repeat").arm("repeat").differing == 1


@pytest.mark.usefixtures("a_second_is_50_looks")
def test_an_arm_during_which_the_unchanged_call_did_not_differ_either_proves_nothing() -> None:
    arm = tried_where(lambda run: run < 12 and run % 2 == 0, seconds=1.0).arm("one_thread")
    assert not arm.ran
    assert "so did those of the unchanged call" in arm.note


def test_arms_that_find_no_time_are_named_and_not_run() -> None:
    found = tried(DETERMINISTIC["a product"](), seconds=-1.0)
    assert {(arm.trials, arm.note) for arm in found.arms} == {(0, "budget")}


def test_a_short_budget_is_kept(a_second_is_50_looks: Iterator[int]) -> None:
    found = tried(DETERMINISTIC["a product"](), seconds=1.0)
    assert next(a_second_is_50_looks) < 2 * 50
    assert any("budget" in arm.note for arm in found.arms)


def test_an_op_that_raises_is_told_by_every_arm_that_was_tried() -> None:
    call = captured(aten.mm.default, numbers(2, 3), numbers(3, 2))
    broken = replace(call, args=(call.args[0], call.args[0]))
    with pytest.raises(RuntimeError) as raised:  # some releases of torch say which op it was
        torch.mm(numbers(2, 3), numbers(2, 3))
    found = tried(broken)
    assert "mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)" in str(raised.value)
    assert [arm.note for arm in found.arms] == [f"raises: {raised.value}"]
    assert (found.first, found.other, found.facts.same_values) == ((), None, None)


def test_everything_is_as_before_afterwards() -> None:
    before, state = settings(), torch.get_rng_state()
    tried(DETERMINISTIC["dropout"]())
    tried(captured(aten.put_.default, torch.zeros(9), torch.tensor([1, 1]), numbers(2)))
    assert settings() == before
    assert torch.equal(torch.get_rng_state(), state)


SDP = ("math", "flash", "mem_efficient", "cudnn")
CHANGES = {
    "one_thread": {"num_threads": "1"},
    "deterministic": {"deterministic_algorithms": "on", "fill_uninitialized_memory": "False"},
    "deterministic_fill": {"deterministic_algorithms": "on", "fill_uninitialized_memory": "True"},
    "nondeterministic": {"deterministic_algorithms": "off", "fill_uninitialized_memory": "False"},
    "onednn_off": {"mkldnn.enabled": "False"},
    "cudnn_off": {"cudnn.enabled": "False"},
    "cudnn_benchmark": {"cudnn.benchmark": "True"},
    "cudnn_deterministic": {"cudnn.deterministic": "True"},
    "onednn_deterministic": {"mkldnn.deterministic": "True"},
    "sdpa_math": {f"sdp.{name}": str(name == "math") for name in SDP},
    "sdpa_flash": {f"sdp.{name}": str(name == "flash") for name in SDP},
    "sdpa_efficient": {f"sdp.{name}": str(name == "mem_efficient") for name in SDP},
    "sdpa_cudnn": {f"sdp.{name}": str(name == "cudnn") for name in SDP},
}


@pytest.mark.parametrize("name", AROUND)
def test_an_experiment_changes_what_it_says_and_puts_it_back_also_on_error(name: str) -> None:
    before = settings()
    with suppress(ZeroDivisionError), AROUND[name].change():
        assert CHANGES.get(name, {}).items() <= settings().items()
        raise ZeroDivisionError
    assert settings() == before


def set_older_names(*, on: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on


def set_newer_names(precision: str) -> None:
    for owner in (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn):
        owner.fp32_precision = precision


TF32_BEFORE: dict[str, Callable[[], None]] = {
    "as a new process has it": lambda: None,
    "older names, off": lambda: set_older_names(on=False),
    "older names, on": lambda: set_older_names(on=True),
    "newer names, off": lambda: set_newer_names("ieee"),
    "newer names, on": lambda: set_newer_names("tf32"),
    "the name for everything": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "a precision of matmuls": lambda: torch.set_float32_matmul_precision("medium"),
}


@pytest.mark.parametrize("on", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("before", TF32_BEFORE)
def test_tf32_is_switched_by_names_that_do_not_contradict_each_other(before: str, on: bool) -> None:
    """torch raises on reading the older names where they and the newer ones differ; its kernels read either."""
    with preserved():
        TF32_BEFORE[before]()
        known = settings()
        with AROUND["tf32_on" if on else "tf32_off"].change():
            assert torch.backends.cuda.matmul.allow_tf32 is on
            assert torch.backends.cudnn.allow_tf32 is on
            owners = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
            assert {owner.fp32_precision for owner in owners} == {"tf32" if on else "ieee"}
        assert settings() == known


@pytest.mark.parametrize(
    ("device", "special"),
    [
        ("cpu", {"one_thread", "onednn_off"}),
        (
            "cuda:1",
            {"cudnn_off", "cudnn_benchmark", "cudnn_deterministic", "tf32_off", "tf32_on", "busy_stream"}
            | {"sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn"},
        ),
        ("xpu", {"onednn_deterministic", "sdpa_math", "sdpa_flash", "busy_stream"}),
        ("mps", set()),
    ],
)
def test_a_kind_of_device_gets_the_arms_that_make_sense_there(device: str, special: set[str]) -> None:
    everywhere = {"deterministic", "deterministic_fill", "nondeterministic", "entropy", "clocks", "one_worker", "busy"}
    found = {name for name in (*AROUND, "busy_stream") if EXPERIMENTS[name].runs_on(torch.device(device).type)}
    assert found == everywhere | special


@pytest.mark.parametrize(
    ("func", "chooses"),
    [
        (aten.scaled_dot_product_attention.default, True),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, False),
        (aten.mm.default, False),
    ],
    ids=str,
)
def test_implementations_of_attention_are_tried_on_ops_that_choose_among_them(
    func: Any, chooses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    everywhere = replace(EXPERIMENTS["sdpa_math"], devices=())
    monkeypatch.setattr(replay_module, "EXPERIMENTS", {**EXPERIMENTS, "sdpa_math": everywhere})
    heads = [numbers(1, 2, 4, 8)] * 3
    arm = tried(captured(func, *(heads if "dot" in str(func) else [numbers(4, 4)] * 2)), "sdpa_math").arm("sdpa_math")
    assert arm.ran is chooses, arm
    assert chooses or arm.note.startswith("this kernel calls no other op")


# ------------------------------------------------------------------------------------------------------------ facts


def digest_of(call: CapturedCall) -> tuple[TensorDigest, ...]:
    with in_force(call):
        live = call.materialise()
        return outcome_of(live.run(), live).written


def test_a_replay_that_gives_what_was_recorded_matches() -> None:
    call = DETERMINISTIC["a product"]()
    recorded = digest_of(call)
    other = (recorded[0]._replace(value="0" * 16),)

    def matches(*records: tuple[TensorDigest, ...]) -> bool | None:
        budget = Budget(5)
        return experiments(call, replays=2, budget=budget, recorded=records, arms=()).facts.matches_record

    assert (matches(other, recorded), matches(other), matches()) == (True, False, None)


def test_exact_values_replace_numbers_and_keep_indices_and_sharing() -> None:
    base = numbers(40)
    call = captured(aten.index_put_.default, base[:20], [torch.tensor([3, 4])], base[20:22])
    changed = with_exact_values(call)
    assert changed is not None
    with in_force(call):
        old, new = call.materialise().tensors, changed.materialise().tensors
    assert new[0].tolist() == new[0].round().clamp(-8, 8).tolist() != old[0].tolist()
    assert torch.equal(old[1], new[1])
    assert new[0].untyped_storage()._cdata == new[2].untyped_storage()._cdata


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_exact_values_of_small_types_are_ones(dtype: torch.dtype) -> None:
    changed = with_exact_values(captured(aten.clone.default, numbers(100).to(dtype)))
    assert changed is not None
    with in_force(changed):
        assert set(changed.materialise().tensors[0].float().tolist()) == {-1.0, 0.0, 1.0}


def test_only_what_is_read_beside_a_written_argument_gets_memory_of_its_own() -> None:
    changed = with_copied_sources(overlapping())
    assert changed is not None
    assert [form.storage for form in changed.tensors if isinstance(form, TensorForm)] == [0, 1]
    assert with_copied_sources(DETERMINISTIC["a product"]()) is None


BASE = torch.arange(64, dtype=torch.float32)

OVERLAPS: dict[str, tuple[Callable[[], CapturedCall], bool]] = {
    "the same view twice": (lambda: captured(aten.add_.Tensor, BASE[:8], BASE[:8]), False),
    "neighbours": (lambda: captured(aten.add_.Tensor, BASE[:8], BASE[8:16]), False),
    "interleaved": (lambda: captured(aten.add_.Tensor, BASE[0:16:2], BASE[1:17:2]), False),
    "shifted by one": (lambda: captured(aten.add_.Tensor, BASE[1:9], BASE[:8]), True),
    "transposed": (lambda: captured(aten.add_.Tensor, BASE.view(8, 8), BASE.view(8, 8).t()), True),
    "its first row": (lambda: captured(aten.sub_.Tensor, BASE.view(8, 8), BASE.view(8, 8)[:1]), True),
    "an expanded target": (lambda: captured(aten.add_.Tensor, BASE[:1].expand(4), BASE[8:12]), True),
    "windows that meet": (lambda: captured(aten.fill_.Scalar, BASE.as_strided((4, 4), (2, 1)), 1.0), True),
    "windows side by side": (lambda: captured(aten.fill_.Scalar, BASE.as_strided((4, 2), (4, 2)), 1.0), False),
    "read only": (lambda: captured(aten.add.Tensor, BASE[1:9], BASE[:8]), False),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_memory_that_is_written_and_read_through_another_view(name: str) -> None:
    make, expected = OVERLAPS[name]
    assert experiments(make(), replays=1, budget=Budget(5), arms=()).facts.overlap is expected


ONE, SWAPPED = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 1.0, 3.0])


SNAPSHOTS = {
    "swapped": ([(ONE,), (SWAPPED,)], True),
    "changed": ([(ONE,), (ONE + 1,)], False),
    "a third": ([(ONE,), (SWAPPED,), (ONE * 2,)], False),
    "two outputs": ([(ONE, ONE), (SWAPPED, ONE)], True),
    "fewer": ([(ONE,), (SWAPPED[:2],)], False),
    "same sum": ([(torch.tensor([0.0, 5.0, 4.0]),), (torch.tensor([2.0, 4.0, 3.0]),)], False),
    "complex": ([(ONE * (1j + 1),), (SWAPPED * (1j + 1),)], True),
    "wide": ([(ONE.to(torch.complex128),), (SWAPPED.to(torch.complex128),)], True),
    "turned": ([(ONE.to(torch.complex128),), (ONE.to(torch.complex128) * 1j,)], False),
}


@pytest.mark.parametrize(("snapshots", "expected"), SNAPSHOTS.values(), ids=SNAPSHOTS)
def test_the_same_values_in_other_places(snapshots: list[tuple[torch.Tensor, ...]], expected: bool) -> None:
    assert have_same_values(snapshots) is expected


MANY = numbers(5000)
CHOSEN = {
    "both from the input": (ONE, [1.0, 2.0], [1.0, 3.0], True),
    "one computed": (ONE, [1.0, 2.0], [1.0, 5.0], False),
    "computed where they agree": (ONE, [9.0, 2.0], [9.0, 3.0], True),
    "another zero": (torch.tensor([0.0]), [0.0], [-0.0], False),
    "the bits of another type": (ONE.view(torch.int32), [1.0], [2.0], False),
    "thousands": (MANY, MANY.tolist(), MANY.flip(0).tolist(), True),
    "one computed of thousands": (MANY, MANY.tolist(), [*MANY[1:].tolist(), 7.5], False),
}


@pytest.mark.parametrize(("source", "one", "other", "expected"), CHOSEN.values(), ids=CHOSEN)
def test_values_chosen_from_the_inputs(
    source: torch.Tensor, one: list[float], other: list[float], expected: bool
) -> None:
    call = captured(aten.clone.default, source)
    with in_force(call):
        assert have_chosen_values(call, [(torch.tensor(one),), (torch.tensor(other),)]) is expected


SCORES = torch.tensor([[2.0, 1.0, 2.0, 3.0], [5.0, 5.0, 4.0, 5.0]])


def places(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        pytest.param((SCORES[:, 0], places(0, 0)), (SCORES[:, 0], places(2, 3)), True, id="along the last dimension"),
        pytest.param((places(0, 0)[:, None],), (places(2, 1)[:, None],), True, id="a dimension of one is kept"),
        pytest.param((places(0, 0),), (places(1, 0),), False, id="another value"),
        pytest.param((places(0, 1),), (places(0, 9),), False, id="no place at all"),
        pytest.param((places(0, 0).int(),), (places(2, 0).int(),), False, id="no indices"),
        pytest.param((SCORES[:, 0], places(0, 0)), (SCORES[:, 1], places(2, 3)), False, id="values differ, too"),
        pytest.param((places(0, 0),), (places(2, 3, 1),), False, id="another number of places"),
        pytest.param(
            (places(1, 1, 0, 0),), (places(1, 1, 0, 1),), False, id="along the first dimension, another value"
        ),
    ],
)
def test_places_of_equal_values(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...], expected: bool) -> None:
    call = captured(aten.median.dim, SCORES, 1)
    with in_force(call):
        assert have_tied_places(call, [one, other]) is expected


TIES = np.random.default_rng(5)


@torch.library.custom_op("replayed::any_largest", mutates_args=())
def any_largest(x: torch.Tensor) -> torch.Tensor:
    """As on a GPU: of several that are the largest, any may be named."""
    rows = [np.flatnonzero(row == row.max()) for row in x.numpy()]
    return torch.tensor([int(TIES.choice(row)) for row in rows])


def test_a_custom_op_that_names_any_of_several_equal_values_has_tied_places() -> None:
    found = tried(captured(torch.ops.replayed.any_largest.default, torch.ones(8, 20)), "exact_values")
    assert found.arm("repeat").differing
    assert (found.facts.tied_places, found.facts.same_values) == (True, False)
    assert found.arm("exact_values").differing


# ------------------------------------------------------------------------------------------------ on accelerators


def test_memory_of_an_accelerator_is_moved_by_an_offset_into_a_larger_block() -> None:
    """Its allocator gives addresses that 512 divides; here the device is one without any, at address 0."""
    like = torch.empty(1000, dtype=torch.uint8, device="meta")
    assert calls_module._aligned(like, 0, exact=True).storage_offset() == 0
    for shift in methods.SHIFTS:
        found = calls_module._aligned(like, shift % 64, exact=shift % 64 == 0)
        assert (found.storage_offset(), found.numel()) == (shift % 64, 1000)
        form = TensorForm(0, torch.float32, (10, 5), (6, 1), offset=2)
        tensor = calls_module.laid_over(found, form)
        assert (tensor.storage_offset(), tensor.shape, tensor.stride()) == (shift % 64 // 4 + 2, (10, 5), (6, 1))


def test_a_call_waits_for_each_of_its_devices_and_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    call = captured(aten.add.Tensor, numbers(3), numbers(3))
    waited: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    calls_module.wait_for(call.accelerators)
    assert (call.device, waited) == (torch.device("cpu"), [])
    devices = {"a": torch.device("cuda:1"), "b": torch.device("cuda"), "c": torch.device("cuda:1")}
    elsewhere = replace(call, kwargs=devices)
    calls_module.wait_for(elsewhere.accelerators)
    assert elsewhere.device == torch.device("cuda:1")
    assert waited == [torch.device("cuda:1"), torch.device("cuda:3")]


def test_the_current_device_is_that_of_the_call_while_it_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    call = captured(aten.add.Tensor, numbers(3), numbers(3))
    chosen: list[int | None] = []
    real = torch.accelerator.device_index
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: [chosen.append(index), real(None)][1])
    for kwargs in ({}, {"device": torch.device("cuda:2")}):
        with in_force(replace(call, kwargs=kwargs)):
            pass
    assert chosen == [None, 2]


def test_the_poison_arm_fills_the_free_blocks_of_the_calls_device(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[tuple[int, torch.device]] = []
    monkeypatch.setattr(poison_module, "_fill_free_blocks", lambda value, device, _: filled.append((value, device)))
    assert tried(captured(aten.add.Tensor, numbers(3), numbers(3)), "poison", replays=2).arm("poison").ran
    assert {device for _, device in filled} == {torch.device("cpu")}
    assert {value for value, _ in filled} == set(poison_module.POISONS)
    assert len(filled) >= 12, "before each replay"


def streams(monkeypatch: pytest.MonkeyPatch, *, milliseconds: float) -> list[str]:
    """What is done on streams of a device, in order, where a product takes so long."""
    done: list[str] = []
    stream, event = mock.MagicMock(), mock.MagicMock()
    stream.__enter__.side_effect = lambda: done.append("entered")
    stream.__exit__.side_effect = lambda *_: done.append("left")
    stream.synchronize.side_effect = lambda: done.append("waited")
    event.elapsed_time.return_value = 10 * milliseconds
    monkeypatch.setattr(torch, "Stream", mock.Mock(return_value=stream))
    monkeypatch.setattr(torch, "Event", mock.Mock(return_value=event))
    monkeypatch.setattr(load, "_matrices", lambda _: (None, None))
    monkeypatch.setattr(load, "_multiply", lambda *_, count: done.append(f"{count} products"))
    load._seconds_of_a_product.cache_clear()
    return done


@pytest.mark.parametrize(
    ("seconds", "milliseconds", "products"),
    [
        pytest.param(0.001, 0.5, 100, id="a short call: for 0.05 seconds"),
        pytest.param(0.2, 0.5, 800, id="a call of 0.2 seconds: for twice as long"),
        pytest.param(30.0, 0.5, 2000, id="a long call: for a second"),
        pytest.param(30.0, 0.001, 20_000, id="no more products than a queue can hold"),
    ],
)
def test_a_second_stream_of_the_call_is_busy_long_enough(
    seconds: float, milliseconds: float, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, device = streams(monkeypatch, milliseconds=milliseconds), torch.device("cuda:1")
    for _ in range(2):
        done.clear()
        with load.second_stream(device, seconds):
            assert done[-3:] == ["entered", f"{products} products", "left"]
        assert done[-1] == "waited"
    assert "5 products" not in done, "it warms up and measures once"
    assert {call.args for call in torch.Stream.call_args_list} == {(device,)}  # type: ignore[attr-defined]
    load._seconds_of_a_product.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_a_second_stream_is_busy_while_a_call_on_a_gpu_runs() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    with load.second_stream(device, 0.0):
        begin = time.perf_counter()
        torch.accelerator.synchronize(device)
        assert 0.02 < time.perf_counter() - begin < 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_all_arms_run_on_a_gpu_and_a_clean_call_differs_under_none() -> None:
    device = torch.device("cuda")
    found = tried(captured(aten.mul.Tensor, numbers(1000).to(device), numbers(1000).to(device)), seconds=60, replays=3)
    assert {arm.name: arm.differing for arm in found.arms if arm.differing} == {}
    ran = {arm.name for arm in found.arms if arm.ran}
    assert ran >= {"repeat", "moved", "poison", "busy_stream", "cudnn_off", "tf32_on", "tf32_off", "exact_values"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_each_implementation_of_attention_is_tried_alone_on_a_gpu() -> None:
    heads = [numbers(1, 2, 64, 64).to("cuda", torch.float16) for _ in range(3)]
    with torch.inference_mode():
        call = captured(aten.scaled_dot_product_attention.default, *heads)
    found = tried(call, "sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", seconds=60)
    assert found.arm("sdpa_math").ran
    assert all(
        found.arm(f"sdpa_{name}").ran or found.arm(f"sdpa_{name}").note.startswith("raises")
        for name in ("flash", "efficient", "cudnn")
    )


@pytest.mark.parametrize(
    ("others", "expected"),
    [([[-0.0, 1.0]], "sign of zero"), ([[0.0, 2.0]], ""), ([[-0.0, 1.0], [0.0, 2.0]], "")],
    ids=["another zero", "another number", "both"],
)
def test_differences_of_representation_only(others: list[list[float]], expected: str) -> None:
    assert representation_of([(torch.tensor([0.0, 1.0]),), *((torch.tensor(other),) for other in others)]) == expected


def test_a_tally_keeps_the_first_outcome_and_a_few_that_differ() -> None:
    tally = Tally()
    outcomes = [CallOutcome((TensorDigest("float32", (), (), str(number % 7)),), (), ()) for number in range(70)]
    for number, outcome in enumerate(outcomes):
        tally.add(outcome, seconds=1.0, copy=lambda number=number: (torch.tensor(number),))
    assert (tally.trials, tally.differing, tally.distinct) == (69, 60, 7)
    assert [int(copy[0]) for copy in tally.copies] == [0, 1, 2, 3, 4]


def test_a_laboratory_sees_writes_that_the_schema_does_not_declare() -> None:
    call = captured(torch.ops.replayed.writes_behind.default, numbers(3))
    with in_force(call):
        lab = Replayer(call, replays=2, budget=Budget(5))
        lab.repeat(Budget(5))
    assert len(lab.repeated.copies[0]) == 2
    assert lab.repeated.copies[0][1].tolist() == (numbers(3) + 1).tolist()


@torch.library.custom_op("replayed::writes_behind", mutates_args=())
def writes_behind(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x.sum()
