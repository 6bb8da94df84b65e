"""Walk back from results that differ, through whatever differs, to where the difference entered.

A graph has two functions: the *predecessors* of a node (what it read), and whether the node differs between the runs.
Nodes are hashable keys. They may lie on several ranks and need no common order: the earliest nodes are those without a
predecessor that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Node = TypeVar("Node", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Slice(Generic[Node]):
    """The nodes from which a difference may have reached the roots.

    Attributes:
        reached: each node that differs → its predecessors that differ or are missing, without itself.
        missing: roots and predecessors of which it is not known whether they differ.
    """

    reached: Mapping[Node, tuple[Node, ...]]
    missing: frozenset[Node]

    @property
    def frontier(self) -> tuple[Node, ...]:
        """The earliest nodes: whatever they read agrees, so the difference entered there.

        Nodes that read each other, and nothing else that differs, are earliest together. There is none only where every
        way back ends in :attr:`open` nodes.
        """
        entries = [node for node, before in self.reached.items() if not before]
        unexplained = self._without_readers_of([*entries, *self.missing])
        while unexplained:
            entries += (circle := self._circle_behind(next(iter(unexplained))))
            unexplained = {node: None for node in self._without_readers_of(circle) if node in unexplained}
        return tuple(entries)

    @property
    def open(self) -> tuple[Node, ...]:
        """The nodes of which a predecessor is missing: the difference entered there, or came from what is missing."""
        return tuple(node for node, before in self.reached.items() if not self.missing.isdisjoint(before))

    def _without_readers_of(self, nodes: Iterable[Node]) -> dict[Node, None]:
        """Return the reached nodes to which no way leads from these; in order."""
        readers: dict[Node, list[Node]] = {}
        for node, before in self.reached.items():
            for read in before:
                readers.setdefault(read, []).append(node)
        explained = _walk(nodes, lambda node: readers.get(node, ()))
        return {node: None for node in self.reached if node not in explained}

    def _circle_behind(self, node: Node) -> tuple[Node, ...]:
        """Return the nodes behind ``node`` that all read each other and nothing else that differs."""
        read = self.reached.__getitem__
        circle = _walk([node], read)
        while fewer := next(
            (walked for walked in (_walk([other], read) for other in circle) if len(walked) < len(circle)), None
        ):
            circle = fewer
        return tuple(circle)


def backward_slice(
    roots: Iterable[Node], edges: Callable[[Node], Iterable[Node]], differs: Callable[[Node], bool | None]
) -> Slice[Node]:
    """Collect the nodes that differ and from which a way through nodes that differ leads to a root.

    Args:
        roots: where to begin, such as the writers of the results that differ. A root that agrees leads nowhere.
        edges: the predecessors of a node that differs: the nodes from which a difference may have come.
        differs: whether a node differs between the runs; ``None`` where nothing is known of it (the trace of its rank
            is missing, a kernel that no trace looks into), which ends the walk and is reported. Asked once a node. True
            of every node where ``edges`` gives those alone through which a difference came.
    """
    known: dict[Node, bool | None] = {}

    def followed(nodes: Iterable[Node]) -> tuple[Node, ...]:
        unique = dict.fromkeys(nodes)
        known.update({node: differs(node) for node in unique if node not in known})
        return tuple(node for node in unique if known[node] is not False)

    reached: dict[Node, tuple[Node, ...]] = {}

    def predecessors(node: Node) -> tuple[Node, ...]:
        if known[node]:
            reached[node] = tuple(read for read in followed(edges(node)) if read != node)
        return reached.get(node, ())

    _walk(followed(roots), predecessors)
    return Slice(reached, frozenset(node for node, answer in known.items() if answer is None))


def _walk(starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> dict[Node, None]:
    """Return the nodes to which a way leads from the starts, which are among them; in the order of their discovery."""
    waiting, seen = list(starts), dict[Node, None]()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen[node] = None
            waiting += following(node)
    return seen
