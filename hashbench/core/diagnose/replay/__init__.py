"""Run experiments on a captured call: replay it many times, change one thing per experiment, count differing outcomes.

    replays = experiments(call, replays=20, budget=Budget(60)) [arm.word() for arm in replays.arms]  # "call/repeat
        17/20", "call/one_thread 0/20", "call/moved not run (budget)", …

Experiments share one time budget, the most decisive first; those without time left are reported as not run. Outcomes
are compared with the first outcome of the same experiment, except where the question is whether a disturbance changes
the single outcome of the undisturbed call.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hashbench.core.catalog import EXPERIMENTS, Experiment, Role
from hashbench.core.diagnose.calls.call import CapturedCall, compiled_kernel, plan_for
from hashbench.core.diagnose.calls.live import OutcomeDigests, captured_environment
from hashbench.core.diagnose.replay import facts as callfacts
from hashbench.core.diagnose.replay.facts import Snapshot
from hashbench.core.diagnose.replay.methods import METHODS
from hashbench.core.diagnose.replay.replayer import InapplicableError, Replayer
from hashbench.core.processes import Budget, tell_phase
from hashbench.core.records import NO_TIME, CallFacts, ExperimentResult, TensorDigest

Recorded = Sequence[tuple[TensorDigest, ...]]

OF_SETTINGS = (Role.FLAG, Role.LIBRARY)
"""Roles of experiments that change settings of torch, by which its own kernels are chosen."""

NO_SETTING = "it is compiled: no setting of torch's reaches its machine code"
"""Note of these experiments on a compiled kernel."""

REPEAT_SHARE = 0.3
"""Share of the budget available to the plain repetition."""


@dataclass(frozen=True, slots=True, eq=False)
class Replays:
    """Results of the experiments on one call.

    Attributes:
        arms: one result per experiment, ``repeat`` first.
        facts: what is known of the call beside the results.
        first: tensors written in one outcome, for measuring the difference; empty if no replay was made.
        other: tensors written in a differing outcome; ``None`` if no outcome differed.
    """

    arms: tuple[ExperimentResult, ...]
    facts: CallFacts
    first: Snapshot = ()
    other: Snapshot | None = None

    def arm(self, name: str) -> ExperimentResult:
        """Return the result of the experiment ``name``, or a result without trials if it is missing."""
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
    """Run all experiments that apply to the call and its device.

    Args:
        call: the call to replay. Its settings are in force meanwhile; global state is restored afterwards.
        replays: minimum number of comparisons per experiment; raised if outcomes differ rarely.
        budget: seconds available to all experiments together.
        recorded: the outputs that the traces of the differing runs recorded for this call.
        arms: names of experiments to run; ``repeat``, their baseline, always runs.
    """
    with warnings.catch_warnings(), captured_environment(call):
        warnings.simplefilter("ignore")  # the replays repeat what the runs have said already
        replayer = Replayer(call, replays=replays, budget=budget)
        tell_phase("experiments: repeat")
        repeat = _run_experiment(replayer, "repeat", share=REPEAT_SHARE)
        results: list[ExperimentResult] = []
        queue = (
            [experiment for experiment in _experiment_order(replayer) if experiment.name in arms]
            if replayer.repeated.outcomes
            else []
        )
        while queue:
            experiment, *queue = queue
            made = len(results) + 2
            tell_phase(f"experiments {made}/{made + len(queue)}: {experiment.name}")
            share = experiment.weight / (experiment.weight + len(queue))
            results.append(_run_experiment(replayer, experiment.name, share=share))
        if repeat.ran:  # with the unchanged replays that were made between those of the others
            note = repeat.note if replayer.repeated.trials < replayer.replays else ""
            repeat = replayer.repeated.result("repeat", note=note)
        copies = replayer.repeated.copies
        seen = copies if len(copies) > 1 else [*copies, *replayer.provoked]
        other = seen[1] if len(seen) > 1 else None
        return Replays((repeat, *results), _facts(replayer, seen, recorded), seen[0] if seen else (), other)


def _experiment_order(replayer: Replayer) -> list[Experiment]:
    """Sort the experiments: if the call differs, those that may remove the difference first, else those that may cause
    one."""
    known = [
        experiment
        for experiment in EXPERIMENTS.values()
        if "call" in experiment.on and experiment.role is not Role.BASE
    ]
    there = [experiment for experiment in known if experiment.runs_on(replayer.call.device.type)]
    return (
        there
        if replayer.repeated.differing
        else sorted(there, key=lambda experiment: experiment.role is not Role.DISTURB)
    )


def _run_experiment(replayer: Replayer, name: str, *, share: float) -> ExperimentResult:
    """Run one experiment within its share of the remaining budget."""
    if EXPERIMENTS[name].role in OF_SETTINGS and compiled_kernel(replayer.call.func) is not None:
        return ExperimentResult(name, "call", note=NO_SETTING)
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
        allocation=plan_for(call.func).blank,
        overlap=callfacts.has_overlap(call),
        matches_record=_matches_record(replayer, recorded),
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


def _matches_record(replayer: Replayer, recorded: Recorded) -> bool | None:
    """Return whether a replay, in place or moved, reproduced a recorded output; ``None`` if that cannot be decided.

    A call with several outcomes need not repeat any recorded one, so only a call with a single outcome can mismatch.
    """
    known = [outputs for outputs in recorded if outputs]
    if not known or not replayer.repeated.outcomes or plan_for(replayer.call.func).blank:
        return None
    seen = [*replayer.repeated.outcomes, *replayer.elsewhere]
    if any(_is_recorded(outcome, outputs) for outcome in seen for outputs in known):
        return True
    return None if replayer.repeated.differing else False


def _is_recorded(outcome: OutcomeDigests, outputs: tuple[TensorDigest, ...]) -> bool:
    """Return whether the outcome equals the recorded outputs.

    Behind the outputs that the schema declares, a trace with hashed inputs also records arguments that changed
    undeclared.
    """
    given = list(map(_without_stride, outcome.arguments))
    declared, more = outputs[: len(outcome.written)], outputs[len(outcome.written) :]
    same = list(map(_without_stride, declared)) == list(map(_without_stride, outcome.written))
    return same and all(_without_stride(output) in given for output in more)


def _without_stride(digest: TensorDigest) -> TensorDigest:
    """Drop the stride: a trace normalises it for contiguous tensors, even where a dimension of size 1 has an odd
    stride."""
    return digest._replace(stride=())
