"""What extends the core: one entry for each capability.

The core asks this table and imports no capability. A target is written ``module:name`` and imported when it is used, so
that ``--help`` loads none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hashbench.check.model import BenchmarkRunner
    from hashbench.check.pair import PairCheck
    from hashbench.check.subject import Subject
    from hashbench.records import ModelSpec, RunOptions
    from hashbench.run.outcome import Outcome, Run
    from hashbench.run.workload import Workload


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
    """

    name: str
    asked: Callable[[RunOptions], bool] = _never
    takes: Callable[[HasRanks], bool] = _never
    own_check: str = ""
    check: str = ""
    stage: str = ""


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
    Extension("compiled", asked=lambda options: bool(options.backend), check="hashbench.check.compiled:check_model"),
    Extension("stress", asked=lambda options: options.stress, stage="hashbench.check.stress:add_stressed_runs"),
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
