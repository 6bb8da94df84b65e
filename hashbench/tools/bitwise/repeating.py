"""Snapshot of a call's arguments and RNG states, from which the call can be made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hashbench.replay.call import LiveMemory, Memory, TensorForm, laid_over
from hashbench.replay.capture import CaptureError, Windows, is_plain, may_resize, refuse_shadows
from hashbench.run.rng import random_states, restore_random_states
from hashbench.tools.bitwise.choosing import Copies
from hashbench.trace.arguments import mapped, named_arguments, tensors_in
from hashbench.trace.digest import components, hash_memory
from hashbench.trace.op_schema import OpPlan
from hashbench.trace.storage_writers import storage_key


class Arguments:
    """The arguments of one call, kept so that it can be made again.

    Copied is what ``copies`` says, as windows of memory: strides, offsets, shared and overlapping memory, and the
    address modulo 64 (kernels choose their code by it) stay. Everything else is passed on as it is. Two copies of a
    window exist while the call is repeated: the one kept and the one that a run works on.

    Raises:
        CaptureError: an argument has no content (fake, meta, of a transform), or must be copied and cannot be.
    """

    def __init__(self, func: Any, plan: OpPlan, args: Sequence[Any], kwargs: Mapping[str, Any], copies: Copies) -> None:
        self.args, self.kwargs = args, kwargs
        self._forms: dict[int, TensorForm] = {}
        self._clones: dict[int, torch.Tensor] = {}
        self._memories: dict[int, Memory] = {}
        self._live: dict[int, LiveMemory] = {}
        tensors = tensors_in([*args, *kwargs.values()])
        for tensor in tensors:
            refuse_without_content(tensor)
        if copies is Copies.ALL:
            self._refuse_objects([*args, *kwargs.values()])
            self._copy(func, tensors, tensors)
        elif copies is Copies.WRITTEN:
            self._copy(func, tensors, plan.written_tensors(args, kwargs))

    def _refuse_objects(self, values: Sequence[Any]) -> None:
        for value in values:
            if isinstance(value, torch.ScriptObject):
                raise CaptureError(f"an argument is a {type(value).__name__}, which it may change")

    def _copy(self, func: Any, tensors: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        plain = [tensor for tensor in tensors if is_plain(tensor)]
        odd = {id(tensor): tensor for tensor in tensors if not is_plain(tensor)}
        windows = Windows(plain, whole=may_resize(func))
        forms = {id(tensor): windows.form(tensor) for tensor in plain}
        places = {forms[id(tensor)].storage for tensor in targets if id(tensor) in forms}
        self._forms = {key: form for key, form in forms.items() if form.storage in places}
        odd_targets = [tensor for tensor in targets if id(tensor) in odd]
        _refuse_shared([tensor for tensor in plain if id(tensor) in self._forms], list(odd.values()))
        _refuse_shared(plain, odd_targets)
        self._clones = {id(tensor): _clone(tensor) for tensor in odd_targets}
        self._memories = {place: windows.memory(place) for place in places}

    def again(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments for one more run, with the content from before the first. Those of the last such call are
        overwritten."""
        if not self._forms and not self._clones:
            return self.args, self.kwargs
        for place, memory in self._memories.items():
            if place not in self._live:
                self._live[place] = LiveMemory(memory)
            self._live[place].touched = True
            self._live[place].restore()
        made: dict[int, Any] = {key: clone.clone() for key, clone in self._clones.items()}
        made |= {key: laid_over(self._live[form.storage].tensor, form) for key, form in self._forms.items()}

        def copied(leaf: Any) -> Any:
            return made.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf

        return mapped(list(self.args), copied), mapped(dict(self.kwargs), copied)


def refuse_without_content(tensor: torch.Tensor) -> None:
    """Also classes that answer every op themselves: nobody else knows what they hold.

    Raises:
        CaptureError: the tensor is such a one.
    """
    refuse_shadows(tensor)
    answers = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if answers and not is_traceable_wrapper_subclass(tensor):
        raise CaptureError(f"a tensor is a {type(tensor).__name__}, which answers every op itself")


def _refuse_shared(plain: Sequence[torch.Tensor], odd: Sequence[torch.Tensor]) -> None:
    """A sparse tensor whose values lie in memory that is copied would go on reading the original, and the other way
    round."""
    keys = {storage_key(tensor) for tensor in plain}
    for tensor in odd:
        if keys & {storage_key(part) for part in components(tensor)} - {None}:
            raise CaptureError(f"it writes memory that a {kind_of(tensor)} tensor shares with another argument")


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return tensor.detach().clone()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise CaptureError(f"an argument, a {kind_of(tensor)} tensor, cannot be copied: {error}") from error


def kind_of(tensor: torch.Tensor) -> str:
    """``sparse_coo``, ``quantized``, ``nested``, or the name of a class."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return type(tensor).__name__
    if tensor.is_nested or tensor.is_quantized:
        return "nested" if tensor.is_nested else "quantized"
    return str(tensor.layout).removeprefix("torch.")


# ----------------------------------------------------------------------------------------------------- generators


class Generators:
    """The states of all generators that a call may draw from: the default ones of the host and of every device in use,
    those among its arguments, and for a custom op Python's and NumPy's."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, outside_torch: bool) -> None:
        self._outside_torch = outside_torch
        values = [*args, *kwargs.values()]
        self._given = [value for value in values if isinstance(value, torch.Generator)]
        self.before = self.now()

    def now(self) -> dict[str, torch.Tensor]:
        """States by name; explicit generators are ``argument 0``, ``argument 1`` and so on."""
        given = {f"argument {number}": generator.get_state() for number, generator in enumerate(self._given)}
        return random_states(None, outside_torch=self._outside_torch) | given

    def restore(self, states: Mapping[str, torch.Tensor]) -> None:
        """Put all back to ``states``."""
        given = [f"argument {number}" for number in range(len(self._given))]
        for name, generator in zip(given, self._given, strict=True):
            generator.set_state(states[name])
        restore_random_states({name: state for name, state in states.items() if name not in given})


def moved(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of generators whose states differ."""
    return [name for name, state in after.items() if name not in before or _digest(before[name]) != _digest(state)]


def _digest(state: torch.Tensor) -> int:
    return hash_memory(state.data_ptr(), state.nbytes)


def argument_names(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, str]:
    """The tensors among the arguments by identity: ``argument 0``, ``argument 1.2``, ``argument out``."""
    return {id(tensor): f"argument {path}" for path, tensor in named_arguments(args, kwargs)}
