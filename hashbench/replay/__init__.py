"""Experiments on a captured call: run it again and again, change one thing at a time, count how often outcomes differ.

Every experiment takes its turn within a time budget, those first that decide most; what finds no time is named and not
run. Outcomes are compared with the first of the same experiment, except where the question is whether a disturbance
changes the one outcome that the undisturbed call has.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hashbench.catalog import EXPERIMENTS, Experiment, Role
from hashbench.processes import Budget, tell_phase
from hashbench.records import NO_TIME, CallFacts, ExperimentResult, TensorDigest
from hashbench.replay import facts as callfacts
from hashbench.replay.call import CallOutcome, CapturedCall, in_force
from hashbench.replay.facts import Snapshot
from hashbench.replay.methods import METHODS
from hashbench.replay.replayer import InapplicableError, Replayer
from hashbench.trace.op_schema import plan_of

Recorded = Sequence[tuple[TensorDigest, ...]]

REPEAT_SHARE = 0.3
"""Share of the time that the plain repetition may take."""


@dataclass(frozen=True, slots=True, eq=False)
class Replays:
    """What the experiments on one call showed. ``first`` and ``other`` are two outcomes that differ, for numbers: the
    tensors that the call wrote; ``other`` is ``None`` where none differed, and ``first`` empty where none was made."""

    arms: tuple[ExperimentResult, ...]
    facts: CallFacts
    first: Snapshot = ()
    other: Snapshot | None = None

    def arm(self, name: str) -> ExperimentResult:
        """The result of the experiment of that name; one without trials where it is missing."""
        known = (result for result in self.arms if result.name == name)
        return next(known, ExperimentResult(name, "call", note="not tried"))


def experiments(
    call: CapturedCall,
    *,
    replays: int,
    budget: Budget,
    recorded: Recorded = (),
    arms: Collection[str] = EXPERIMENTS.keys(),
) -> Replays:
    """Make the experiments that make sense for the call and its device.

    Args:
        call: what to repeat. Its settings are put in force, and everything is as before afterwards.
        replays: comparisons in each experiment, at least; more where outcomes differ rarely.
        budget: the seconds that all of it may take.
        recorded: the outputs that the traces of the differing runs recorded for this call.
        arms: these experiments alone, and ``repeat``, with which they are compared.
    """
    with warnings.catch_warnings(), in_force(call):
        warnings.simplefilter("ignore")  # the replays repeat what the runs have said already
        replayer = Replayer(call, replays=replays, budget=budget)
        tell_phase("experiments: repeat")
        repeat = _attempted(replayer, "repeat", share=REPEAT_SHARE)
        results: list[ExperimentResult] = []
        queue = [one for one in _order(replayer) if one.name in arms] if replayer.repeated.outcomes else []
        while queue:
            experiment, *queue = queue
            made = len(results) + 2
            tell_phase(f"experiments {made}/{made + len(queue)}: {experiment.name}")
            share = experiment.weight / (experiment.weight + len(queue))
            results.append(_attempted(replayer, experiment.name, share=share))
        if repeat.ran:  # with the unchanged replays that were made between those of the others
            note = repeat.note if replayer.repeated.trials < replayer.replays else ""
            repeat = replayer.repeated.result("repeat", note=note)
        copies = replayer.repeated.copies
        seen = copies if len(copies) > 1 else [*copies, *replayer.provoked]
        other = seen[1] if len(seen) > 1 else None
        return Replays((repeat, *results), _facts(replayer, seen, recorded), seen[0] if seen else (), other)


def _order(replayer: Replayer) -> list[Experiment]:
    """Where the call differs, those first that may remove that; else those first that may bring it about."""
    known = [one for one in EXPERIMENTS.values() if "call" in one.on and one.role is not Role.BASE]
    there = [one for one in known if one.runs_on(replayer.call.device.type)]
    return there if replayer.repeated.differing else sorted(there, key=lambda one: one.role is not Role.DISTURB)


def _attempted(replayer: Replayer, name: str, *, share: float) -> ExperimentResult:
    """One experiment within its share of what is left."""
    left = replayer.budget.left()
    if left <= 2 * replayer.cost:
        return ExperimentResult(name, "call", note=NO_TIME)
    budget = Budget(left * share)
    try:
        return replayer.repeat(budget) if name == "repeat" else METHODS[name](name, replayer, budget)
    except InapplicableError as error:
        return ExperimentResult(name, "call", note=str(error))
    except Exception as error:  # the op refuses what the experiment asks of it: that is what it has to say
        text = str(error).strip() or type(error).__name__
        sentence = text.splitlines()[0].partition(". ")[0]
        return ExperimentResult(name, "call", note=f"raises: {sentence}", raised=True)


# -------------------------------------------------------------------------------------------------- conclusions


def _facts(replayer: Replayer, seen: Sequence[Snapshot], recorded: Recorded) -> CallFacts:
    call = replayer.call
    facts = CallFacts(
        call.op,
        custom=replayer.custom,
        allocation=plan_of(call.func).blank,
        overlap=callfacts.has_overlap(call),
        matches_record=_matches(replayer, recorded),
    )
    if len(seen) < 2:
        return facts
    return replace(
        facts,
        same_values=callfacts.have_same_values(seen),
        chosen_values=callfacts.have_chosen_values(call, seen),
        tied_places=callfacts.have_tied_places(call, seen),
        representation=callfacts.representation_of(seen),
    )


def _matches(replayer: Replayer, recorded: Recorded) -> bool | None:
    """Whether a replay, in place or moved, gave what a trace recorded. A call of many outcomes need not give one of two
    again, so that only one of a single outcome can fail to match."""
    known = [outputs for outputs in recorded if outputs]
    if not known or not replayer.repeated.outcomes or plan_of(replayer.call.func).blank:
        return None
    seen = [*replayer.repeated.outcomes, *replayer.elsewhere]
    if any(_is_recorded(outcome, outputs) for outcome in seen for outputs in known):
        return True
    return None if replayer.repeated.differing else False


def _is_recorded(outcome: CallOutcome, outputs: tuple[TensorDigest, ...]) -> bool:
    """Whether the outcome has the recorded outputs. Behind those that the schema declares, a trace with hashed inputs
    also records arguments that changed all the same."""
    given = list(map(_without_stride, outcome.arguments))
    declared, more = outputs[: len(outcome.written)], outputs[len(outcome.written) :]
    same = list(map(_without_stride, declared)) == list(map(_without_stride, outcome.written))
    return same and all(_without_stride(output) in given for output in more)


def _without_stride(digest: TensorDigest) -> TensorDigest:
    """A trace writes the common stride for a contiguous tensor, also where a dimension of size 1 has an odd one."""
    return digest._replace(stride=())
