"""What can extend the core: the fields of an :class:`Extension`, and who asks for them.

The core asks the table in :mod:`hashbench.extensions`, names no extension and imports none. A target is written
``module:name`` and imported when it is used, so that ``--help`` loads no library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol

from hashbench.core.text import rate

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

    from hashbench.core.check.model import BenchmarkRunner
    from hashbench.core.check.pair import PairCheck
    from hashbench.core.check.subject import Subject
    from hashbench.core.finding import Finding
    from hashbench.core.records import Facts, ModelSpec, Row, RunOptions
    from hashbench.core.report.audits import AuditKind
    from hashbench.core.report.reasons import KernelSigns
    from hashbench.core.run.outcome import Outcome, Run
    from hashbench.core.run.workload import Workload
    from hashbench.core.sweep.executors import Executor
    from hashbench.core.sweep.request import SweepRequest
    from hashbench.core.sweep.run import SweepResult


RowPair = tuple["Row | None", "Row | None"]
"""The rows of one model in two sweeps; ``None``: absent."""


class HasRanks(Protocol):
    """A model that says on how many ranks it runs: a ``ModelSpec``, or a ``Workload`` once it is loaded."""

    @property
    def world_size(self) -> int | None: ...


class OwnCheck(Protocol):
    """Checks a model that it loads itself, in processes of its own; ``target`` is how these load it."""

    def __call__(self, spec: ModelSpec, options: RunOptions, level: str, *, target: str) -> Outcome: ...


class Check(Protocol):
    """Checks a loaded model in place of the comparison of equal runs, at deterministic ``level``."""

    def __call__(
        self, runner: BenchmarkRunner, workload: Workload, subject: Subject, level: str, optimizer: str
    ) -> Outcome: ...


class Stage(Protocol):
    """Adds to the outcome of equal runs, before it is confirmed and diagnosed.

    ``first`` is the run that the others were compared with; ``seconds`` is what they took, the load included.
    """

    def __call__(self, check: PairCheck, outcome: Outcome, first: Run, *, seconds: float) -> Outcome: ...


class MakeExecutor(Protocol):
    """Returns an executor of models, connected; ``how``: ``jobs``, ``preload`` and ``cluster``, see
    :data:`hashbench.core.sweep.EXECUTORS`."""

    def __call__(self, specs: Sequence[ModelSpec], options: RunOptions, **how: Any) -> Executor: ...


class AfterSweep(Protocol):
    """Records more of the models that a sweep ran, beside their rows, in its folder."""

    def __call__(
        self,
        request: SweepRequest,
        options: RunOptions,
        result: SweepResult,
        *,
        executor: Executor,
        environment: Mapping[str, Any],
        on_note: Callable[[str], object],
    ) -> None: ...


class ForgetModels(Protocol):
    """Deletes what an earlier sweep recorded of models that run again, since the file of their suite has changed."""

    def __call__(self, outdated: Sequence[ModelSpec], request: SweepRequest) -> None: ...


class RowWords:
    """Describes rows of a kind of its own, in tables, comparisons and failed tests. Each method has its default, with
    which rows are described as the core describes them."""

    def shown(self, row: Row) -> Row:
        """Return a row as reports show it; :meth:`written` is the inverse."""
        return row

    def written(self, row: Row) -> Row:
        """Return a row as a CSV has it."""
        return row

    def tells(self, row: Row) -> bool:  # noqa: ARG002
        """Return True if a row that does not pass is described by the next four, and not as eager runs are."""
        return False

    def where(self, row: Row) -> str:  # noqa: ARG002
        """Return the place of a difference, on a line of its own."""
        return ""

    def why(self, row: Row) -> str:  # noqa: ARG002
        """Return what was measured, below a row whose stage is shown."""
        return ""

    def why_with_stage(self, row: Row) -> str:
        """Return what was measured, with the stage."""
        return self.why(row)

    def place(self, row: Row) -> str:
        """Return stage and place as comparisons show them."""
        return self.where(row)

    def condition(self, row: Row) -> str:  # noqa: ARG002
        """Return the condition under which alone a row differs; empty for none."""
        return ""

    def rate(self, row: Row) -> str:  # noqa: ARG002
        """Return how often a row differs; empty if the usual words do."""
        return ""

    def finding(self, row: Row, *, folder: Path) -> Finding | None:  # noqa: ARG002
        """Return the report of a failed test; ``None`` if the usual one does. ``folder`` has repro and traces."""
        return None

    def remarks(self, row: Row) -> Iterator[str]:  # noqa: ARG002
        """Yield what is said beside the status of a row."""
        yield from ()

    def mechanism(self, row: Row) -> str:  # noqa: ARG002
        """Return what explains a difference without a cause; empty if nothing does."""
        return ""

    def blamed(self, row: Row) -> str:  # noqa: ARG002
        """Return what a row without a kernel blames; empty for nothing."""
        return ""

    def facts(self, row: Row) -> Iterator[tuple[str, str]]:  # noqa: ARG002
        """Yield labels and texts that the page of a model shows beside columns; those that are empty are left out."""
        yield from ()

    def remedy(self, row: Row) -> str:  # noqa: ARG002
        """Return what to do about a difference or failure; empty if the usual words do."""
        return ""

    def moved(self, base: Row, new: Row) -> tuple[str, ...]:  # noqa: ARG002
        """Return the columns of facts in which two rows of one difference agree, where both are certain of them."""
        return ()

    def looked(self, row: Row) -> bool:  # noqa: ARG002
        """Return whether a row would say if a model that passes differs now and then."""
        return False

    def always(self, base: Row) -> bool:  # noqa: ARG002
        """Return whether the difference of ``base``, which shows now and then, would show in every row that
        :meth:`looked`."""
        return False

    def speaks_of(self, row: Row) -> bool:  # noqa: ARG002
        """Return True if :meth:`what_passing_means` says of a row that passes what equal runs prove."""
        return False

    def suggestion(self, rows: Sequence[Row]) -> str:  # noqa: ARG002
        """Return what finds more than equal runs do; empty where these rows have it."""
        return ""

    def what_passing_means(self, rows: Sequence[Row], *, bound: float) -> str:  # noqa: ARG002
        """Return what rows that pass, also those that differ now and then, prove and may have missed; empty for none.

        ``bound``: largest share of runs in which a difference may show that two equal runs miss (95 % confidence).
        """
        return ""


class Remarks(Protocol):
    """Yields sentences on what an extension recorded of the same models in two sweeps.

    ``pairs`` has the rows of each model in both; ``base`` and ``new`` are the CSVs of the two sweeps.
    """

    def __call__(self, pairs: Iterable[RowPair], *, base: Sequence[Path], new: Sequence[Path]) -> Iterator[str]: ...


class ComparesKernels(Protocol):
    """Returns what an extension recorded of the kernels of the same models in two sweeps, by the key of the row.

    Arguments as of :class:`Remarks`. A model of which neither sweep has anything is left out.
    """

    def __call__(
        self, pairs: Iterable[RowPair], *, base: Sequence[Path], new: Sequence[Path]
    ) -> Mapping[tuple[str, ...], KernelSigns]: ...


class DiffsFiles(Protocol):
    """Compares two files of a kind of its own for ``hashbench diff``; a module can be one."""

    KIND: str
    """The kind in words, with an article."""

    def owns(self, text: str) -> bool:
        """Return True if a text is of this kind."""

    def diff(self, texts: Sequence[str], names: Sequence[str], *, context: int) -> Finding:
        """Return the report of two texts; ``context``: records shown around a difference."""


class AnswersNumeric(Protocol):
    """Answers ``hashbench numeric``: prints a verdict and returns the exit code; ``None`` where it was not asked."""

    def __call__(self, parsed: Namespace) -> int | None: ...


class OwnsFile(Protocol):
    """Returns something true for a CSV of another kind than the rows of a sweep."""

    def __call__(self, path: Path) -> object: ...


EXTENSIONS = "hashbench.extensions:EXTENSIONS"
"""Where the table lies."""

MISSING = "hashbench.extensions:MISSING"
"""Where the names of those without a folder lie."""


def _never(_: Any) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Extension:
    """One capability beside the core.

    Attributes:
        name: in lists of extensions.
        asked: whether options ask for it.
        takes: whether a model is of its kind, whatever the options are.
        own_check: target of an :class:`OwnCheck` of the models that it takes.
        check: target of a :class:`Check`.
        stage: target of a :class:`Stage`.
        executor: target of a :class:`MakeExecutor`, by ``name`` after ``--executor``.
        after_sweep: target of an :class:`AfterSweep` of the sweeps for which ``asked_of_sweep`` holds.
        forget: target of a :class:`ForgetModels`, for every sweep.
        facts: target of the :class:`~hashbench.core.records.Facts` of its rows.
        words: target of the :class:`RowWords` of its rows.
        owns_file: target of an :class:`OwnsFile`.
        audit: target of an :class:`~hashbench.core.report.audits.AuditKind`, what an audit of ops may measure.
        remarks: target of :class:`Remarks`.
        kernels: target of :class:`ComparesKernels`.
        diffs: module that is a :class:`DiffsFiles`.
        commands: module whose ``add`` adds subcommands to the command line.
        run_flags: target of a function that adds flags on how each model of a sweep runs.
        sweep_flags: target of a function that adds flags on the sweep.
        audit_flags: target of a function that adds flags on how an audit runs each op.
        numeric_flags: target of a function that adds flags to two groups: what is compared, and how.
        numeric: target of an :class:`AnswersNumeric`.
        folder: of the capability in the package; empty: that of its name among the extensions.
        preload: what the workers of these sweeps import or call before they are forked.
    """

    name: str
    asked: Callable[[RunOptions], bool] = _never
    takes: Callable[[HasRanks], bool] = _never
    own_check: str = ""
    check: str = ""
    stage: str = ""
    executor: str = ""
    asked_of_sweep: Callable[[SweepRequest], bool] = _never
    after_sweep: str = ""
    forget: str = ""
    facts: str = ""
    words: str = ""
    owns_file: str = ""
    audit: str = ""
    remarks: str = ""
    kernels: str = ""
    diffs: str = ""
    commands: str = ""
    run_flags: str = ""
    sweep_flags: str = ""
    audit_flags: str = ""
    numeric_flags: str = ""
    numeric: str = ""
    folder: str = ""
    preload: tuple[str, ...] = ()


def extensions() -> tuple[Extension, ...]:
    """Return the extensions whose folder is there, in the order in which they are asked."""
    found: tuple[Extension, ...] = resolve_name(EXTENSIONS)
    return found


def own_check_of(model: HasRanks) -> OwnCheck | None:
    """Return the check of the extension that takes a model, imported; ``None`` if the core checks it."""
    target = next((each.own_check for each in extensions() if each.own_check and each.takes(model)), "")
    found: OwnCheck | None = resolve_name(target) if target else None
    return found


def check_for(options: RunOptions) -> Check | None:
    """Return the check that options ask for, imported; ``None`` if equal runs are compared."""
    target = next((each.check for each in extensions() if each.check and each.asked(options)), "")
    found: Check | None = resolve_name(target) if target else None
    return found


def stages_for(options: RunOptions) -> Iterator[Stage]:
    """Yield the stages that options ask for, imported one by one."""
    for each in extensions():
        if each.stage and each.asked(options):
            yield resolve_name(each.stage)


def executor_names() -> tuple[str, ...]:
    """Return the names of executors, beside that of this machine's worker processes."""
    return tuple(each.name for each in extensions() if each.executor)


def executor_maker(name: str) -> MakeExecutor:
    """Return what makes the executor of this name, imported."""
    found: MakeExecutor = resolve_name(next(each.executor for each in extensions() if each.name == name))
    return found


def preload_to(name: str) -> tuple[str, ...]:
    """Return what workers preload for the extension of this name."""
    return next(each.preload for each in extensions() if each.name == name)


def preload_of(request: SweepRequest) -> tuple[str, ...]:
    """Return what workers of a sweep preload for extensions."""
    return tuple(target for each in extensions() if each.asked_of_sweep(request) for target in each.preload)


def after_sweep(request: SweepRequest) -> Iterator[AfterSweep]:
    """Yield what a sweep asks for beside its rows, imported one by one."""
    for each in extensions():
        if each.after_sweep and each.asked_of_sweep(request):
            yield resolve_name(each.after_sweep)


def forget_models(outdated: Sequence[ModelSpec], request: SweepRequest) -> None:
    """Delete what extensions recorded of models that run again."""
    for each in extensions():
        if outdated and each.forget:
            resolve_name(each.forget)(outdated, request)


def is_owned(path: Path) -> bool:
    """Return True if a CSV is of an extension, and not of a sweep's rows."""
    return any(resolve_name(each.owns_file)(path) for each in extensions() if each.owns_file)


def audits() -> Iterator[AuditKind]:
    """Yield what an audit of ops may measure of them, beside their determinism."""
    for each in extensions():
        if each.audit:
            yield resolve_name(each.audit)


@functools.cache
def facts_kinds() -> tuple[type[Facts], ...]:
    """Return the facts that rows may have, in the order of their columns."""
    return tuple(resolve_name(each.facts) for each in extensions() if each.facts)


def facts_asked(options: RunOptions) -> tuple[type[Facts], ...]:
    """Return the facts that options ask for, whose columns every row of the sweep has."""
    return tuple(resolve_name(each.facts) for each in extensions() if each.facts and each.asked(options))


def missing_extensions() -> tuple[str, ...]:
    """Return the names of the extensions whose folder was deleted."""
    found: tuple[str, ...] = resolve_name(MISSING)
    return found


def remarks_on(pairs: Sequence[RowPair], *, base: Sequence[Path], new: Sequence[Path]) -> Iterator[str]:
    """Yield what extensions say of the same models in two sweeps; see :class:`Remarks`."""
    for each in extensions():
        if each.remarks:
            yield from resolve_name(each.remarks)(pairs, base=base, new=new)


def kernels_of(
    pairs: Sequence[RowPair], *, base: Sequence[Path], new: Sequence[Path]
) -> dict[tuple[str, ...], KernelSigns]:
    """Return what extensions recorded of the kernels of the same models in two sweeps; see :class:`ComparesKernels`."""
    found: dict[tuple[str, ...], KernelSigns] = {}
    for each in extensions():
        if each.kernels and pairs:
            found |= resolve_name(each.kernels)(pairs, base=base, new=new)
    return found


def kinds_of_diffs() -> Iterator[DiffsFiles]:
    """Yield what compares two files that are no traces, imported one by one."""
    for each in extensions():
        if each.diffs:
            yield resolve_name(each.diffs)


def flags_of(group: str, *names: str) -> Iterator[Callable[..., None]]:
    """Yield what adds flags to the group ``run``, ``sweep``, ``audit`` or ``numeric``, imported.

    ``names``: of the extensions that are asked; none: all.
    """
    for each in extensions():
        if (target := getattr(each, f"{group}_flags")) and (each.name in names or not names):
            yield resolve_name(target)


def answers_of_numeric() -> Iterator[AnswersNumeric]:
    """Yield what answers ``hashbench numeric`` in place of a comparison of models, imported one by one."""
    for each in extensions():
        if each.numeric:
            yield resolve_name(each.numeric)


def commands() -> Iterator[Any]:
    """Yield the modules that add subcommands, imported."""
    for each in extensions():
        if each.commands:
            yield resolve_name(each.commands)


@functools.cache
def all_words() -> tuple[RowWords, ...]:
    """Return the words of every extension that has some."""
    return tuple(resolve_name(each.words) for each in extensions() if each.words)


def words_for(row: Row) -> RowWords | None:
    """Return what describes a row that does not pass; ``None``: as eager runs are described."""
    return next((words for words in all_words() if words.tells(row)), None)


def _first(ask: Callable[[RowWords], str]) -> str:
    """Return what the first extension that has something to say answers; empty if none has."""
    return next(filter(None, map(ask, all_words())), "")


def blamed(row: Row) -> str:
    """Return the kernel to blame, or in the words of an extension what a row without a kernel blames."""
    return row.kernel or _first(lambda words: words.blamed(row))


def mechanism(row: Row) -> str:
    """Return the cause of a difference, or in the words of an extension what explains it."""
    return row.cause or _first(lambda words: words.mechanism(row))


def remedy(row: Row) -> str:
    """Return what an extension advises on a row; empty if the usual words do."""
    return _first(lambda words: words.remedy(row))


def remarks_of(row: Row) -> tuple[str, ...]:
    """Return what extensions say beside the status of a row."""
    return tuple(text for words in all_words() for text in words.remarks(row))


def facts_of(row: Row) -> tuple[tuple[str, str], ...]:
    """Return labels and texts of extensions on a row."""
    return tuple((label, text) for words in all_words() for label, text in words.facts(row) if text)


def condition_of(row: Row) -> str:
    """Return the condition under which alone a row differs; empty for none."""
    return _first(lambda words: words.condition(row))


def shown(row: Row) -> Row:
    """Return a row as reports show it: flaky, where it passes and an extension made it differ."""
    return functools.reduce(lambda known, words: words.shown(known), all_words(), row)


def written(row: Row) -> Row:
    """Return a row as a CSV has it; the inverse of :func:`shown`."""
    return functools.reduce(lambda known, words: words.written(known), all_words(), row)


def rate_of(row: Row) -> str:
    """Return ``33 of 33 replays``, or in the words of an extension how often a row differs."""
    return _first(lambda words: words.rate(row)) or rate(row)


def failure(row: Row, *, folder: Path) -> Finding:
    """Return the report of a row as a failed test shows it. ``folder`` has repro and traces."""
    from hashbench.core.finding.row import row_finding

    own = (words.finding(row, folder=folder) for words in all_words())
    return next(filter(None, own), None) or row_finding(row, folder=folder)
