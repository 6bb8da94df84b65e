"""Counterparts of calls that two runs make a different number of times."""

from __future__ import annotations

import torch

from hashbench.batch.judged import RowEffect
from hashbench.batch.layout import ItemSubset
from tests.batch.programs import compared_runs, random_inputs, runner

SUBSET = ItemSubset(8, 4)


def test_loops_over_items_are_matched_by_content() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        doubled = [item * 2 for item in x.unbind()]
        return torch.stack([item * 3 for item in doubled])

    found = compared_runs(runner(function, random_inputs(0, 8), batch=8), SUBSET).comparison
    assert (found.not_attributable, found.differing) == ((), ())
    references = [found.judged[f"forward.0//aten.mul.Tensor#{number}"].reference for number in (4, 7)]
    assert references == ["forward.0//aten.mul.Tensor#8", "forward.0//aten.mul.Tensor#11"]


def test_cut_for_another_call_is_not_different() -> None:
    """The smaller run makes one range more: the one that the reference has, too, where another one is beside it."""

    def function(x: torch.Tensor) -> torch.Tensor:
        own = torch.arange(3.0 * len(x))
        return x * 2 if len(x) == 8 else x * 2 + 0 * own.sum() + 0 * torch.arange(24.0).sum()

    found = compared_runs(runner(function, random_inputs(0, 8), batch=8), SUBSET).comparison
    twin = found.judged["forward.0//aten.arange.default#1"]
    assert (twin.reference, twin.effect) == ("forward.0//aten.arange.default#0", RowEffect.UNKNOWN)
