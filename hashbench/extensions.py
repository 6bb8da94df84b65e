"""What extends the core: one entry for each capability.

The core asks this table and imports no capability. A target is written ``module:name`` and imported when it is used, so
that ``--help`` loads none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from hashbench.check.model import BenchmarkRunner
    from hashbench.check.pair import PairCheck
    from hashbench.check.subject import Subject
    from hashbench.records import ModelSpec, Row, RunOptions
    from hashbench.run.outcome import Outcome, Run
    from hashbench.run.workload import Workload
    from hashbench.sweep.executors import Executor
    from hashbench.sweep.request import SweepRequest
    from hashbench.sweep.run import SweepResult


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
    :data:`hashbench.sweep.EXECUTORS`."""

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


class RowWords(Protocol):
    """Describes rows of a kind of its own, in tables and comparisons; a module can be one."""

    def tells(self, row: Row) -> bool:
        """Return True if a row that does not pass is described by the words below, and not as eager runs are."""

    def where(self, row: Row) -> str:
        """Return the place of a difference, on a line of its own."""

    def why(self, row: Row) -> str:
        """Return what was measured, below a row whose stage is shown."""

    def why_with_stage(self, row: Row) -> str:
        """Return what was measured, with the stage."""

    def place(self, row: Row) -> str:
        """Return stage and place as comparisons show them."""

    def remarks(self, row: Row) -> Iterator[str]:
        """Yield what a row that passes says beside its status."""

    def remedy(self, row: Row) -> str:
        """Return what to do about a difference or failure; empty if the usual words do."""

    def speaks_of(self, row: Row) -> bool:
        """Return True if :meth:`what_passing_means` is asked about a row that passes."""

    def what_passing_means(self, passing: Sequence[Row], *, bound: float) -> str:
        """Return what these rows prove and may have missed; empty for none. ``bound``: largest share of runs in which
        a difference may show that two equal runs miss (95 % confidence)."""


class OwnsFile(Protocol):
    """Returns something true for a CSV of another kind than the rows of a sweep."""

    def __call__(self, path: Path) -> object: ...


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
        words: module that is the :class:`RowWords` of its rows.
        owns_file: target of an :class:`OwnsFile`.
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
    words: str = ""
    owns_file: str = ""
    preload: tuple[str, ...] = ()


EXTENSIONS: tuple[Extension, ...] = (
    Extension(
        "ranks",
        takes=lambda model: (model.world_size or 1) > 1,
        own_check="hashbench.check.ranks:check_model",
    ),
    Extension(
        "invariance",
        asked=lambda options: options.batch_invariant,
        check="hashbench.check.invariance:check_model",
    ),
    Extension(
        "compiled",
        asked=lambda options: bool(options.backend),
        check="hashbench.check.compiled:check_model",
        words="hashbench.compiled.text",
    ),
    Extension("stress", asked=lambda options: options.stress, stage="hashbench.check.stress:add_stressed_runs"),
    Extension(
        "fingerprint",
        asked_of_sweep=lambda request: request.fingerprints,
        after_sweep="hashbench.sweep.fingerprints:record_missing",
        forget="hashbench.sweep.fingerprints:remove",
        preload=("hashbench.fingerprint.library:measure_clock",),  # spares each worker up to a second
    ),
    Extension("ray", executor="hashbench.sweep.executors.ray:connected"),
    Extension("audit", owns_file="hashbench.results.invariance_table:audit_kind"),
)
"""In the order in which they are asked: the first check that applies is the one that runs."""


def own_check_of(model: HasRanks) -> OwnCheck | None:
    """Return the check of the extension that takes a model, imported; ``None`` if the core checks it."""
    target = next((each.own_check for each in EXTENSIONS if each.own_check and each.takes(model)), "")
    found: OwnCheck | None = resolve_name(target) if target else None
    return found


def check_for(options: RunOptions) -> Check | None:
    """Return the check that options ask for, imported; ``None`` if equal runs are compared."""
    target = next((each.check for each in EXTENSIONS if each.check and each.asked(options)), "")
    found: Check | None = resolve_name(target) if target else None
    return found


def stages_for(options: RunOptions) -> Iterator[Stage]:
    """Yield the stages that options ask for, imported one by one."""
    for each in EXTENSIONS:
        if each.stage and each.asked(options):
            yield resolve_name(each.stage)


def executor_names() -> tuple[str, ...]:
    """Return the names of executors, beside that of this machine's worker processes."""
    return tuple(each.name for each in EXTENSIONS if each.executor)


def executor_maker(name: str) -> MakeExecutor:
    """Return what makes the executor of this name, imported."""
    found: MakeExecutor = resolve_name(next(each.executor for each in EXTENSIONS if each.name == name))
    return found


def preload_to(name: str) -> tuple[str, ...]:
    """Return what workers preload for the extension of this name."""
    return next(each.preload for each in EXTENSIONS if each.name == name)


def preload_of(request: SweepRequest) -> tuple[str, ...]:
    """Return what workers of a sweep preload for extensions."""
    return tuple(target for each in EXTENSIONS if each.asked_of_sweep(request) for target in each.preload)


def after_sweep(request: SweepRequest) -> Iterator[AfterSweep]:
    """Yield what a sweep asks for beside its rows, imported one by one."""
    for each in EXTENSIONS:
        if each.after_sweep and each.asked_of_sweep(request):
            yield resolve_name(each.after_sweep)


def forget_models(outdated: Sequence[ModelSpec], request: SweepRequest) -> None:
    """Delete what extensions recorded of models that run again."""
    for each in EXTENSIONS:
        if outdated and each.forget:
            resolve_name(each.forget)(outdated, request)


def is_owned(path: Path) -> bool:
    """Return True if a CSV is of an extension, and not of a sweep's rows."""
    return any(resolve_name(each.owns_file)(path) for each in EXTENSIONS if each.owns_file)


def all_words() -> Iterator[RowWords]:
    """Yield the words of every extension that has some, imported."""
    for each in EXTENSIONS:
        if each.words:
            yield resolve_name(each.words)


def words_for(row: Row) -> RowWords | None:
    """Return what describes a row that does not pass; ``None``: as eager runs are described."""
    return next((words for words in all_words() if words.tells(row)), None)
