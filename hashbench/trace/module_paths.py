"""Fully qualified name of the module being called, kept by global module hooks."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


def _nobody(*_: Any) -> None:
    """Is told where nobody listens."""


NamedState = list[tuple[torch.Tensor, str, str, str]]
"""Parameters and buffers of a model: the tensor, its kind, the path of its module, and its name there."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Who is told what while modules are followed.

    Attributes:
        stepped: called with an optimizer that has made a step.
        changed: called when a step begins or ends.
        moved: called with the path of the module that we are in now.
        named: called with the state of a model that becomes known.
    """

    stepped: Callable[[torch.optim.Optimizer], object] = _nobody
    changed: Callable[[], object] = _nobody
    moved: Callable[[str], object] = _nobody
    named: Callable[[NamedState], object] = _nobody


class ModulePaths:
    """Where in which model we are: paths such as ``ResNet.layer1.0.conv1``; ``optimizing`` while an optimizer steps.

    Of the hooks half is torch's own way to call them, and theirs costs as little as Python can: many workloads call a
    module every 50 µs. Replacing ``Module.__call__`` instead was measured at 0.2 ms a trace, since it invalidates
    Python's caches of every module class.
    """

    def __init__(self) -> None:
        self.current = ""
        self.optimizing = False
        self._paths: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}
        self._state: dict[int, tuple[weakref.ref[torch.nn.Module], str, str]] = {}
        self._roots: Counter[str] = Counter()
        self._hooks: list[RemovableHandle] = []
        self._thread, self._outer = 0, list[str]()
        self._listener = Listener()

    def register(self, root: torch.nn.Module) -> NamedState:
        """Name a model and all modules in it after the class of the root; a second root of one class gets ``@2``."""
        name = type(root).__name__
        self._roots[name] += 1
        prefix = name if self._roots[name] == 1 else f"{name}@{self._roots[name]}"
        modules: dict[torch.nn.Module, str] = {}
        _walk(root, prefix, modules)
        found: NamedState = []
        for module, path in reversed(modules.items()):  # of tied tensors the first name stays
            reference = weakref.ref(module)
            self._paths[id(module)] = reference, path
            for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
                for attribute, tensor in tensors.items():
                    if tensor is not None:
                        self._state[id(tensor)] = reference, path, attribute
                        found.append((tensor, kind, path, attribute))
        return found

    def state_name(self, tensor: torch.Tensor) -> tuple[str, str]:
        """``("parameter" | "buffer", path)`` of a tensor that belongs to a known module, else two empty texts."""
        reference, path, attribute = self._state.get(id(tensor), (None, "", ""))
        module = reference() if reference is not None else None
        if module is not None and module._parameters.get(attribute) is tensor:
            return "parameter", f"{path}.{attribute}"
        if module is not None and module._buffers.get(attribute) is tensor:
            return "buffer", f"{path}.{attribute}"
        return "", ""  # also where the module's tensor died, and another one got its id

    @contextmanager
    def watched(self, listener: Listener | None = None) -> Iterator[None]:
        """Follow the module calls of this thread, and optimizers' steps."""
        self._thread = threading.get_ident()
        self._outer.clear()
        self._listener = listener or Listener()
        self.follow()
        try:
            yield
        finally:
            self.rest()
            self.current, self.optimizing = "", False
            self._listener.changed()
            self._listener = Listener()  # nothing refers to who listened: what a trace keeps is released with it

    def follow(self) -> None:
        """Register torch's global hooks."""
        if self._hooks:
            return
        enter, leave = self._module_hooks()
        self._hooks += (
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
        )

    def rest(self) -> None:
        """Remove them: dynamo compiles what hooks do into a graph, cannot follow ours, and compiles anew without."""
        while self._hooks:
            self._hooks.pop().remove()

    def _module_hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """What is called before and after every module; all that they need are variables of this function."""
        get_ident, thread, outer = threading.get_ident, self._thread, self._outer
        known_path, moved = self._paths.get, self._listener.moved

        def enter(module: torch.nn.Module, _inputs: Any) -> None:
            if get_ident() == thread:
                outer.append(self.current)
                known = known_path(id(module))
                self.current = path = known[1] if known is not None and known[0]() is module else self._new(module)
                moved(path)

        def leave(_module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
            if outer and get_ident() == thread:
                self.current = path = outer.pop()
                moved(path)

        return enter, leave

    def _new(self, module: torch.nn.Module) -> str:
        """The path of a module that is no part of a known model."""
        self._listener.named(self.register(module))
        return self._paths[id(module)][1]

    def _begin_step(self, *_: Any) -> None:
        self.optimizing = True
        self._listener.changed()

    def _end_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.optimizing = False
        self._listener.changed()
        if threading.get_ident() == self._thread:
            self._listener.stepped(optimizer)


def _walk(module: torch.nn.Module, path: str, found: dict[torch.nn.Module, str]) -> None:
    """Put a module and all in it into ``found``, each with its first path, as ``named_modules`` does in thrice the
    time."""
    if module not in found:
        found[module] = path
        for name, child in module._modules.items():
            if child is not None:
                _walk(child, f"{path}.{name}", found)
