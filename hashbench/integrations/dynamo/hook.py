"""Wrap the harness's ``check_accuracy``.

A Python that finds a session in its environment watches its imports from the start (``site/sitecustomize.py``), and
the methods of ``class BenchmarkRunner`` in a module called ``common`` are wrapped when its import ends. torch is not
imported from here: that is the harness's. A fault of ours is noted and printed on standard error, and never changes
what the harness finds.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from hashbench.core.processes import describe_end, phases_told_to
from hashbench.integrations.dynamo.session import (
    CANNOT_FOLLOW,
    Note,
    Session,
    after_flags,
    amend_note,
    chosen_model,
    collect,
    name_of,
    rename_note,
    tell,
    write,
    write_note,
)


def attach(module: ModuleType) -> None:
    """Wrap the methods of ``BenchmarkRunner`` in ``module``, if it has that class and this process has a session."""
    session = Session.of(os.environ)
    runner: Any = getattr(module, "BenchmarkRunner", None)
    if session is None or not hasattr(runner, "check_accuracy"):
        return
    name = name_of(chosen_model(sys.argv))
    generators: dict[str, list[int]] = {}
    if name and not _is_worker():
        after_flags(vars(module), lambda: guarded(session, name, lambda: _begin_model(session, name, generators)))
    elif not name and hasattr(module, "subprocess"):
        vars(module)["subprocess"] = _Subprocess(vars(module)["subprocess"], session)
        atexit.register(_complete, session, os.getppid())
        after_flags(vars(module), lambda: guarded(session, "", lambda: _begin_sweep(session)))
    runner.check_accuracy = _checked(runner.check_accuracy, session, vars(module), "ModelCheck", generators)
    if hasattr(runner, "check_batch_invariance"):
        runner.check_batch_invariance = _checked(
            runner.check_batch_invariance, session, vars(module), "BatchModelCheck", generators
        )
    if hasattr(runner, "validate_model"):
        runner.validate_model = _validated(runner.validate_model, session)


def _begin_model(session: Session, name: str, generators: dict[str, list[int]]) -> None:
    """Note that a model begins, and save the states of the global random generators in ``generators``.

    The harness builds a model of a file before it seeds them, so a fresh process needs them to build the same model.
    """
    write_note(session, Note(name, run=session.run))
    if "torch" in sys.modules:
        from hashbench.core.run.rng import random_states, states_to_json

        generators.update(states_to_json(random_states(None, outside_torch=True)))


def _is_worker() -> bool:
    """Return True in a process started by ``multiprocessing``, which has our arguments."""
    return any(word.startswith("from multiprocessing.") for word in sys.orig_argv)


def _begin_sweep(session: Session) -> None:
    """Remove earlier rows if the harness begins anew, and compile the native tracer if models will use it, so that none
    of them waits for that."""
    if session.anew:
        session.prepare(anew=True)
    _ready_tracer(session)


def _ready_tracer(session: Session) -> None:
    """Compile the native tracer if models will use it and it is not there yet, and say so: it takes a minute or two."""
    if session.tracer != "python":
        from hashbench.core.trace.tracer import native_unavailable

        with phases_told_to(tell):
            native_unavailable()


class _Subprocess:
    """The module ``subprocess`` as the harness's sweep uses it; notes how the process of a model ended, which the
    harness prints and writes nowhere."""

    def __init__(self, module: ModuleType, session: Session) -> None:
        self._module, self._session = module, session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def check_call(self, command: Any, *arguments: Any, **named: Any) -> Any:
        """Call the real ``check_call`` and note a failure."""
        try:
            return self._module.check_call(command, *arguments, **named)
        except subprocess.CalledProcessError as error:
            name = name_of(chosen_model([str(word) for word in command])) if isinstance(command, list) else ""
            ended = describe_end(error.returncode)
            if name:
                guarded(self._session, name, lambda: amend_note(self._session, name, ended=ended))
            raise


def _complete(session: Session, parent: int) -> None:
    """Write both tables at the end of a sweep whose ``hashbench`` process is gone."""
    if os.getppid() != parent:
        ended = "its process ended without a row"
        guarded(session, "", lambda: write(session, collect(session, ended=ended)))


def guarded(session: Session, name: str, action: Callable[[], Any]) -> Any:
    """Return the value of ``action``; print and note a fault of it, and return ``None``."""
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


def _checked(
    original: Callable[..., Any],
    session: Session,
    names: dict[str, Any],
    check: str,
    generators: Mapping[str, Sequence[int]],
) -> Callable[..., Any]:
    """Wrap a method of the harness that checks one model by the class ``check`` of ``model_check``.

    ``generators`` are the states of the random generators before the model was built.
    """

    @functools.wraps(original)
    def checked(self: Any, *arguments: Any, **named: Any) -> Any:
        def begin() -> Any:
            from hashbench.integrations.dynamo import model_check

            given = inspect.signature(original).bind(self, *arguments, **named).arguments
            if not given.keys() >= {"name", "model", "example_inputs"}:
                raise TypeError(f"{CANNOT_FOLLOW}: {original.__name__} is not given a name, a model and example_inputs")
            rename_note(session, chosen, given["name"])
            case = model_check.HarnessModel.begun(
                session,
                self,
                names,
                name=given["name"],
                model=given["model"],
                inputs=given["example_inputs"],
                optimize_ctx=given.get("optimize_ctx"),
                generators=generators,
            )
            _ready_tracer(session)
            return getattr(model_check, check)(case)

        chosen = name_of(chosen_model(sys.argv))
        ours = guarded(session, chosen, begin)
        if ours is None:
            return original(self, *arguments, **named)
        with ours.watched():
            status = original(self, *arguments, **named)
        guarded(session, ours.case.spec.name, lambda: ours.conclude(str(status)))
        return status

    return checked


def _validated(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Wrap ``validate_model`` to note why a model failed: the harness swallows the exception and writes
    ``eager_fail_to_run``."""

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
    from hashbench.core.run.outcome import failure_of

    failure = failure_of(cause)
    amend_note(session, name, failure=failure.error[:2000], nondeterministic_op=failure.nondeterministic_op)
