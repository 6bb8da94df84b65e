"""Check a model with ranks: start them, compare two runs on every rank, and find the rank and kernel that differ first.

    worker ── started() ──┬── rank 0: make_runs ── run1/rank0.log.gz, run2/rank0.log.gz, answer0.json
                          └── rank 1: make_runs ── …

The stages are those of :mod:`hashbench.core.check.pipeline`. A rank that dies makes the model ``crashed``; one that
hangs is killed with the worker, at its time limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from hashbench.core.catalog import EXPERIMENTS, Origin, Status
from hashbench.core.check import pipeline
from hashbench.core.check.row import keep_draft
from hashbench.core.diagnose import causes, driver
from hashbench.core.diagnose.rank_processes import RankEnd, backend_for, started
from hashbench.core.diagnose.repro.writer import new_folder
from hashbench.core.divergence.collective_calls import contributed_by, nodes_of_call
from hashbench.core.processes import tell_phase
from hashbench.core.records import (
    COMPUTED,
    SEEDED,
    UNREDUCED,
    Diagnosis,
    Divergence,
    Evidence,
    ExperimentResult,
    Failure,
    ModelSpec,
    OpRecord,
    RunCounts,
    RunOptions,
    Trace,
    Verdict,
)
from hashbench.core.results.folder import ResultsFolder, file_key
from hashbench.core.run.distance import Difference
from hashbench.core.run.outcome import Outcome, failed_status
from hashbench.core.text import count, join_limited
from hashbench.core.trace import file
from hashbench.extensions.ranks.contributions import repeated_alone, write_script
from hashbench.extensions.ranks.diagnosis import RankDiagnosisTask, read_diagnosis
from hashbench.extensions.ranks.facts import RankFacts
from hashbench.extensions.ranks.find import find_across_ranks
from hashbench.extensions.ranks.replicas import ReplicaDifference, check_replicas
from hashbench.extensions.ranks.runs import RankAnswer, RankRuns, read_answer, trace_path
from hashbench.extensions.ranks.verdict import RankDivergence, RanksVerdict

COLLECTIVE_SETTINGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gloo": {"BACKEND": "gloo"},
        "nvls_off": {"NCCL_ALGO": "^NVLS"},
        "nccl_ring": {"NCCL_ALGO": "Ring"},
        "nccl_simple": {"NCCL_PROTO": "Simple"},
    }
)
"""Experiment on a collective → the environment variables that make it."""


@dataclass(frozen=True, slots=True)
class RankPair:
    """Runs of all ranks in the same processes.

    Attributes:
        folder: with their traces.
        ends: how each rank ended.
        answers: what each rank that reached its end says, by rank.
    """

    folder: Path
    ends: tuple[RankEnd, ...]
    answers: Mapping[int, RankAnswer]

    @property
    def death(self) -> RankEnd | None:
        """The first rank that died, or did not end after another one had ended; ``None`` if all ended."""
        died = [end for end in self.ends if end.rank not in self.answers]
        return min(died, key=lambda end: (end.status is None, end.seconds), default=None)

    @property
    def failed(self) -> tuple[int, RankAnswer] | None:
        """The rank whose run raised first, and its answer: the others may have raised since it was gone."""
        failed = [(rank, answer) for rank, answer in self.answers.items() if answer.failure is not None]
        return min(failed, key=lambda each: each[1].at, default=None)

    @property
    def run_counts(self) -> RunCounts:
        """Runs that differ from the first on any rank."""
        labels = list(zip(*(answer.labels for answer in self.answers.values()), strict=True))
        return RunCounts(len(labels) - 1, sum(label != labels[0] for label in labels), distinct=len(set(labels)))

    @property
    def differing_run(self) -> int | None:
        """The number of the first run that differs from the first, from 1; ``None`` if none does."""
        labels = list(zip(*(answer.labels for answer in self.answers.values()), strict=True))
        return next((number for number, label in enumerate(labels, start=1) if label != labels[0]), None)

    def traces(self, run: int) -> dict[int, Trace]:
        """Read the traces of a run, by rank."""
        return {rank: file.read(trace_path(self.folder, run=run, rank=rank)) for rank in self.answers}


class RanksCheck:
    """The :class:`~hashbench.core.check.pipeline.Runs` of a model with ranks.

    Args:
        spec: the model, with its number of ranks.
        options: of the sweep.
        level: deterministic level.
        target: ``module:class`` of the runner that builds the model in each rank.
    """

    def __init__(self, spec: ModelSpec, options: RunOptions, level: str, *, target: str) -> None:
        self.spec, self.options, self.level, self.target = spec, options, level, target
        self.world_size = spec.world_size or 1

    def run(self) -> Outcome:
        """Run all stages in their order."""
        if why := self._why_not():
            return replace(self._begun(), accuracy=Status.SKIPPED, failure=Failure(why))
        return pipeline.checked(self)

    def _begun(self) -> Outcome:
        return Outcome(Status.PASS, self.level, facts=(RankFacts(world_size=self.world_size),))

    def _why_not(self) -> str:
        """Return why the sweep's check does not apply to a model with ranks."""
        flag = "--backend" if self.options.backend else "--batch-invariant" if self.options.batch_invariant else ""
        return f"{flag} runs a model in one process, and this one has {count(self.world_size, 'rank')}" if flag else ""

    # ------------------------------------------------------------------------------------------------- stages

    def repeat(self) -> Outcome:
        """Make the runs on all ranks, and compare them; if they agree, compare what must be replicas."""
        with self._made(max(2, self.options.runs or self.spec.runs or 2)) as pair:
            return self.replicated(self.repeated(self._begun(), pair), pair)

    def repeated(self, outcome: Outcome, pair: RankPair) -> Outcome:
        """Add what the runs show: the status, the counts, and where they diverge."""
        outcome = _with_answers(outcome, pair)
        if (end := pair.death) is not None:
            return replace(outcome, accuracy=Status.CRASHED, failure=Failure(end.in_words()))
        if (failed := pair.failed) is not None:
            return _of_failure(outcome, *failed)
        number = pair.differing_run
        outcome = replace(outcome, run_counts=pair.run_counts, difference=_joined(pair.answers))
        traces = pair.traces(1), pair.traces(number or 2)
        found = find_across_ranks(*traces, world_size=self.world_size)
        if number is not None:
            return self._named(replace(outcome, accuracy=Status.TWO_RUNS_DIFFER), found, traces)
        if not found.first:
            return outcome
        named = self._named(replace(outcome, accuracy=Status.NOT_COMPARABLE), found, traces)
        early = found.first[0]
        why = f"the results are not those of an untraced run: on rank {early.rank}, {early.detail}"
        return replace(named, failure=Failure(why))

    def further_pair(self, outcome: Outcome, *, number: int) -> Outcome | None:
        """Make two further runs with every input hashed; return which verdict stands."""
        with self._made(2, diagnosing=True) as pair:
            if pair.death is not None or pair.failed is not None:
                return replace(outcome, confirmed=pipeline.FURTHER_RUN_FAILED)
            if pair.differing_run is None:
                return None
            traces = pair.traces(1), pair.traces(2)
            hashed = self._named(outcome, find_across_ranks(*traces, world_size=self.world_size), traces)
        rank, again = outcome.of(RankFacts).rank, hashed.of(RankFacts).rank
        if rank is not None and again != rank:
            return replace(outcome, confirmed=f"differs again, there on rank {again}")
        of_rank = () if rank is None else tuple(trace[rank] for trace in traces)
        return pipeline.confirmed_by(hashed, outcome, of_rank, number=number)

    def search(self, outcome: Outcome) -> pipeline.Search | None:
        """Return what looks for the cause on the rank where the difference entered; ``None`` if that is not known, the
        cause is, or there is no budget."""
        rank = outcome.of(RankFacts).rank
        if self.options.diagnose_budget <= 0 or rank is None or outcome.diagnosis is not None:
            return None
        return lambda: replace(outcome, diagnosis=self._diagnosis(outcome, rank))

    def keep_draft(self, outcome: Outcome) -> None:
        """Write down an outcome before what may end the process."""
        keep_draft(self.spec, self.options, outcome)

    def replicated(self, outcome: Outcome, pair: RankPair) -> Outcome:
        """Compare what must be replicas over the ranks of the first run, where two runs agree."""
        if outcome.accuracy != Status.PASS or self.world_size == 1:
            return outcome
        traces = pair.traces(1)
        found = check_replicas(traces)
        if not found.differing:
            return outcome
        named = found.differing[0]
        outcome = replace(
            outcome,
            accuracy=Status.REPLICAS_DIFFER,
            difference=Difference(tuple(difference.name for difference in found.differing)),
            verdict=Verdict(tuple(difference.name for difference in found.differing), _of_replica(named), ()),
            diagnosis=_why_replicas_differ(named),
            process_traces=(traces,),
        )
        rank = named.minority[0] if named.minority else None
        return outcome.having(replace(outcome.of(RankFacts), rank=rank, group=_joined_ranks(named.ranks)))

    # ------------------------------------------------------------------------------------------------ helpers

    def _named(
        self, outcome: Outcome, found: RanksVerdict, traces: tuple[Mapping[int, Trace], Mapping[int, Trace]]
    ) -> Outcome:
        """Add the first divergence, on the lowest rank that has one, and the traces."""
        names = tuple(f"rank {difference.rank}: {difference.name}" for difference in found.differing)
        named = found.first[0] if found.first else None
        outcome = replace(outcome, process_traces=traces)
        unseen = " ".join(found.unknown)
        if named is None:
            return replace(outcome, verdict=Verdict(names, None, (), unseen))
        others = [f"rank {each.rank}: {each.kernel or each.node}" for each in (*found.first[1:], *found.later)]
        detail = "; ".join(filter(None, (named.detail, f"also on {join_limited(others)}" if others else "")))
        known = {field.name: getattr(named, field.name) for field in dataclasses.fields(Divergence)}
        divergence = replace(Divergence(**known), detail=detail)
        facts = replace(outcome.of(RankFacts), rank=named.rank, through=named.through, group=_group_of(named, *traces))
        return replace(outcome, verdict=Verdict(names, divergence, (), unseen)).having(facts)

    def _diagnosis(self, outcome: Outcome, leader: int) -> Diagnosis:
        """Let the rank where the difference entered look for its cause; without experiments, decide here."""
        known = replace(outcome, process_traces=(), facts=())
        ours = replace(known, traces=tuple(trace[leader] for trace in outcome.process_traces), difference=None)
        alone = driver.DiagnosisCase(_no_runs, self.options, ours)
        if not driver.stages_of(alone):
            return driver.diagnose(alone)
        tell_phase(f"experiments on rank {leader}")
        task = RankDiagnosisTask(leader, known, ours.traces)
        request = RankRuns(self.target, self.spec, self.options, self.level, 1)
        with self._ended("hashbench.extensions.ranks.diagnosis:diagnose", request, task) as (folder, ends):
            found = read_diagnosis(folder)
            if found is None:
                died = min(ends, key=lambda end: (not end.died, end.seconds))
                raise RuntimeError(died.in_words())
        divergence = outcome.verdict.divergence if outcome.verdict is not None else None
        if divergence is None or divergence.origin != Origin.COLLECTIVE:
            return found
        nodes = nodes_of_call(outcome.process_traces[0], leader, divergence.node)
        return self.repeated_alone(found, request, nodes) if len(nodes) > 1 else found

    def repeated_alone(self, found: Diagnosis, request: RankRuns, nodes: Mapping[int, str]) -> Diagnosis:
        """Add what the collective does when it is repeated with the contribution of each rank, and write its repro.

        Args:
            found: the diagnosis so far.
            request: how runs are made.
            nodes: record of the collective by rank, in the order of its group.
        """
        key = file_key(suite=self.spec.suite, mode=self.options.mode, name=self.spec.name)
        kept = Path(self.options.output) / "repro" / key if self.options.output else None
        backend = backend_for(self.options.device, self.world_size)
        with tempfile.TemporaryDirectory(prefix="hashbench-") as name:
            folder = Path(name)
            with self._ended("hashbench.extensions.ranks.diagnosis:contribute", request, dict(nodes), folder):
                pass
            if any(not (folder / f"rank{member}.pt").exists() for member in range(len(nodes))):
                return found
            claim = f"A collective of the model {self.spec.name} ({self.options.mode}): {', '.join(nodes.values())}"
            write_script(folder, members=len(nodes), backend=backend, claim=claim)
            arms = tuple(_repeated_under(folder, len(nodes), backend))
            if kept is not None:
                with new_folder(kept) as new:
                    shutil.copytree(folder, new, dirs_exist_ok=True)
        evidence = replace(found.evidence, arms=(*found.evidence.arms, *arms))
        decided = replace(found, evidence=evidence, decision=causes.decide(evidence))
        plain = arms[0]
        again = (
            f"in fresh processes {plain.differing} of {plain.trials} repetitions differ" if plain.ran else plain.note
        )
        return replace(decided, repro=f"repro/{key}" if kept is not None else "", reproduced=again)

    @contextlib.contextmanager
    def _made(self, runs: int, *, diagnosing: bool = False) -> Iterator[RankPair]:
        """Make runs in new processes; yield what they left, which is gone afterwards."""
        tell_phase(f"{runs} runs on {count(self.world_size, 'rank')}")
        request = RankRuns(self.target, self.spec, self.options, self.level, runs, diagnosing)
        with self._ended("hashbench.extensions.ranks.runs:make_runs", request) as (folder, ends):
            answers = {rank: read_answer(folder, rank) for rank in range(self.world_size)}
            yield RankPair(folder, ends, {rank: answer for rank, answer in answers.items() if answer is not None})

    @contextlib.contextmanager
    def _ended(self, target: str, *arguments: object) -> Iterator[tuple[Path, tuple[RankEnd, ...]]]:
        """Run a function on every rank; yield their folder, which is gone afterwards, and how they ended."""
        with tempfile.TemporaryDirectory(prefix="hashbench-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            with started(target, arguments, world_size=self.world_size, folder=folder, logs=self._logs()) as ranks:
                ends = ranks.wait()
            yield folder, ends

    def _logs(self) -> tuple[Path, ...]:
        """Return where the ranks print to: beside the log of the worker, if there is one."""
        if not self.options.output:
            return ()
        folder = ResultsFolder(Path(self.options.output))
        log = folder.log_path(file_key(suite=self.spec.suite, mode=self.options.mode, name=self.spec.name))
        if not log.parent.is_dir():
            return ()
        return tuple(log.with_name(f"{log.stem}.rank{rank}.log") for rank in range(self.world_size))


def check_model(spec: ModelSpec, options: RunOptions, level: str, *, target: str) -> Outcome:
    """Check a model with ranks; an :class:`~hashbench.core.extensions.OwnCheck`."""
    return RanksCheck(spec, options, level, target=target).run()


def _with_answers(outcome: Outcome, pair: RankPair) -> Outcome:
    """Add the facts that every rank reports."""
    answers = [pair.answers[rank] for rank in sorted(pair.answers)]
    if not answers:
        return outcome

    def joined(name: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(value for answer in answers for value in getattr(answer, name)))

    return replace(
        outcome,
        runs=max(answer.number for answer in answers),
        iterations=answers[0].iterations,
        ops=answers[0].ops,
        tracer=answers[0].tracer,
        settings_changed=joined("settings_changed"),
        compiled=joined("compiled"),
        not_compared=joined("not_compared"),
        beside_mib=sum(answer.memory_mib for answer in answers),
    )


def _of_failure(outcome: Outcome, rank: int, answer: RankAnswer) -> Outcome:
    """Return the outcome of a model that raised on a rank."""
    assert answer.failure is not None
    failure = replace(answer.failure, error=f"rank {rank}: {answer.failure.error}")
    status = failed_status(failure, number=answer.number)
    by_stage = {"loading": Status.FAIL_TO_LOAD, "preparing": Status.FAIL_TO_RUN}
    if answer.number == 1 and not failure.out_of_memory and not failure.not_comparable:
        status = by_stage.get(answer.stage, status)
    return replace(outcome, accuracy=status, failure=failure, runs=answer.number)


def _joined(answers: Mapping[int, RankAnswer]) -> Difference | None:
    """Return the differences of all ranks as one, each result named with its rank."""
    parts = {rank: each.difference for rank, each in sorted(answers.items()) if each.difference is not None}
    if not parts:
        return None

    def known(name: str) -> list[float]:
        return [value for part in parts.values() if (value := getattr(part, name)) is not None]

    kinds = {part.representation for part in parts.values()}
    return Difference(
        tuple(f"rank {rank}: {name}" for rank, part in parts.items() for name in part.names),
        elements=_whole(sum, known("elements")),
        max_abs=max(known("max_abs"), default=None),
        max_ulp=_whole(max, known("max_ulp")),
        representation=", ".join(sorted(kinds)) if "" not in kinds else "",
        total=_whole(sum, known("total")),
        sum_relative=sum(known("sum_relative")) if known("sum_relative") else None,
        max_relative=max(known("max_relative"), default=None),
    )


def _whole(fold: Callable[[Sequence[float]], float], values: Sequence[float]) -> int | None:
    return int(fold(values)) if values else None


def _group_of(named: RankDivergence, first: Mapping[int, Trace], second: Mapping[int, Trace]) -> str:
    """Return the global ranks of the group of the collective that is to blame, or by which the difference came to
    other ranks first: ``0-1``; empty if it came to none."""
    rank = named.rank
    theirs = {record.id: record for record in second[rank].records}
    behind = False
    for record in first[rank].records:
        behind = behind or record.id == named.node
        if record.collective is None or not record.collective.process_group or not behind:
            continue
        other = theirs.get(record.id)
        if record.id == named.node or other is None or _given_digests(record) != _given_digests(other):
            return _joined_ranks(record.collective.process_group)
    return ""


def _joined_ranks(ranks: Sequence[int]) -> str:
    return "-".join(map(str, ranks))


def _of_replica(named: ReplicaDifference) -> Divergence:
    """Return where two ranks of one run diverge, as a divergence."""
    return Divergence(
        origin="" if named.origin == UNREDUCED else named.origin,
        node=named.node,
        kernel=named.kernel,
        op_index=None,
        phase=named.phase,
        iteration=named.iteration,
        module=named.module,
        forward_op="",
        detail=f"{named.name}: {named.detail}",
        first=named.first,
        second=named.second,
        source=named.source,
    )


def _why_replicas_differ(named: ReplicaDifference) -> Diagnosis:
    by = {UNREDUCED: UNREDUCED, Origin.RNG: SEEDED}.get(named.origin, COMPUTED)
    evidence = Evidence(named.origin, first_pair=(0, 1), replicas=by, parameter=named.name)
    return Diagnosis(causes.decide(evidence), evidence)


def _repeated_under(folder: Path, members: int, backend: str) -> Iterator[ExperimentResult]:
    """Repeat the collective of a repro alone, unchanged and under each setting that may decide its output."""
    for experiment in EXPERIMENTS.values():
        if "collective" not in experiment.on:
            continue
        change = COLLECTIVE_SETTINGS.get(experiment.name, {})
        if change.get("BACKEND") == backend:
            yield ExperimentResult(experiment.name, "collective", note=f"its backend is {backend}")
        elif backend != "nccl" and any(name.startswith("NCCL_") for name in change):
            yield ExperimentResult(experiment.name, "collective", note=f"its backend is {backend}, not NCCL")
        else:
            yield repeated_alone(experiment.name, folder, members=members, change=change)


def _given_digests(record: OpRecord) -> list[str]:
    return [ref.digest for ref in contributed_by(record)]


def _no_runs(*_: object, **__: object) -> Failure:
    return Failure("no run was asked for")
