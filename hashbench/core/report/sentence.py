"""A night in one sentence: which models got worse, and of what kind the reason is. Imports no torch.

A :class:`WorsenedRow` has the signs of one model, :mod:`~hashbench.core.report.reasons` decides, and the rest says it.
"""

from __future__ import annotations

import errno
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hashbench.core.catalog import Kind, Status, kind_of, status_of
from hashbench.core.commands import replay_command
from hashbench.core.extensions import all_words, blamed, rate_of
from hashbench.core.finding import Facts
from hashbench.core.processes import was_killed
from hashbench.core.records import ROW_KEY, Row
from hashbench.core.report.again import sweep_again
from hashbench.core.report.compare import Became, Comparison, EnvironmentChange, RowChange, environment_changes
from hashbench.core.report.reasons import KernelSigns, Reason, Sign, Signs, decide_reason, explained_by_chance
from hashbench.core.results.folder import ResultsFolder, file_key
from hashbench.core.results.load import Sweep
from hashbench.core.results.rows import row_key
from hashbench.core.text import count, is_replayable, join_limited, one_line, shorten

_NAMES, _KERNELS, _CHANGES = 3, 2, 2
"""Maximum models, kernels and changes of the environment that a clause names."""

_CLAUSES = 5
"""Maximum reasons in a sentence."""

_LISTED = 10
"""Maximum models with a line of their own."""

_MORE_RUNS = 60
"""Runs that tell a flake: they miss none that shows in more than 5 % of runs."""

_NO_DISK = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))

_COMPILED = (Status.FAIL_ACCURACY, Status.COMPILED_RUNS_DIFFER, Status.COMPILATIONS_DIFFER)


@dataclass(frozen=True, slots=True)
class Explained:
    """One model that got worse, and why.

    Attributes:
        change: what became of it.
        reason: the kind of reason.
        because: what shows it, without the kernel.
        error: what it raises, in short; empty if it does not fail.
        kernel: where its runs diverge first; empty if unknown or if it fails.
        source: the source line there, or the one that raised.
        link: the file or folder that shows more: repro, trace or log.
        next: the command that repeats it or, where the reason is not known, would tell.
        tells: what that command would tell.
    """

    change: RowChange[Row]
    reason: Reason
    because: str
    error: str = ""
    kernel: str = ""
    source: str = ""
    link: str = ""
    next: str = ""
    tells: str = ""

    @property
    def name(self) -> str:
        """The name of the model, for a line."""
        return shorten(one_line(self.change.key[-1]), 40)

    @property
    def is_comparable(self) -> bool:
        """False if whether it got worse is not known."""
        return self.change.outcome is not Became.NOT_COMPARABLE


# ------------------------------------------------------------------------------------------------- one model


@dataclass(frozen=True, slots=True, kw_only=True)
class WorsenedRow:
    """What there is to judge from of one model that got worse.

    Attributes:
        change: with its present row, if there is one.
        new: the sweep of the present row.
        before: its row when it was last well; ``None``: unknown.
        base: the sweep of that row, with environments and what was asked of it; ``None``: unknown.
        kernels: what recordings of its kernels in both say.
        nights: in how many of how many nights of this build it differs, where it passed in between; ``None``: it did
            not.
    """

    change: RowChange[Row]
    new: Sweep
    before: Row | None = None
    base: Sweep | None = None
    kernels: KernelSigns = field(default_factory=KernelSigns)
    nights: tuple[int, int] | None = None

    @property
    def row(self) -> Row | None:
        """The present row."""
        return self.change.new

    @property
    def differs(self) -> bool:
        """True if runs of the present row differ, so that there is a kernel to name."""
        return self.row is not None and kind_of(self.row.accuracy).has_cause

    @property
    def environment(self) -> tuple[EnvironmentChange, ...] | None:
        """What changed between the machines of both rows; ``None`` where one of them is not known."""
        if self.base is None or self.before is None or self.row is None:
            return None
        old, now = self.base.environments.get(self.before.env), self.new.environments.get(self.row.env)
        return None if old is None or now is None else environment_changes([old], [now])

    @property
    def model(self) -> Sign:
        """Whether the files of its suite changed."""
        told = self.row or self.before
        old = self.base.digest_of(self.before) if self.base is not None and self.before is not None else ""
        now = self.new.digest_of(told) if told is not None else ""
        if not (old and now):
            return Sign.UNKNOWN
        return Sign.SAME if old == now else Sign.CHANGED

    @property
    def lacked(self) -> str:
        """What it lacked, in words: memory, time, disk, or any row; empty if nothing."""
        row, base = self.row, self.change.base
        if row is None:
            asked = base is not None and any(selection.covers(base) for selection in self.new.selections)
            return "it was asked for and left no row" if asked and self.change.outcome is Became.MISSING else ""
        status = status_of(row.accuracy)
        if kind_of(row.accuracy) is not Kind.FAIL:
            return ""
        if status is not None and status.ran_out_of_memory:
            return "out of memory"
        if status is Status.TIMEOUT:
            return "time limit"
        if any(text in row.error for text in _NO_DISK):
            return "disk full"
        return "killed from outside" if status is Status.CRASHED and was_killed(row.error) else ""

    @property
    def some_runs(self) -> bool:
        """True if it differs in some runs of this build and not in others, so that chance explains the earlier pass."""
        row = self.row
        if row is None or self.nights is not None:
            return self.nights is not None
        if kind_of(row.accuracy) is Kind.LATENT:
            return not any(words.always(row) for words in all_words())
        pairs = (self.before.runs or 2) - 1 if self.before is not None else 1
        return kind_of(row.accuracy) is Kind.DIFFER and row.rate is not None and explained_by_chance(row.rate, pairs)

    @property
    def signs(self) -> Signs:
        """All that the rule takes into account."""
        row, environment = self.row, self.environment
        return Signs(
            comparable=self.change.outcome is not Became.NOT_COMPARABLE,
            lacked=bool(self.lacked),
            compiled=row is not None and _is_of_compiler(row),
            some_runs=self.some_runs,
            model=self.model,
            environment=Sign.UNKNOWN if environment is None else Sign.CHANGED if environment else Sign.SAME,
            kernel=self.kernels.of(row.kernel) if row is not None and row.kernel else Sign.UNKNOWN,
        )


def _is_of_compiler(row: Row) -> bool:
    """Return True if eager runs agree and the compiled program does not, or does not run."""
    status = status_of(row.accuracy)
    return status in _COMPILED or (bool(row.backend) and status is Status.REFERENCE_FAIL)


def explained(case: WorsenedRow) -> Explained:
    """Explain why a model got worse."""
    row, signs = case.row, case.signs
    reason = decide_reason(signs)
    command, tells = _next(reason, signs, case)
    return Explained(
        case.change,
        reason,
        one_line(_because(reason, signs, case)),
        error=_what_fails(row) if row is not None else "",
        kernel=blamed(row) if row is not None and case.differs else "",
        source=row.source if row is not None else "",
        link=link_of(row, case.new.folders.get(row_key(row))) if row is not None else "",
        next=command,
        tells=tells,
    )


def link_of(row: Row, folder: Path | None) -> str:
    """Return the path of what shows more of a row: its repro, else a trace, else the log of a failure."""
    if folder is None:
        return ""
    if row.repro or row.traces:
        return str(folder / (row.repro or row.traces.split()[0]))
    if kind_of(row.accuracy) is not Kind.FAIL:
        return ""
    log = ResultsFolder(folder).log_path(file_key(suite=row.suite, mode=row.mode, name=row.name)).name
    return str(folder / "logs" / log)


def changes_in_words(changes: Iterable[EnvironmentChange]) -> str:
    """Return ``torch 2.14.0 -> 2.15.0, cpu.model A -> B and 3 more``, packages first."""
    ordered = sorted(changes, key=lambda change: (not change.key.startswith("packages."), change.key))
    if any(change.key == "packages.torch" for change in ordered):
        ordered = [change for change in ordered if change.key != "torch.git"]
    texts = [
        f"{change.key.removeprefix('packages.').removeprefix('variables.')} "
        f"{shorten(change.base, 30) or 'none'} -> {shorten(change.new, 30) or 'none'}"
        for change in ordered
    ]
    return join_limited(texts, _CHANGES)


def _because(reason: Reason, signs: Signs, case: WorsenedRow) -> str:
    """Return what shows that a reason is of this kind, without the kernel."""
    row = case.row
    match reason:
        case Reason.COMPILER:
            return "eager runs agree, compiled code does not"
        case Reason.LIBRARY:
            return case.kernels.environment or changes_in_words(case.environment or ())
        case Reason.MODEL:
            return f"the file of {case.change.key[0]} changed"
        case Reason.MACHINE:
            return case.lacked
        case Reason.FLAKE if case.nights is not None:
            return f"{case.nights[0]} of {case.nights[1]} nights of this build"
        case Reason.FLAKE if row is not None:
            often = rate_of(row)
            return often if kind_of(row.accuracy) is Kind.LATENT else f"{often} of this build"
        case _:
            return _unknown(signs, case)


def _unknown(signs: Signs, case: WorsenedRow) -> str:
    """Return why the kind of reason is not known."""
    if not signs.comparable:
        return case.change.note
    environment = changes_in_words(case.environment or ()) or case.kernels.environment
    file = f"the file of {case.change.key[0]} changed" if signs.model is Sign.CHANGED else ""
    parts = [*filter(None, (case.lacked, environment, file))]
    if len(parts) > 1:
        return f"{' and '.join(parts)} at once"
    if environment and signs.kernel is Sign.SAME:
        return f"{environment}, which did not change its kernel"
    if environment:
        return f"perhaps {environment}"
    if parts:
        return parts[0]
    if case.row is None:
        return "it left no row, and nothing says that it was asked for"
    unrecorded = signs.environment is Sign.UNKNOWN
    return "what changed is not recorded" if unrecorded else "nothing that is recorded changed"


def _what_fails(row: Row) -> str:
    return shorten(one_line(row.error or row.accuracy), 60) if kind_of(row.accuracy) in (Kind.FAIL, Kind.SKIP) else ""


def _next(reason: Reason, signs: Signs, case: WorsenedRow) -> tuple[str, str]:
    """Return the command that repeats the trouble or, where the reason is not known, would tell; and what."""
    row = case.row or case.change.base
    if row is None:
        return "", ""
    environments = case.new.environments if case.row is not None or case.base is None else case.base.environments
    folder = case.new.folders.get(row_key(row)) if case.row is not None else None
    unknown = reason is Reason.UNKNOWN and signs.comparable
    if unknown and case.kernels.tell and case.differs and signs.model is not Sign.CHANGED:
        return case.kernels.tell, f"whether {changes_in_words(case.environment or ())} changed {row.kernel}"
    if not unknown and folder is not None and is_replayable(row):
        files = sweep_again(row, environments)[3:4]
        return replay_command(folder / row.repro, files=files), ""
    runs = _MORE_RUNS if unknown and case.differs else 0
    again = shlex.join(sweep_again(row, environments, runs=runs))
    return again, _would_tell(signs, case) if unknown else ""


def _would_tell(signs: Signs, case: WorsenedRow) -> str:
    what = (
        f"whether it is a flake, which agrees in some of {_MORE_RUNS} runs"
        if case.differs
        else "whether it fails again"
    )
    if case.environment:
        return f"{what}; run under what was before ({changes_in_words(case.environment)}), whether that did it"
    return f"{what}; with the file of before, whether the model did it" if signs.model is Sign.CHANGED else what


def clauses_between(
    comparison: Comparison[Row], *, base: Sweep, new: Sweep, kernels: Mapping[tuple[str, ...], KernelSigns]
) -> tuple[Clause, ...]:
    """Explain the rows of a comparison that got worse; ``kernels`` by the key of the row."""
    nothing = KernelSigns()
    cases = (
        WorsenedRow(change=change, new=new, before=change.base, base=base, kernels=kernels.get(change.key, nothing))
        for change in comparison.changes
        if change.outcome.worse
    )
    return clauses_of(map(explained, cases))


# ---------------------------------------------------------------------------------------------- the sentence


@dataclass(frozen=True, slots=True)
class Clause:
    """Models that got worse for one reason."""

    reason: Reason
    because: str
    models: tuple[Explained, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its models, each once."""
        return tuple(dict.fromkeys(model.name for model in self.models))

    @property
    def kernels(self) -> tuple[str, ...]:
        """Kernels where their runs diverge first, each once."""
        return tuple(dict.fromkeys(model.kernel for model in self.models if model.kernel))

    @property
    def why(self) -> str:
        """The reason in words: ``library: torch 2.14 -> 2.15 changed aten.mm.default``."""
        kernels = join_limited(self.kernels, _KERNELS)
        if self.reason is Reason.LIBRARY:
            return f"{self.reason}: {self.because} changed {kernels}"
        sources = {model.source for model in self.models}
        source = sources.pop() if len(sources) == 1 else ""
        errors = {model.error for model in self.models} if self.reason is Reason.UNKNOWN else set()
        error = errors.pop() if len(errors) == 1 else ""
        return f"{self.reason}: {', '.join(filter(None, (self.because, kernels, source, error)))}"

    def __str__(self) -> str:
        return f"{join_limited(self.names, _NAMES)} ({self.why})"


def clauses_of(models: Iterable[Explained]) -> tuple[Clause, ...]:
    """Group models by their reason, the most severe first, then the largest."""
    groups: dict[tuple[Reason, str, bool], list[Explained]] = {}
    for model in models:
        groups.setdefault((model.reason, model.because, model.is_comparable), []).append(model)
    order = list(Reason)
    ranked = sorted(groups.items(), key=lambda item: (not item[0][2], order.index(item[0][0]), -len(item[1])))
    return tuple(Clause(reason, because, tuple(members)) for (reason, because, _), members in ranked)


def sentence(clauses: Sequence[Clause], *, new: str = "") -> str:
    """Return ``3 models got worse: a, b (library: …), c (flake: …)``; empty if nothing is to be said.

    ``new``: what is said first, of rows that nothing can be compared with.
    """
    worse, unknown = ([clause for clause in clauses if _is_worse(clause) is known] for known in (True, False))
    parts = [new]
    if worse:
        parts.append(f"{_models(worse)} got worse: {', '.join(map(str, worse[:_CLAUSES]))}")
        if rest := worse[_CLAUSES:]:
            parts[-1] += f" and {_models(rest)} for {count(len(rest), 'other reason')}"
    parts += [
        f"whether {join_limited(clause.names, _NAMES)} got worse is not known: {clause.because}" for clause in unknown
    ]
    text = "; ".join(filter(None, parts))
    return f"{text[:1].upper()}{text[1:]}" if not new and not worse else text  # no name comes first


def _models(clauses: Iterable[Clause]) -> str:
    return count(len({model.change.key[::4] for clause in clauses for model in clause.models}), "model")


def _is_worse(clause: Clause) -> bool:
    return all(model.is_comparable for model in clause.models)


def facts_of(clauses: Sequence[Clause], others: Sequence[Explained] = ()) -> Facts:
    """Return a label and a line for each of the first models, ``others`` last: what it did and does, where, and the
    link."""
    models = [*(model for clause in clauses for model in clause.models), *others]
    often = Counter(model.name for model in models)
    lines = [(_label(model, often[model.name] > 1), _line(model)) for model in models[:_LISTED]]
    more = len(models) - _LISTED
    return (*lines, *((("and more", count(more, "row")),) if more > 0 else ()))


def _label(model: Explained, several: bool) -> str:
    name = shorten(model.name, 24)
    return f"{name}, {model.change.key[1]}" if several else name


def _line(model: Explained) -> str:
    base, new = (row.accuracy if row else "no row" for row in (model.change.base, model.change.new))
    status = new if model.change.outcome is Became.NEW else f"{base} -> {new}"
    where = ", ".join(filter(None, (_in_module(model), model.source)))
    return "; ".join(filter(None, (status, one_line(where), model.error, model.link)))


def _in_module(model: Explained) -> str:
    row = model.change.new
    return f"{model.kernel} in {row.module}" if row is not None and row.module and model.kernel else model.kernel


def notes_of(clauses: Sequence[Clause]) -> tuple[str, ...]:
    """Return what the commands for models would tell whose reason is not known, a note for each clause."""
    return tuple(
        f"Not known of {join_limited(clause.names, _NAMES)}: the command for {clause.models[0].name} below tells "
        f"{clause.models[0].tells}."
        for clause in clauses
        if clause.models[0].tells
    )


def next_of(clauses: Sequence[Clause]) -> tuple[str, ...]:
    """Return the commands of the first model of each clause, each once."""
    return tuple(dict.fromkeys(filter(None, (clause.models[0].next for clause in clauses))))


def data_of(clauses: Sequence[Clause]) -> list[dict[str, Any]]:
    """Return the clauses as plain values."""
    return [
        {
            "class": str(clause.reason),
            "because": clause.because,
            "got_worse": _is_worse(clause),
            "kernels": list(clause.kernels),
            "next": clause.models[0].next,
            "tells": clause.models[0].tells,
            "models": [
                {
                    **dict(zip(ROW_KEY, model.change.key, strict=True)),
                    "outcome": str(model.change.outcome),
                    "kernel": model.kernel,
                    "source": model.source,
                    "link": model.link,
                }
                for model in clause.models
            ],
        }
        for clause in clauses
    ]
