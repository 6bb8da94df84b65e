"""The arms on a captured call that change the call itself, its memory, or more than one setting.

Each is a function of the laboratory and of the time it may take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from hashbench.processes import Budget
from hashbench.records import NO_TIME, ExperimentResult
from hashbench.replay.call import Materialised, TensorForm, held_bytes
from hashbench.replay.controls import Generators
from hashbench.replay.experiments.memory import poison_arm
from hashbench.replay.experiments.table import (
    dirty_freed_memory,
    possible_shifts,
    with_copied_sources,
    with_exact_values,
)
from hashbench.replay.replayer import DIFFERS_IN_PLACE, Laboratory
from hashbench.replay.tally import Tally
from hashbench.trace.op_schema import plan_of

MOST_MEMORIES = 8
"""Memories that are also moved alone; a fused optimizer has hundreds."""

Move = tuple[int | None, int]
"""A memory (``None``: all together) and by how many bytes it is moved."""


def fresh_memory(lab: Laboratory, left: Budget) -> ExperimentResult:
    """New memory for the inputs of each replay, and other bytes in what was freed before."""
    if lab.in_place is None:
        return ExperimentResult("fresh_memory", "call", note=DIFFERS_IN_PLACE)
    tally = Tally(lab.in_place)
    sizes = [memory.content.nbytes for memory in lab.call.memories]
    sizes += [held_bytes(tensor) for copy in lab.repeated.copies[:1] for tensor in copy]
    held: list[Materialised] = []

    def block(count: int) -> None:
        for _ in range(count):
            dirty_freed_memory(sizes, value=37 * len(tally.seconds) + 1, device=lab.call.device)
            held.append(lab.call.materialise())
            lab.replay(tally, live=held[-1])
            del held[:-1]  # not before: the next memory must be another

    found = lab.controlled("fresh_memory", tally, left, block=block)
    lab.keep(tally)
    return found


def poison(lab: Laboratory, left: Budget) -> ExperimentResult:
    """Two values in all fresh memory; see ``poisonarm``."""
    if plan_of(lab.call.func).blank:
        return ExperimentResult("poison", "call", note="the op hands out memory for others to write")
    return poison_arm(lab.call, lab.live, trials=lab.replays, left=left, snapshot=lab.snapshot)


def exact_values(lab: Laboratory, left: Budget) -> ExperimentResult:
    """Small whole numbers for all contents: sums no longer depend on their order."""
    changed = with_exact_values(lab.call)
    if changed is None and all(_is_whole(form) for form in lab.call.tensors) and lab.call.tensors:
        return replace(lab.repeated.arm("exact_values"), note="all inputs are whole numbers as they are")
    if changed is None:
        return ExperimentResult("exact_values", "call", note="no floating-point input in plain memory")
    return lab.compared("exact_values", left, live=changed.materialise())


def _is_whole(form: TensorForm | torch.Tensor) -> bool:
    return isinstance(form, TensorForm) and not (form.dtype.is_floating_point or form.dtype.is_complex)


def copied_sources(lab: Laboratory, left: Budget) -> ExperimentResult:
    """Memory of its own for what is only read but shares memory with what is written."""
    changed = with_copied_sources(lab.call)
    if changed is None:
        return ExperimentResult(
            "copied_sources", "call", note="nothing that is written shares memory with what is read"
        )
    return lab.compared("copied_sources", left, live=changed.materialise())


def moved(lab: Laboratory, left: Budget) -> ExperimentResult:
    """Inputs at other addresses, against the one outcome in place."""
    if lab.in_place is None:
        return ExperimentResult("moved", "call", note=DIFFERS_IN_PLACE)
    several = len(lab.call.memories) > 1
    places: list[int | None] = [None, *(range(min(len(lab.call.memories), MOST_MEMORIES)) if several else ())]
    variants = [(place, shift) for place in places for shift in possible_shifts(lab.call, place)]
    return (
        _moved_by(lab, variants, left)
        if variants
        else ExperimentResult("moved", "call", note="no plain memory to move")
    )


def _moved_by(lab: Laboratory, variants: Sequence[Move], left: Budget) -> ExperimentResult:
    tally = Tally(lab.in_place)
    times = max(3, -(-lab.replays // len(variants)))
    differing: list[Move] = []
    unsteady = tried = 0
    for place, shift in variants:
        if tried and left.left() <= 0:
            break
        tried += 1
        alone = _moved_alone(lab, place, shift, times=times)
        if alone.differing:  # then it is not the address alone that decides
            unsteady += 1
            continue
        for seconds in alone.seconds:
            tally.add(alone.outcomes[0], seconds=seconds, copy=lambda copies=alone.copies: copies[0])  # type: ignore[misc]
        lab.elsewhere += alone.outcomes[:1]
        if alone.reference != lab.in_place:
            differing.append((place, shift))
    notes = [f"{unsteady} shifts give several outcomes"] if unsteady else []
    notes += [f"{tried} of {len(variants)} shifts: {NO_TIME}"] if tried < len(variants) else []
    lab.keep(tally)
    found = tally.arm("moved", found=_shifts_text(differing), note="; ".join(notes))
    return replace(found, moves=tuple(differing))


def _moved_alone(lab: Laboratory, place: int | None, shift: int, *, times: int) -> Tally:
    tally, live = Tally(), lab.call.materialise(shift, only=place)
    for _ in range(times):
        lab.replay(tally, live=live)
    return tally


def _shifts_text(differing: Sequence[Move]) -> str:
    """``all by 4, 8 bytes; memory 0 by 4 bytes``."""
    by_place: dict[int | None, list[str]] = {}
    for place, shift in differing:
        by_place.setdefault(place, []).append(str(shift))
    return "; ".join(
        f"{'all' if place is None else f'memory {place}'} by {', '.join(shifts)} bytes"
        for place, shifts in by_place.items()
    )


def generators(lab: Laboratory, left: Budget) -> ExperimentResult:
    """Every generator object alive put back before each replay."""
    if not lab.custom:
        return ExperimentResult(
            "generators", "call", note="torch's own kernels draw from generators that are restored anyway"
        )
    noted = Generators.alive()
    tally = Tally()

    def block(count: int) -> None:
        for _ in range(count):
            noted.restored()
            lab.replay(tally)

    try:
        arm = lab.controlled("generators", tally, left, block=block)
        removed = lab.repeated.differing and arm.ran and not arm.differing
        found = _guilty(lab, noted) if removed else ()
    finally:
        noted.restored()
    return replace(arm, found=", ".join(found))


def _guilty(lab: Laboratory, noted: Generators) -> tuple[str, ...]:
    """Those of the generators that moved which alone remove the difference; all that moved where none does."""
    moved_ones = noted.changed()
    alone = []
    for name in moved_ones:
        tally = Tally()
        noted.restored()
        for _ in range(GUILTY_REPLAYS):
            noted.restored(only=name)
            lab.replay(tally)
        if not tally.differing:
            alone.append(name)
    return tuple(alone or moved_ones)


GUILTY_REPLAYS = 5

SPECIAL_ARMS: Mapping[str, Callable[[Laboratory, Budget], ExperimentResult]] = {
    "fresh_memory": fresh_memory,
    "poison": poison,
    "moved": moved,
    "exact_values": exact_values,
    "copied_sources": copied_sources,
    "generators": generators,
}
