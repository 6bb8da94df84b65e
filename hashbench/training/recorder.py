"""``hashbench.watch``: write a line of digests for each step of a training loop.

::

    with hashbench.watch("runs/a", model=model, optimizer=optimizer):
        for batch in loader:
            …

Hooks on the model and on optimizers do it; the loop stays as it is.
"""

from __future__ import annotations

import functools
import itertools
import os
import platform
import sys
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hashbench import __version__
from hashbench.errors import HashbenchError, named_line
from hashbench.trace.groups import rank_of
from hashbench.training import file, parts
from hashbench.training.lines import WaitingLines
from hashbench.training.rotation import Rotation
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
        optimizer: its optimizers, of which the state before the first step is read. Default: those that step
            parameters of the model, once they do.
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

    ``start()`` and ``stop()`` are the same for callbacks of trainers.
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
        self._optimizers = _WatchedOptimizers(optimizers)
        self._every, self._told_start, self._traced = every, start, traced
        self._step = start or 0
        self._stop_at = int(os.environ.get(STOP_VARIABLE) or -1)
        self._lines: WaitingLines | None = None
        self._handles: list[Any] = []

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
        self._rank, self._world = rank_of(os.environ) or (0, 1)
        self._lines = WaitingLines.create(self.folder / f"rank{self._rank}.jsonl", tip=_OTHER_FOLDER)
        self._tensors: parts.ModelTensors | None = None
        self._options: dict[str, str] = {}
        self._option_values: list[tuple[str, Any]] = []
        self._missed: list[str] = []
        """What is not recorded, each a phrase."""
        self._fresh = True  # the next call of a model begins a micro-batch
        self._begin_step()
        self.install()

    def stop(self, error: BaseException | None = None) -> None:
        """Remove the hooks, and write the last line: how the run ended."""
        if self._lines is None:
            return
        self.remove()
        if self._tensors is None:
            self._begin()
        self._tracer.end()
        self._read_final()
        self._lines.close({"steps": self._lines.steps, "ended": _end_of(error), "missed": self._missed})
        self._lines = None

    def install(self) -> None:
        """Install the hooks: steps are recorded from now on."""
        for model in self._models.values():
            self._handles.append(model.register_forward_pre_hook(self._before_forward, with_kwargs=True))
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
        self._tensors = tensors = parts.ModelTensors.of(self._models)
        self._parameters = Rotation.of(list(parts.sizes(tensors.parameters)), every=self._every)
        self._buffers = Rotation.of(list(parts.sizes(tensors.buffers)), every=self._every)
        models = {name: parts.unwrapped(model) for name, model in self._models.items()}
        whole = models[""] if list(models) == [""] else torch.nn.ModuleDict(models)
        self._tracer = StepTracer(self._traced, self.folder, self._rank, whole)
        header = {
            "schema": file.SCHEMA,
            "rank": self._rank,
            "world_size": self._world,
            "start": self._told_start,
            "every": self._every,
            "traced": [self._traced.start, self._traced.stop] if self._traced else [],
        }
        self._open.write("header", header | _described(models.values(), tensors) | _program())

    def _begin_step(self) -> None:
        self._batches: list[parts.Reading] = []
        self._losses: list[parts.Reading] = []
        self._loss_values: list[torch.Tensor | None] = []
        self._parts: dict[str, Any] = {}

    # --------------------------------------------------------------------------------------------------------- hooks

    def batch(self, value: Any) -> None:
        """Tell the batch that the program trains on now, where it does not call the model itself."""
        self._seen(value)

    def _before_forward(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        if self._tensors is not None:
            self._end_of_trace()
        if model.training and torch.is_grad_enabled():
            self._seen((*args, kwargs) if kwargs else args)

    def _end_of_trace(self) -> None:
        if self._tracer.active:
            self._tracer.begin(self._step, None)

    def _seen(self, value: Any) -> None:
        """Read a batch, if none was since the last optimizer step or backward pass."""
        if not self._fresh:
            return
        self._fresh = False
        if self._step == self._stop_at:
            self._open.flush()
            raise SystemExit(0)
        with parts.quiet():
            if self._tensors is None:
                self._begin()
                self._read_start()
            if not self._batches:
                self._parts["generator"] = self._generators.digests()
                if self._scaler is not None:
                    self._parts["scaler"] = parts.scaler(self._scaler)
                if self._every == 1 and self._step > (self._told_start or 0):
                    self._parts["begin"] = parts.whole_state(self._known, self._optimizers.all, self._open.ledger)
            self._batches.append(parts.Reading(parts.batch(value, self._open.ledger)))
        self._tracer.begin(self._step, value)

    def _before_backward(self, roots: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # within another one, of a reentrant checkpoint
            return
        self._fresh = True
        tensors = (
            [roots] if isinstance(roots, torch.Tensor) else [one for one in roots if isinstance(one, torch.Tensor)]
        )
        with parts.quiet():
            read, value = parts.loss(tensors, self._open.ledger)
        self._losses.append(parts.Reading(read))
        self._loss_values.append(value)
        if self._tensors is not None:
            for number, root in enumerate(tensors):
                self._tracer.add(self._step, f"loss {len(self._losses) - 1}.{number}", root)

    def _is_watched(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._optimizers.has(optimizer, self._tensors.index if self._tensors is not None else {})

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._tensors is None:
            with parts.quiet():
                self._begin()
                self._read_start()
        if not self._is_watched(optimizer):
            return
        with parts.quiet():
            self._read_order(optimizer)
            self._parts["lr"] = parts.rates(optimizer)
            self._read_options(optimizer)
            if not _has_closure(args, kwargs):
                self._read_gradients(optimizer)

    def _read_options(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the options where they changed: then a line has them."""
        values = parts.option_values(optimizer)
        if any(isinstance(value, torch.Tensor) for _, value in values) or values != self._option_values:
            self._option_values = values
            others = parts.options(values)
            if others != self._options:
                self._parts["options"] = self._options = others

    def _read_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the gradients; where several optimizers take turns, those that this one gets: others may be old ones."""
        held: Collection[int] = range(len(self._known.parameters))
        if len(self._optimizers.all) > 1:
            held = frozenset(itertools.chain(*self._known.of_optimizer(optimizer)))
        indices = [index for index in self._parameters.read_at(self._step) if index in held]
        self._parts["gradient"] = parts.gradients(self._known, indices, self._open.ledger)
        if self._tracer.active:
            for name, tensor in (self._known.parameters[index] for index in held):
                self._tracer.add(self._step, f"gradient of {name}", tensor.grad)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._tensors is None or not self._is_watched(optimizer):
            return
        tensors, ledger = self._known, self._open.ledger
        with parts.quiet():
            if _has_closure(args, kwargs):
                self._read_gradients(optimizer)
            indices = self._parameters.read_at(self._step)
            self._parts["parameter"] = parts.values(tensors.parameters, indices, ledger)
            self._parts["state"] = parts.state(tensors, indices, self._optimizers.all, ledger)
            self._parts["buffer"] = parts.values(tensors.buffers, self._buffers.read_at(self._step), ledger)
        if self._tracer.active:
            for name, tensor in (*tensors.parameters, *tensors.buffers):
                self._tracer.add(self._step, name, tensor)
            self._tracer.stepped(self._step)
        self._put_step()

    # -------------------------------------------------------------------------------------------------- what is read

    @property
    def _open(self) -> WaitingLines:
        assert self._lines is not None
        return self._lines

    @property
    def _known(self) -> parts.ModelTensors:
        assert self._tensors is not None
        return self._tensors

    def _read_start(self, of: torch.optim.Optimizer | None = None) -> None:
        """Read the state before the first step; the state ``of`` an optimizer alone where one is given."""
        read = parts.whole_state(self._known, self._optimizers.all if of is None else [of], self._open.ledger)
        read = read if of is None else {"state": read["state"]}
        self._open.put("start", {"step": self._step - 1, "complete": of is None, **read})

    def _read_final(self) -> None:
        """Read all tensors once more: a rotation has not come to some since they changed, and the program may have
        changed others after the last step."""
        if self._step == (self._told_start or 0):
            return
        try:
            with parts.quiet():
                read = parts.whole_state(self._known, self._optimizers.all, self._open.ledger)
                generator = self._generators.digests()
                self._open.put("final", {"step": self._step - 1, "complete": True, "generator": generator, **read})
                self._open.flush()
        except Exception as error:  # as after a fault of the device: that is the one to show
            lost = self._step - (self._told_start or 0) - self._open.steps
            steps = f"the last {lost} steps and " if lost else ""
            self._missed.append(f"{steps}the state at the end ({named_line(error, limit=200)})")

    def _read_order(self, optimizer: torch.optim.Optimizer) -> None:
        """Write the order of an optimizer's parameters at its first step, and its state if that was not read before."""
        if not self._optimizers.meet(optimizer):
            return
        if not self._optimizers.are_given and self._step == (self._told_start or 0):
            self._read_start(of=optimizer)
        self._open.put("order", {"order": self._known.of_optimizer(optimizer)})

    def _put_step(self) -> None:
        """Write the line of the step, and begin the next."""
        read = {
            "step": self._step,
            "complete": self._parameters.reads_all,
            "batch": self._batches,
            "loss": self._losses,
            **self._parts,
        }
        self._open.put("step", read, self._loss_values)
        self._step += 1
        self._fresh = True
        self._begin_step()


def _described(models: Iterable[torch.nn.Module], tensors: parts.ModelTensors) -> dict[str, Any]:
    """Return what the header says of the models."""
    return {
        "model": ", ".join(type(model).__qualname__ for model in models),
        "device": parts.device_of(tensors),
        "parameter": [name for name, _ in tensors.parameters],
        "buffer": [name for name, _ in tensors.buffers],
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
    return named_line(error, limit=500)


class _WatchedOptimizers:
    """Optimizers whose steps are recorded: those given, else those that step parameters of the model.

    Attributes:
        are_given: whether the program named them.
        all: those known so far.
    """

    def __init__(self, given: Sequence[torch.optim.Optimizer]) -> None:
        self.are_given = bool(given)
        self.all: list[torch.optim.Optimizer] = list(map(_inner, given))
        self._met: list[torch.optim.Optimizer] = []

    def has(self, optimizer: torch.optim.Optimizer, parameters: Container[int]) -> bool:
        """Return True for one that is watched, by the ids of the model's parameters."""
        if self.are_given:
            return any(optimizer is one for one in self.all)
        return any(id(tensor) in parameters for group in optimizer.param_groups for tensor in group["params"])

    def meet(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True at the first step of an optimizer, which is known from then on."""
        if any(optimizer is one for one in self._met):
            return False
        self._met.append(optimizer)
        if not self.are_given:
            self.all.append(optimizer)
        return True


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


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside the wrapper of a trainer."""
    while True:
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            return optimizer  # type: ignore[no-any-return]
        optimizer = inner
