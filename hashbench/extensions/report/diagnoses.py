"""Prepare the diagnoses of the page: evidence, excerpts of traces, commands, logs.

The only part of the page that opens files. Traces are named by rows, which may come from elsewhere: a path that leads
out of its sweep's folder is not followed, and contents of files are checked against the row.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from hashbench.core.catalog import EXPERIMENTS, Kind, Origin, Role, kind_of
from hashbench.core.commands import replay_command
from hashbench.core.diagnose.causes.evidence import base_of, effect
from hashbench.core.diagnose.causes.stats import MOST_TRIALS, Effect, rate_of
from hashbench.core.divergence.align import align
from hashbench.core.errors import HashbenchError
from hashbench.core.extensions import words_for
from hashbench.core.records import (
    Evidence,
    ExperimentResult,
    OpRecord,
    Rate,
    Row,
    TensorDigest,
    Trace,
    value_of,
)
from hashbench.core.report.again import sweep_again
from hashbench.core.results.folder import file_key, traceback_of
from hashbench.core.text import is_replayable
from hashbench.core.trace import file as tracefile
from hashbench.extensions.report.history import History, ModelHistory, models_in_trouble

DETAILS = 150
"""Maximum models with a whole diagnosis on the page, the newest trouble first."""

TRACEBACKS = 500
"""Maximum logs of failed models read for one report."""


@dataclass(frozen=True, slots=True)
class ModelView:
    """The diagnosis of one model as the page shows it.

    Attributes:
        index: of :attr:`History.models`.
        model: its history.
        row: its newest row that differs or fails.
        night: the index of that row's night.
        experiments: the row's evidence, in the order of display.
        excerpt: both traces around the divergence.
        folder: the folder of the row's sweep.
        sweep: the command that runs it again (:func:`sweep_again`).
        traceback: the end of its log if it failed.
    """

    index: int
    model: ModelHistory
    row: Row
    night: int
    experiments: tuple[ExperimentView, ...]
    excerpt: Excerpt | None
    folder: Path = Path()
    sweep: tuple[str, ...] = ()
    traceback: str = ""

    @property
    def anchor(self) -> str:
        """The fragment of the page's address that opens this model; independent of other models."""
        return anchor_of(self.model.key)

    @property
    def not_run(self) -> dict[str, list[ExperimentResult]]:
        """Experiments that were not run, by reason."""
        reasons: dict[str, list[ExperimentResult]] = {}
        for result in (view.result for view in self.experiments if not view.result.ran):
            reasons.setdefault(result.note, []).append(result)
        return reasons

    @property
    def repro(self) -> str:
        """Path of the repro's folder."""
        return str(self.folder / self.row.repro)

    @property
    def commands(self) -> tuple[tuple[str, str], ...]:
        """Next steps as ``(purpose, command line)``; none for a path that leads out of the sweep's folder."""
        row, repro = self.row, [self.row.repro] if self.row.repro else []
        traces = [] if words_for(row) else row.traces.split()
        lines = [
            ("run the captured call again, with its torch", [*_running(row), f"{self.repro}/repro.py"], repro),
            (
                "repeat the experiments on that call",
                shlex.split(replay_command(Path(self.repro))) if _is_inside(self.folder, row.repro) else [],
                repro * is_replayable(row),
            ),
            (
                "the first divergence of both traces" if len(traces) == 2 else "where the replicas diverge",
                ["hashbench", *_comparing(row), *(str(self.folder / t) for t in traces)],
                traces,
            ),
            ("sweep this model again", self.sweep, ["."] * bool(self.sweep)),
        ]
        return tuple(
            (what, shlex.join(words))
            for what, words, paths in lines
            if paths and all(_is_inside(self.folder, path) for path in paths)
        )


def anchor_of(key: Sequence[str]) -> str:
    """Return the anchor of the model with this key (:data:`~hashbench.core.records.ROW_KEY`): its words, safe in an
    address.

    >>> anchor_of(("torchvision", "training", "float32", "cpu", "resnet18"))
    'torchvision.training-float32-cpu.resnet18'
    """
    suite, *scope, name = key
    return file_key(suite=suite, mode=re.sub(r"[^A-Za-z0-9_-]", "_", "-".join(filter(None, scope))), name=name)


def model_views(
    history: History,
    excerpts: Mapping[tuple[str, ...], Excerpt],
    tracebacks: Mapping[tuple[str, ...], str] | None = None,
) -> tuple[ModelView, ...]:
    """Return views of the first :data:`DETAILS` models in trouble, the newest trouble first."""
    traceback_of = tracebacks or {}
    return tuple(
        ModelView(
            *(index, model, trouble.row, trouble.night, read_evidence(trouble.row)),
            excerpt=excerpts.get(model.key),
            folder=trouble.folder,
            sweep=sweep_again(trouble.row, history.nights[trouble.night].environments),
            traceback=traceback_of.get(model.key, ""),
        )
        for index, model, trouble in models_in_trouble(history)[:DETAILS]
    )


def read_tracebacks(history: History, *, limit: int = TRACEBACKS) -> dict[tuple[str, ...], str]:
    """Read the end of the log of each failed model (at most ``limit``), by model key.

    Raises nothing: a model without a log has no entry.
    """
    failed = [
        (model.key, newest)
        for _, model, newest in models_in_trouble(history)
        if kind_of(newest.row.accuracy) is Kind.FAIL
    ]
    texts = {key: traceback_of(trouble.row, trouble.folder) for key, trouble in failed[:limit]}
    return {key: text for key, text in texts.items() if text}


# -------------------------------------------------------------------------------------------------- experiments


@dataclass(frozen=True, slots=True)
class ExperimentView:
    """One experiment as the page shows it.

    Attributes:
        result: its counts.
        phrase: what was changed.
        effect: what that did to the difference, by the rules that decide the cause; empty for a baseline.
        is_base: whether it is a baseline.
        rate: how often it differed; ``None`` if it was not run.
    """

    result: ExperimentResult
    phrase: str
    effect: str
    is_base: bool
    rate: Rate | None


def read_evidence(row: Row) -> tuple[ExperimentView, ...]:
    """Return the experiments of a row: per kind of repetition the baseline first, then in the order of running, those
    not run last. Empty for a row read from a CSV alone."""
    evidence = Evidence(origin=row.origin, arms=row.evidence.results)
    kinds = list(dict.fromkeys(result.on for result in evidence.arms))
    views = [_view(result, evidence) for result in evidence.arms]
    return tuple(sorted(views, key=lambda view: (not view.result.ran, kinds.index(view.result.on), not view.is_base)))


def _view(result: ExperimentResult, evidence: Evidence) -> ExperimentView:
    experiment = EXPERIMENTS.get(result.name)
    phrase = experiment.phrase if experiment is not None else result.name.replace("_", " ")
    is_base = experiment is not None and experiment.role is Role.BASE
    if not result.ran:
        return ExperimentView(result, phrase, "", is_base, None)
    rate = rate_of(result.differing, result.trials, distinct=result.distinct, of=result.on)
    return ExperimentView(result, phrase, "" if is_base else _effect(result, evidence), is_base, rate)


def _effect(result: ExperimentResult, evidence: Evidence) -> str:
    experiment = EXPERIMENTS.get(result.name)
    if experiment is not None and experiment.proof is not None:
        return experiment.proof[0 if result.differing else 1]
    base = base_of(evidence, result.name, result.on)
    # Fisher's test over counts that no experiment ever reaches would take minutes, and a file can claim them.
    if max(result.trials, base.trials) > 5 * MOST_TRIALS:
        return ""
    if (
        experiment is not None and experiment.role is Role.COMPILER
    ):  # one each: the first compilation is what they are compared with
        return "still there" if result.differing else "gone"
    known = effect(evidence, result.name, result.on)
    if known is not Effect.ABSENT:
        return str(known.value)
    if not base.ran:
        return "differs" if result.differing else "agrees"
    return "brings it about" if result.differing else "agrees too"


# -------------------------------------------------------------------------------------------- excerpts of traces

TRACE_MIB = 48.0
"""Maximum MiB of traces read for one report; reading takes about 0.2 s per MiB."""

CONTEXT = 3
"""Steps shown before and after the divergence."""

_TOKENS = 8
_TEXT = 160
_SIBLINGS = 4


class Token(NamedTuple):
    """One word of a step: a tensor read or written, or another fact. ``differs``: the runs disagree on it."""

    text: str
    differs: bool = False


@dataclass(frozen=True, slots=True)
class DiagnosedSweep:
    """Reads, writes and other facts of one run in a step."""

    reads: tuple[Token, ...]
    writes: tuple[Token, ...]
    facts: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class StepView:
    """Corresponding records of both runs.

    Attributes:
        position: in the alignment of both runs, from 0.
        record: the record of the first run, else that of the second.
        first: the first run's side; ``None`` if it has no such record.
        second: the second run's side.
        same: whether both sides are equal.
        here: whether this is the divergence.
    """

    position: int
    record: OpRecord
    first: DiagnosedSweep | None
    second: DiagnosedSweep | None
    same: bool
    here: bool


@dataclass(frozen=True, slots=True)
class Branch:
    """One line of the module tree.

    Attributes:
        depth: from the model, 0.
        name: of the module; empty for folded siblings.
        steps: ops that ran in the module and below it.
        differing: how many of these differ.
        here: whether the divergence is in this module.
        folded: siblings that this line stands for.
    """

    depth: int
    name: str
    steps: int
    differing: int
    here: bool = False
    folded: int = 0


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Both traces around a divergence.

    Attributes:
        steps: around the divergence.
        tree: the module tree around its module.
        total: number of all steps.
        missing: why there is nothing to show; empty if there is.
        folder: of the sweep; empty if it has no such traces.
    """

    steps: tuple[StepView, ...] = ()
    tree: tuple[Branch, ...] = ()
    total: int = 0
    missing: str = ""
    folder: str = ""


def read_excerpts(history: History, *, limit: int = DETAILS, mib: float = TRACE_MIB) -> dict[tuple[str, ...], Excerpt]:
    """Read an excerpt of the traces of each model in trouble that has some (at most ``limit``), by model key.

    Raises nothing: for a missing, damaged or foreign trace, the excerpt says so in ``missing``.
    """
    with_traces = [
        (model.key, trouble)
        for _, model, trouble in models_in_trouble(history)
        if len(trouble.row.traces.split()) == 2 and not words_for(trouble.row)  # those of eager runs, which agree
    ]
    excerpts: dict[tuple[str, ...], Excerpt] = {}
    left = mib * 2**20
    for key, (row, _, folder) in with_traces[:limit]:
        try:
            files = [path for name in _trace_files(row) if (path := _inside(folder, name)).is_file()]
            size = sum(map(tracefile.text_size, files))
            if len(files) != 2:
                excerpt = Excerpt(missing=f"The traces are not in the sweep's folder any more ({row.traces}).")
            elif size > left:
                too_large = f"The traces ({size / 2**20:.1f} MiB) are too large to be read for this page"
                excerpt = Excerpt(missing=f"{too_large}; hashbench diff shows them.", folder=str(folder))
            else:
                first, second = (tracefile.read(path, most=int(left)) for path in files)
                left -= size
                excerpt = replace(excerpt_of(first, second, row), folder=str(folder))
        except (OSError, ValueError, RuntimeError, HashbenchError) as error:
            excerpt = Excerpt(missing=f"The traces cannot be shown: {error}", folder=str(folder))
        excerpts[key] = excerpt
    return excerpts


def _trace_files(row: Row) -> Sequence[str]:
    """Return the files of both traces: of a model with ranks those of the rank where the runs diverge."""
    ranks = f"/rank{value_of(row, 'rank') or 0}.log.gz" if (value_of(row, "world_size") or 1) > 1 else ""
    return [name + ranks for name in row.traces.split()]


def _running(row: Row) -> Sequence[str]:
    """Return the command that runs the script of a repro: that of a collective on all members of its group."""
    if row.origin != Origin.COLLECTIVE:
        return ("uv", "run")
    return ("torchrun", "--nproc-per-node", str(len(str(value_of(row, "group")).split("-"))))


def _comparing(row: Row) -> Sequence[str]:
    """Return the command that reads the traces of a row."""
    if (value_of(row, "world_size") or 1) == 1:
        return ("diff",)
    return ("ranks", "diff" if len(row.traces.split()) == 2 else "check")


def _inside(folder: Path, name: str) -> Path:
    """Return the path of that name in the folder, or the folder itself if the name leads out of it."""
    return (folder / name).resolve() if _is_inside(folder, name) else folder


def _is_inside(folder: Path, name: str) -> bool:
    return (folder / name).resolve().is_relative_to(folder.resolve())


def excerpt_of(first: Trace, second: Trace, row: Row, *, context: int = CONTEXT) -> Excerpt:
    """Cut the excerpt of two traces around the op named by ``row``."""
    pairs = align(first.records, second.records)
    here = next((position for position, (a, _) in enumerate(pairs) if a is not None and a == row.op_index), None)
    if here is None:
        return Excerpt(missing="The difference entered at no op of the first run, so there is no place to show.")
    record = first.records[row.op_index or 0]
    if row.kernel not in ("", record.op) or row.module not in ("", record.module):
        return Excerpt(missing=f"The traces are of other runs: op {row.op_index} is {record.op}, not {row.kernel}.")
    contents = _contents(first), _contents(second)
    steps = []
    for position, (a, b) in enumerate(pairs):
        content, other = (None if at is None else side[at] for side, at in zip(contents, (a, b), strict=True))
        record = next(trace.records[at] for trace, at in ((first, a), (second, b)) if at is not None)
        steps.append(
            StepView(position, record, _side(content, other), _side(other, content), content == other, position == here)
        )
    around = steps[max(0, here - context) : here + context + 1]
    return Excerpt(steps=tuple(around), tree=module_tree(steps, row.module), total=len(steps))


class _Content(NamedTuple):
    """Reads by argument, writes, and other facts of a record."""

    reads: dict[str, str]
    writes: tuple[TensorDigest, ...]
    facts: dict[str, str]


def _contents(trace: Trace) -> list[_Content]:
    written = {leaf.id: leaf.digest.value for leaf in trace.leaves}
    written |= {record.id: tracefile.short_digest(record.outputs) for record in trace.records if record.outputs}
    contents = []
    for record in trace.records:
        reads = {
            ref.argument: f"{_short(ref.source)} {(ref.digest or written.get(ref.source, ''))[:16]}"
            for ref in record.inputs
        }
        facts = {"arguments": record.arguments, "returned": record.scalar, "generator": record.rng}
        contents.append(_Content(reads, record.outputs, {name: text for name, text in facts.items() if text}))
    return contents


def _short(source: str) -> str:
    """Drop phase, iteration and module from a writer's id; the writer's own step shows these."""
    return source.rpartition("/")[2] if "." in source.partition("/")[0] else source


def _side(content: _Content | None, other: _Content | None) -> DiagnosedSweep | None:
    """Return one run's side of a step; without a counterpart, no token differs."""
    if content is None:
        return None
    reads, writes, facts = other or content
    return DiagnosedSweep(
        reads=_few(Token(f"{name} ← {text}", reads.get(name) != text) for name, text in content.reads.items()),
        writes=_few(
            Token(tracefile.digest_text(digest), writes[position : position + 1] != (digest,))
            for position, digest in enumerate(content.writes)
        ),
        facts=_few(Token(f"{name} {text}", facts.get(name) != text) for name, text in content.facts.items()),
    )


def _few(tokens: Iterable[Token]) -> tuple[Token, ...]:
    """Keep the first tokens, cut to moderate length; say so if one that differs is left out."""
    kept = [Token(text if len(text) <= _TEXT else f"{text[:_TEXT]}…", differs) for text, differs in tokens]
    rest = kept[_TOKENS:]
    more = [Token(f"and {len(rest)} more", any(token.differs for token in rest))] if rest else []
    return (*kept[:_TOKENS], *more)


def module_tree(steps: Sequence[StepView], module: str) -> tuple[Branch, ...]:
    """Return the path from the model to ``module``, with the nearest siblings at each level, and its children."""
    counts: Counter[str] = Counter()
    differing: Counter[str] = Counter()
    for step in steps:
        for name in _upwards(step.record.module):
            counts[name] += 1
            differing[name] += not step.same
    return tuple(_branches(counts, differing, _upwards(module), "", 0))


def _upwards(path: str) -> list[str]:
    """Return the prefixes of a path: ``a.b.c`` → ``a``, ``a.b``, ``a.b.c``."""
    parts = path.split(".") if path else []
    return [".".join(parts[: length + 1]) for length in range(len(parts))]


def _branches(
    counts: Counter[str], differing: Counter[str], path: Sequence[str], parent: str, depth: int
) -> Iterator[Branch]:
    def folded(names: Sequence[str]) -> Iterator[Branch]:
        if names:
            steps, different = (sum(count[name] for name in names) for count in (counts, differing))
            yield Branch(depth, "", steps, different, folded=len(names))

    names = [name for name in counts if name.rpartition(".")[0] == parent]
    at = names.index(path[depth]) if depth < len(path) and path[depth] in names else -1
    low, high = max(0, at - _SIBLINGS), at + 1 + _SIBLINGS
    yield from folded(names[:low])
    for position, name in enumerate(names[low:high], start=low):
        here = position == at and depth == len(path) - 1
        yield Branch(depth, name.rpartition(".")[2], counts[name], differing[name], here=here)
        if position == at:
            yield from _branches(counts, differing, path, name, depth + 1)
    yield from folded(names[high:])
