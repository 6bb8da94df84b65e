"""The poison arm: does an outcome follow what fresh memory was filled with?

The call is repeated with one value in all fresh memory and with another, in an order that favours neither. An element
follows the poison where it has one content in all replays under the first value and another one in all under the
second. By luck alone, an element with two outcomes falls so into two halves of N with a chance of 2 / C(2N, N): one in
10**10 for N = 20.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import comb

import torch

from hashbench.processes import Budget
from hashbench.records import ExperimentResult
from hashbench.replay.call import CallOutcome, CapturedCall, Materialised, outcome_of
from hashbench.replay.controls import POISONS, poison_reach, poisoned_memory
from hashbench.replay.facts import Snapshot, have_same_form, snapshot_bits

WANTED = 12
FEWEST = 6
"""Replays under each value. With 12, one element in 1.4 million that vary by themselves seems to follow; with 6, one in
460, so that nothing may vary."""

LUCK = 0.01
"""Chance that one of the elements that vary by themselves may have of seeming to follow."""

ORDER = (0, 1, 1, 0)


@dataclass(slots=True)
class _Side:
    """What stayed the same in all replays under one value."""

    bits: list[torch.Tensor] = field(default_factory=list)
    stable: list[torch.Tensor] = field(default_factory=list)
    replays: int = 0
    same_form: bool = True

    def add(self, bits: list[torch.Tensor]) -> None:
        self.replays += 1
        if self.replays == 1:
            self.bits = bits
            self.stable = [torch.ones(len(part), dtype=torch.bool, device=part.device) for part in bits]
        elif not have_same_form(self.bits, bits):
            self.same_form = False
        else:
            for stable, old, new in zip(self.stable, self.bits, bits, strict=True):
                stable &= (old == new).all(dim=1)


def poison_arm(
    call: CapturedCall,
    live: Materialised,
    *,
    trials: int,
    left: Budget,
    snapshot: Callable[[object, Materialised, CallOutcome], Snapshot],
) -> ExperimentResult:
    """The arm ``poison``: trials are the replays under the second value, those that differ all of them or none."""
    sides = (_Side(), _Side())
    wanted = max(trials, WANTED)
    for number in range(2 * wanted):
        if number % len(ORDER) == 0 and number and left.left() <= 0:
            break
        which = ORDER[number % len(ORDER)]
        live.reset()
        with poisoned_memory(POISONS[which], device=call.device):
            output = live.run()
        sides[which].add(snapshot_bits(snapshot(output, live, outcome_of(output, live))))
    return _judged(sides, reach=poison_reach(call.device.type))


def _judged(sides: tuple[_Side, _Side], *, reach: str) -> ExperimentResult:
    first, second = sides
    if second.replays < FEWEST:
        return ExperimentResult("poison", "call", note=f"budget: {second.replays} replays are too few")
    if not (first.same_form and second.same_form and have_same_form(first.bits, second.bits)):
        return ExperimentResult("poison", "call", note="replays give outputs of other sizes")
    elements = sum(map(len, first.bits))
    following = sum(map(_following, first.bits, second.bits, first.stable, second.stable))
    varying = sum(int((~(one & other)).sum()) for one, other in zip(first.stable, second.stable, strict=True))
    if following and varying and (varying + following) * 2 / comb(2 * second.replays, second.replays) > LUCK:
        return ExperimentResult(
            "poison", "call", note=f"budget: {second.replays} replays of {varying} varying elements are too few"
        )
    return ExperimentResult(
        "poison",
        "call",
        trials=second.replays,
        differing=second.replays if following else 0,
        distinct=2 if following else 1,
        found=f"{following} of {elements} elements" if following else "",
        note=reach,
    )


def _following(one: torch.Tensor, other: torch.Tensor, stable: torch.Tensor, other_stable: torch.Tensor) -> int:
    return int((stable & other_stable & (one != other).any(dim=1)).sum())
