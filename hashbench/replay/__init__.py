"""Experiments on a captured call: run it again and again, change one thing at a time, count how often outcomes differ.

Every arm takes its turn within a time budget, those first that decide most; what finds no time is named and not run. An
arm's outcomes are compared with its own first one, except where the question is whether a disturbance changes the one
outcome that the undisturbed call has.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hashbench.catalog import EXPERIMENTS, Experiment, Role
from hashbench.processes import Budget
from hashbench.records import NO_TIME, CallFacts, ExperimentResult, TensorDigest
from hashbench.replay import facts as callfacts
from hashbench.replay.call import CallOutcome, CapturedCall, in_force
from hashbench.replay.experiments.special import SPECIAL_ARMS
from hashbench.replay.experiments.table import SURROUNDINGS
from hashbench.replay.facts import Snapshot
from hashbench.replay.op_owner import calls_others
from hashbench.replay.replayer import DIFFERS_IN_PLACE, Laboratory
from hashbench.replay.tally import Tally
from hashbench.trace.op_schema import plan_of

Recorded = Sequence[tuple[TensorDigest, ...]]

REPEAT_SHARE = 0.3
"""Share of the time that the plain repetition may take."""


@dataclass(frozen=True, slots=True, eq=False)
class Replays:
    """What the experiments on one call found. ``first`` and ``other`` are two outcomes that differ, for numbers: the
    tensors that the call wrote; ``other`` is ``None`` where none differed, and ``first`` empty where none was made."""

    arms: tuple[ExperimentResult, ...]
    facts: CallFacts
    first: Snapshot = ()
    other: Snapshot | None = None

    def arm(self, name: str) -> ExperimentResult:
        """The arm of that name; one without trials where it is missing."""
        return next((arm for arm in self.arms if arm.name == name), ExperimentResult(name, "call", note="not tried"))


def experiments(
    call: CapturedCall,
    *,
    replays: int,
    budget: Budget,
    recorded: Recorded = (),
    arms: Collection[str] = EXPERIMENTS.keys(),
) -> Replays:
    """Run the arms that make sense for the call and its device.

    Args:
        call: what to repeat. Its settings are put in force, and everything is as before afterwards.
        replays: comparisons in each arm, at least; more where outcomes differ rarely.
        budget: the seconds that all of it may take.
        recorded: the outputs that the traces of the differing runs recorded for this call.
        arms: these alone, and ``repeat``, with which they are compared.
    """
    with warnings.catch_warnings(), in_force(call):
        warnings.simplefilter("ignore")  # the replays repeat what the runs have said already
        lab = Laboratory(call, replays=replays, budget=budget)
        found = [_attempted(lab, "repeat", share=REPEAT_SHARE)]
        queue = [one for one in _order(lab) if one.name in arms] if lab.repeated.outcomes else []
        while queue:
            experiment, *queue = queue
            share = experiment.weight / (experiment.weight + len(queue))
            found.append(_attempted(lab, experiment.name, share=share))
        return _concluded(lab, found, recorded)


def _order(lab: Laboratory) -> list[Experiment]:
    """Where the call differs, those first that may remove that; else those first that may bring it about."""
    known = [one for one in EXPERIMENTS.values() if "call" in one.on and one.role is not Role.BASE]
    there = [one for one in known if one.runs_on(lab.call.device.type)]
    return there if lab.repeated.differing else sorted(there, key=lambda one: one.role is not Role.DISTURB)


def _attempted(lab: Laboratory, name: str, *, share: float) -> ExperimentResult:
    """One arm within its share of what is left."""
    left = lab.budget.left()
    if left <= 2 * lab.cost:
        return ExperimentResult(name, "call", note=NO_TIME)
    budget = Budget(left * share)
    try:
        if name == "repeat":
            return lab.repeat(budget)
        return SPECIAL_ARMS[name](lab, budget) if name in SPECIAL_ARMS else _surrounded(lab, name, budget)
    except Exception as error:  # the op refuses what the arm asks of it: that is what the arm has to say
        return ExperimentResult(name, "call", note=f"raises: {_first_sentence(error)}", raised=True)


def _surrounded(lab: Laboratory, name: str, left: Budget) -> ExperimentResult:
    arm = SURROUNDINGS[name]
    if arm.outside and not lab.custom:
        return ExperimentResult(name, "call", note="torch's own kernels read nothing from outside torch")
    if arm.inside and not (lab.custom or calls_others(lab.call.func)):
        return ExperimentResult(name, "call", note="this kernel calls no other op, so there is nothing to choose")
    if arm.disturbs and lab.in_place is None:
        return ExperimentResult(name, "call", note=DIFFERS_IN_PLACE)
    if name == "nondeterministic" and lab.call.settings.get("deterministic_algorithms") == "off":
        return replace(lab.repeated.arm(name), note="as it was captured")
    tally = Tally(lab.in_place if arm.disturbs else None)
    change = arm.around(lab.call.device, seconds=lab.cost)
    found = lab.compared(name, left, change=change, each=arm.each, tally=tally)
    if arm.disturbs:
        lab.keep(tally)
    return found


def _first_sentence(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].partition(". ")[0]


# -------------------------------------------------------------------------------------------------- conclusions


def _concluded(lab: Laboratory, arms: Sequence[ExperimentResult], recorded: Recorded) -> Replays:
    copies = lab.repeated.copies
    seen = copies if len(copies) > 1 else [*copies, *lab.provoked]
    facts = CallFacts(
        lab.call.op,
        custom=lab.custom,
        allocation=plan_of(lab.call.func).blank,
        overlap=callfacts.has_overlap(lab.call),
        same_values=callfacts.have_same_values(seen),
        chosen_values=callfacts.have_chosen_values(lab.call, seen),
        tied_places=callfacts.have_tied_places(lab.call, seen),
        matches_record=_matches(lab, recorded),
        representation=callfacts.representation_of(seen),
    )
    final = tuple(_with_controls(lab, arm) for arm in arms)
    return Replays(final, facts, first=seen[0] if seen else (), other=seen[1] if len(seen) > 1 else None)


def _with_controls(lab: Laboratory, arm: ExperimentResult) -> ExperimentResult:
    """``repeat`` with the unchanged replays that were made between those of other arms."""
    if arm.name != "repeat" or not arm.ran:
        return arm
    return lab.repeated.arm("repeat", note=arm.note if lab.repeated.trials < lab.replays else "")


def _matches(lab: Laboratory, recorded: Recorded) -> bool | None:
    """Whether a replay, in place or moved, gave what a trace recorded. A call of many outcomes need not give one of two
    again, so that only one of a single outcome can fail to match."""
    known = [outputs for outputs in recorded if outputs]
    if not known or not lab.repeated.outcomes or plan_of(lab.call.func).blank:
        return None
    seen = [*lab.repeated.outcomes, *lab.elsewhere]
    if any(_is_recorded(outcome, outputs) for outcome in seen for outputs in known):
        return True
    return None if lab.repeated.differing else False


def _is_recorded(outcome: CallOutcome, outputs: tuple[TensorDigest, ...]) -> bool:
    """Whether the outcome has the recorded outputs. Behind those that the schema declares, a trace with hashed inputs
    also records arguments that changed all the same."""
    given = [_without_stride(digest) for digest in outcome.arguments]
    declared, more = outputs[: len(outcome.written)], outputs[len(outcome.written) :]
    same = [_without_stride(digest) for digest in declared] == [_without_stride(digest) for digest in outcome.written]
    return same and all(_without_stride(output) in given for output in more)


def _without_stride(digest: TensorDigest) -> TensorDigest:
    """A trace writes the common stride for a contiguous tensor, also where a dimension of size 1 has an odd one."""
    return digest._replace(stride=())
