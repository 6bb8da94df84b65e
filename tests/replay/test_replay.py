"""The arms on a captured call tell mechanisms apart: real kernels and custom ops, each beside what it is not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from hashbench.budget import Budget
from hashbench.determinism import preserved, settings
from hashbench.diagnosis import rates
from hashbench.records import Evidence, TensorDigest
from hashbench.replay import ARMS, Replays, experiments
from hashbench.replay import arms as arms_module
from hashbench.replay.arms import with_copied_sources, with_exact_values
from hashbench.replay.callfacts import have_chosen_values, have_same_values, representation_of
from hashbench.replay.calls import CapturedCall, Outcome, TensorForm, in_force, outcome_of
from hashbench.replay.capture import capture
from hashbench.replay.laboratory import Laboratory
from hashbench.replay.tally import Tally

aten = torch.ops.aten
REPLAYS = 8


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Races need a second thread, and calls of milliseconds, else one thread does it all before the other wakes."""
    with preserved():
        torch.set_num_threads(2)
        yield


def captured(func: Any, *args: Any, **kwargs: Any) -> CapturedCall:
    return capture(func, args, kwargs, limit_bytes=2**30)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def tried(call: CapturedCall, *names: str, seconds: float = 20.0, replays: int = REPLAYS) -> Replays:
    return experiments(call, replays=replays, budget=Budget(seconds), arms=names or ARMS)


def tried_until_it_differs(call: CapturedCall, *names: str, seconds: float = 6.0) -> Replays:
    """Other work on the machine may keep the second thread off its core for a while."""
    for _ in range(5):
        found = tried(call, *names, seconds=seconds)
        if found.arm("repeat").differing and all(found.arm(name).ran for name in names if name != "moved"):
            break
    return found


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
    found = tried_until_it_differs(accumulated(), "one_thread", "exact_values", "deterministic", "moved")
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
    found = tried_until_it_differs(RACES[name](), "one_thread", "exact_values")
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
    found = tried_until_it_differs(overlapping(), "copied_sources", "deterministic")
    assert found.facts.overlap is True
    assert found.arm("repeat").differing
    assert found.arm("copied_sources").differing == 0
    assert found.arm("deterministic").differing


ALIGNED = {
    "mv": lambda: captured(aten.mv.default, numbers(300, 515), numbers(515)),
    "dot": lambda: captured(aten.dot.default, numbers(515), numbers(515).clone()),
}


@pytest.mark.parametrize("name", ALIGNED)
def test_a_kernel_that_goes_by_addresses_differs_when_moved_and_in_place_never(name: str) -> None:
    found = tried(ALIGNED[name](), "moved")
    assert found.arm("repeat").differing == 0
    assert found.arm("moved").differing > 0
    assert "by 4" in found.arm("moved").found
    assert "64" not in found.arm("moved").found
    assert found.other is not None


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
    found = tried(DETERMINISTIC[name](), seconds=30, replays=2)
    assert rates.deterministic_price(Evidence("kernel", arms=found.arms)) is not None
    assert {arm.name: arm.differing for arm in found.arms if arm.differing and arm.name != "moved"} == {}
    assert found.arm("repeat").trials >= 2
    assert [arm.name for arm in found.arms if not arm.ran and (not arm.note or "raises" in arm.note)] == []
    assert (found.facts.same_values, found.facts.chosen_values, found.facts.overlap) == (
        None,
        None,
        False,
    ) or found.other


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
    return x + time.perf_counter_ns() % 1000


@torch.library.custom_op("replayed::as_completed", mutates_args=())
def in_order_of_completion(x: torch.Tensor) -> torch.Tensor:
    def task(row: int) -> torch.Tensor:
        time.sleep(0.0002 * float(np.random.default_rng().random()))
        return x[row].clone()

    with ThreadPoolExecutor(4) as pool:
        return torch.stack([done.result() for done in as_completed([pool.submit(task, row) for row in range(8)])])


WORLD = ("generators", "entropy", "clocks", "one_worker")


def removers(found: Replays) -> list[str]:
    return [name for name in WORLD if found.arm(name).ran and not found.arm(name).differing]


@pytest.mark.parametrize(
    ("name", "remover"),
    [("noisy", "entropy"), ("privately_drawn", "generators"), ("timed", "clocks"), ("as_completed", "one_worker")],
)
def test_what_a_custom_op_takes_from_outside_torch_is_named(name: str, remover: str) -> None:
    call = captured(getattr(torch.ops.replayed, name).default, numbers(8, 3))
    found = tried(call, *WORLD, seconds=30, replays=2)
    assert found.facts.custom is True
    assert found.arm("repeat").differing
    assert removers(found) == [remover]


def test_the_guilty_generator_is_named() -> None:
    found = tried(captured(torch.ops.replayed.privately_drawn.default, numbers(3)), "generators")
    assert found.arm("generators").found.endswith("PRIVATE")


def test_what_completes_in_another_order_has_the_same_values() -> None:
    found = tried(captured(torch.ops.replayed.as_completed.default, numbers(8, 3)), "one_thread")
    assert found.facts.same_values is True


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


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often ``replayed::counted`` was run; its outcome is what the test makes of that."""
    runs: list[int] = []
    monkeypatch.setattr(COUNTED, "runs", runs)
    return runs


class COUNTED:
    """What ``replayed::counted`` looks at, since an op cannot be given a function."""

    runs: ClassVar[list[int]] = []
    differs: ClassVar[Callable[[int], bool]] = staticmethod(lambda _run: False)


@torch.library.custom_op("replayed::counted", mutates_args=())
def counted_op(x: torch.Tensor) -> torch.Tensor:
    COUNTED.runs.append(1)
    return x + COUNTED.differs(len(COUNTED.runs))


def test_a_rare_difference_makes_all_arms_longer(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(COUNTED, "differs", lambda run: run % 10 == 5)
    found = tried(captured(torch.ops.replayed.counted.default, numbers(3)), "one_thread", replays=20)
    assert found.arm("repeat").trials > 40
    assert found.arm("one_thread").trials > 40
    assert len(counted) < 1000


def test_a_difference_that_first_shows_after_the_replays_asked_for_is_still_seen(
    counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(COUNTED, "differs", lambda run: run == 50)
    found = tried(captured(torch.ops.replayed.counted.default, numbers(3)), "one_thread", replays=8)
    assert found.arm("repeat").differing == 1
    assert counted


@pytest.mark.usefixtures("counted")
def test_an_arm_during_which_the_unchanged_call_did_not_differ_either_proves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(COUNTED, "differs", lambda run: run < 12 and run % 2 == 0)
    arm = tried(captured(torch.ops.replayed.counted.default, numbers(3)), "one_thread", seconds=3, replays=8).arm(
        "one_thread"
    )
    assert not arm.ran
    assert "so did those of the unchanged call" in arm.note


def test_arms_that_find_no_time_are_named_and_not_run() -> None:
    found = tried(DETERMINISTIC["a product"](), seconds=-1.0)
    assert {(arm.trials, arm.note) for arm in found.arms} == {(0, "budget")}


def test_a_short_budget_is_kept() -> None:
    begin = time.perf_counter()
    found = tried(overlapping(), seconds=1.0)
    assert time.perf_counter() - begin < 6
    assert any("budget" in arm.note for arm in found.arms)


def test_an_op_that_raises_is_told_by_every_arm_that_was_tried() -> None:
    call = captured(aten.mm.default, numbers(2, 3), numbers(3, 2))
    broken = replace(call, args=(call.args[0], call.args[0]))
    found = tried(broken)
    assert [arm.note for arm in found.arms] == ["raises: mm: mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"]
    assert (found.first, found.other, found.facts.same_values) == ((), None, None)


def test_everything_is_as_before_afterwards() -> None:
    before, state = settings(), torch.get_rng_state()
    tried(DETERMINISTIC["dropout"](), seconds=20)
    tried(captured(aten.put_.default, torch.zeros(9), torch.tensor([1, 1]), numbers(2)), seconds=20)
    assert settings() == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("arm", arms_module.SURROUNDINGS, ids=lambda arm: arm.name)
def test_an_arm_puts_back_what_it_changed_also_on_error(arm: Any) -> None:
    if arm.name == "busy_stream":
        pytest.skip("needs an accelerator")
    before = settings()
    with pytest.raises(ZeroDivisionError), arm.change():
        raise ZeroDivisionError
    assert settings() == before


@pytest.mark.parametrize(
    ("arm", "changed"),
    [
        ("one_thread", {"num_threads": "1"}),
        ("deterministic", {"deterministic_algorithms": "on", "fill_uninitialized_memory": "False"}),
        ("deterministic_fill", {"deterministic_algorithms": "on", "fill_uninitialized_memory": "True"}),
        ("nondeterministic", {"deterministic_algorithms": "off", "fill_uninitialized_memory": "False"}),
        ("onednn_off", {"mkldnn.enabled": "False"}),
        ("cudnn_off", {"cudnn.enabled": "False"}),
        ("cudnn_benchmark", {"cudnn.benchmark": "True"}),
        ("cudnn_deterministic", {"cudnn.deterministic": "True"}),
        ("sdpa_math", {"sdp.math": "True", "sdp.flash": "False", "sdp.mem_efficient": "False", "sdp.cudnn": "False"}),
        ("tf32_off", {"cuda.matmul.allow_tf32": "False", "cudnn.allow_tf32": "False"}),
    ],
)
def test_an_arm_changes_what_it_says(arm: str, changed: dict[str, str]) -> None:
    change = next(found for found in arms_module.SURROUNDINGS if found.name == arm).change
    with change():
        assert changed.items() <= settings().items()


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


@pytest.mark.parametrize(
    ("snapshots", "expected"),
    [
        ([(ONE,)], None),
        ([(ONE,), (SWAPPED,)], True),
        ([(ONE,), (ONE + 1,)], False),
        ([(ONE,), (SWAPPED,), (ONE * 2,)], False),
        ([(ONE, ONE), (SWAPPED, ONE)], True),
        ([(ONE,), (SWAPPED[:2],)], False),
        ([(torch.tensor([0.0, 5.0, 4.0]),), (torch.tensor([2.0, 4.0, 3.0]),)], False),
        ([(ONE * (1j + 1),), (SWAPPED * (1j + 1),)], True),
        ([(ONE.to(torch.complex128),), (SWAPPED.to(torch.complex128),)], True),
        ([(ONE.to(torch.complex128),), (ONE.to(torch.complex128) * 1j,)], False),
    ],
    ids=[
        "one outcome",
        "swapped",
        "changed",
        "a third",
        "two outputs",
        "fewer",
        "same sum",
        "complex",
        "wide",
        "turned",
    ],
)
def test_the_same_values_in_other_places(snapshots: list[tuple[torch.Tensor, ...]], expected: bool | None) -> None:
    assert have_same_values(snapshots) is expected


@pytest.mark.parametrize(
    ("source", "one", "other", "expected"),
    [
        (ONE, [1.0, 2.0], [1.0, 3.0], True),
        (ONE, [1.0, 2.0], [1.0, 5.0], False),
        (ONE, [9.0, 2.0], [9.0, 3.0], True),
        (torch.tensor([0.0]), [0.0], [-0.0], False),
    ],
    ids=["both from the input", "one computed", "computed where they agree", "another zero"],
)
def test_values_chosen_from_the_inputs(
    source: torch.Tensor, one: list[float], other: list[float], expected: bool
) -> None:
    call = captured(aten.clone.default, source)
    with in_force(call):
        assert have_chosen_values(call, [(torch.tensor(one),), (torch.tensor(other),)]) is expected


def test_values_of_another_type_are_not_chosen() -> None:
    call = captured(aten.clone.default, ONE.view(torch.int32))
    with in_force(call):
        assert have_chosen_values(call, [(ONE[:1],), (ONE[1:2],)]) is False


def test_thousands_of_values_chosen_from_the_inputs() -> None:
    source = numbers(5000)
    call = captured(aten.clone.default, source)
    with in_force(call):
        assert have_chosen_values(call, [(source,), (source.flip(0),)]) is True
        assert have_chosen_values(call, [(source,), (torch.cat([source[1:], torch.tensor([7.5])]),)]) is False


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([[-0.0, 1.0]], "sign of zero"),
        ([[0.0, 2.0]], ""),
        ([[-0.0, 1.0], [0.0, 2.0]], ""),
        ([], ""),
    ],
    ids=["another zero", "another number", "both", "nothing"],
)
def test_differences_of_representation_only(others: list[list[float]], expected: str) -> None:
    assert representation_of([(torch.tensor([0.0, 1.0]),), *((torch.tensor(other),) for other in others)]) == expected


def test_a_tally_keeps_the_first_outcome_and_a_few_that_differ() -> None:
    tally = Tally()
    outcomes = [Outcome((TensorDigest("float32", (), (), str(number % 7)),), (), ()) for number in range(70)]
    for number, outcome in enumerate(outcomes):
        tally.add(outcome, seconds=1.0, copy=lambda number=number: (torch.tensor(number),))
    assert (tally.trials, tally.differing, tally.distinct) == (69, 60, 7)
    assert [int(copy[0]) for copy in tally.copies] == [0, 1, 2, 3, 4]


def test_a_laboratory_sees_writes_that_the_schema_does_not_declare() -> None:
    call = captured(torch.ops.replayed.writes_behind.default, numbers(3))
    with in_force(call):
        lab = Laboratory(call, replays=2, budget=Budget(5))
        lab.repeat(Budget(5))
    assert len(lab.repeated.copies[0]) == 2
    assert lab.repeated.copies[0][1].tolist() == (numbers(3) + 1).tolist()


@torch.library.custom_op("replayed::writes_behind", mutates_args=())
def writes_behind(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x.sum()
