"""Read the steps of a loop, and write their lines: what the hooks of ``recorder`` call."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hashbench import __version__
from hashbench.core.text import masked
from hashbench.core.trace import settings
from hashbench.core.trace.groups import rank_of
from hashbench.core.trace.steps import StepClock
from hashbench.extensions.watch import file, parts
from hashbench.extensions.watch.lines import WaitingLines
from hashbench.extensions.watch.optimizers import WatchedOptimizer, WatchedOptimizers
from hashbench.extensions.watch.rotation import Rotation
from hashbench.extensions.watch.samples import Samples
from hashbench.extensions.watch.schedulers import WatchedSchedulers
from hashbench.extensions.watch.tensors import ModelTensors, unwrapped
from hashbench.extensions.watch.tracing import StepTracer


@dataclass(frozen=True, slots=True)
class Watched:
    """What is watched, and how.

    Attributes:
        models: by name.
        optimizers: those that the program named.
        scaler: a ``GradScaler``, or ``None``.
        generators: private ones, by name.
        every: in how many steps each tensor is read once.
        start: number of the first step, if the program said it.
        traced: steps to trace.
    """

    models: Mapping[str, torch.nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    scaler: Any
    generators: Mapping[str, Any]
    every: int
    start: int | None
    traced: range


class RecordedSteps:
    """Steps of a loop, from the first on. Nothing of it raises but what a file or the program itself does.

    Attributes:
        lines: of the file.
        optimizers: whose steps are recorded.
        clock: of their steps.
        tracer: of steps that are traced.
    """

    def __init__(self, watched: Watched, folder: Path, *, tip: str) -> None:
        self._of = watched
        self._rank, self._world = rank_of(os.environ) or (0, 1)
        self.lines = WaitingLines.create(folder / f"rank{self._rank}.jsonl", tip=tip)
        self._generators = parts.WatchedGenerators(watched.generators)
        self._tensors = ModelTensors(watched.models)
        self.optimizers = WatchedOptimizers(watched.optimizers)
        self.tracer = StepTracer(watched.traced, folder, self._rank, self.failed)
        self._first = watched.start or 0
        self.clock = StepClock(each=True, number=self._first, precedes=self.optimizers.precedes)
        self._begun = False
        self._settings = _Settings()
        self._options: dict[str, str] = {}
        self._schedulers = WatchedSchedulers()
        self._fixed: tuple[Any, list[Any] | None] = (None, None)
        self._here = threading.local()  # whether the loop runs in this thread: others have losses of their own
        self._thread_is_known = False
        self._begin_step()

    @property
    def step(self) -> int:
        """Number of the step that is being read."""
        return self.clock.number

    @property
    def _reader(self) -> parts.Reader:
        return self.lines.reader

    def failed(self, what: str, error: BaseException | str) -> None:
        """Note that something could not be read."""
        self._reader.failed(what, error)

    def trying(self, what: str, read: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Read something; where that raises, note it."""
        try:
            read(*args, **kwargs)
        except Exception as error:
            self.failed(what, error)

    # ------------------------------------------------------------------------------------------- beginning and end

    def _begin_recording(self) -> None:
        """Write the header and the state before the first step, before anything else is read."""
        if self._begun:
            return
        self._write_header()
        self.trying("optimizers", self.optimizers.expect, self._tensors)
        read = self._reader.whole_state(self._tensors, self.optimizers.owner)
        self.lines.put("start", {"step": self.step - 1, "complete": True, **read})

    def _write_header(self) -> None:
        """Name the tensors: when the first step begins, the model is what it will be."""
        self._begun = True
        self.trying("tensors of the model", self._look_up)
        models = {name: unwrapped(model) for name, model in self._of.models.items()}
        self.tracer.model = models[""] if list(models) == [""] else torch.nn.ModuleDict(models)
        rank = {"rank": self._rank, "world_size": self._world}
        described = {"device": self._tensors.device, **self._tensors.joined(), "settings": self._settings.now}
        self.lines.write("header", {**rank, **_header(self._of), **described})

    def read_final(self) -> None:
        """Read all tensors once more: a rotation has not come to some since they changed, and the program may have
        changed others after the last step."""
        self.trying("settings", self._look_at_settings)
        if not self._begun:
            self._write_header()
        if self.step == self._first:
            return
        with parts.quiet():
            self.trying("tensors of the model", self._look_up)
            self._put_names()
            read = self._reader.whole_state(self._tensors, self.optimizers.owner)
            generator = self._generators.digests(self.failed)
            self.lines.put("final", {"step": self.step - 1, "complete": True, "generator": generator, **read})

    # ------------------------------------------------------------------------------------------------------- a step

    def _begin_step(self) -> None:
        self._fresh = True  # the next call of a model begins a micro-batch
        self._batches: list[tuple[parts.Reading, Samples]] = []
        self._losses: list[tuple[bool, parts.Reading, torch.Tensor | None]] = []
        self._parts: dict[str, Any] = {}

    def begins_with_a_batch(self) -> bool:
        """Return True where the next batch to be read begins a step or a micro-batch."""
        self._here.trains = self._thread_is_known = True
        return self._fresh

    def read_batch(self, value: Any) -> None:
        """Read a batch, and what the step begins with where it is its first."""
        self._fresh = False
        self.trying("settings", self._look_at_settings)
        inside = torch._C._functorch.peek_interpreter_stack() is not None
        with parts.quiet():
            if not inside:  # of a transform, in whose calls the model may hold wrappers of its parameters
                self._begin_unless_swapped()
            if not self._batches:
                self._parts["generator"] = self._generators.digests(self.failed)
                if self._of.scaler is not None:
                    self.trying("scaler", lambda: self._parts.update(scaler=self._reader.scaler(self._of.scaler)))
                if self._of.every == 1 and self.step > self._first and not inside:
                    self.trying("state that a step begins with", self._read_begin)
            self._batches.append(self._reader.batch(value))
        if not inside:
            self.tracer.begin(self.step, value)

    def _begin_unless_swapped(self) -> None:
        """Begin the recording, but within a ``functional_call``: then the first step of an optimizer begins it."""
        if not self._begun:
            self.trying("tensors of the model", self._look_up)
            if not self._tensors.are_swapped:
                self._begin_recording()

    def read_loss(self, roots: Any) -> None:
        """Read the roots of a backward pass of the loop."""
        here = getattr(self._here, "trains", False)
        if self._thread_is_known and not here:
            return
        self._fresh = True
        given = roots if isinstance(roots, (list, tuple)) else [roots]  # an iterator is not consumed
        tensors = [argument for argument in given if isinstance(argument, torch.Tensor)]
        with parts.quiet():
            self._losses.append((here, *self._reader.loss(tensors)))
        named = ((f"loss {len(self._losses) - 1}.{number}", root) for number, root in enumerate(tensors))
        self.tracer.add_all(self.step, lambda: named)

    def read_before_step(self, optimizer: torch.optim.Optimizer, *, with_gradients: bool) -> None:
        """Read what an optimizer gets, where its steps are recorded."""
        self._here.stepped = None
        if not self._begun:
            self.trying("settings", self._look_at_settings)
        with parts.quiet():
            self.trying("tensors of the model", self._look_up)
            met, changed = self.optimizers.meet(optimizer, self._tensors)
            self._here.stepped = met
            if met is None:
                return
            self._begin_recording()
            if changed:
                self._put_order(met)
                self.trying("schedulers", self._schedulers.look_up, self.optimizers.known)
            self.trying("learning rate", lambda: self._parts.update(lr=self._reader.rates(optimizer)))
            self.trying("schedulers", self._read_schedulers)
            self.trying("options of the optimizer", self._read_options, optimizer)
            if with_gradients:
                self._read_gradients(met)

    def read_after_step(self, optimizer: torch.optim.Optimizer, *, with_gradients: bool) -> None:
        """Read what an optimizer left, and write the line of the step."""
        met: WatchedOptimizer | None = getattr(self._here, "stepped", None)
        if met is None or met.optimizer is not optimizer:
            return
        tensors, reader = self._tensors, self._reader
        with parts.quiet():
            self.trying("tensors of the model", self._look_up)
            if with_gradients:
                self._read_gradients(met)
            numbers = self._parameters.read_at(self.step)
            self._parts["parameter"] = reader.named("parameter", tensors.parameters, numbers)
            self._parts["state"] = reader.states(tensors.parameters, numbers, self.optimizers.owner)
            self._parts["buffer"] = reader.named("buffer", tensors.buffers, self._buffers.read_at(self.step))
        self.tracer.add_all(self.step, tensors.all)
        self.tracer.stepped(self.step)
        self._put_step()
        self.clock.count(optimizer)

    # -------------------------------------------------------------------------------------------------- what is read

    def _look_up(self) -> None:
        """Look the tensors up, and divide them among the steps anew where they are others."""
        if self._tensors.look_up():
            self._parameters = Rotation.of(list(self._tensors.parameters.sizes()), every=self._of.every)
            self._buffers = Rotation.of(list(self._tensors.buffers.sizes()), every=self._of.every)

    def _look_at_settings(self) -> None:
        if (changed := self._settings.look()) and self._begun:
            self._parts["settings"] = changed

    def _read_begin(self) -> None:
        self._look_up()
        if not self._tensors.are_swapped:
            self._parts["begin"] = self._reader.whole_state(self._tensors, self.optimizers.owner)

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
        numbers: Sequence[int] = self._parameters.read_at(self.step)
        if self.optimizers.are_several:
            numbers = [number for number in numbers if number in of.numbers]
        self._parts["gradient"] = self._reader.gradients(parameters, numbers)
        held = ((parameters.names[number], parameters.tensors[number]) for number in sorted(of.numbers))
        named = ((f"gradient of {name}", None if tensor is None else tensor.grad) for name, tensor in held)
        self.tracer.add_all(self.step, lambda: named)

    # ------------------------------------------------------------------------------------------------------- lines

    def _put_order(self, met: WatchedOptimizer) -> None:
        """Write the order of an optimizer's parameters, and its state if that was not read before the first step."""
        self._put_names()
        if not self.optimizers.is_given(met.optimizer) and self.step == self._first:
            parameters = self._tensors.parameters
            state = self._reader.states(parameters, sorted(met.numbers), self.optimizers.owner)
            self.lines.put("start", {"step": self.step - 1, "complete": False, "state": state})
        self.lines.put("order", {"step": self.step, "order": met.order})

    def _put_names(self) -> None:
        """Write the names of tensors that joined the model."""
        if joined := self._tensors.joined():
            self.lines.put("names", joined)

    def _put_step(self) -> None:
        """Write the line of the step, and begin the next."""
        self._put_names()
        losses = [loss for loss in self._losses if loss[0]] if self._thread_is_known else self._losses
        self._here.trains = self._thread_is_known = True
        read = {
            "step": self.step,
            "complete": self._parameters.reads_all and self._buffers.reads_all,
            "batch": [batch for batch, _ in self._batches],
            "samples": [samples for _, samples in self._batches],
            "loss": [loss for _, loss, _ in losses],
            **self._parts,
        }
        self.lines.put("step", read, [value for *_, value in losses])
        self._begin_step()


class _Settings:
    """Torch's global settings, read anew where a glance shows that they changed.

    Attributes:
        now: as they were read last.
    """

    def __init__(self) -> None:
        self.now: dict[str, str] = {}
        self._glance: tuple[Any, ...] = ()

    def look(self) -> dict[str, str]:
        """Return those that changed since they were read last."""
        glance = settings.glance()
        if glance == self._glance:
            return {}
        before, self.now, self._glance = self.now, settings.settings(), glance
        return {name: value for name, value in self.now.items() if before.get(name) != value}


def _header(of: Watched) -> dict[str, Any]:
    """Return what the header says of the program."""
    models = map(unwrapped, of.models.values())
    return {
        "schema": file.SCHEMA,
        "start": of.start,
        "every": of.every,
        "traced": [of.traced.start, of.traced.stop] if of.traced else [],
        "model": ", ".join(type(model).__qualname__ for model in models),
        "command": [*masked([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]])],
        "versions": {"hashbench": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "environment": settings.variables(os.environ),
        "machine": settings.machine(),
    }
