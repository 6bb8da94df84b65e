"""The two sides of a comparison: how each is built, in its own dtype and in float64, and run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hashbench.core.divergence.content import Kind
from hashbench.core.run.rng import preserved_rng, reset_rng_state
from hashbench.core.run.wide import WideMode, default_dtype, widened
from hashbench.core.run.workload import call, clone_inputs
from hashbench.core.trace.arguments import mapped, named_tensors

OUTPUT = "output"
"""Name of a result that is one tensor."""

LOSS = "loss"
"""Name of the loss among the results."""

GRADIENT = "gradient of "
"""Begins the name of a parameter's gradient among the results."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of two implementations.

    Attributes:
        make: builds a module, or any callable; called with the generators seeded.
        inputs: returns a tuple of arguments, a dict of keyword arguments, or one tensor.
        outputs: picks what is compared from the returned value: any nesting of tensors. Default: all of it.
        loss: returns a scalar from the returned value; with it gradients are compared as well.
        ranks: number of processes that run it together: ``make`` and ``inputs`` are called in each, with
            ``torch.distributed`` initialised (gloo). Functions are then sent by name: no lambdas, none of a script.
        rank_seconds: time limit of one run of these.
        again: ``module:function`` and arguments that return this side, instead of functions by name.
        rebuilt: in float64, build a module anew; false: only cast what it holds.
    """

    make: Callable[[], Any]
    inputs: Callable[[], Any]
    outputs: Callable[[Any], Any] | None = None
    loss: Callable[[Any], torch.Tensor] | None = None
    ranks: int = 1
    rank_seconds: float = 600.0
    again: tuple[str, tuple[Any, ...]] | None = None
    rebuilt: bool = True


@dataclass(frozen=True, slots=True)
class BuiltSide:
    """A side that is ready to run. ``model`` is run, and may be changed by it.

    ``widened`` are modules that a function calls: they are in float64 during a run. ``rebuilt``: the model was built
    anew in float64.
    """

    side: Side
    model: Any
    inputs: Any
    seed: int
    widened: tuple[torch.nn.Module, ...] = ()
    rebuilt: bool = False

    @property
    def module(self) -> torch.nn.Module | None:
        """The model, if it is a module."""
        return self.model if isinstance(self.model, torch.nn.Module) else None

    def leaves(self) -> Iterator[tuple[Kind, str, torch.Tensor]]:
        """Yield inputs, parameters and buffers with their names."""
        for name, tensor in named_tensors(self.inputs):
            yield Kind.INPUT, f"input {name}" if name else "input", tensor
        if self.module is not None:
            for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
                yield Kind.WEIGHT, name, tensor

    def run(self) -> dict[str, torch.Tensor]:
        """Run it and return what is compared, by name: outputs, and with a loss that and the gradients of parameters.

        Whatever the model raises is raised.
        """
        reset_rng_state(self.seed)
        with _in_float64(self.widened), torch.set_grad_enabled(self.side.loss is not None):
            returned = call(self.model, self.inputs)
            picked = returned if self.side.outputs is None else self.side.outputs(returned)
            results = {f"{OUTPUT}.{name}" if name else OUTPUT: tensor for name, tensor in named_tensors(picked)}
            if self.side.loss is not None:
                loss = self.side.loss(returned)
                loss.backward()
                results[LOSS] = loss
                results |= {f"{GRADIENT}{name}": tensor for name, tensor in self._gradients()}
        return results

    def _gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.module is not None:
            for name, parameter in self.module.named_parameters():
                if parameter.grad is not None:
                    yield name, parameter.grad


def build(side: Side, seed: int) -> BuiltSide:
    """Build a side in its own dtype."""
    with preserved_rng():
        return BuiltSide(side, _own(_made(side, seed)), _inputs(side, seed), seed)


def build_wide(side: Side, seed: int) -> BuiltSide:
    """Build a side in float64, with the weights that it has in its own dtype.

    A module is built twice. Parameters and persistent buffers come from that in its own dtype; whatever else its
    constructor computes, such as the frequencies of rotary embeddings, is computed in float64. With ``side.rebuilt``
    false all of it comes from that in its own dtype.
    """
    with preserved_rng():
        made = _made(side, seed)
        inputs = mapped(_inputs(side, seed), widened)
        if isinstance(made, torch.nn.Module):
            cast: torch.nn.Module = copy.deepcopy(made)._apply(widened)
            anew = _computed_wide(side, made, cast, seed) if side.rebuilt else None
            return BuiltSide(side, cast if anew is None else anew, inputs, seed, rebuilt=anew is not None)
        return BuiltSide(side, made, inputs, seed, widened=tuple(_modules_in(made)))


def _made(side: Side, seed: int) -> Any:
    reset_rng_state(seed)
    return side.make()


def _inputs(side: Side, seed: int) -> Any:
    reset_rng_state(seed)
    return clone_inputs(side.inputs())


def _own(model: Any) -> Any:
    return copy.deepcopy(model) if isinstance(model, torch.nn.Module) else model


def _computed_wide(side: Side, made: torch.nn.Module, cast: torch.nn.Module, seed: int) -> torch.nn.Module | None:
    """Return the model built anew with the weights of ``cast``; ``None`` if that is the same one, or does not do."""
    try:
        with default_dtype(torch.float64), WideMode():
            again = _made(side, seed)
        if again is made or not isinstance(again, torch.nn.Module):
            return None
        wide: torch.nn.Module = copy.deepcopy(again)._apply(widened)
        wide.load_state_dict(cast.state_dict())
        return wide.train(made.training)
    except Exception:  # it insists on a dtype, or has other weights then
        return None


def _modules_in(function: Any, depth: int = 3) -> Iterator[torch.nn.Module]:
    """Yield the modules that a function holds: its own object, what it closes over, arguments of a ``partial``."""
    if isinstance(function, torch.nn.Module):
        yield function
    elif depth and callable(function):
        cells = (cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_filled(cell))
        held = [getattr(function, "__self__", None), getattr(function, "func", None), *getattr(function, "args", ())]
        for value in (*held, *cells):
            if value is not None and value is not function:
                yield from _modules_in(value, depth - 1)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that is not bound yet
        return False


@contextmanager
def _in_float64(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Replace parameters and buffers of modules by ones in float64, and put them back."""
    held = [(tensor, tensor.data) for module in modules for tensor in (*module.parameters(), *module.buffers())]
    try:
        for tensor, data in held:
            tensor.data = widened(data)
        yield
    finally:
        for tensor, data in held:
            tensor.data = data


def common_names(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the name in (a) of each output of (b), by name, or by order if no name is common and their number is
    equal; and those of either side that are not compared. Gradients are left out; losses only correspond to losses."""
    ours, theirs = ([name for name in names if name != LOSS and not name.startswith(GRADIENT)] for names in (a, b))
    both = {name: name for name in theirs if name in ours}
    if not both and len(ours) == len(theirs):
        both = dict(zip(theirs, ours, strict=True))
    if LOSS in a and LOSS in b:
        both[LOSS] = LOSS
    left = [name for name in a if name not in both.values()] + [name for name in b if name not in both]
    return both, tuple(name for name in dict.fromkeys(left) if not name.startswith(GRADIENT))
