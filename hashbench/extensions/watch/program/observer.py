"""Record a program in this process: the step recorder traces some steps, and ``watch`` writes digests of all.

Models are those that the program calls; an optimizer's parameters that are in none of them are watched as its own.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count as counting
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hashbench.core.run.recorder import StepRecorder, told_of_termination
from hashbench.core.text import ending
from hashbench.extensions.watch.program.task import ProgramEnd, ProgramTask
from hashbench.extensions.watch.recorder import Watch, has_closure
from hashbench.extensions.watch.steps import Watched

if TYPE_CHECKING:
    from hashbench.extensions.watch.program.capture import ProgramCapture

EVERY = 16
"""In how many steps each tensor is read once."""

_LOOK_SECONDS = 0.02
"""How often the number of records is looked at."""

_MOST_PRINTS = 100_000
"""Steps of which it is kept how much was printed before them."""


class ProgramObserver:
    """Recording of a program in this process, from :meth:`following` until :meth:`end`."""

    def __init__(self, task: ProgramTask) -> None:
        self._task, self._process = task, os.getpid()
        self._capture = _capture_of(task)
        self._recorder: StepRecorder | None = None
        self._bound: _Bound | None = None
        self._watch: ProgramWatch | None = None

    @contextmanager
    def following(self) -> Iterator[ProgramObserver]:
        """Record what the program does from now on."""
        task, folder = self._task, Path(self._task.folder)
        with ExitStack() as stack:
            if task.first < task.stop:
                steps = range(task.first, task.stop)
                self._recorder = recorder = StepRecorder(
                    folder, None, steps, source_lines=True, capture=self._capture, each=True
                )
                recorder.start()
                self._bound = _Bound(recorder, task.most)
                stack.enter_context(told_of_termination(recorder))
            if task.watched:
                self._watch = ProgramWatch(folder, self._recorder)
                self._watch.start()
            yield self

    def end(self, error: BaseException | None) -> ProgramEnd:
        """End, and return what is known of the run."""
        recorder, watch, bound = self._recorder, self._watch, self._bound
        if bound is not None:
            bound.stop()
        if recorder is not None:
            recorder.end(ending(error))
        if watch is not None:
            watch.stop(error)
        if self._capture is not None:
            self._capture.write()
        return ProgramEnd(
            ending(error),
            torch=True,
            steps=0 if watch is None else watch.steps,
            bounded=bound is not None and bound.reached,
            prints=() if watch is None else tuple(watch.prints),
        )


def _capture_of(task: ProgramTask) -> ProgramCapture | None:
    if not task.capture:
        return None
    from hashbench.extensions.watch.program.capture import ProgramCapture  # which imports all experiments

    return ProgramCapture(task.capture, Path(task.folder))


class ProgramWatch(Watch):
    """Watches the models of a program that names none, as its optimizers step.

    Attributes:
        steps: number of steps so far.
        prints: step and number of bytes printed before it began.
    """

    def __init__(self, folder: Path, recorder: StepRecorder | None) -> None:
        self._models: dict[str, torch.nn.Module] = {}
        super().__init__(folder, Watched(self._models, [], None, {}, EVERY, None, range(0)))
        self._recorder = recorder
        self._held: set[int] = set()  # ids of parameters that are watched
        self._numbers = counting()
        self._late: torch.optim.Optimizer | None = None
        self.steps = 0
        self.prints: list[tuple[int, int]] = []

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], counts: bool
    ) -> None:
        if counts and self._is_new(optimizer):
            if has_closure(args, kwargs):  # which calls the models, perhaps for the first time
                self._late = optimizer
                return
            self._guarded("models", self._find_models, optimizer)
        super()._before_step(optimizer, args, kwargs, counts)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._late is optimizer:
            self._late = None
            self._guarded("models", self._find_models, optimizer)
            super()._before_step(optimizer, args, kwargs, True)
        super()._after_step(optimizer, args, kwargs)
        self._guarded("printed output", self._count_step)

    def _count_step(self, _: Any) -> None:
        self.steps += 1
        with suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
            printed = os.fstat(1).st_size
            if len(self.prints) < _MOST_PRINTS and (not self.prints or self.prints[-1][1] != printed):
                self.prints.append((self.steps, printed))

    def _is_new(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(parameter) not in self._held for parameter in _parameters(optimizer))

    def _find_models(self, _: Any, optimizer: torch.optim.Optimizer) -> None:
        """Watch what holds the optimizer's parameters, if it is not watched yet."""
        held = _parameters(optimizer)
        roots = {} if self._recorder is None else self._recorder.roots()
        for name, model in roots.items():
            own = {id(parameter) for parameter in model.parameters()}
            if name not in self._models and not own.isdisjoint(map(id, held)):
                self.add(name, model)
                self._held |= own
        alone = [parameter for parameter in held if id(parameter) not in self._held]
        if alone:
            self.add(f"optimizer{next(self._numbers)}", _Leaves(alone))
            self._held |= set(map(id, alone))


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class _Leaves(torch.nn.Module):
    """Holds parameters of an optimizer that are in no module which the program called."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        for number, tensor in enumerate(tensors):
            self._parameters[f"parameter{number}"] = tensor  # type: ignore[assignment]


class _Bound:
    """Ends a trace that has too many records. A thread looks; the program's own ends it, between two instructions."""

    def __init__(self, recorder: StepRecorder, most: int) -> None:
        self.reached = False
        self._recorder, self._most = recorder, most
        self._done, self._process = threading.Event(), os.getpid()
        self._call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._end)
        if most and threading.current_thread() is threading.main_thread():
            threading.Thread(target=self._look, name="hashbench bound", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._done.set()

    def _look(self) -> None:
        while not self._done.wait(_LOOK_SECONDS):
            if self._recorder.records >= self._most:
                ctypes.pythonapi.Py_AddPendingCall(self._call, None)
                return

    def _end(self, _: Any) -> int:
        if not self._done.is_set() and os.getpid() == self._process:
            self.reached = self._recorder.end_early()
        return 0
