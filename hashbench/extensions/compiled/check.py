"""Check a compiled model: against itself, against eager mode, and kernel by kernel against its own graph.

The order of steps is that of PyTorch's harness: two eager runs, a reference in float64, a compiled run. Then come a
second compiled run, which must give the same bits, and a third one, whose kernels are judged.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from hashbench.core.catalog import Confidence, Status
from hashbench.core.check import pipeline
from hashbench.core.check.pair import PairCheck, compared
from hashbench.core.check.row import keep_draft
from hashbench.core.check.subject import Subject
from hashbench.core.diagnose.causes import stats
from hashbench.core.errors import HashbenchError, log_error
from hashbench.core.inductor.graphs import CompiledGraph
from hashbench.core.inductor.internals import CapturedGraphs, why_hidden, wrapper_of
from hashbench.core.inductor.nodes import common, facts_of
from hashbench.core.processes import Budget, tell_phase
from hashbench.core.records import Failure, RunOptions
from hashbench.core.results.folder import file_key
from hashbench.core.run.environment import check_backend
from hashbench.core.run.outcome import Outcome, Run, RunMaker
from hashbench.core.run.rounding import LIMIT
from hashbench.core.run.workload import Workload
from hashbench.core.text import count, join_limited
from hashbench.extensions.compiled import compiled_kernels
from hashbench.extensions.compiled.advice import LEFT_OUT, advice_for
from hashbench.extensions.compiled.as_device.backend import refuse_settings
from hashbench.extensions.compiled.cause import CompiledCase, explain, of_facts, undeclared
from hashbench.extensions.compiled.compilations import Compiled, compiled_again, in_fresh_process, program_of
from hashbench.extensions.compiled.compiled_kernels import ListedKernel
from hashbench.extensions.compiled.facts import NOT_SEEN, CompiledFacts, FurtherCompilations
from hashbench.extensions.compiled.judge import KernelJudge, KernelJudgement
from hashbench.extensions.compiled.kernel_list import KernelList
from hashbench.extensions.compiled.observed import KernelWatcher
from hashbench.extensions.compiled.program import Compilation, CompiledModel, compiling
from hashbench.extensions.compiled.reference import Reference
from hashbench.extensions.compiled.varieties import Variety, further

if TYPE_CHECKING:
    from hashbench.core.check.model import BenchmarkRunner


_SECONDS = 600.0
"""For a compilation in a fresh process."""


_QUICK, _QUICK_RUNS = 0.1, 5
"""Seconds of a compiled run, with its trace, below which so many are compared: a race that shows in every third run
stays unseen in one pair of two times out of three."""


@dataclass(frozen=True, slots=True)
class CompiledCheck:
    """Checks one model under ``options.backend``.

    Args:
        model: as it is run.
        subject: of the eager runs.
        options: of the sweep.
        level: the deterministic level in force.
        harness_status: what PyTorch's own harness gave the compiled model, which stays; empty: there is none.
    """

    model: CompiledModel
    subject: Subject
    options: RunOptions
    level: str
    harness_status: str = ""

    def run(self) -> Outcome:
        """Make all runs, and return the outcome with the worst status."""
        try:
            check_backend(self.options.backend)
            refuse_settings(self.options.backend, device=self.options.device)
        except HashbenchError as error:  # of a machine of a cluster, which the sweep's own cannot know
            facts = (CompiledFacts(stage="dynamo"),)
            return Outcome(Status.REFERENCE_FAIL, self.level, failure=Failure(str(error)), facts=facts)
        eager = PairCheck(self.subject, self.options, self.level)
        outcome = eager.repeat()
        first = outcome.first
        outcome = replace(outcome, first=None)
        if outcome.accuracy != Status.PASS or first is None:
            return pipeline.explained(eager, outcome)
        return self.compared(outcome, first)

    def compared(self, outcome: Outcome, eager: Run) -> Outcome:
        """Compile the model, and return ``outcome``, that of its eager runs, with what its compiled runs show.

        Args:
            outcome: of eager runs that agree.
            eager: one of them.
        """
        tell_phase("float64 reference")
        reference = self.model.make(dtype=torch.float64)(traced=False)
        with compiling(), CapturedGraphs() as hooks:
            return self._compiled(outcome, eager, None if isinstance(reference, Failure) else reference, hooks.graphs)

    # ------------------------------------------------------------------------------------------------- stages

    def _compiled(
        self, outcome: Outcome, eager: Run, reference: Run | None, graphs: Mapping[str, CompiledGraph]
    ) -> Outcome:
        program = self.model.make(backend=self.options.backend)
        tell_phase("compiling")
        began = perf_counter()
        first = program()
        ended = perf_counter()
        made = Compilation.so_far()
        outcome = _with(outcome, graphs=made.graphs, graph_breaks=made.graph_breaks)
        if isinstance(first, Failure):
            failed = replace(outcome, accuracy=_failed(first), failure=first)
            return _with(failed, **self._place_of(first))
        if not made.graphs:
            why = join_limited(made.reasons) or "no frame was compiled"
            failure = Failure(f"nothing was compiled: {why}")
            return replace(outcome, accuracy=Status.SKIPPED, failure=failure)
        tell_phase("second compiled run")
        again = perf_counter()
        second = program()
        lasted = perf_counter() - again
        outcome = _with(outcome, compile_seconds=round(max(0.0, (ended - began) - lasted), 3))
        other: Run | Failure = second
        for number in range(2, runs_of(self.subject.runs(), seconds=lasted) + 1):
            if number > 2:
                other = program()
            if isinstance(other, Failure):
                return replace(outcome, accuracy=_failed(other), failure=other)
            found = compared(outcome, first, other, number=number, keep_traces=self.options.keep_traces)
            if found.accuracy != Status.PASS:
                outcome = self._differing(outcome, found, program, graphs)
                break
            outcome = replace(found, runs=outcome.runs)
        if outcome.accuracy != Status.PASS and not self.harness_status:
            return outcome
        return self._judged(outcome, program, eager, first, reference, graphs)

    def _place_of(self, failure: Failure) -> dict[str, Any]:
        """Return where a compiled run failed: at a custom op that breaks its promises, or elsewhere."""
        if failure.stage == "runtime" and self.options.diagnose_budget > 0:
            tell_phase("what custom ops promise")
            found = undeclared(self.model.step)
            if found.facts.op:
                place = {"module": found.finding.module, "detail": found.finding.detail}
                return {"stage": found.facts.stage, "op": found.facts.op, **place}
        return {"stage": failure.stage, "op": failure.op}

    def _differing(
        self, outcome: Outcome, found: Outcome, program: RunMaker, graphs: Mapping[str, CompiledGraph]
    ) -> Outcome:
        """Find out why two runs of one compilation, as ``found``, are not equal."""
        if found.accuracy != Status.TWO_RUNS_DIFFER:
            return replace(found, runs=outcome.runs)
        if self.harness_status:
            divergence = found.verdict.divergence if found.verdict is not None else None
            kernel = divergence.kernel if divergence is not None else ""
            return _with(outcome, detail=f"two compiled runs differ{f' from {kernel} on' if kernel else ''}")
        subject = replace(self.subject, attempt=program, compiled=True)
        check = PairCheck(subject, self.options, self.level, drafted=_of_compiled_runs)
        outcome = _of_compiled_runs(pipeline.explained(check, found))
        divergence = outcome.verdict.divergence if outcome.verdict is not None else None
        op = "" if divergence is None else op_of_kernel(divergence.kernel, graphs)
        diagnosis = outcome.diagnosis
        if op and diagnosis is not None and diagnosis.evidence.arm("poison", "call").differing:
            return _with(outcome, stage="codegen", op=op, advice=advice_for(LEFT_OUT, op, ""))
        return _with(outcome, stage="runtime", op=op)

    def _judged(
        self,
        outcome: Outcome,
        program: RunMaker,
        eager: Run,
        compiled: Run,
        reference: Run | None,
        graphs: Mapping[str, CompiledGraph],
    ) -> Outcome:
        against = Reference(self.model, eager, reference)
        failed = against.exceeding_tolerance(compiled)
        if failed:
            outcome = _with(replace(outcome, accuracy=Status.FAIL_ACCURACY), differing_results=join_limited(failed))
        elif self.harness_status:
            again = "within the tolerance when it was compiled again"
            outcome = _noted(replace(outcome, accuracy=self.harness_status), again)
        found = judged(program, graphs)
        doubts = against.doubts(compiled, program, graphs, refused=failed)
        outcome = _with(outcome, reference="; ".join(doubts.texts))
        outcome = _noted(outcome, _unseen(graphs, found))
        if found is not None:
            outcome = _with(outcome, **_seen(found))
            self._keep_kernels(found)
            outcome = self._compiled_again(outcome, Compiled(compiled.noted, found.listed))
        suspected = found is not None and found.judgement.first_beyond(LIMIT) is not None
        lost = found is not None and bool(found.judgement.lost)
        if not (failed or self.harness_status or suspected or lost or doubts.asks):
            return outcome
        if self.options.diagnose_budget <= 0:
            return outcome
        case = CompiledCase(
            self.model,
            self.options.backend,
            against.exceeding_tolerance,
            failed,
            None if found is None else found.judgement,
            Budget(self.options.diagnose_budget),
            self._repro(),
        )
        return pipeline.searched(
            outcome,
            functools.partial(self._explained, outcome, case),
            keep_draft=functools.partial(keep_draft, self.subject.spec, self.options),
            failed=_unexplained,
        )

    def _repro(self) -> tuple[Path, str] | None:
        spec, options = self.subject.spec, self.options
        if spec is None or not options.output:
            return None
        key = file_key(suite=spec.suite, mode=options.mode, name=spec.name)
        return Path(options.output) / "repro" / key, f"{spec.name} ({options.mode})"

    def _keep_kernels(self, found: Judged) -> None:
        """Write the list of kernels beside the rows, by which nights are compared."""
        if self.options.output and self.subject.spec is not None and found.listed:
            program = program_of(self.subject.spec, self.options, found.listed)
            try:
                compiled_kernels.write(Path(self.options.output), program)
            except HashbenchError:
                log_error("the kernels were not written")

    def _compiled_again(self, outcome: Outcome, first: Compiled) -> Outcome:
        """Compare further compilations with the first one, if requested."""
        varieties = further(self.options.compilations)
        if not varieties:
            return outcome
        make = functools.partial(self.model.make, backend=self.options.backend)
        made = list(compiled_again(make, first, varieties, functools.partial(_in_fresh_process, self)))
        outcome = _with(
            outcome, compilations=str(FurtherCompilations({again.variety.name: again.word() for again in made}))
        )
        differing = next((again for again in made if again.differs), None)
        if differing is None or outcome.accuracy != Status.PASS:
            return outcome
        outcome = replace(outcome, accuracy=Status.COMPILATIONS_DIFFER)
        pair = differing.difference.first if differing.difference is not None else None
        detail = f"{differing.variety.meaning}: {join_limited(differing.results)}"
        if pair is None:
            return _with(outcome, detail=detail)
        kernel = pair.shown
        place = {"kernel": kernel.name, "op": ", ".join(kernel.ops[:3]), "module": kernel.module, "phase": kernel.phase}
        return _with(outcome, detail=f"{detail}; first kernel with {pair.what}", **place)

    def _explained(self, outcome: Outcome, case: CompiledCase) -> Outcome:
        """Add what an inaccurate model, or a kernel beyond rounding, turns out to be."""
        blamed = explain(case)
        if outcome.accuracy == Status.PASS and blamed.facts.stage in ("", "rounding"):
            detail = _only_rounding(case) if blamed.facts.semantic == "no" else blamed.finding.detail
            return _with(outcome, semantic=blamed.facts.semantic, detail=detail)
        found = blamed.finding
        root = self.model.root
        if found.module and found.module.partition(".")[0] != root:  # a container's own call is not on dynamo's stack
            found = replace(found, module=f"{root}.{found.module}")
        columns = {
            field.name: value
            for holder in (blamed.facts, replace(found, detail=""))
            for field in fields(holder)
            if (value := getattr(holder, field.name))
        }
        op = " or ".join(blamed.candidates) if len(blamed.candidates) > 1 else blamed.facts.op
        columns["advice"] = advice_for(blamed.facts.stage, op, blamed.facts.cured_by)
        return _with(_noted(outcome, found.detail), **columns)


def _unexplained(outcome: Outcome, because: str) -> Outcome:
    return _with(outcome, confidence=str(Confidence.OPEN), because=because)


def _noted(outcome: Outcome, detail: str) -> Outcome:
    return outcome.having(detail="; ".join(filter(None, (outcome.finding.detail, detail))))


def _with(outcome: Outcome, **columns: Any) -> Outcome:
    facts, finding = of_facts(columns)
    return outcome.having(replace(outcome.of(CompiledFacts), **facts), **finding)


def runs_of(asked: int, *, seconds: float) -> int:
    """Return how many runs of one compilation are compared: as many as are asked for, five where one takes no time."""
    return max(asked, 2, _QUICK_RUNS if seconds < _QUICK else 2)


def check_model(runner: BenchmarkRunner, workload: Workload, subject: Subject, level: str, optimizer: str) -> Outcome:
    """Check a loaded model under ``options.backend``; a :class:`~hashbench.core.extensions.Check`."""
    suite = subject.spec.suite if subject.spec is not None else ""
    model = CompiledModel.of(runner, workload, runner.options, suite=suite, optimizer=optimizer)
    return CompiledCheck(model, subject, runner.options, level).run()


def _in_fresh_process(check: CompiledCheck, _: Variety) -> Compiled:
    spec = check.subject.spec
    if spec is None:
        return Compiled(error="only models of a suite can be built again")
    return in_fresh_process(spec, check.options, check.level, seconds=_SECONDS)


@dataclass(frozen=True, slots=True)
class Judged:
    """The kernels of a run: their number, the judgement, the list of those of the first step, and the files of the
    graphs that were shown."""

    kernels: int
    judgement: KernelJudgement
    listed: tuple[ListedKernel, ...] = ()
    shown: frozenset[str] = frozenset()


def judged(program: RunMaker, graphs: Mapping[str, CompiledGraph]) -> Judged | None:
    """Make a run whose kernels are judged; ``None`` if there are none that were captured, or the run failed."""
    if not graphs:
        return None
    tell_phase("judging kernels")
    judge, kernels = KernelJudge(), KernelList()
    watcher = KernelWatcher(graphs, judge, kernels)
    run = program(watcher=watcher)
    if isinstance(run, Failure) or not watcher.kernels:
        return None
    return Judged(watcher.kernels, judge.result(), kernels.result(), watcher.shown)


def op_of_kernel(name: str, graphs: Mapping[str, CompiledGraph]) -> str:
    """Return the op of the program that a generated kernel computes last; empty if no graph calls it."""
    for path, graph in graphs.items():
        for call in wrapper_of(path).calls.values():
            if call.kernel == name:
                return common(facts_of(graph.nodes[target]) for target in call.targets if target in graph.nodes).op
    return ""


def _unseen(graphs: Mapping[str, CompiledGraph], found: Judged | None) -> str:
    """Say that the kernels of some graphs are not seen, and why; of graphs that were not called nothing is known."""
    unseen = [path for path in graphs if found is None or path not in found.shown]
    why = why_hidden(unseen) if unseen else ""
    if found is None and graphs:
        return f"kernels {NOT_SEEN}{f': {why}' if why else ''}"
    words = [f"the kernels of {count(len(unseen), 'graph')} {NOT_SEEN}: {why}"] if why else []
    refused = {} if found is None else found.judgement.refused
    if refused:
        words.append(
            f"{count(len(refused), 'kernel')} {NOT_SEEN}, ATen ran in place of: {next(iter(refused.values()))}"
        )
    return "; ".join(words)


def _seen(found: Judged) -> dict[str, Any]:
    """Return the columns that a judgement fills."""
    largest = found.judgement.largest
    return {
        "kernels": found.kernels,
        "checked": stats.significant(found.judgement.checked),
        "beyond_rounding": None if largest is None else stats.significant(largest.ratio),
        "eager_rounding": None if largest is None else stats.significant(largest.own_ratio),
    }


def _only_rounding(case: CompiledCase) -> str:
    largest = case.judgement.largest if case.judgement is not None else None
    if largest is None:
        return ""
    return f"{largest.kernel} is {largest.ratio:.3g} times beyond what rounding explains, and right in float64"


def _of_compiled_runs(outcome: Outcome) -> Outcome:
    if outcome.accuracy != Status.TWO_RUNS_DIFFER:
        return outcome
    return replace(outcome, accuracy=Status.COMPILED_RUNS_DIFFER)


def _failed(failure: Failure) -> str:
    return Status.OOM if failure.out_of_memory else Status.REFERENCE_FAIL
