"""Show observers the calls of compiled graphs: what each kernel read and wrote, by the names of Inductor's buffers."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol

import torch

from hashbench.core.inductor.graphs import BufferRead, BufferWrite, CompiledGraph, KernelCall
from hashbench.core.inductor.internals import inside_wrapper, wrapper_of
from hashbench.core.trace.arguments import named_arguments
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.digest import raw_digest, readable, untraced
from hashbench.core.trace.generated import GeneratedKernel
from hashbench.core.trace.op_schema import plan_of


class GraphObserver(Protocol):
    """What is shown the calls of compiled graphs."""

    def observe(self, graph: CompiledGraph, inputs: Sequence[Any]) -> Generator[None, KernelCall, None]:
        """Observe one call of a graph: every ``yield`` returns the next call of a kernel, whose tensors are as it left
        them. The generator is closed when the graph has returned, or raised. It runs untraced."""


class KernelWatcher(TraceCallback):
    """Callback that shows the kernels of known graphs to observers.

    Args:
        graphs: by the file of the generated module.
        observers: each is shown all of them.

    Attributes:
        kernels: number of calls of kernels, and of ops by generated modules.
        unseen: number of calls of graphs that are not among ``graphs``.
    """

    wants_trace = False

    def __init__(self, graphs: Mapping[str, CompiledGraph], *observers: GraphObserver) -> None:
        self.kernels = self.unseen = 0
        self._graphs, self._observers = graphs, observers
        self._path = ""
        self._open: list[Generator[None, KernelCall, None]] = []
        self._reads: tuple[BufferRead, ...] = ()
        self._depth = 0  # an op may call others
        self._used: dict[str, frozenset[str]] = {}

    @property
    def shown(self) -> frozenset[str]:
        """The files of the known graphs that were called."""
        return frozenset(self._used)

    def graph(self, path: str, inputs: Sequence[Any]) -> None:
        graph = self._graphs.get(path)
        if graph is None:
            self.unseen += 1
            return
        self._path, self._depth = path, 0
        if path not in self._used:
            self._used[path] = wrapper_of(path).used()
        with untraced():
            self._open = [observer.observe(graph, inputs) for observer in self._observers]
            for observed in self._open:
                next(observed)

    def graph_ended(self) -> None:
        self._path = ""
        with untraced():
            for observed in self._open:
                observed.close()

    def before(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:  # noqa: ARG002
        self._depth += 1
        if not self._path or self._depth > 1:
            return
        self.kernels += 1
        if isinstance(func, GeneratedKernel):
            call = wrapper_of(self._path).calls.get(func.line)
            read = range(len(args)) if call is None else call.reads
            named = [(name, value) for at, (name, value) in enumerate(_padded(func.buffers, args)) if at in read]
            named = [(name, value) for name, value in named if isinstance(value, torch.Tensor)]
        else:
            plan = plan_of(func)
            given = named_arguments(args, kwargs)
            named = [("", tensor) for path, tensor in given if path != "out" or not plan.writes("out")]
        self._reads = tuple(_read(name, tensor) for name, tensor in named)

    def after(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        self._depth -= 1
        if not self._path or self._depth > 0:
            return
        if isinstance(func, GeneratedKernel):
            line, kernel = func.line, func.plan.name
            named = [(func.buffers[at] if at < len(func.buffers) else "", args[at]) for at in func.plan.written]
        else:
            kernel, place = str(func), inside_wrapper()
            line = place[1] if place is not None and place[0] == self._path else 0
            named = self._written(func, args, kwargs, output, line)
        last = wrapper_of(self._path).last_writers.get(line, frozenset()) & self._used[self._path]
        writes = tuple(_write(name, tensor) for name, tensor in named)
        launch = func.launch if isinstance(func, GeneratedKernel) else ""
        refused = func.refused if isinstance(func, GeneratedKernel) else ""
        generated = isinstance(func, GeneratedKernel)
        shown = KernelCall(node, kernel, generated, self._reads, writes, last, launch, refused)
        with untraced():
            for observed in self._open:
                observed.send(shown)

    def _written(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any, line: int
    ) -> list[tuple[str, torch.Tensor]]:
        """Return what an op wrote, by the buffers of the line that called it."""
        plan = plan_of(func)
        tensors, mutated = plan.written_by(args, kwargs, output), len(plan.written_tensors(args, kwargs))
        call = wrapper_of(self._path).calls.get(line)
        if call is None:
            return [("", tensor) for tensor in tensors]
        names = [*(call.pieces or call.targets[mutated:]), *call.targets[:mutated]]  # as the tensors: outputs first
        if len(names) != len(tensors):
            names = [""] * len(tensors)
        return list(zip(names, tensors, strict=True))


def _padded(names: Sequence[str], args: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(names[at] if at < len(names) else "", value) for at, value in enumerate(args)]


def _read(name: str, tensor: torch.Tensor) -> BufferRead:
    return BufferRead(name, readable(raw_digest(tensor)).value, *_place(tensor))


def _write(name: str, tensor: torch.Tensor) -> BufferWrite:
    return BufferWrite(name, tensor, readable(raw_digest(tensor)).value, *_place(tensor))


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    try:
        return tensor.data_ptr(), tensor.nbytes
    except (RuntimeError, NotImplementedError):
        return 0, 0
