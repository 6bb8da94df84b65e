"""Find out why a compiled model is inaccurate: the stage of the compiler, what in it is to blame, and experiments.

A ladder of backends in float64, where rounding is out of the way, names the stage. Inside TorchInductor its passes are
evaluated one by one, then its kernels, each from what it was given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from hashbench.core.catalog import Confidence
from hashbench.core.diagnose import fresh_process
from hashbench.core.diagnose.driver import CallCapturer
from hashbench.core.diagnose.repro import REPRO_SECONDS
from hashbench.core.errors import HashbenchError, named_line
from hashbench.core.inductor.graphs import CompiledGraph, KernelCall, phase_of
from hashbench.core.inductor.internals import CapturedGraphs
from hashbench.core.inductor.nodes import NodeFacts
from hashbench.core.processes import Budget, tell_phase
from hashbench.core.records import NO_TIME, ExperimentResult, Failure, RowEvidence
from hashbench.core.run.outcome import FoundColumns, Run, RunMaker
from hashbench.core.run.rounding import LIMIT
from hashbench.core.trace.generated import GeneratedKernel
from hashbench.extensions.compiled import experiments, fallbacks
from hashbench.extensions.compiled.amplification import Amplification, Amplified
from hashbench.extensions.compiled.decompositions import WrongDecomposition, check_decompositions
from hashbench.extensions.compiled.dynamo_graphs import first_stale
from hashbench.extensions.compiled.facts import CompiledFacts
from hashbench.extensions.compiled.judge import JudgedBuffer, KernelJudge, KernelJudgement
from hashbench.extensions.compiled.ladder import BACKENDS, Ladder, Semantic, climb
from hashbench.extensions.compiled.mutations import UndeclaredEffect, WrongFake, undeclared_effects, wrong_fakes
from hashbench.extensions.compiled.names import Overwriter, OverwriterSearch
from hashbench.extensions.compiled.observed import GraphObserver, KernelWatcher
from hashbench.extensions.compiled.passes import Change, WrongPass, first_wrong_pass, inputs_by_name
from hashbench.extensions.compiled.program import CompiledModel, compiling
from hashbench.extensions.compiled.repro import BlamedCall, ExpectedResult, run_accuracy_repro, write_accuracy_repro
from hashbench.extensions.compiled.split import StageSplit

MISTAKE = 1000.0
"""Ratio from which a kernel is wrong by what its own dtype shows alone. Below, rounding that eager mode does not do may
explain it: batch-norm statistics in float32 reach 12.6."""

_MOST_BYTES = 2**30
"""Of the captured inputs of a kernel."""


@dataclass(frozen=True, slots=True)
class CompiledCase:
    """A compiled model to explain.

    Attributes:
        model: as it is run.
        backend: that is judged.
        inaccurate: the names of a run's results that are beyond the tolerance.
        failed: those of the row; empty if it passes.
        judgement: of the kernels in the model's own dtype; ``None`` if they were not seen.
        budget: for experiments.
        repro: folder of the repro, and the model in words; ``None``: no repro is written.
    """

    model: CompiledModel
    backend: str
    inaccurate: Callable[[Run], tuple[str, ...]]
    failed: tuple[str, ...]
    judgement: KernelJudgement | None
    budget: Budget
    repro: tuple[Path, str] | None = None


@dataclass(frozen=True, slots=True)
class Blamed:
    """What is to blame, in columns.

    Attributes:
        facts: those of the compiled model.
        finding: those of the core.
        pass_name: of a pass that is wrong.
        node: of the kernel's record.
        ops: that the kernel computes.
        buffer: of the kernel that is wrong.
        candidates: ops of the kernel of which it is not known which is wrong.
    """

    facts: CompiledFacts = field(default_factory=CompiledFacts)
    finding: FoundColumns = field(default_factory=FoundColumns)
    pass_name: str = ""
    node: str = ""
    ops: tuple[NodeFacts, ...] = ()
    buffer: str = ""
    candidates: tuple[str, ...] = ()

    def having(self, **columns: Any) -> Blamed:
        """Return it with other columns, or attributes."""
        own = {name: columns.pop(name) for name in [*columns] if hasattr(self, name)}
        facts, finding = of_facts(columns)
        return replace(self, facts=replace(self.facts, **facts), finding=replace(self.finding, **finding), **own)

    @classmethod
    def at(cls, stage: str, **columns: Any) -> Blamed:
        """Return a stage of the compiler with columns, or attributes."""
        return cls().having(stage=stage, **columns)


def of_facts(columns: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the columns of a compiled model, and those of the core."""
    own = {field.name: columns[field.name] for field in fields(CompiledFacts) if field.name in columns}
    return own, {name: value for name, value in columns.items() if name not in own}


def explain(case: CompiledCase) -> Blamed:
    """Name the stage and what in it is to blame, and prove it within the budget."""
    with contextlib.ExitStack() as stack:
        runs = _LadderRuns(case, stack)
        tell_phase("ladder of backends in float64")
        runs.ladder = ladder = climb(runs, backends=rungs_below(case.backend))
        blamed = _proven(case, runs, _found(case, runs, ladder))
        repro, reproduced = _reproduced(case, runs, blamed)
        return blamed.having(repro=repro, reproduced=reproduced)


def rungs_below(backend: str) -> tuple[str, ...]:
    """Return the backends of the ladder up to one; another one comes after all of them."""
    if backend in BACKENDS:
        return BACKENDS[: BACKENDS.index(backend) + 1]
    return (*BACKENDS, backend)


def _found(case: CompiledCase, runs: _LadderRuns, ladder: Ladder) -> Blamed:
    found = _at_stage(case, runs, ladder)
    if ladder.dtype is not None or not ladder.stage:
        return found
    words = "compared in the model's own dtype", ladder.reason
    return found.having(detail="; ".join(filter(None, (found.finding.detail, *words))))


def _at_stage(case: CompiledCase, runs: _LadderRuns, ladder: Ladder) -> Blamed:
    semantic, reason = str(ladder.semantic), ladder.reason
    match ladder.stage:
        case "":
            own = _wrong_in_own_dtype(case.judgement, None if runs.look is None else runs.look.judgement)
            if own is None and ladder.dtype is None:
                return Blamed.at("", semantic=semantic, detail=_without_float64(ladder))
            if own is None:
                return _rounding(runs, semantic, reason)
            found = _kernel(own, runs.own())
            words = "not judged in float64" + (f": {reason}" if reason else "")
            return found.having(semantic="unknown", detail=f"{found.finding.detail}; {words}")
        case "dynamo":
            stale = first_stale(runs, dtype=ladder.dtype)
            if stale is None:
                return Blamed.at("dynamo", semantic=semantic, detail=_of(ladder))
            return Blamed.at("dynamo", **_place(stale.facts), phase="forward", semantic=semantic, detail=str(stale))
        case "aot_autograd":
            op_at_fault = undeclared(runs)
            return op_at_fault.having(semantic=semantic, detail=op_at_fault.finding.detail or _of(ladder))
        case "decomposition":
            wrong = check_decompositions(runs, dtype=ladder.dtype).wrong
            if not wrong:
                return Blamed.at("decomposition", semantic=semantic, detail=_of(ladder))
            detail = f"its decomposition differs by {wrong[0].relative:.2g}"
            return Blamed.at("decomposition", **_place_of_op(wrong[0]), semantic=semantic, detail=detail)
        case _:
            return _inside(case, runs, ladder).having(semantic=semantic)


def _wrong_in_own_dtype(own: KernelJudgement | None, wide: KernelJudgement | None) -> JudgedBuffer | None:
    """Return the first buffer that is wrong by far in the model's own dtype, and was not found right in float64."""
    right = (
        {}
        if wide is None
        else {(buffer.op, buffer.module, buffer.phase): buffer for buffer in wide.buffers if buffer.ratio <= LIMIT}
    )
    beyond = [] if own is None else [buffer for buffer in own.buffers if buffer.ratio > MISTAKE and not buffer.lost]
    return next((each for each in beyond if (each.op, each.module, each.phase) not in right), None)


def _place(facts: NodeFacts | JudgedBuffer) -> dict[str, Any]:
    return {"op": facts.op, "module": facts.module, "source": facts.source}


def _place_of_op(found: UndeclaredEffect | WrongFake | WrongDecomposition) -> dict[str, Any]:
    return {**_place(found.facts), "op": found.op, "phase": phase_of(found.backward)}


def _of(ladder: Ladder) -> str:
    last = ladder.rungs[-1] if ladder.rungs else None
    if last is None:
        return ""
    if last.raised:
        return f"{last.backend} raises: {last.raised}"
    return f"{last.result} differs with backend {last.backend}"


def _without_float64(ladder: Ladder) -> str:
    """Say what is known where nothing was found, and float64 did not run."""
    if not ladder.measured:
        return f"mistake or rounding is not known: {ladder.reason}"
    return f"in the model's own dtype, no backend differs by more than rounding explains; {ladder.reason}"


def undeclared(runs: Any) -> Blamed:
    """Return the custom op that does something else than AOTAutograd was told."""
    effects = undeclared_effects(runs).wrong
    if effects:
        detail = f"{effects[0].argument}: {effects[0].effect.value}, not declared in its schema"
        return Blamed.at("aot_autograd", **_place_of_op(effects[0]), detail=detail)
    fakes = [fake for fake in wrong_fakes(runs).wrong if fake.custom]
    if fakes:
        detail = f"fake implementation returns {fakes[0].what} {fakes[0].fake}, real kernel {fakes[0].real}"
        return Blamed.at("aot_autograd", **_place_of_op(fakes[0]), detail=detail)
    return Blamed.at("aot_autograd")


def _inside(case: CompiledCase, runs: _LadderRuns, ladder: Ladder) -> Blamed:
    """Look inside TorchInductor: custom ops that promise something else, passes, memory, kernels."""
    op_at_fault = undeclared(runs)
    if op_at_fault.facts.op:
        return op_at_fault
    float64 = ladder.dtype is not None
    look = runs.look if float64 else runs.own()
    if look is None or not look.graphs:
        return Blamed.at("inductor", detail=f"{_of(ladder)}; kernels were not seen")
    wrong = look.wrong_pass()
    if wrong is not None:
        facts = _of_pass(wrong)
        place: dict[str, Any] = {} if facts is None else _place(facts)
        detail = f"pass {wrong.name} changes {wrong.result} by {wrong.relative:.2g}{_inserted(wrong)}"
        return Blamed.at(wrong.subsystem, pass_name=wrong.name, detail=detail, **place)
    for judgement, seen in ((look.judgement, look), (case.judgement, None)):
        if judgement is None:
            continue
        if judgement.lost:
            return _lost(judgement)
        beyond = judgement.first_beyond(LIMIT if seen is not None and float64 else MISTAKE)
        if beyond is not None:
            found = _kernel(beyond, seen or runs.own())
            return _in_own_dtype(found, case.judgement) if float64 else found
    return Blamed.at("inductor", detail=f"{_of(ladder)}; every kernel that was checked is right")


def _of_pass(wrong: WrongPass) -> NodeFacts | None:
    """Return the facts of the last node that a pass removed, else changed, else made: what is removed because nothing
    reads it any more stands before. What only reads a node that was made comes after that one."""
    for change in (Change.REMOVED, Change.CHANGED, Change.MADE, Change.FED, Change.MOVED):
        found = [node.facts for node in wrong.nodes if node.change is change and node.facts.op]
        if found:
            return found[-1]
    return None


def _inserted(wrong: WrongPass) -> str:
    """Say before what a pass put a node, which has neither a module nor a line of its own; empty if it did more."""
    kinds = {node.change for node in wrong.nodes}
    fed = [node.facts for node in wrong.nodes if node.change is Change.FED]
    if not fed or not kinds <= {Change.MADE, Change.FED}:
        return ""
    place = f" in {fed[0].module}" if fed[0].module else ""
    return f": what it inserts is read by {fed[0].op}{place}{f', {fed[0].source}' if fed[0].source else ''}"


def _lost(judgement: KernelJudgement) -> Blamed:
    lost = judgement.lost[0]
    detail = f"{lost.overwritten_by} writes over {lost.buffer} of {lost.written_by} before {lost.reader} reads it"
    by_node = {buffer.node: buffer for buffer in judgement.buffers}
    facts = by_node.get(lost.node)
    place: dict[str, Any] = {} if facts is None else {**_place(facts), "phase": facts.phase}
    return Blamed.at("memory_planning", kernel=lost.overwritten_by, detail=detail, node=lost.node, **place)


def _kernel(buffer: JudgedBuffer, look: _CompiledLook | None) -> Blamed:
    split = None if look is None else look.split(buffer)
    return Blamed.at(
        (split.stage if split is not None else "") or "codegen",
        ops=() if split is None else split.ops,
        kernel=buffer.kernel,
        op=buffer.op,
        module=buffer.module,
        source=buffer.source,
        phase=buffer.phase,
        beyond_rounding=buffer.ratio,
        eager_rounding=buffer.own_ratio,
        node=buffer.node,
        buffer=buffer.buffer,
        detail=f"{buffer.buffer}: relative error {buffer.relative_error:.2g}",
    )


def _in_own_dtype(blamed: Blamed, own: KernelJudgement | None) -> Blamed:
    """Return a finding from float64 with the ratios of the same kernel in the model's own dtype."""
    buffers = [] if own is None else [buffer for buffer in own.buffers if buffer.kernel == blamed.finding.kernel]
    worst = max(buffers, key=lambda buffer: buffer.ratio, default=None)
    if worst is None:
        return blamed
    detail = f"{blamed.finding.detail}, in float64 {blamed.facts.beyond_rounding:.2g} times beyond rounding"
    return blamed.having(beyond_rounding=worst.ratio, eager_rounding=worst.own_ratio, detail=detail)


def _rounding(runs: _LadderRuns, semantic: str, reason: str) -> Blamed:
    """Say how rounding grew, where nothing but rounding was found."""
    look = runs.own()
    worst = look.amplified() if look is not None else ()
    words = [
        f"{step.facts.op} in {step.facts.module or 'the model'} x{step.factor:.3g} (to {step.error:.3g} ulp)"
        for step in worst
    ]
    detail = "rounding" + (f", amplified by {'; '.join(words)}" if words else "") + (f"; {reason}" if reason else "")
    op = worst[0].facts.op if worst else ""
    return Blamed.at("rounding" if semantic != "unknown" else "", op=op, semantic=semantic, detail=detail)


# ----------------------------------------------------------------------------------------------------- experiments


def _proven(case: CompiledCase, runs: _LadderRuns, blamed: Blamed) -> Blamed:
    """Compile with one change at a time, until the finding is proven or the budget is spent."""
    made: list[ExperimentResult] = []
    ops = (blamed.facts.op, *(each.op for each in blamed.ops))
    while attempt := experiments.next_attempt(blamed.facts.stage, ops, made):
        if case.budget.left() <= 0:
            made.append(experiments.trial(attempt, note=NO_TIME))
            break
        tell_phase(f"compilation with {attempt.change}")
        made.append(_trial(runs, blamed, attempt))
    cure, confidence = experiments.conclude(blamed.facts.stage, made)
    confidence = confidence if made else Confidence.OPEN
    blamed = blamed.having(evidence=RowEvidence.of(made), confidence=str(confidence) if blamed.facts.stage else "")
    if cure is None:
        return blamed
    change = fallbacks.CHANGES_BY_NAME[cure.change]
    named = blamed.pass_name if change.target == "pass" else cure.op or blamed.facts.op
    blamed = _at_op(blamed, cure.op).having(cured_by=change.phrase.replace("{}", named))
    if blamed.facts.stage == "codegen" and not cure.op and cure.change not in experiments.STAGE_OF_CURE:
        return _narrowed(case, runs, blamed, [op for op in dict.fromkeys(ops) if op])
    stage = experiments.STAGE_OF_CURE.get(cure.change, blamed.facts.stage)
    return blamed if stage == blamed.facts.stage else _overwritten(runs, blamed).having(stage=stage)


def _at_op(blamed: Blamed, op: str) -> Blamed:
    """Return the finding at another op that its buffer is computed by, with the module and line of that one."""
    found = next((each for each in blamed.ops if each.op == op), None)
    return blamed if not op or op == blamed.facts.op or found is None else blamed.having(**_place(found))


def _narrowed(case: CompiledCase, runs: _LadderRuns, blamed: Blamed, ops: Sequence[str]) -> Blamed:
    """Look for the op of a kernel whose code is wrong: without that one in it, the rest is right.

    A heuristic: an op that runs eagerly splits the kernel, and the rest may be right because it became smaller.
    """
    made = list(blamed.finding.evidence.results)
    for op in ops if len(ops) > 1 else ():
        attempt = experiments.Trial(experiments.OP, op)
        if case.budget.left() <= 0 or len(made) >= experiments.MOST:
            break
        tell_phase(f"compilation with {attempt.change}")
        made.append(_trial(runs, blamed, attempt))
        if made[-1].ran and not made[-1].differing:
            return _at_op(blamed, op).having(evidence=RowEvidence.of(made), candidates=())
    return blamed.having(evidence=RowEvidence.of(made), candidates=tuple(ops))


def _overwritten(runs: _LadderRuns, blamed: Blamed) -> Blamed:
    """Return the finding with the kernel that wrote over what the blamed one read, by the names of buffers."""
    look = runs.look or runs.own()
    found = None if look is None else look.overwriter_of(blamed.node)
    if found is None:
        return blamed
    detail = f"{found.kernel} writes over {found.buffer} of {found.written_by} before {blamed.finding.kernel} reads it"
    return blamed.having(kernel=found.kernel, detail=detail, node=found.node, **_place(found.facts))


def _trial(runs: _LadderRuns, blamed: Blamed, attempt: experiments.Trial) -> ExperimentResult:
    change = fallbacks.CHANGES_BY_NAME[attempt.change]
    try:
        with fallbacks.applied(change, op=attempt.op or blamed.facts.op, pass_name=blamed.pass_name):
            return experiments.trial(attempt, gone=runs.is_gone(blamed))
    except (HashbenchError, RuntimeError, AssertionError) as error:
        return experiments.trial(attempt, note=named_line(error, limit=120))


def _reproduced(case: CompiledCase, runs: _LadderRuns, blamed: Blamed) -> tuple[str, str]:
    """Write the repro of a wrong kernel and run it; return its folder and what came of that, empty without one."""
    if case.repro is None or not blamed.buffer or blamed.facts.stage not in ("lowering", "codegen"):
        return "", ""
    folder, model = case.repro
    look = runs.own()
    call = None if look is None else look.blamed(blamed)
    if call is None:
        return "", ""
    tell_phase("repro")
    try:
        write_accuracy_repro(folder, call, seen_in=f"in the model {model}")
    except (HashbenchError, OSError) as error:
        return "", f"no repro: {error}"
    return f"repro/{folder.name}", run_accuracy_repro(folder, timeout=REPRO_SECONDS, by=fresh_process.run_python)


# ------------------------------------------------------------------------------------------------------------ runs


class _LadderRuns:
    """Runs of a case by backend and dtype, as the ladder asks for them; the compiled one in float64 is looked into."""

    def __init__(self, case: CompiledCase, stack: contextlib.ExitStack) -> None:
        self._case, self._stack = case, stack
        self.look: _CompiledLook | None = None
        self.ladder = Ladder(())
        self._own: _CompiledLook | None = None

    def __call__(self, backend: Any, dtype: torch.dtype | None) -> Mapping[str, torch.Tensor]:
        if backend == self._case.backend and dtype == torch.float64 and self.look is None:
            self.look = self._stack.enter_context(looking(self._case, dtype))
            return self.look.results
        if backend == self._case.backend and dtype is None and self._own is None:
            self._own = self._stack.enter_context(looking(self._case, None))
            return self._own.results
        return self._case.model.step(backend, dtype)

    def own(self) -> _CompiledLook | None:
        """Return a look into the program in the model's own dtype; ``None`` if it fails."""
        if self._own is None:
            try:
                self._own = self._stack.enter_context(looking(self._case, None))
            except RuntimeError:
                return None
        return self._own

    def is_gone(self, blamed: Blamed) -> bool:
        """Return whether a compilation, as it is now, is as eager mode: in float64 but for rounding, which a cast to
        float32 leaves there, or within the tolerance."""
        case = self._case
        if blamed.facts.semantic == Semantic.YES:
            again = climb(self, backends=(), inductor=self(case.backend, torch.float64))
            return again.measured and not again.stage
        if self.ladder.stage and self.ladder.dtype is None:
            again = climb(self, backends=(), inductor=self(case.backend, None), dtype=None)
            return again.measured and not again.stage
        with compiling():
            run = case.model.make(backend=case.backend, dtype=None)(traced=False)
        return bool(case.failed) and not isinstance(run, Failure) and not case.inaccurate(run)


class _CompiledLook:
    """A compiled program whose graphs are captured, as long as its context lasts.

    Attributes:
        results: of a run.
        graphs: by file of the generated module.
        judgement: of its kernels.
    """

    def __init__(self, case: CompiledCase, program: RunMaker, hooks: CapturedGraphs) -> None:
        self._program, self._hooks = program, hooks
        self.graphs = hooks.graphs
        self.results = case.model.tensors(program(traced=False))
        judge, self._inputs = KernelJudge(), _Inputs()
        failed = self._watched(self._inputs, judge)
        self.judgement = None if failed else judge.result()

    def wrong_pass(self) -> WrongPass | None:
        """Return the first pass that changes what its graph computes; ``None`` if none does."""
        tell_phase("passes")
        joint = first_wrong_pass(self._hooks.joint, self._inputs.all)
        if joint.wrong is not None:
            return joint.wrong
        for path, graph in self.graphs.items():
            found = first_wrong_pass(graph.passes, self._inputs.of.get(path, {})).wrong
            if found is not None:
                return found
        return None

    def split(self, buffer: JudgedBuffer) -> StageSplit:
        """Return whether lowering or code generation made a buffer wrong, and the ops that it is computed by."""
        split = StageSplit(buffer.node, buffer.buffer)
        self._watched(split)
        return split

    def overwriter_of(self, node: str) -> Overwriter | None:
        """Return who wrote over what a call read under the name of a buffer that another had written."""
        search = OverwriterSearch(node)
        self._watched(search)
        return search.found

    def blamed(self, blamed: Blamed) -> BlamedCall | None:
        """Capture the call of a generated kernel, with what its wrong buffer should hold."""
        split, capturer = StageSplit(blamed.node, blamed.buffer), CallCapturer(blamed.node, limit_bytes=_MOST_BYTES)
        self._watched(split)
        self._program(watcher=capturer)
        call, expected = capturer.call, split.expected
        kernel = None if call is None else call.func
        if call is None or expected is None or not isinstance(kernel, GeneratedKernel):
            return None
        place = next((at for at in kernel.plan.written if kernel.buffers[at : at + 1] == (blamed.buffer,)), None)
        if place is None:
            return None
        result = ExpectedResult(blamed.buffer, place, expected.reference, expected.allowed, blamed.facts.eager_rounding)
        call = replace(
            call,
            node=blamed.node,
            phase=blamed.finding.phase,
            module=blamed.finding.module,
            source=blamed.finding.source,
        )
        return BlamedCall(call, (result,), stage=blamed.facts.stage, op=blamed.facts.op, semantic=blamed.facts.semantic)

    def amplified(self) -> Sequence[Amplified]:
        """Return where rounding grew most."""
        amplification = Amplification()
        return () if self._watched(amplification) else amplification.result()

    def _watched(self, *observers: GraphObserver) -> bool:
        """Make a run with observers; return whether it failed."""
        return isinstance(self._program(watcher=KernelWatcher(self.graphs, *observers)), Failure)


@contextlib.contextmanager
def looking(case: CompiledCase, dtype: torch.dtype | None) -> Iterator[_CompiledLook]:
    """Compile a case in a dtype, and look into it."""
    tell_phase("compiling again, to look into it" if dtype is None else "compiling in float64")
    with compiling(), CapturedGraphs(passes=True) as hooks:
        yield _CompiledLook(case, case.model.make(backend=case.backend, dtype=dtype), hooks)


@dataclass(slots=True)
class _Inputs:
    """Observer that only keeps the inputs of each graph's first call, by the names of its placeholders."""

    of: dict[str, dict[str, Any]] = field(default_factory=dict)
    all: dict[str, Any] = field(default_factory=dict)

    def observe(self, graph: CompiledGraph, inputs: Sequence[Any]) -> Generator[None, KernelCall, None]:
        if graph.path not in self.of:
            self.of[graph.path] = inputs_by_name(graph.module, inputs)
            self.all = {**self.of[graph.path], **self.all}
        while True:
            yield
