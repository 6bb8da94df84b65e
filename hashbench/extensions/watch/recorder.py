"""``hashbench.watch``: write a line of digests for each step of a training loop.

::

    with hashbench.watch("runs/a", model=model, optimizer=optimizer):
        for batch in loader:
            …

Hooks on the model and on optimizers do it; the loop stays as it is.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from hashbench.core.errors import HashbenchError
from hashbench.core.text import ending
from hashbench.extensions.watch.calls import SeenCalls
from hashbench.extensions.watch.steps import RecordedSteps, Watched
from hashbench.extensions.watch.tracing import steps_to_trace

FOLDER_VARIABLE = "HASHBENCH_WATCH"
"""Environment variable with the folder of the recording, in place of the program's."""

EVERY_VARIABLE = "HASHBENCH_WATCH_EVERY"
"""Environment variable with ``every``, in place of the program's."""

STOP_VARIABLE = "HASHBENCH_STOP_AT"
"""Environment variable with a step before which the program is ended, as by its machine: for ``watch resume``."""

_OTHER_FOLDER = f"Give another folder, or set {FOLDER_VARIABLE} in the environment."


def watch(
    folder: str | Path,
    *,
    model: torch.nn.Module | Mapping[str, torch.nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    scaler: Any = None,
    generators: Mapping[str, Any] | None = None,
    every: int = 16,
    start: int | None = None,
    trace: range | Sequence[int] | int | None = None,
) -> Watch:
    """Return a context manager that writes a line of digests for each optimizer step into ``folder/rankN.jsonl``.

    Args:
        folder: created if needed; ``HASHBENCH_WATCH`` in the environment precedes it. One recording each: an existing
            one is never overwritten.
        model: the model that the loop calls, or several by name.
        optimizer: its optimizers, of which the state before the first step is read. Any that steps parameters of the
            model is recorded, once it does.
        scaler: a ``GradScaler``, whose state is read in each step.
        generators: random generators of the program itself (a ``DataLoader``'s) by name, beside the global ones.
        every: each parameter, its gradient and its optimizer state is sampled every N steps, round-robin; 1: in each.
        start: number of the first step, in a program that goes on from a checkpoint.
        trace: steps to trace as well (``range(299, 302)``); ``HASHBENCH_TRACE_STEP`` in the environment precedes it.

    Raises:
        HashbenchError: an argument is out of range; or, on entering, the folder holds a recording of this rank or
            cannot be written.
    """
    every = _every(every)
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
    path = Path(os.environ.get(FOLDER_VARIABLE) or folder)
    watched = Watched(models, given, scaler, generators or {}, every, start, steps_to_trace(trace))
    return Watch(path, watched)


def _every(given: int) -> int:
    text = os.environ.get(EVERY_VARIABLE, "") or str(given)
    if not (text.isdecimal() and int(text) > 0):
        raise HashbenchError(f"every must be >= 1, got {text}", consequence="nothing is recorded")
    return int(text)


class Watch:
    """Recording of a training loop, between ``__enter__`` and ``__exit__``. Made by :func:`watch`.

    ``start()`` and ``stop()`` are the same for callbacks of trainers. A copy of one, as of a trainer that holds it,
    records nothing.
    """

    def __init__(self, folder: Path, watched: Watched | None = None) -> None:
        self.folder = folder
        self._watched = watched
        self._stop_at = int(os.environ.get(STOP_VARIABLE) or -1)
        self._steps: RecordedSteps | None = None
        self._lock, self._process = threading.RLock(), os.getpid()
        self._handles: list[Any] = []

    def __reduce__(self) -> tuple[type[Watch], tuple[Path]]:
        return Watch, (self.folder,)

    # ------------------------------------------------------------------------------------------------- begin and end

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        self.stop(error)

    def start(self) -> None:
        """Create the file, and install the hooks.

        Raises:
            HashbenchError: the folder holds a recording of this rank, or cannot be written.
        """
        if self._watched is None:
            return
        self._process = os.getpid()
        self._steps = RecordedSteps(self._watched, self.folder, tip=_OTHER_FOLDER)
        self.install()

    def stop(self, error: BaseException | None = None) -> None:
        """Remove the hooks, and write the last line: how the run ended."""
        steps = self._steps
        if steps is None:
            return
        self.remove()
        self._guarded("trace", lambda steps: steps.tracer.end())
        if steps.clock.is_compiled:
            steps.failed("steps of an optimizer", "its step is compiled")
        self._guarded("state at the end", RecordedSteps.read_final)
        self._guarded("end", lambda steps: steps.lines.close({"ended": ending(error), "missed": []}))
        self._steps = None

    def install(self) -> None:
        """Install the hooks: steps are recorded from now on."""
        if self._watched is None or self._steps is None:
            return
        for model in self._watched.models.values():
            self._guarded("calls of the model", self._listen_to, model)
        self._steps.clock.install(self._before_step, self._after_step)
        self._handles += self._steps.clock, _BackwardHook(self._before_backward)

    def add(self, name: str, model: torch.nn.Module) -> None:
        """Watch another model from now on; :func:`watch` was given a dictionary of them, to which it is added."""
        if self._watched is not None and isinstance(self._watched.models, dict):
            self._watched.models[name] = model
            self._guarded("calls of the model", self._listen_to, model)

    def _listen_to(self, _: RecordedSteps, model: torch.nn.Module) -> None:
        self._handles.append(SeenCalls(model, self._called))

    def remove(self) -> None:
        """Remove the hooks: steps are not recorded, nor counted, until they are installed again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # --------------------------------------------------------------------------------------------------------- hooks

    def batch(self, value: Any) -> None:
        """Tell the batch that the program trains on now, where it does not call the model itself."""
        self._guarded("batch", self._seen, value)

    def _called(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._guarded("trace", lambda steps: steps.tracer.leave(steps.step))
        if model.training and torch.is_grad_enabled():
            self._guarded("batch", self._seen, (*args, kwargs) if kwargs else args)

    def _seen(self, steps: RecordedSteps, value: Any) -> None:
        """Read a batch, if none was since the last optimizer step or backward pass."""
        if not steps.begins_with_a_batch():
            return
        if steps.step == self._stop_at:
            self.stop()
            raise SystemExit(0)
        steps.read_batch(value)

    def _before_backward(self, roots: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # else it is within another one, of a reentrant checkpoint
            self._guarded("loss", RecordedSteps.read_loss, roots)

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], counts: bool
    ) -> None:
        if counts:
            gradients = not has_closure(args, kwargs)
            self._guarded("optimizer", RecordedSteps.read_before_step, optimizer, with_gradients=gradients)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        gradients = has_closure(args, kwargs)
        self._guarded("optimizer", RecordedSteps.read_after_step, optimizer, with_gradients=gradients)

    def _guarded(self, what: str, read: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Read something for the recording; where that raises, the recording says so, and the program goes on.

        Threads of the program take turns. A fork of it, which may have left one of them behind, reads nothing.
        """
        steps = self._steps
        if steps is None or os.getpid() != self._process:
            return
        with self._lock:
            steps.trying(what, read, steps, *args, **kwargs)


class _BackwardHook:
    """Replacement of ``torch.autograd.backward``, which ``Tensor.backward`` calls: it tells the roots first."""

    def __init__(self, on_backward: Callable[[Any], None]) -> None:
        self._original = original = torch.autograd.backward

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._active and not torch.compiler.is_compiling():
                on_backward(tensors)
            original(tensors, *args, **kwargs)

        self._ours, self._active = backward, True
        torch.autograd.backward = backward

    def remove(self) -> None:
        """Put torch's function back, unless another one stands there now, which may call this one."""
        self._active = False
        if torch.autograd.backward is self._ours:
            torch.autograd.backward = self._original


def has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call of ``optimizer.step`` computes the gradients itself, as Lightning's do."""
    return any(callable(each) for each in (*args[1:], *kwargs.values()))
