"""Run a program in this fresh process, recorded. The target of :mod:`~hashbench.extensions.watch.program.launch`.

Nothing of torch is imported before the program does: it may set variables that torch reads at import.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hashbench.core.io import from_json, read_json, replace_file, to_json
from hashbench.core.run.script import run_as_main
from hashbench.core.text import ending
from hashbench.extensions.watch.program.task import END, FIXED_NAME, FIXED_PROCESS, TASK, ProgramEnd, ProgramTask

if TYPE_CHECKING:
    from hashbench.extensions.watch.program.observer import ProgramObserver


def run(folder: str) -> int:
    """Run the program of the task in ``folder``, and return its exit code."""
    task = from_json(ProgramTask, read_json(Path(folder, TASK)))
    program, observed = task.program, _Observed(task)
    error: BaseException | None = None
    with ExitStack() as stack:
        if task.clocks:
            stack.enter_context(_fixed(task.clocks))
        if program.seed is not None or task.clocks:
            observed.begin()
        if program.seed is not None:
            _seed(program.seed)
        if not observed.began:
            sys.meta_path.insert(0, _OnTorch(observed.begin))
        try:
            run_as_main(program.script, program.arguments, module=program.module)
        except BaseException as raised:
            error = raised
        observed.end(error)
    return _exit_code(error)


def _seed(seed: int) -> None:
    from hashbench.core.run.rng import reset_rng_state

    reset_rng_state(seed)


class _Observed:
    """The recording of this process, which begins once torch is imported."""

    def __init__(self, task: ProgramTask) -> None:
        self._task, self._process = task, os.getpid()
        self._stack = ExitStack()
        self._observer: ProgramObserver | None = None
        self.began = False

    def begin(self) -> None:
        """Begin to record."""
        self.began = True
        if self._task.first == self._task.stop and not self._task.watched:
            return
        from hashbench.extensions.watch.program.observer import ProgramObserver

        self._observer = self._stack.enter_context(ProgramObserver(self._task).following())

    def end(self, error: BaseException | None) -> None:
        """End, and write how the program ended."""
        if os.getpid() != self._process:
            return
        end = ProgramEnd(ending(error), "torch" in sys.modules)
        if self._observer is not None:
            end = self._observer.end(error)
        self._stack.close()
        replace_file(Path(self._task.folder, END), json.dumps(to_json(end)))


class _OnTorch:
    """Finder that calls a function once torch is imported, and finds nothing itself."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        """Return the spec of torch, whose loader then calls the function."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self._call()

        loader.exec_module = exec_module
        return spec


@contextmanager
def _fixed(clocks: Mapping[str, int]) -> Iterator[None]:
    """Give the program clocks that advance per call, one process number, and fixed names of temporary files."""
    import tempfile
    import uuid

    from hashbench.core.diagnose.replay.controls import ticking_clocks
    from hashbench.core.diagnose.replay.controls.system import builtin_answering, sees_real_time

    numbers = iter(range(1, sys.maxsize))

    names = (f"{FIXED_NAME}{number:03}" for number in numbers)
    before, tempfile._name_sequence = tempfile._name_sequence, names  # type: ignore[attr-defined]
    with (
        ticking_clocks(clocks),
        builtin_answering(os.getpid, lambda: FIXED_PROCESS, is_spared=sees_real_time),
        builtin_answering(
            os.urandom,
            lambda size: next(numbers).to_bytes(size, "little"),
            is_spared=lambda frame: frame.f_globals.get("__name__") != uuid.__name__,
        ),
    ):
        try:
            yield
        finally:
            tempfile._name_sequence = before  # type: ignore[attr-defined]


def _exit_code(error: BaseException | None) -> int:
    """Return the exit code as of Python, which is told an exception."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    sys.excepthook(type(error), error, _of_the_program(error.__traceback__))
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _of_the_program(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that called the program."""
    found = trace
    while found is not None and found.tb_frame.f_globals.get("__name__") in _CALLERS:
        found = found.tb_next
    return found or trace


_CALLERS = (__name__, "hashbench.core.run.script", "runpy")
