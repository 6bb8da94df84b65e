"""The kernel calls of a compiled step as data: sources and contents as digests, by which compilations are compared."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hashbench.core.inductor.graphs import CompiledGraph, KernelCall, phase_of
from hashbench.core.inductor.internals import wrapper_of
from hashbench.core.inductor.nodes import common, facts_of
from hashbench.extensions.compiled.compiled_kernels import DIGITS, ListedKernel
from hashbench.extensions.compiled.sources import source_digest


class KernelList:
    """Observer that lists the kernel calls of the first call of each compiled graph."""

    def __init__(self) -> None:
        self._kernels: list[ListedKernel] = []
        self._graphs: set[str] = set()

    def observe(self, graph: CompiledGraph, inputs: Sequence[Any]) -> Generator[None, KernelCall, None]:  # noqa: ARG002
        """List the calls of one graph."""
        number, listed = len(self._graphs), graph.path in self._graphs
        self._graphs.add(graph.path)
        sources = {} if listed else {kernel.name: source_digest(kernel) for kernel in wrapper_of(graph.path).kernels}
        while True:
            call = yield
            if listed:
                continue
            facts = [facts_of(graph.nodes[write.buffer]) for write in call.writes if write.buffer in graph.nodes]
            self._kernels.append(
                ListedKernel(
                    call.kernel,
                    sources.get(call.kernel, "") if call.generated else "",
                    tuple(read.digest[:DIGITS] for read in call.reads),
                    tuple(write.digest[:DIGITS] for write in call.writes),
                    tuple(dict.fromkeys(fact.op for fact in facts if fact.op)),
                    common(facts).module,
                    phase_of(graph.backward),
                    number,
                    call.launch,
                )
            )

    def result(self) -> tuple[ListedKernel, ...]:
        """Return the calls in order."""
        return tuple(self._kernels)


@dataclass(frozen=True, slots=True)
class AnyGraph(Mapping[str, CompiledGraph]):
    """Graphs by the file of their module, with an empty one for a module that came out of a cache."""

    known: Mapping[str, CompiledGraph] = field(default_factory=dict)

    def __getitem__(self, path: str) -> CompiledGraph:
        graph = self.known.get(path)
        return graph if graph is not None else CompiledGraph(path, torch.fx.GraphModule({}, torch.fx.Graph()), {})

    def __contains__(self, path: object) -> bool:
        return bool(path)

    def __iter__(self) -> Any:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)
