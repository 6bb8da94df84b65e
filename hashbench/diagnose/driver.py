"""The driver of the experiments: which are run on a model whose runs differ, in which order, and what follows.

A difference that a kernel introduced is looked for in the captured call first, where an experiment costs milliseconds;
what is not explained there, and all that came from outside, is looked for in pairs of runs of the whole model, and last
in fresh processes, which cost seconds each. Every decision is that of ``causes.decide`` on the evidence so far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import psutil

from hashbench import causes, replay
from hashbench.causes import stats
from hashbench.deadline import Budget
from hashbench.diagnose import fresh_process, patching
from hashbench.diagnose.pairs import PAIR_ARMS, Pairs, process_arms
from hashbench.divergence import introduce
from hashbench.errors import HashbenchError
from hashbench.records import (
    CallFacts,
    Diagnosis,
    Divergence,
    Evidence,
    ExperimentResult,
    Failure,
    ModelSpec,
    RunOptions,
    Trace,
)
from hashbench.replay import facts
from hashbench.replay.call import CapturedCall
from hashbench.replay.capture import CaptureError, capture
from hashbench.repro import folder as repro
from hashbench.repro import torch_docs
from hashbench.repro.op_definition import definition_of, needs_definition
from hashbench.results.folder import file_key
from hashbench.run import outputs
from hashbench.run.outcome import Outcome, Run, difference_between
from hashbench.trace.callbacks import TraceCallback
from hashbench.trace.op_schema import plan_of

FRESH_PROCESSES = 4
"""Fresh processes that make a pair each. All four pairs differ and their first runs agree by luck with p = 0.03."""
FIXED_PROCESSES = 4
"""Fresh processes with a fixed order. Three agree with a fourth where three others did not, by luck, with p = 0.05."""
REPRO_SECONDS = 60.0
"""Time limit of a repro's own run; it is made to take a few seconds."""
MOST_SOURCES = 20
"""Independent sources looked for at most."""
COPIES = 6
"""A captured call, its live copies and two of its outcomes take up to so many times its size."""
CALL_SHARE = 0.6
"""Part of the budget that the experiments on the captured call may take."""
_BYTES_PER_MIB = 2**20
_WORLD = ("entropy", "clocks", "one_worker")


class Attempt(Protocol):
    """One run of the model from the reset state; see ``BenchmarkRunner``."""

    def __call__(
        self, *, traced: bool = True, diagnosing: bool = False, watcher: TraceCallback | None = None
    ) -> Run | Failure: ...


@dataclass(frozen=True, slots=True)
class Subject:
    """What is diagnosed: how to run the model, and what is known of its difference. ``spec`` is how ``target`` builds
    it again in a fresh process."""

    attempt: Attempt
    options: RunOptions
    outcome: Outcome
    spec: ModelSpec | None = None
    target: str = fresh_process.DEFAULT_TARGET

    @property
    def divergence(self) -> Divergence | None:
        """Where the difference entered."""
        return self.outcome.verdict.divergence if self.outcome.verdict is not None else None


def diagnose(subject: Subject) -> Diagnosis:
    """Run the experiments on a model whose runs differ, within its budget."""
    return _Diagnostician(subject).run()


class _Diagnostician:
    def __init__(self, subject: Subject) -> None:
        self.subject, self.options = subject, subject.options
        self.budget = Budget(self.options.diagnose_budget)
        self.found = subject.divergence
        self.call: CapturedCall | None = None
        self.replays: replay.Replays | None = None
        self.evidence = _first_evidence(subject.outcome, self.found)
        self.pairs = Pairs(
            subject.attempt,
            self.found,
            replays=self.options.replays,
            budget=self.budget,
            device=self.options.device,
        )

    # ------------------------------------------------------------------------------------------------ in order

    def run(self) -> Diagnosis:
        """All experiments that the origin calls for, then the repro."""
        if self.subject.outcome.accuracy == "pass" or self.found is None:
            self._examine_untraced()
        elif self.found.origin == "kernel":
            self._examine_kernel(self.found)
        elif self.found.origin != "settings":
            self._examine_outside(self.found)
        return self._conclude()

    def _examine_untraced(self) -> None:
        self._add(self.pairs.plain())
        self._add(self.pairs.untraced())

    def _examine_kernel(self, found: Divergence) -> None:
        self.call, limits = self._capture(found)
        allocates = self.call is not None and plan_of(self.call.func).blank
        if self.call is None or allocates:
            self.evidence = replace(self.evidence, call=CallFacts(found.kernel, allocation=allocates, limits=limits))
        else:
            self._replay(self.call)
        if allocates:  # to repeat it shows nothing: the question is whether results follow what it leaves in memory
            self._add(self.pairs.plain())
            self._add(self.pairs.poison())
        if not self._proven() and not allocates:
            self._add(self.pairs.plain())
        if not self._proven():
            self._change_the_world(threads=self.call is None)
        if not self._proven():
            self._start_afresh()

    def _examine_outside(self, found: Divergence) -> None:
        self._add(self.pairs.plain())
        self._change_the_world(threads=False)
        if found.origin == "state" or not self._proven():
            self._start_afresh()
        if found.origin in ("sequence", "outside") and not self._proven():
            self._fix_the_order()

    def _change_the_world(self, *, threads: bool) -> None:
        """The arms on the pair that hold one thing outside torch still."""
        self._add(self.pairs.generators())
        for name, change in PAIR_ARMS:
            if name in _WORLD or threads:
                self._add(self.pairs.under(name, change))

    # ----------------------------------------------------------------------------------------------- one at a time

    def _capture(self, found: Divergence) -> tuple[CapturedCall | None, str]:
        """The guilty call from one more run, or why there is none."""
        catcher = _Catcher(found.node, limit_bytes=self._limit_bytes())
        run = self.subject.attempt(watcher=catcher)
        if catcher.call is not None:
            call = replace(catcher.call, node=found.node, phase=found.phase, module=found.module)
            return replace(call, forward_op=found.forward_op, source=found.source), ""
        if catcher.reason:
            return None, catcher.reason
        return None, f"the run failed: {run.error}" if isinstance(run, Failure) else "the call did not come again"

    def _limit_bytes(self) -> int:
        """The largest call to capture: as asked, and on the CPU no more than memory allows."""
        asked = int(self.options.capture_mib * _BYTES_PER_MIB)
        if self.options.device != "cpu":
            return asked
        return min(asked, psutil.virtual_memory().available // COPIES)

    def _replay(self, call: CapturedCall) -> None:
        recorded = _recorded(self.subject.outcome.traces, call.node)
        share = Budget(self.budget.left() * CALL_SHARE)
        self.replays = replay.experiments(call, replays=self.options.replays, budget=share, recorded=recorded)
        self.evidence = replace(self.evidence, call=self.replays.facts, arms=(*self.evidence.arms, *self.replays.arms))

    def _start_afresh(self) -> None:
        for arm in self._in_processes("fresh_process", processes=FRESH_PROCESSES, runs=2, fixed_order=False):
            self._add(arm)

    def _fix_the_order(self) -> None:
        for arm in self._in_processes("fixed_order", processes=FIXED_PROCESSES, runs=1, fixed_order=True):
            self._add(arm)

    def _in_processes(self, name: str, *, processes: int, runs: int, fixed_order: bool) -> Sequence[ExperimentResult]:
        spec = self.subject.spec
        if spec is None:
            return [ExperimentResult(name, "process", note="only models of a suite can be built again")]
        if self.budget.left() <= 0:
            return [ExperimentResult(name, "process", note="budget")]
        fresh = fresh_process.fresh_traces(
            spec,
            self.options,
            level=self.subject.outcome.deterministic,
            processes=processes,
            runs=runs,
            fixed_order=fixed_order,
            timeout=self.budget.left(),
            target=self.subject.target,
        )
        return process_arms(fresh, self.found, name=name)

    def _add(self, arm: ExperimentResult) -> None:
        self.evidence = replace(self.evidence, arms=(*self.evidence.arms, arm))

    def _proven(self) -> bool:
        return causes.decide(self.evidence).confidence == "proven"

    # ------------------------------------------------------------------------------------------------ conclusions

    def _conclude(self) -> Diagnosis:
        decision = causes.decide(self.evidence)
        diagnosis = Diagnosis(
            decision,
            self.evidence,
            rate=stats.rate_of_evidence(self.evidence) or stats.rate_of_runs(self.subject.outcome.run_counts),
        )
        if self.found is not None and self.found.origin == "kernel":
            diagnosis = replace(
                diagnosis,
                deterministic_doc=torch_docs.documented(
                    self.found.kernel, device=self.options.device, backward_of=_op_of(self.found.forward_op)
                ),
                deterministic_here=stats.deterministic_here(self.evidence),
                deterministic_price=stats.deterministic_price(self.evidence),
            )
        if self.options.all_sources and self.found is not None:
            diagnosis = replace(diagnosis, other_sources=tuple(self._other_sources(self.found)))
        return self._write_repro(diagnosis)

    def _write_repro(self, diagnosis: Diagnosis) -> Diagnosis:
        """The folder that shows the difference without the model, run once in a fresh process."""
        spec, call = self.subject.spec, self.call
        if spec is None or call is None or not self.options.output:
            return diagnosis
        name = f"repro/{file_key(suite=spec.suite, mode=self.options.mode, name=spec.name)}"
        folder = Path(self.options.output) / name
        seen_in = f"in the model {spec.name} ({self.options.mode})"
        try:
            repro.write_repro(folder, call, diagnosis, difference=self._difference(), seen_in=seen_in)
        except HashbenchError as error:  # OSError ends the sweep: its folder takes no more
            return replace(diagnosis, reproduced=f"no repro: {error}")
        definition = definition_of(call.func) if needs_definition(call.func) else None
        argument = definition.argument if definition is not None else None
        reproduced = repro.run_in_fresh_process(folder, timeout=REPRO_SECONDS, definition=argument)
        return replace(diagnosis, repro=name, reproduced=reproduced)

    def _difference(self) -> outputs.Difference | None:
        """Two outcomes of the captured call that differ, in numbers."""
        if self.replays is None or self.replays.other is None:
            return None
        return facts.difference_of(self.replays.first, self.replays.other)

    # --------------------------------------------------------------------------------------------- other sources

    def _other_sources(self, found: Divergence) -> Sequence[str]:
        """What else differs once the known sources are made to give what they gave in the first run of a pair."""
        known, told = [found.node], []
        while len(known) <= MOST_SOURCES and self.budget.left() > 0:
            following = self._next_source(known)
            if following is None:
                break
            if isinstance(following, str) or following.node in known:
                told.append(following if isinstance(following, str) else f"cannot get past {following.node}")
                break
            known.append(following.node)
            told.append(self._describe(following))
        return told

    def _next_source(self, known: Sequence[str]) -> Divergence | str | None:
        recorder = patching.Recorder(known)
        first = self.subject.attempt(diagnosing=True, watcher=recorder)
        replacer = patching.Replacer(recorder.contents)
        second = self.subject.attempt(diagnosing=True, watcher=replacer)
        if isinstance(first, Failure) or isinstance(second, Failure) or first.trace is None or second.trace is None:
            return "a further run failed"
        difference = difference_between(first, second)
        if difference is None:
            return None
        return introduce.find(first.trace, second.trace, differing=difference.names).divergence

    def _describe(self, found: Divergence) -> str:
        place = f"{found.origin}: {found.kernel} in {found.module or 'the model'} ({found.phase})"
        evidence = _first_evidence(self.subject.outcome, found)
        if found.origin == "kernel":
            call, limits = self._capture(found)
            if call is None:
                return f"{place}: {limits}"
            share = Budget(self.budget.left() / 2)
            replays = replay.experiments(call, replays=self.options.replays, budget=share)
            evidence = replace(evidence, call=replays.facts, arms=replays.arms)
        decision = causes.decide(evidence)
        return f"{place}: {decision.cause}, {decision.confidence}"


class _Catcher(TraceCallback):
    """Captures the call of one id when it comes."""

    def __init__(self, node: str, *, limit_bytes: int) -> None:
        self.node, self.limit_bytes = node, limit_bytes
        self.call: CapturedCall | None = None
        self.reason = ""

    def before(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if node != self.node:
            return
        try:
            self.call = capture(func, args, kwargs, limit_bytes=self.limit_bytes)
        except CaptureError as error:
            self.reason = str(error)


# ------------------------------------------------------------------------------------------------- plain values


def _first_evidence(outcome: Outcome, found: Divergence | None) -> Evidence:
    """What the sweep's own runs say of a divergence, before any experiment."""
    counts = outcome.run_counts
    return Evidence(
        origin=found.origin if found is not None else "",
        opaque_producer=found is not None and found.opaque_producer,
        steered=found is not None and found.steered_by is not None,
        reordered=_reordered(outcome.traces),
        representation=outcome.difference.representation if outcome.difference is not None else "",
        first_pair=(counts.differing, counts.compared) if counts is not None else (1, 1),
        untraced=outcome.untraced,
    )


def _reordered(traces: Sequence[Trace]) -> bool:
    """Whether two runs have the same ops in the same modules, in whatever order."""
    if len(traces) != 2:
        return False
    first, second = ([(record.phase, record.module, record.op) for record in trace.records] for trace in traces)
    return Counter(first) == Counter(second)


def _recorded(traces: Sequence[Trace], node: str) -> list[tuple[Any, ...]]:
    return [record.outputs for trace in traces for record in trace.records if record.id == node]


def _op_of(node: str) -> str:
    """The op in the id of a record."""
    return node.rpartition("/")[2].partition("#")[0]
