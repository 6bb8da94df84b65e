"""Fully qualified name of the module being called, kept by global module hooks."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


def _nobody(*_: Any) -> None:
    """Is told where nobody listens."""


class ModulePaths:
    """Where in which model we are: paths such as ``ResNet.layer1.0.conv1``; ``optimizing`` while an optimizer steps.
    ``stepped`` is called with the optimizer when it has, ``changed`` when one of these changes, and ``named`` with
    the parameters and buffers of a model that becomes known, the kind and the name of each.

    Hooks cost about 2 µs a module call; replacing ``Module.__call__`` instead was measured at 0.2 ms a trace, since it
    invalidates Python's caches of every module class.
    """

    def __init__(self, stepped: Callable[[torch.optim.Optimizer], object] = lambda _: None) -> None:
        self.current = ""
        self.optimizing = False
        self._paths: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}
        self._state: dict[int, tuple[weakref.ref[torch.nn.Module], str, str]] = {}
        self._roots: Counter[str] = Counter()
        self._hooks: list[RemovableHandle] = []
        self._thread, self._outer = 0, list[str]()
        self._stepped = stepped
        self.changed: Callable[[], object] = _nobody
        self.named: Callable[[list[tuple[torch.Tensor, str, str]]], object] = _nobody

    def register(self, root: torch.nn.Module) -> str:
        """Name a model and all modules in it after the class of the root; a second root of one class gets ``@2``."""
        name = type(root).__name__
        self._roots[name] += 1
        prefix = name if self._roots[name] == 1 else f"{name}@{self._roots[name]}"
        found: list[tuple[torch.Tensor, str, str]] = []
        for path, module in reversed(list(root.named_modules())):  # of tied tensors the first name stays
            full, reference = f"{prefix}.{path}" if path else prefix, weakref.ref(module)
            self._paths[id(module)] = (reference, full)
            for attribute, tensor in [*module._parameters.items(), *module._buffers.items()]:
                self._state[id(tensor)] = (reference, full, attribute)
                if tensor is not None:
                    kind = "parameter" if attribute in module._parameters else "buffer"
                    found.append((tensor, kind, f"{full}.{attribute}"))
        self.named(found)
        return prefix

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
    def watched(self) -> Iterator[None]:
        """Follow the module calls of this thread, and optimizers' steps."""
        self._thread = threading.get_ident()
        self._outer.clear()
        self.follow()
        try:
            yield
        finally:
            self.rest()
            self.current, self.optimizing = "", False
            self.changed()

    def follow(self) -> None:
        """Register torch's global hooks."""
        if self._hooks:
            return
        self._hooks += (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
        )

    def rest(self) -> None:
        """Remove them: dynamo compiles what hooks do into a graph, cannot follow ours, and compiles anew without."""
        while self._hooks:
            self._hooks.pop().remove()

    def _enter(self, module: torch.nn.Module, _inputs: Any) -> None:
        if threading.get_ident() == self._thread:
            self._outer.append(self.current)
            known = self._paths.get(id(module))
            self.current = known[1] if known is not None and known[0]() is module else self.register(module)
            self.changed()

    def _leave(self, _module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        if threading.get_ident() == self._thread and self._outer:
            self.current = self._outer.pop()
            self.changed()

    def _begin_step(self, *_: Any) -> None:
        self.optimizing = True
        self.changed()

    def _end_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.optimizing = False
        self.changed()
        if threading.get_ident() == self._thread:
            self._stepped(optimizer)
