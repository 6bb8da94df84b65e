"""Small runs written by hand: nodes that hold real arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from hashbench.core.divergence.content import ContentGraph, ContentNode, Kind, Moments

Array = npt.NDArray[np.float64]
LARGEST = 1e30


def moments_of(values: Array) -> Moments:
    usual = values[np.abs(values) < LARGEST]
    sums = usual.sum(), (usual**2).sum(), (usual**3).sum(), np.sin(3 * usual).sum()
    size = np.abs(usual).sum()
    sizes = size, (usual**2).sum(), np.abs(usual**3).sum(), 3 * size
    return Moments(
        (float(sums[0]), float(sums[1]), float(sums[2]), float(sums[3])),
        (float(sizes[0]), float(sizes[1]), float(sizes[2]), float(sizes[3])),
        int(values.size - usual.size),
    )


def rows_of(values: Array) -> Array:
    rows = np.where(np.abs(values) < LARGEST, values, 0.0).reshape(-1, values.shape[-1])
    sums = np.stack([rows.sum(1), (rows**2).sum(1), (rows**3).sum(1), np.sin(3 * rows).sum(1)], 1)
    return np.asarray(sums[np.abs(rows).sum(1) > 0])


class Run:
    """A run that is recorded while it is computed with numpy: ``run.op("mm", np.matmul, x, w)``."""

    def __init__(self) -> None:
        self.nodes: dict[str, ContentNode] = {}
        self.values: dict[str, Array] = {}
        self.calls = 0

    def leaf(self, name: str, values: object, kind: Kind = Kind.INPUT) -> str:
        return self._add(name, "", kind, np.asarray(values, np.float64), (), copies=False)

    def weight(self, name: str, values: object) -> str:
        return self.leaf(name, values, Kind.WEIGHT)

    def op(
        self, name: str, function: Callable[..., object], *reads: str, copies: bool = False, scalars: str = ""
    ) -> str:
        """Call a function on what nodes hold; returns the node. Several results: the nodes of :meth:`outputs`."""
        value = function(*(self.values[read] for read in reads))
        made = self._add(
            f"{self._next()}:0", name, self._kind(reads), np.asarray(value, np.float64), reads, copies=copies
        )
        self.nodes[made] = replace(self.nodes[made], scalars=scalars)
        return made

    def outputs(self, name: str, function: Callable[..., object], *reads: str, copies: bool = True) -> list[str]:
        """The same of a function that returns several arrays."""
        values = function(*(self.values[read] for read in reads))
        call = self._next()
        return [
            self._add(f"{call}:{index}", name, self._kind(reads), np.asarray(value, np.float64), reads, copies=copies)
            for index, value in enumerate(values)  # type: ignore[arg-type, var-annotated]
        ]

    def draw(self, name: str, values: object) -> str:
        return self._add(f"{self._next()}:0", name, Kind.RANDOM, np.asarray(values, np.float64), (), copies=False)

    def constant(self, name: str, values: object) -> str:
        return self._add(f"{self._next()}:0", name, Kind.CONSTANT, np.asarray(values, np.float64), (), copies=False)

    def without_rows(self, *nodes: str) -> None:
        for node in nodes:
            self.nodes[node] = replace(self.nodes[node], rows=None)

    def tolerate(self, node: str, tolerance: float) -> None:
        self.nodes[node] = replace(self.nodes[node], tolerance=tolerance)

    def graph(self, **results: str) -> ContentGraph:
        return ContentGraph(dict(self.nodes), results)

    def _next(self) -> str:
        self.calls += 1
        return f"r{self.calls}"

    def _kind(self, reads: tuple[str, ...]) -> Kind:
        data = {Kind.INPUT, Kind.COMPUTED, Kind.RANDOM}
        return Kind.COMPUTED if any(self.nodes[read].kind in data for read in reads) else Kind.CONSTANT

    def _add(self, name: str, op: str, kind: Kind, values: Array, reads: tuple[str, ...], *, copies: bool) -> str:
        values = np.atleast_1d(values)
        self.nodes[name] = ContentNode(
            name,
            op,
            kind,
            moments_of(values),
            reads,
            copies,
            numel=values.size,
            rows=rows_of(values),
            shape=values.shape,
        )
        self.values[name] = values
        return name
