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
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hashbench import __version__
from hashbench.errors import HashbenchError
from hashbench.trace.groups import rank_of
from hashbench.training import file, parts
from hashbench.training.calls import SeenCalls
from hashbench.training.lines import WaitingLines
from hashbench.training.optimizers import WatchedOptimizer, WatchedOptimizers
from hashbench.training.rotation import Rotation
from hashbench.training.samples import Samples
from hashbench.training.schedulers import WatchedSchedulers
from hashbench.training.tensors import ModelTensors, unwrapped
from hashbench.training.tracing import StepTracer, steps_to_trace

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
        every: each parameter, its gradient and its optimizer state is read once in so many steps, in turn; 1: in each.
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
    return Watch(
        path,
        models,
        optimizers=given,
        scaler=scaler,
        generators=generators or {},
        every=every,
        start=start,
        traced=steps_to_trace(trace),
    )


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

    def __init__(
        self,
        folder: Path,
        models: Mapping[str, torch.nn.Module],
        *,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: Any,
        generators: Mapping[str, Any],
        every: int,
        start: int | None,
        traced: range,
    ) -> None:
        self.folder = folder
        self._models, self._scaler, self._generators = models, scaler, parts.WatchedGenerators(generators)
        self._optimizers = WatchedOptimizers(optimizers)
        self._every, self._told_start, self._traced = every, start, traced
        self._step = start or 0
        self._stop_at = int(os.environ.get(STOP_VARIABLE) or -1)
        self._lines: WaitingLines | None = None
        self._lock, self._process = threading.RLock(), os.getpid()
        self._handles: list[Any] = []

    def __reduce__(self) -> tuple[type[_Unwatched], tuple[Path]]:
        return _Unwatched, (self.folder,)

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
        self._process = os.getpid()
        self._rank, self._world = rank_of(os.environ) or (0, 1)
        self._lines = WaitingLines.create(self.folder / f"rank{self._rank}.jsonl", tip=_OTHER_FOLDER)
        self._tensors = ModelTensors(self._models)
        self._tracer = StepTracer(self._traced, self.folder, self._rank, self._open.reader.failed)
        self._begun = self._compiled_step = False
        self._named = 0, 0
        self._options: dict[str, str] = {}
        self._schedulers = WatchedSchedulers()
        self._fixed: tuple[Any, list[Any] | None] = (None, None)
        self._trains = threading.local()  # in which threads: others have losses of their own
        self._seen_training = False
        self._fresh = True  # the next call of a model begins a micro-batch
        self._begin_step()
        self.install()

    def stop(self, error: BaseException | None = None) -> None:
        """Remove the hooks, and write the last line: how the run ended."""
        if self._lines is None:
            return
        self.remove()
        self._guarded("model", self._begin)
        self._guarded("trace", self._tracer.end)
        if self._compiled_step:
            self._reader.failed("steps of an optimizer", "its step is compiled")
        self._guarded("state at the end", self._read_final)
        self._lines.close({"ended": _end_of(error), "missed": []})
        self._lines = None

    def install(self) -> None:
        """Install the hooks: steps are recorded from now on."""
        for model in self._models.values():
            self._guarded(
                "calls of the model", lambda model=model: self._handles.append(SeenCalls(model, self._called))
            )
        self._handles.append(register_optimizer_step_pre_hook(self._before_step))
        self._handles.append(register_optimizer_step_post_hook(self._after_step))
        self._handles.append(_BackwardHook(self._before_backward))

    def remove(self) -> None:
        """Remove the hooks: steps are not recorded, nor counted, until they are installed again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self) -> None:
        """Name the tensors and write the header: when the first step begins, the model is what it will be."""
        if self._begun:
            return
        self._begun = True
        self._look_up()
        models = {name: unwrapped(model) for name, model in self._models.items()}
        self._tracer.model = models[""] if list(models) == [""] else torch.nn.ModuleDict(models)
        header = {
            "schema": file.SCHEMA,
            "rank": self._rank,
            "world_size": self._world,
            "start": self._told_start,
            "every": self._every,
            "traced": [self._traced.start, self._traced.stop] if self._traced else [],
        }
        self._open.write("header", header | _described(models.values(), self._tensors) | _program())
        self._named = len(self._tensors.parameters.names), len(self._tensors.buffers.names)

    def _look_up(self) -> None:
        """Look the tensors up, and divide them among the steps anew where they are others."""
        if self._tensors.look_up():
            self._parameters = Rotation.of(list(self._tensors.parameters.sizes()), every=self._every)
            self._buffers = Rotation.of(list(self._tensors.buffers.sizes()), every=self._every)

    def _begin_step(self) -> None:
        self._batches: list[parts.Reading] = []
        self._samples: list[Samples] = []
        self._losses: list[tuple[bool, parts.Reading, torch.Tensor | None]] = []
        self._parts: dict[str, Any] = {}

    # --------------------------------------------------------------------------------------------------------- hooks

    def batch(self, value: Any) -> None:
        """Tell the batch that the program trains on now, where it does not call the model itself."""
        if self._lines is not None:
            self._guarded("batch", self._seen, value)

    def _called(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._tracer.active:
            self._guarded("trace", self._tracer.begin, self._step, None)
        if model.training and torch.is_grad_enabled():
            self._guarded("batch", self._seen, (*args, kwargs) if kwargs else args)

    def _seen(self, value: Any) -> None:
        """Read a batch, if none was since the last optimizer step or backward pass."""
        self._trains.here = self._seen_training = True
        if not self._fresh:
            return
        self._fresh = False
        if self._step == self._stop_at:
            self.stop()
            raise SystemExit(0)
        with parts.quiet():
            inside = _in_a_transform()  # then the model may hold wrappers of its parameters
            if not (inside or self._begun):
                self._look_up()
                if not self._tensors.are_swapped:
                    self._begin_recording()
            if not self._batches:
                self._parts["generator"] = self._generators.digests(self._reader.failed)
                if self._scaler is not None:
                    self._guarded("scaler", self._read_scaler)
                if self._every == 1 and self._step > (self._told_start or 0) and not inside:
                    self._guarded("state that a step begins with", self._read_begin)
            batch, samples = self._reader.batch(value)
            self._batches.append(batch)
            self._samples.append(samples)
        if not inside:
            self._tracer.begin(self._step, value)

    def _before_backward(self, roots: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # else it is within another one, of a reentrant checkpoint
            self._guarded("loss", self._read_loss, roots)

    def _read_loss(self, roots: Any) -> None:
        here = getattr(self._trains, "here", False)
        if self._seen_training and not here:
            return
        self._fresh = True
        given = roots if isinstance(roots, (list, tuple)) else [roots]  # an iterator is not consumed
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        with parts.quiet():
            self._losses.append((here, *self._reader.loss(tensors)))
        for number, root in enumerate(tensors):
            self._tracer.add(self._step, f"loss {len(self._losses) - 1}.{number}", root)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            self._compiled_step = True  # no more than that can be done in a compiled step
            return
        if not self._optimizers.begin_step(optimizer):
            return
        self._guarded("optimizer", self._read_before_step, optimizer, with_gradients=not _has_closure(args, kwargs))

    def _read_before_step(self, optimizer: torch.optim.Optimizer, *, with_gradients: bool) -> None:
        with parts.quiet():
            self._look_up()
            met, changed = self._optimizers.meet(optimizer, self._tensors)
            self._trains.stepped = met
            if met is None:
                return
            self._begin_recording()
            if changed:
                self._put_order(met)
                self._guarded("schedulers", self._schedulers.look_up, self._optimizers.known)
            self._guarded("learning rate", lambda: self._parts.update(lr=self._reader.rates(optimizer)))
            self._guarded("schedulers", self._read_schedulers)
            self._guarded("options of the optimizer", self._read_options, optimizer)
            if with_gradients:
                self._read_gradients(met)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not self._optimizers.end_step(optimizer):
            return
        self._guarded("optimizer", self._read_after_step, optimizer, with_gradients=_has_closure(args, kwargs))

    def _read_after_step(self, optimizer: torch.optim.Optimizer, *, with_gradients: bool) -> None:
        met: WatchedOptimizer | None = getattr(self._trains, "stepped", None)
        if met is None or met.optimizer is not optimizer:
            return
        with parts.quiet():
            self._look_up()
            if with_gradients:
                self._read_gradients(met)
            tensors, reader = self._tensors, self._reader
            numbers = self._parameters.read_at(self._step)
            self._parts["parameter"] = reader.named("parameter", tensors.parameters, numbers)
            self._parts["state"] = reader.states(tensors.parameters, numbers, self._optimizers.owner)
            self._parts["buffer"] = reader.named("buffer", tensors.buffers, self._buffers.read_at(self._step))
        if self._tracer.active:
            for name, tensor in tensors.all():
                self._tracer.add(self._step, name, tensor)
            self._tracer.stepped(self._step)
        self._put_step()

    def _guarded(self, what: str, read: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Read something for the recording; where that raises, the recording says so, and the program goes on.

        Threads of the program take turns. A fork of it, which may have left one of them behind, reads nothing.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            try:
                read(*args, **kwargs)
            except Exception as error:
                self._reader.failed(what, error)

    # -------------------------------------------------------------------------------------------------- what is read

    @property
    def _open(self) -> WaitingLines:
        assert self._lines is not None
        return self._lines

    @property
    def _reader(self) -> parts.Reader:
        return self._open.reader

    def _read_final(self) -> None:
        """Read all tensors once more: a rotation has not come to some since they changed, and the program may have
        changed others after the last step."""
        if self._step == (self._told_start or 0):
            return
        with parts.quiet():
            self._look_up()
            self._put_names()
            read = self._reader.whole_state(self._tensors, self._optimizers.owner)
            generator = self._generators.digests(self._reader.failed)
            self._open.put("final", {"step": self._step - 1, "complete": True, "generator": generator, **read})

    def _begin_recording(self) -> None:
        """Write the header and the state before the first step, before anything else is read."""
        if self._begun:
            return
        self._begin()
        self._guarded("optimizers", self._optimizers.expect, self._tensors)
        read = self._reader.whole_state(self._tensors, self._optimizers.owner)
        self._open.put("start", {"step": self._step - 1, "complete": True, **read})

    def _read_begin(self) -> None:
        self._look_up()
        if not self._tensors.are_swapped:
            self._parts["begin"] = self._reader.whole_state(self._tensors, self._optimizers.owner)

    def _read_scaler(self) -> None:
        self._parts["scaler"] = self._reader.scaler(self._scaler)

    def _read_schedulers(self) -> None:
        if changed := self._schedulers.changes():
            self._parts["scheduler"] = changed

    def _read_options(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the options where they may have changed: then a line has them."""
        fixed = parts.fixed_options(optimizer)
        last, values = self._fixed
        if last is optimizer and parts.are_same(fixed, values):
            return
        self._fixed = optimizer, fixed
        options = self._reader.options(optimizer)
        if options != self._options:
            self._parts["options"] = self._options = options

    def _read_gradients(self, of: WatchedOptimizer) -> None:
        """Read the gradients; where several optimizers take turns, those that this one gets: others may be old ones."""
        parameters = self._tensors.parameters
        numbers: Sequence[int] = self._parameters.read_at(self._step)
        if self._optimizers.are_several:
            numbers = [number for number in numbers if number in of.numbers]
        self._parts["gradient"] = self._reader.gradients(parameters, numbers)
        if self._tracer.active:
            for number in sorted(of.numbers):
                tensor = parameters.tensors[number]
                if tensor is not None:
                    self._tracer.add(self._step, f"gradient of {parameters.names[number]}", tensor.grad)

    def _put_order(self, met: WatchedOptimizer) -> None:
        """Write the order of an optimizer's parameters, and its state if that was not read before the first step."""
        self._put_names()
        if not self._optimizers.is_given(met.optimizer) and self._step == (self._told_start or 0):
            parameters = self._tensors.parameters
            state = self._reader.states(parameters, sorted(met.numbers), self._optimizers.owner)
            self._open.put("start", {"step": self._step - 1, "complete": False, "state": state})
        self._open.put("order", {"step": self._step, "order": met.order})

    def _put_names(self) -> None:
        """Write the names of tensors that joined the model."""
        parameters, buffers = self._tensors.parameters.names, self._tensors.buffers.names
        named, self._named = self._named, (len(parameters), len(buffers))
        if named != self._named:
            self._open.put("names", {"parameter": parameters[named[0] :], "buffer": buffers[named[1] :]})

    def _put_step(self) -> None:
        """Write the line of the step, and begin the next."""
        self._put_names()
        here = [one for one in self._losses if one[0]] if self._seen_training else self._losses
        self._trains.here = self._seen_training = True
        read = {
            "step": self._step,
            "complete": self._parameters.reads_all and self._buffers.reads_all,
            "batch": self._batches,
            "samples": self._samples,
            "loss": [loss for _, loss, _ in here],
            **self._parts,
        }
        self._open.put("step", read, [value for *_, value in here])
        self._step += 1
        self._fresh = True
        self._begin_step()


class _Unwatched:
    """Copy of a :class:`Watch`, as in a copy of the program's trainer, or in a process that it starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self) -> None:
        """Record nothing."""

    def stop(self, error: BaseException | None = None) -> None:
        """End nothing."""

    def install(self) -> None:
        """Install no hook."""

    def remove(self) -> None:
        """Remove no hook."""

    def batch(self, value: Any) -> None:
        """Read no batch."""


def _in_a_transform() -> bool:
    """Return True inside ``grad``, ``vmap`` and the other transforms of ``torch.func``."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _described(models: Iterable[torch.nn.Module], tensors: ModelTensors) -> dict[str, Any]:
    """Return what the header says of the models."""
    return {
        "model": ", ".join(type(model).__qualname__ for model in models),
        "device": tensors.device,
        "parameter": list(tensors.parameters.names),
        "buffer": list(tensors.buffers.names),
    }


def _program() -> dict[str, Any]:
    """Return what the header says of this process."""
    return {
        "command": [Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]],
        "versions": {"hashbench": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def _end_of(error: BaseException | None) -> str:
    """Return the exception that ended a run; empty where it ended by itself."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return ""
    return parts.said_by(error)


class _BackwardHook:
    """Replacement of ``torch.autograd.backward``, which ``Tensor.backward`` calls: it tells the roots first."""

    def __init__(self, told: Callable[[Any], None]) -> None:
        self._original = original = torch.autograd.backward

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._active and not torch.compiler.is_compiling():
                told(tensors)
            original(tensors, *args, **kwargs)

        self._ours, self._active = backward, True
        torch.autograd.backward = backward

    def remove(self) -> None:
        """Put torch's function back, unless another one stands there now, which may call this one."""
        self._active = False
        if torch.autograd.backward is self._ours:
            torch.autograd.backward = self._original


def _has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call of ``optimizer.step`` computes the gradients itself, as Lightning's do."""
    return any(callable(one) for one in (*args[1:], *kwargs.values()))
