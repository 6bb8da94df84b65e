"""Perturbations apply in the variations that they should, and everything is restored afterwards."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from hashbench.replay.controls.perturbations import (
    FEWEST_THREADS,
    WITHIN_A_RUN,
    no_collector,
    oversubscribed,
    provoked,
)

CPU = torch.device("cpu")


def state() -> tuple[object, ...]:
    return torch.get_num_threads(), gc.isenabled(), gc.get_threshold(), threading.active_count()


@pytest.mark.parametrize("variation", [0, 1, 2])
@pytest.mark.parametrize("name", WITHIN_A_RUN)
def test_everything_is_restored(name: str, variation: int) -> None:
    before = state()
    with pytest.raises(ZeroDivisionError), provoked([name], variation, device=CPU):
        raise ZeroDivisionError
    assert state() == before


def test_variation_0_applies_threads_only() -> None:
    before = state()
    with provoked(WITHIN_A_RUN, 0, device=CPU):
        inside = state()
    assert inside == (oversubscribed(), *before[1:])


def test_threads_are_oversubscribed() -> None:
    with provoked(["threads"], 1, device=CPU):
        assert torch.get_num_threads() == oversubscribed() >= FEWEST_THREADS


@pytest.mark.parametrize(("variation", "enabled", "threshold"), [(1, True, 10), (2, False, None)])
def test_collector_runs_often_or_never(variation: int, enabled: bool, threshold: int | None) -> None:
    usual = gc.get_threshold()
    with provoked(["collector"], variation, device=CPU):
        assert gc.isenabled() is enabled
        assert gc.get_threshold() == ((threshold, *usual[1:]) if threshold else usual)


def test_disabled_collector_stays_disabled() -> None:
    with no_collector():
        gc.enable()
        gc.set_threshold(1)
        assert not gc.isenabled()
        assert gc.collect() == 0
    assert gc.isenabled()


def test_unnamed_perturbations_do_not_apply() -> None:
    before = state()
    with provoked(["address"], 1, device=CPU):
        assert state() == before
