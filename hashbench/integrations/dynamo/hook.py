"""Import hook that wraps the harness's ``check_accuracy``.

A Python that finds a session in its environment loads this module at start-up (``site/sitecustomize.py``), and
whichever module called ``common`` brings a ``class BenchmarkRunner`` gets its methods wrapped when its import ends.
torch is not imported from here: that is the harness's. A fault of ours is noted and told on standard error, and never
changes what the harness finds.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from hashbench.integrations.dynamo.session import (
    VARIABLE,
    Note,
    Session,
    amend_note,
    chosen_model,
    tell,
    write_note,
)
from hashbench.records import Failure, ModelSpec, RunOptions, Trace

OnImport = Callable[[ModuleType], None]


def watch_for_harness(on_import: OnImport) -> None:
    """Call ``on_import`` with every module called ``common`` once it is imported."""
    sys.meta_path.insert(0, _Finder(on_import))


def attach(module: ModuleType) -> None:
    """Wrap the methods of ``BenchmarkRunner`` in ``module``, where it has that class and this process has a session."""
    session = Session.of(os.environ)
    runner: Any = getattr(module, "BenchmarkRunner", None)
    if session is None or not hasattr(runner, "check_accuracy"):
        return
    name = chosen_model(sys.argv)
    if name:
        guarded(session, name, lambda: write_note(session, Note(name)))
    runner.check_accuracy = _checked(runner.check_accuracy, session)
    if hasattr(runner, "validate_model"):
        runner.validate_model = _validated(runner.validate_model, session)


def guarded(session: Session, name: str, action: Callable[[], Any]) -> Any:
    """What ``action`` returns; a fault of it is told and noted, and ``None`` returned."""
    try:
        return action()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        tell(f"{name}: {problem}")
        try:
            amend_note(session, name, problem=problem[:500])
        except OSError as unwritten:
            tell(f"{name}: cannot write to {session.folder}: {unwritten}")
        return None


def _checked(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    @functools.wraps(original)
    def check_accuracy(self: Any, name: str, model: Any, example_inputs: Any, *rest: Any, **named: Any) -> Any:
        def begin() -> Any:
            from hashbench.integrations.dynamo.model_check import ModelCheck

            return ModelCheck(session, self, original.__globals__, name=name, model=model, inputs=example_inputs)

        check = guarded(session, name, begin)
        if check is None:
            return original(self, name, model, example_inputs, *rest, **named)
        with check.eager.watched():
            status = original(self, name, model, example_inputs, *rest, **named)
        guarded(session, name, lambda: check.conclude(str(status)))
        return status

    return check_accuracy


def _validated(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """The harness swallows why a model could not be run once, and writes ``eager_fail_to_run``."""

    @functools.wraps(original)
    def validate_model(self: Any, name: str, *rest: Any, **named: Any) -> Any:
        try:
            return original(self, name, *rest, **named)
        except Exception as error:
            cause = error.__cause__ or error
            guarded(session, name, lambda: _note_failure(session, name, cause))
            raise

    return validate_model


def _note_failure(session: Session, name: str, cause: Any) -> None:
    from hashbench.run.outcome import failure_of

    failure = failure_of(cause)
    amend_note(session, name, failure=failure.error[:2000], nondeterministic_op=failure.nondeterministic_op)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: it asks the other finders, and has the loader of a ``common`` tell when it is done."""

    def __init__(self, on_import: OnImport) -> None:
        self._on_import = on_import

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.rpartition(".")[2] != "common":
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._announce(spec.loader)
        return spec

    def _announce(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            self._on_import(module)

        try:
            loader.exec_module = exec_module
        except AttributeError:  # a loader of somebody's own that takes no attributes: no harness comes from there
            tell(f"cannot look into what {type(loader).__name__} loads")


# -------------------------------------------------------------------------------------------------- a fresh process


class FreshHarness:
    """Builds a model by running the harness; see :class:`hashbench.check.model.BenchmarkRunner`.

    The target of :func:`hashbench.diagnose.fresh_process.fresh_traces`. The harness runs as always up to its
    ``check_accuracy``; there the traced runs are made and everything ends. Its output goes to a folder that is thrown
    away.
    """

    def __init__(self, options: RunOptions) -> None:
        self.options = options

    def traces_of(self, spec: ModelSpec, *, level: str, runs: int) -> list[Trace | Failure]:  # noqa: ARG002
        """``runs`` traced runs of the model. ``level`` is what the harness has set, and it sets it again."""
        os.environ.pop(VARIABLE, None)
        watch_for_harness(lambda module: _replace_check(module, self.options, runs))
        asked = spec.arguments
        with tempfile.TemporaryDirectory(prefix="hashbench-") as folder:
            flags = [*asked["arguments"], f"--only={asked['only']}", f"--output={folder}/unused.csv"]
            sys.argv = [asked["script"], *flags]
            sys.path.insert(0, str(Path(asked["script"]).parent))
            try:
                runpy.run_path(asked["script"], run_name="__main__")
            except _Done as done:
                return done.traces
        return [Failure("the harness did not get as far as its accuracy check")]


class _Done(BaseException):
    """Leaves the harness; no ``except Exception`` of it catches this."""

    def __init__(self, traces: list[Trace | Failure]) -> None:
        super().__init__()
        self.traces = traces


def _replace_check(module: ModuleType, options: RunOptions, runs: int) -> None:
    runner = getattr(module, "BenchmarkRunner", None)
    if runner is None:
        return
    from hashbench.integrations.dynamo.model_check import harness_attempt
    from hashbench.run.outcome import traces_of
    from hashbench.run.settings import claim_workspace

    def check_accuracy(self: Any, name: str, model: Any, example_inputs: Any, *_: Any, **__: Any) -> NoReturn:
        claim_workspace(options.device)
        with self.pick_grad(name, self.args.training):
            model, inputs = self.maybe_cast(model, example_inputs)
            raise _Done(traces_of(harness_attempt(self, vars(module), model, inputs, options), runs=runs))

    runner.check_accuracy = check_accuracy
