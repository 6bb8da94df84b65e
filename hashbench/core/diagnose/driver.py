"""Run the experiments on a model whose runs differ, in order, and conclude.

A difference that a kernel introduced is tested on the captured call first, where an experiment costs milliseconds;
what is not explained there, and everything that came from outside, is tested in pairs of runs of the whole model, and
last in fresh processes, which cost seconds each. Every decision is that of ``causes.decide`` on the evidence so far.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from hashbench.core.catalog import Confidence, Limit, Origin, Perturbation, Status
from hashbench.core.diagnose import causes, fresh_process, replay, repro
from hashbench.core.diagnose.calls.call import MIB, CapturedCall, compiled_kernel, plan_for
from hashbench.core.diagnose.calls.capture import CaptureError, capture
from hashbench.core.diagnose.calls.ops import definition_of, why_undefined
from hashbench.core.diagnose.causes import stats
from hashbench.core.diagnose.pairs import CONTROLS, Pairs, of_same_weights, process_results
from hashbench.core.diagnose.replay import facts
from hashbench.core.diagnose.repro import torch_docs
from hashbench.core.divergence import find as find_divergence
from hashbench.core.errors import HashbenchError
from hashbench.core.processes import Budget, tell_phase
from hashbench.core.records import (
    NO_TIME,
    CallFacts,
    Diagnosis,
    Divergence,
    Evidence,
    ExperimentResult,
    Failure,
    ModelSpec,
    RunOptions,
    op_of,
)
from hashbench.core.results.folder import file_key
from hashbench.core.run.outcome import Outcome, RunMaker, results_that_differ
from hashbench.core.run.outputs import bitwise_equal
from hashbench.core.trace.arguments import tensors_in
from hashbench.core.trace.callbacks import TraceCallback

MOST_SOURCES = 20
"""Upper limit of independent sources to look for."""
COPIES = 6
"""Memory for a captured call, its live copies and two of its outcomes, in multiples of its size."""
CALL_SHARE = 0.6
"""Share of the budget for experiments on the captured call."""
FIXED_ORDERS = 3
"""Attempts at processes with fixed addresses: one Python in eight has forks that differ."""

WITH_PEERS = "needs all ranks"
"""Note of an experiment in fresh processes on one of several ranks."""

COMPILES_ANEW = "would recompile"
"""Note of an experiment on a compiled program that torch would compile anew for it."""


class DiagnosisCase:
    """A model to diagnose: how to run it, its known difference, and the budget, which starts now.

    Attributes:
        divergence: where the difference entered.
        spec: from which ``target`` builds the same model in a fresh process.
        compiled: its runs are those of one compilation, which neither a process nor another number of threads shares.
        with_peers: it is one of several ranks, which make each run with it.
        pairs: runs the whole model under one change at a time.
    """

    def __init__(
        self,
        attempt: RunMaker,
        options: RunOptions,
        outcome: Outcome,
        *,
        spec: ModelSpec | None = None,
        target: str = fresh_process.DEFAULT_TARGET,
        compiled: bool = False,
        with_peers: bool = False,
    ) -> None:
        self.attempt, self.options, self.outcome, self.spec, self.target = attempt, options, outcome, spec, target
        self.compiled, self.with_peers = compiled, with_peers
        self.divergence = outcome.verdict.divergence if outcome.verdict is not None else None
        self.budget = Budget(options.diagnose_budget)
        collective = self.divergence is not None and self.divergence.origin == Origin.COLLECTIVE
        self.pairs = Pairs(
            attempt,
            None if collective else self.divergence,  # of which the trace of one rank does not tell that it is there
            replays=options.replays,
            budget=self.budget,
            device=options.device,
            counts=outcome.run_counts,
        )


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings so far: the evidence, the captured call of the divergent kernel, and the results of its replays."""

    evidence: Evidence
    call: CapturedCall | None = None
    replays: replay.Replays | None = None

    def plus(self, *results: ExperimentResult) -> Findings:
        """Return a copy with further experiments' results."""
        return replace(self, evidence=replace(self.evidence, arms=(*self.evidence.arms, *results)))

    @property
    def proven(self) -> bool:
        """True if the cause is proven."""
        return causes.decide(self.evidence).confidence == Confidence.PROVEN


Stage = Callable[[DiagnosisCase, Findings], Findings]


def diagnose(case: DiagnosisCase) -> Diagnosis:
    """Run the experiments that the origin of a case calls for, within budget; decide the cause; write the repro."""
    findings = Findings(_first_evidence(case.outcome, case.divergence))
    for stage in stages_of(case):
        findings = stage(case, findings)
    return _conclude(case, findings)


def stages_of(case: DiagnosisCase) -> Sequence[Stage]:
    """Return the stages of a diagnosis in order, by what is known before it."""
    if case.divergence is None or case.outcome.accuracy == Status.PASS:
        return repeat_pair, repeat_untraced
    in_processes = start_processes, start_processes_in_fixed_order
    if case.outcome.between_processes:
        if case.divergence.origin != Origin.KERNEL:
            return in_processes
        return capture_call, replay_call, *map(_unless_proven, in_processes)
    if case.outcome.perturbation == Perturbation.MEMORY and case.divergence.origin != Origin.KERNEL:
        return (poison_memory,)
    around = (repeat_pair, control_environment)
    match case.divergence.origin:
        case Origin.SETTINGS | Origin.RANKS | Origin.UNWAITED:
            return ()
        case Origin.COLLECTIVE:
            return repeat_pair, fix_sources
        case Origin.KERNEL:
            before = capture_call, replay_call, poison_allocation
            return *before, *map(_unless_proven, (*around, start_processes)), try_memory_and_collector
        case Origin.STATE:
            return *around, start_processes, try_memory_and_collector
        case Origin.SEQUENCE | Origin.OUTSIDE:
            return *around, *map(_unless_proven, in_processes), try_memory_and_collector
        case _:
            return *around, _unless_proven(start_processes), try_memory_and_collector


# ------------------------------------------------------------------------------------------------- the stages


def _unless_proven(stage: Stage) -> Stage:
    """Skip the stage if the cause is proven."""

    @functools.wraps(stage)
    def guarded(case: DiagnosisCase, findings: Findings) -> Findings:
        return findings if findings.proven else stage(case, findings)

    return guarded


def repeat_pair(case: DiagnosisCase, findings: Findings) -> Findings:
    """Run the pair again unchanged, unless an allocation is to blame, for which that was done."""
    return findings if _allocates(findings) else findings.plus(case.pairs.plain())


def repeat_untraced(case: DiagnosisCase, findings: Findings) -> Findings:
    """Run pairs without a trace."""
    return findings.plus(case.pairs.untraced())


def capture_call(case: DiagnosisCase, findings: Findings) -> Findings:
    """Capture the divergent kernel's call in one more run, or record why it could not be captured."""
    assert case.divergence is not None
    tell_phase("capturing the call")
    call, limits = _capture(case, case.divergence)
    allocation = plan_for(call.func).blank if call is not None else _left_blank(case, case.divergence.node)
    facts = CallFacts(case.divergence.kernel, allocation=allocation, limits=limits)
    return replace(findings, call=call, evidence=replace(findings.evidence, call=facts))


def _left_blank(case: DiagnosisCase, node: str) -> bool:
    """Return True if every output of a call, in the traces that differ, is memory that was never written."""
    records = [record for trace in case.outcome.traces for record in trace.records if record.id == node]
    return bool(records) and all(record.outputs and not any(out.value for out in record.outputs) for record in records)


def replay_call(case: DiagnosisCase, findings: Findings) -> Findings:
    """Replay the captured call under one change at a time; not an allocation, whose replay shows nothing."""
    if findings.call is None or _allocates(findings):
        return findings
    records = [record for trace in case.outcome.traces for record in trace.records]
    recorded = [record.outputs for record in records if record.id == findings.call.node]
    share = Budget(case.budget.left() * CALL_SHARE)
    replays = replay.experiments(findings.call, replays=case.options.replays, budget=share, recorded=recorded)
    findings = replace(findings, replays=replays, evidence=replace(findings.evidence, call=replays.facts))
    return findings.plus(*replays.arms)


def poison_allocation(case: DiagnosisCase, findings: Findings) -> Findings:
    """Test whether results follow the content of an allocation."""
    if not _allocates(findings):
        return findings
    # Where a stressed pair has shown it, pairs without stress agree.
    stressed = case.outcome.perturbation == Perturbation.MEMORY
    return poison_memory(case, findings if stressed else findings.plus(case.pairs.plain()))


def poison_memory(case: DiagnosisCase, findings: Findings) -> Findings:
    """Test whether results follow the content of fresh memory, unless the runs of a pair differ in another
    perturbation."""
    if case.outcome.perturbation not in _NOT_BETWEEN_RUNS:
        note = "the runs of a pair differ in a perturbation"
        return findings.plus(ExperimentResult("poison", "pair", note=note))
    return findings.plus(case.pairs.poison())


_NOT_BETWEEN_RUNS = ("", Perturbation.MEMORY, Perturbation.THREADS)
"""Perturbations that are the same in both runs of the pairs that experiments repeat."""


def control_environment(case: DiagnosisCase, findings: Findings) -> Findings:
    """Run pairs that each hold one thing outside torch constant.

    Also the number of threads if the divergent kernel's call could not be captured, and the garbage collector if that
    was perturbed.
    """
    threads = findings.evidence.origin == Origin.KERNEL and findings.call is None
    collector = case.outcome.perturbation in (Perturbation.COLLECTOR, Perturbation.TOGETHER)
    wanted = {"one_thread": threads, "no_collector": collector}
    names = [name for name in CONTROLS if wanted.get(name, True)]
    anew = [name for name in names if case.compiled and name in _COMPILES_ANEW]
    made = [case.pairs.generators(), *(case.pairs.under(name) for name in names if name not in anew)]
    return findings.plus(*made, *(ExperimentResult(name, "pair", note=COMPILES_ANEW) for name in anew))


def fix_sources(case: DiagnosisCase, findings: Findings) -> Findings:
    """Run pairs in which each message comes from a fixed rank."""
    return findings.plus(case.pairs.fixed_sources())


_COMPILES_ANEW = frozenset({"one_thread"})
"""Experiments on the pair that change what dynamo guards on."""


def start_processes(case: DiagnosisCase, findings: Findings) -> Findings:
    """Run pairs in fresh processes, in which no state survives."""
    return findings.plus(*_in_processes(case, "fresh_process", runs=2))


def start_processes_in_fixed_order(case: DiagnosisCase, findings: Findings) -> Findings:
    """Run fresh processes with the same string hashes and memory addresses.

    If they differ they are run again, up to :data:`FIXED_ORDERS` times in all, each time as forks of another Python,
    and the last ones count: a process in which one block of memory was free that was taken in the others has another
    order of all later addresses, and so has the same one of all forks of that Python.
    """
    made = _in_processes(case, "fixed_order", runs=1)
    with fresh_process.unpooled():
        for _ in range(FIXED_ORDERS - 1):
            if not any(arm.differing for arm in made):
                break
            again = _in_processes(case, "fixed_order", runs=1)
            if not any(arm.trials for arm in again):
                made = [replace(arm, note=again[0].note) for arm in made]
                break
            made = again
    return findings.plus(*made)


def try_memory_and_collector(case: DiagnosisCase, findings: Findings) -> Findings:
    """Run the fallback experiments: poisoned memory, and pairs without the garbage collector.

    For a difference that nothing explains but earlier runs, or nothing at all. Pairs under ``--stress``, which perturbs
    both, are skipped.
    """
    decided = causes.decide(findings.evidence)
    in_kernel = findings.evidence.origin == Origin.KERNEL
    undecided = (Confidence.OPEN,) if in_kernel else (Confidence.OPEN, Confidence.LIKELY)
    if case.outcome.perturbation or (decided.cause != "surviving_state" and decided.confidence not in undecided):
        return findings
    made = {arm.name for arm in findings.evidence.arms if arm.on == "pair"}
    if case.budget.left() <= 0:
        names = {"no_collector", "poison"} - made
        return findings.plus(*(ExperimentResult(name, "pair", note=NO_TIME) for name in sorted(names)))
    if "no_collector" not in made and findings.evidence.arm("pair", "pair").differing:
        findings = findings.plus(case.pairs.under("no_collector"))
    collected = causes.decide(findings.evidence).cause == "garbage_collection" and findings.proven
    if "poison" not in made and not collected:
        if case.budget.left() <= 0:
            return findings.plus(ExperimentResult("poison", "pair", note=NO_TIME))
        differing = case.outcome.verdict.differing if case.outcome.verdict is not None else ()
        findings = findings.plus(case.pairs.poison(among=differing))
    return findings


def _in_processes(case: DiagnosisCase, name: str, *, runs: int) -> Sequence[ExperimentResult]:
    if case.compiled or case.with_peers:
        return [ExperimentResult(name, "process", note=COMPILES_ANEW if case.compiled else WITH_PEERS)]
    if case.spec is None or case.budget.left() <= 0:
        note = NO_TIME if case.spec is not None else "only models of a suite can be built again"
        return [ExperimentResult(name, "process", note=note)]
    tell_phase(f"{name}: {fresh_process.PROCESSES} processes")
    fresh = fresh_process.fresh_traces(
        case.spec,
        replace(case.options, tracer=case.outcome.tracer or case.options.tracer),  # another would name other ops
        level=case.outcome.deterministic,
        processes=fresh_process.PROCESSES,
        runs=runs,
        fixed_order=name == "fixed_order",
        timeout=case.budget.left(),
        target=case.target,
    )
    late = len(fresh.processes) < fresh_process.PROCESSES and case.budget.left() <= 0
    if not case.outcome.between_processes:
        fresh = of_same_weights(fresh, case.outcome.traces)
    results = process_results(fresh, case.divergence, name=name)
    return [replace(result, note=NO_TIME) for result in results] if late else results


def _allocates(findings: Findings) -> bool:
    return findings.evidence.call is not None and findings.evidence.call.allocation


# --------------------------------------------------------------------------------------------------- conclusions


def _conclude(case: DiagnosisCase, findings: Findings) -> Diagnosis:
    evidence, divergence = findings.evidence, case.divergence
    rate = stats.rate_of_evidence(evidence) or stats.rate_of_runs(case.outcome.run_counts)
    diagnosis = Diagnosis(causes.decide(evidence), evidence, rate=rate)
    generated = findings.call is not None and compiled_kernel(findings.call.func) is not None
    if divergence is not None and divergence.origin == Origin.KERNEL and not generated:
        diagnosis = documented(diagnosis, divergence.kernel, divergence.forward_op, device=case.options.device)
    if case.options.all_sources and divergence is not None:
        diagnosis = replace(diagnosis, other_sources=tuple(_other_sources(case, divergence)))
    return _with_repro(case, findings, diagnosis)


def documented(diagnosis: Diagnosis, kernel: str, forward_op: str, *, device: str) -> Diagnosis:
    """Add what torch documents of a kernel under the deterministic flag, and what the flag did here.

    Args:
        diagnosis: with the experiments on its call.
        kernel: name of the op.
        forward_op: id of the forward record of a backward op.
        device: on which it ran.
    """
    return replace(
        diagnosis,
        deterministic_doc=torch_docs.look_up(kernel, device=device, backward_of=op_of(forward_op)).text,
        deterministic_here=stats.deterministic_here(diagnosis.evidence),
        deterministic_price=stats.deterministic_price(diagnosis.evidence),
    )


def _with_repro(case: DiagnosisCase, findings: Findings, diagnosis: Diagnosis) -> Diagnosis:
    """Write the repro and run it once in a fresh process; return the diagnosis with both."""
    spec, call = case.spec, findings.call
    if spec is None or call is None or not case.options.output:
        return diagnosis
    name = f"repro/{file_key(suite=spec.suite, mode=case.options.mode, name=spec.name)}"
    folder = Path(case.options.output) / name
    seen_in = f"in the model {spec.name} ({case.options.mode})"
    replays, difference = findings.replays, None
    if replays is not None and replays.other is not None:
        difference = facts.difference_of(replays.first, replays.other)
    try:
        repro.write_repro(folder, call, diagnosis, difference=difference, seen_in=seen_in)
    except (HashbenchError, OSError) as error:
        return replace(diagnosis, reproduced=f"no repro: {error}")
    if why := why_undefined(call.func):
        return replace(diagnosis, repro=name, reproduced=f"not run: {why}")
    definition = definition_of(call.func)
    argument = definition.argument if definition is not None else None
    tell_phase("running the repro")
    run_python = fresh_process.run_python  # which finds what defines the op only where a new Python does
    reproduced = repro.run_in_fresh_process(folder, timeout=repro.REPRO_SECONDS, definition=argument, by=run_python)
    return replace(diagnosis, repro=name, reproduced=reproduced)


# ------------------------------------------------------------------------------------------------- other sources


def _other_sources(case: DiagnosisCase, divergence: Divergence) -> Sequence[str]:
    """Describe what still differs once known sources are patched with the values of a pair's first run."""
    known, descriptions = [divergence.node], []
    while len(known) <= MOST_SOURCES:
        if case.budget.left() <= 0:
            descriptions.append(f"further ones were not looked for: {Limit.BUDGET.meaning}")
            break
        tell_phase(f"source {len(known) + 1}")
        following = _next_source(case, known)
        if following is None:
            break
        if isinstance(following, str) or following.node in known:
            descriptions.append(following if isinstance(following, str) else f"cannot get past {following.node}")
            break
        known.append(following.node)
        descriptions.append(_describe(case, following))
    return descriptions


def _next_source(case: DiagnosisCase, known: Sequence[str]) -> Divergence | str | None:
    recorder = Recorder(known)
    first = case.attempt(diagnosing=True, watcher=recorder)
    second = case.attempt(diagnosing=True, watcher=Replacer(recorder.contents))
    if isinstance(first, Failure) or isinstance(second, Failure) or first.trace is None or second.trace is None:
        return "a further run failed"
    names = results_that_differ(first, second)
    return find_divergence(first.trace, second.trace, differing=names, draws_first=False).divergence if names else None


def _describe(case: DiagnosisCase, divergence: Divergence) -> str:
    where = f"{divergence.origin}: {divergence.kernel} in {divergence.module or 'the model'} ({divergence.phase})"
    evidence = _first_evidence(case.outcome, divergence)
    if divergence.origin == Origin.KERNEL:
        call, limits = _capture(case, divergence)
        if call is None:
            return f"{where}: {limits}"
        share = Budget(case.budget.left() / 2)
        replays = replay.experiments(call, replays=case.options.replays, budget=share)
        evidence = replace(evidence, call=replays.facts, arms=replays.arms)
    decision = causes.decide(evidence)
    return f"{where}: {decision.cause}, {decision.confidence}"


# --------------------------------------------------------------------------------------------- capturing the call


def _capture(case: DiagnosisCase, divergence: Divergence) -> tuple[CapturedCall | None, str]:
    """Capture the divergent kernel's call in one more run; return it, or ``None`` and the reason."""
    limit = int(case.options.capture_mib * MIB)
    if case.options.device == "cpu":  # no more than memory allows
        limit = min(limit, psutil.virtual_memory().available // COPIES)
    capturer = CallCapturer(divergence.node, limit_bytes=limit)
    run = case.attempt(watcher=capturer)
    if capturer.call is not None:
        call = replace(capturer.call, node=divergence.node, phase=divergence.phase, module=divergence.module)
        return replace(call, forward_op=divergence.forward_op, source=divergence.source), ""
    if capturer.reason:
        return None, capturer.reason
    return None, f"the run failed: {run.error}" if isinstance(run, Failure) else "the call did not come again"


# ------------------------------------------------------------------------------------------------- plain values


def _first_evidence(outcome: Outcome, divergence: Divergence | None) -> Evidence:
    """Return the evidence of the sweep's own runs, before any experiment."""
    counts = outcome.run_counts
    ops = [Counter((record.phase, record.module, record.op) for record in trace.records) for trace in outcome.traces]
    reordered = len(ops) == 2 and ops[0] == ops[1]  # in whatever order
    return Evidence(
        origin=divergence.origin if divergence is not None else "",
        opaque_producer=divergence is not None and divergence.opaque_producer,
        steered=divergence is not None and divergence.steered_by is not None,
        reordered=reordered,
        representation=outcome.difference.representation if outcome.difference is not None else "",
        first_pair=(counts.differing, counts.compared) if counts is not None else (1, 1),
        untraced=outcome.untraced,
    )


# ------------------------------------------------------------------------------------- what is done during a run


class CallCapturer(TraceCallback):
    """Captures the call with one record id.

    Attributes:
        call: the last such call; ``None`` if there was none.
        reason: why it could not be captured.
    """

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


Contents = dict[tuple[str, int], list[torch.Tensor]]
"""Copies of tensors, by record or leaf id and how often it was visited before. A :class:`Recorder` keeps what the
sources of known differences wrote or held in one run, a :class:`Replacer` puts it in place in the next before it is
read (activation patching); what still differs then has another source."""


class _Patch(TraceCallback):
    """Visits the outputs of every record and leaf (activation patching)."""

    def __init__(self) -> None:
        self._met: Counter[str] = Counter()

    def after(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        del func
        # Everything that the call may have written: its outputs and, declared or not, its arguments.
        tensors = {id(tensor): tensor for tensor in tensors_in([output, list(args), dict(kwargs)])}
        self.leaves_behind(node, list(tensors.values()))

    def leaf(self, node: str, tensor: torch.Tensor) -> None:
        self.leaves_behind(node, [tensor])

    def leaves_behind(self, node: str, tensors: Sequence[torch.Tensor]) -> None:
        self.meet((node, self._met[node]), tensors)
        self._met[node] += 1

    def meet(self, key: tuple[str, int], tensors: Sequence[torch.Tensor]) -> None:
        raise NotImplementedError


class Recorder(_Patch):
    """Copies the tensors of the records and leaves with these ids to ``contents``."""

    def __init__(self, nodes: Collection[str]) -> None:
        super().__init__()
        self.nodes = frozenset(nodes)
        self.contents: Contents = {}

    def meet(self, key: tuple[str, int], tensors: Sequence[torch.Tensor]) -> None:
        if key[0] in self.nodes:
            self.contents[key] = [tensor.detach().clone() for tensor in tensors]


class Replacer(_Patch):
    """Overwrites tensors with recorded content."""

    def __init__(self, contents: Contents) -> None:
        super().__init__()
        self.contents = contents

    def meet(self, key: tuple[str, int], tensors: Sequence[torch.Tensor]) -> None:
        kept = self.contents.get(key)
        if kept is None or [tensor.shape for tensor in kept] != [tensor.shape for tensor in tensors]:
            return
        with torch.no_grad():
            for tensor, content in zip(tensors, kept, strict=True):
                if not bitwise_equal(tensor, content):  # an argument that was only read may be expanded: never written
                    tensor.detach().copy_(content)
