"""Parameters and buffers of the watched models, looked up anew in each step: a program replaces, adds and ties them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy

_WRAPPERS = ("_orig_mod", "module")
"""Attributes under which ``torch.compile`` and data parallel wrappers hold the module that they wrap."""

_HELD = operator.attrgetter("_parameters", "_buffers", "_modules")


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside ``torch.compile`` and data parallel wrappers, whose names do not depend on these."""
    while True:
        children = model._modules if isinstance(model._modules, dict) else {}  # one of TorchScript has none
        inner = next((children[name] for name in _WRAPPERS if list(children) == [name]), None)
        if inner is None or next(model.parameters(recurse=False), None) is not None:
            return model
        model = inner


@dataclass(slots=True)
class NamedTensors:
    """Tensors by number. A name keeps its number; it has no tensor while no model has one of this name.

    Attributes:
        names: in the order in which they were met.
        tensors: of the names, as they were looked up last.
    """

    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor | None] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)

    def set(self, found: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take over what the models hold now."""
        self.tensors = [None] * len(self.names)
        for name, tensor in found:
            number = self._numbers.setdefault(name, len(self.names))
            if number == len(self.names):
                self.names.append(name)
                self.tensors.append(tensor)
            else:
                self.tensors[number] = tensor

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield names and sizes in bytes."""
        for name, tensor in zip(self.names, self.tensors, strict=True):
            yield name, 0 if tensor is None or is_lazy(tensor) else tensor.numel() * tensor.element_size()

    def present(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors that the models hold."""
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if tensor is not None:
                yield name, tensor


class ModelTensors:
    """Parameters and buffers of the watched models; a name begins with its model's, if that is not empty.

    Attributes:
        parameters, buffers: as they were looked up last.
        index: number of a parameter by its ``id``.
        looked_up: how often another parameter was found in the place of one.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module]) -> None:
        self._models = models
        self.parameters, self.buffers = NamedTensors(), NamedTensors()
        self.index: Mapping[int, int] = {}
        self.looked_up = 0
        self._modules: Sequence[torch.nn.Module] = ()
        self._held: list[Any] = []
        self._written: Mapping[str, int] = {}

    def look_up(self) -> bool:
        """Look the tensors up, and return True if any of them, or its size, is another one than before.

        Where all modules hold the objects that they held, nothing is listed: this takes 20 µs for a hundred modules.
        """
        held = self._objects()
        if held is not None and len(held) == len(self._held) and all(map(operator.is_, held, self._held)):
            return False
        named = {name: unwrapped(model) for name, model in self._models.items()}
        self._modules = [*dict.fromkeys(part for model in self._models.values() for part in model.modules())]
        self.parameters.set(found for name, model in named.items() for found in model.named_parameters(prefix=name))
        self.buffers.set(found for name, model in named.items() for found in model.named_buffers(prefix=name))
        index = {id(tensor): number for number, tensor in enumerate(self.parameters.tensors) if tensor is not None}
        self.looked_up += index != self.index
        self.index = index
        pending = any(map(is_lazy, (tensor for _, tensor in self.all())))  # it gets its size as the same object
        self._held = [] if pending else self._objects() or []
        return True

    def joined(self) -> dict[str, list[str]]:
        """Return the names that joined since this was asked last; empty where none did."""
        kinds = {"parameter": self.parameters.names, "buffer": self.buffers.names}
        before, self._written = self._written, {kind: len(names) for kind, names in kinds.items()}
        return {kind: names[before.get(kind, 0) :] for kind, names in kinds.items()} if before != self._written else {}

    def all(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield parameters, then buffers, by name."""
        yield from self.parameters.present()
        yield from self.buffers.present()

    @property
    def are_swapped(self) -> bool:
        """Whether tensors stand in for parameters, as ``torch.func.functional_call`` puts them there for a call."""
        return any(not isinstance(tensor, torch.nn.Parameter) for _, tensor in self.parameters.present())

    @property
    def device(self) -> str:
        """The type of the device of the tensors; several are joined."""
        return "+".join(sorted({tensor.device.type for _, tensor in self.all()})) or "cpu"

    def _objects(self) -> list[Any] | None:
        """Return what all modules hold, and the modules; ``None`` where a module does not hold them in dicts, as one of
        TorchScript."""
        try:
            kept = itertools.chain.from_iterable(map(_HELD, self._modules))
            held = itertools.chain.from_iterable(map(dict.values, kept))
            return [*self._models.values(), *held] if self._modules else None
        except (TypeError, AttributeError):
            return None
