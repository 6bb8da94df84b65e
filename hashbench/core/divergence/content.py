"""Runs of two programs as graphs of contents, whose tensors correspond by what they hold, not by name, shape or order.

No torch. A node is one output of one recorded op, or a leaf. Its moments are sums over its elements: blind to layout,
and additive over the parts of a fused tensor. In float64 equal contents agree to 1e-9; see :class:`Moments`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

EXACT = 1e-9
"""Relative tolerance of moments of float64 values."""

FALLBACK = 1e-5
"""The same behind an op that was computed in float32."""

COARSE = 2e-3
"""The same behind one that was computed in bfloat16 or float16."""


class Kind(enum.Enum):
    """What a node depends on."""

    INPUT = "input"
    """A leaf of the inputs."""
    WEIGHT = "weight"
    """A parameter or buffer."""
    CONSTANT = "constant"
    """Made of constants and weights only; also a leaf of unknown origin."""
    RANDOM = "random"
    """Drawn from a generator, itself: what reads it is not."""
    COMPUTED = "computed"
    """Computed from an input, or from what was drawn."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over the elements of a tensor. Each is zero for a zero, so that padding with zeros is not seen.

    Attributes:
        sums: of ``x``, ``x**2``, ``x**3`` and ``x / (1 + x**2)``, in float64, without the elements that count in
            ``special``.
        sizes: sums of the magnitudes of the terms, with what cancellation in the op may have lost.
        special: number of elements that are NaN, infinite or as large as a mask's fill.
    """

    sums: tuple[float, float, float, float]
    sizes: tuple[float, float, float, float]
    special: int = 0

    def __add__(self, other: Moments) -> Moments:
        sums = tuple(x + y for x, y in zip(self.sums, other.sums, strict=True))
        sizes = tuple(x + y for x, y in zip(self.sizes, other.sizes, strict=True))
        return Moments(sums, sizes, self.special + other.special)  # type: ignore[arg-type]

    def agree(self, other: Moments, tolerance: float) -> bool:
        """Return whether both are the sums of the same elements."""
        if self.special != other.special:
            return False
        both = zip(self.sums, other.sums, self.sizes, other.sizes, strict=True)
        return all(abs(x - y) <= tolerance * (p + q) for x, y, p, q in both)


@dataclass(frozen=True, slots=True)
class ContentNode:
    """One output of one op, or a leaf.

    Attributes:
        id: ``<record>:<output>``, or the id of a leaf, unique in its graph.
        op: qualified name of the op, such as ``aten.mm.default``; ``""`` of a leaf.
        kind: what it depends on.
        moments: ``None`` where it holds no numbers that were read.
        reads: nodes that were read, in the order of arguments.
        copies: its elements are elements of what it read (a view, ``cat``, ``index``, ``clone``, …).
        tolerance: :data:`EXACT`, or a looser one at and behind an op that was computed in a lower dtype.
        numel: number of elements.
        rows: moments of the rows along the last dimension that hold anything but zeros: ``[rows, 4]``, float64, sums
            alone; ``None`` if not kept.
        scalars: its arguments that are no tensors, as text.
        shape: of the tensor.
        ordered: sum of its elements, each weighted by its place in memory order of its shape; and the sum of the
            terms' magnitudes. It tells two orders of the same elements apart where shapes are equal.
    """

    id: str
    op: str
    kind: Kind
    moments: Moments | None
    reads: tuple[str, ...] = ()
    copies: bool = False
    tolerance: float = EXACT
    numel: int = 0
    rows: npt.NDArray[np.float64] | None = field(default=None, compare=False, repr=False)
    scalars: str = ""
    shape: tuple[int, ...] = ()
    ordered: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class ContentGraph:
    """One run.

    Attributes:
        nodes: by id, in the order of calls.
        results: ids of the nodes that hold the results, by name. Outputs have the same name on both sides. Gradients of
            parameters have not: one that the other side lacks by name agrees where any node there holds the same.
    """

    nodes: Mapping[str, ContentNode]
    results: Mapping[str, str]

    def __iter__(self) -> Iterator[ContentNode]:
        return iter(self.nodes.values())

    def following(self, node: str) -> set[str]:
        """Return a node and what reads it, directly or through others."""
        found = {node}
        for each in self:
            if not found.isdisjoint(each.reads):
                found.add(each.id)
        return found


@dataclass(frozen=True, slots=True)
class ContentAlignment:
    """Which contents of two runs correspond.

    Attributes:
        partners: of each aligned node of the second run: nodes of the first that hold the same, several where the
            second is made of parts of the first; empty where it only copies aligned nodes, and of those below.
        covered: nodes of the first run whose content the second has too, or that only copy such nodes.
        part_of: of nodes of the second run that are a part of a fused tensor: that node of the first.
        rows: of nodes of the second run that correspond by rows alone: a node of the first that has their rows, or
            nodes whose rows they have.
    """

    partners: Mapping[str, tuple[str, ...]]
    covered: frozenset[str]
    part_of: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def counterparts(self, node: str) -> tuple[str, ...]:
        """Return the nodes of the first run that hold what a node of the second holds, whole or in part."""
        return self.partners.get(node) or ((self.part_of[node],) if node in self.part_of else self.rows.get(node, ()))


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two runs compute something else from equal data.

    Attributes:
        a: nodes of the first run from its first op without a partner on, in order; empty if none was found.
        b: the same of the second run.
        agree: nodes of both that were read and hold the same: those that the first ops read.
        constants: constants and weights that they read and that have no partner: nodes of the first run, of the second.
        result: names of the results that it reaches.
    """

    a: tuple[str, ...]
    b: tuple[str, ...]
    agree: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    results: tuple[str, ...] = ()
