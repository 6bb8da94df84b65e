"""Experiments on a compiled kernel: its own binary is repeated; what compiles anew or reaches nothing is not run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hashbench.core.catalog import EXPERIMENTS, Role
from hashbench.core.diagnose import causes
from hashbench.core.diagnose.calls.live import LiveCall, captured_environment
from hashbench.core.diagnose.replay import NO_SETTING, Replays
from hashbench.core.diagnose.replay.methods import OF_FILLED, with_exact_values
from hashbench.core.records import Decision, Evidence
from tests.core.diagnose.replay.replay_helpers import tried
from tests.kernel_helpers import FakeKernel, added, call_of, last

SETTINGS = [name for name, one in EXPERIMENTS.items() if one.role in (Role.FLAG, Role.LIBRARY) and "call" in one.on]


def decided(made: Replays) -> Decision:
    return causes.decide(Evidence("kernel", call=made.facts, arms=made.arms))


def test_atomic_additions_have_the_cause_of_eager_ones() -> None:
    made = tried(call_of(FakeKernel(added)), replays=20)
    assert made.arm("repeat").differing
    assert made.arm("one_thread").differing == made.arm("exact_values").differing == 0
    assert made.arm("exact_values").found == "multiples of 1024"  # small integers are no whole numbers behind gelu
    found = decided(made)
    assert (found.cause, found.confidence) == ("accumulation_order", "proven")
    assert not made.facts.custom


def test_twin_that_adds_in_one_order_shows_nothing() -> None:
    made = tried(call_of(FakeKernel(added, ordered=True)), replays=5)
    assert not any(arm.differing for arm in made.arms if arm.name != "exact_values")


def test_race_of_writers_is_no_order_of_additions() -> None:
    made = tried(call_of(FakeKernel(last)), "one_thread", "exact_values", replays=20)
    assert made.arm("one_thread").differing == 0
    assert made.arm("exact_values").differing
    assert decided(made).cause != "accumulation_order"


@pytest.mark.parametrize(("filled", "followed"), [((1,), "1 of 2 elements"), ((), "")])
def test_memory_that_a_kernel_is_to_fill_is_poisoned(filled: tuple[int, ...], followed: str) -> None:
    made = tried(call_of(FakeKernel(added, ordered=True, filled=filled)), "poison", replays=6)
    arm = made.arm("poison")
    assert (arm.differing, arm.found, arm.note == OF_FILLED) == (arm.trials if filled else 0, followed, bool(filled))
    assert arm.trials
    if filled:
        assert (decided(made).cause, decided(made).confidence) == ("uninitialized_memory", "proven")


def test_settings_are_not_changed_for_a_binary() -> None:
    threads = torch.get_num_threads()
    made = tried(call_of(FakeKernel(added)), *SETTINGS, "one_thread", replays=3)
    assert torch.get_num_threads() == threads
    notes = {arm.name: arm.note for arm in made.arms if arm.name in SETTINGS}
    assert set(notes.values()) == {NO_SETTING}
    assert {"deterministic", "onednn_off"} <= notes.keys()


def test_without_openmp_one_thread_is_not_run() -> None:
    arm = tried(call_of(FakeKernel(added, openmp=False)), "one_thread", replays=3).arm("one_thread")
    assert (arm.ran, arm.raised) == (False, False)
    assert arm.note == "no OpenMP runtime is loaded whose threads could be limited"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_large_integers_are_whole_behind_activations(dtype: torch.dtype) -> None:
    call = call_of(FakeKernel(added))
    forms = tuple(replace(form, dtype=dtype, shape=(8,), stride=(1,)) for form in call.tensors[:1])
    changed = with_exact_values(replace(call, tensors=(*forms, call.tensors[1])), large=True)
    with captured_environment(changed):
        values = LiveCall(changed).tensors[0]
    assert set(values.abs().tolist()) <= ({16.0, 32.0} if dtype is torch.bfloat16 else {1024.0, 2048.0})
    activations = torch.nn.functional
    for function in (activations.gelu, activations.silu, activations.softplus, torch.tanh, activations.relu):
        made = function(values.double())
        assert dtype is torch.bfloat16 or torch.equal(made, made.round()), function
