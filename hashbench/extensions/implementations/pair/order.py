"""The same elements in another order: moments are blind to it, places in tensors of equal shape are not. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from hashbench.core.divergence.content import ContentAlignment, ContentGraph, ContentNode, Parting


def other_order(a: ContentGraph, b: ContentGraph, alignment: ContentAlignment) -> tuple[Parting, ...]:
    """Return where the order of elements first differs behind an output that holds the same elements in another order;
    nothing if each output has the same order, or another shape."""
    found: list[Parting] = []
    for name, node in b.results.items():
        ours = a.results.get(name)
        if ours is None or not is_reordered(a.nodes[ours], b.nodes[node]):
            continue
        found += [replace(each, results=(name,)) for each in _first_reordered(a, b, alignment, [node])]
    return tuple(dict.fromkeys(found))


def with_order(a: ContentGraph, b: ContentGraph, alignment: ContentAlignment, parting: Parting) -> Parting:
    """Return a parting, moved to where the order of what it read first differs, if it reads the same elements in
    another order."""
    moved = [theirs for ours, theirs in parting.agree if is_reordered(a.nodes[ours], b.nodes[theirs])]
    if not moved or not parting.b or any(b.nodes[node].shape == () for node in moved):
        return parting
    first = next(iter(_first_reordered(a, b, alignment, moved)), None)
    return parting if first is None else replace(first, results=parting.results)


def is_reordered(ours: ContentNode, theirs: ContentNode) -> bool:
    """Return whether two nodes of equal content and shape hold it in different orders."""
    if ours.shape != theirs.shape or not ours.ordered[1] or not theirs.ordered[1]:
        return False
    tolerance = max(ours.tolerance, theirs.tolerance) * (ours.ordered[1] + theirs.ordered[1])
    return abs(ours.ordered[0] - theirs.ordered[0]) > tolerance


def _first_reordered(
    a: ContentGraph, b: ContentGraph, alignment: ContentAlignment, roots: Iterable[str]
) -> Iterator[Parting]:
    """Yield the reordered nodes behind roots that read nothing reordered."""
    behind = _ancestors(b, roots)
    reordered = {node: partner for node in behind if (partner := _reordered_partner(a, b, alignment, node))}
    for node, partner in reordered.items():
        if b.nodes[node].op and not (_ancestors(b, b.nodes[node].reads) & reordered.keys()):
            agree = tuple(
                (alignment.partners[read][0], read) for read in b.nodes[node].reads if alignment.partners.get(read)
            )
            yield Parting((partner,), (node,), agree)


def _reordered_partner(a: ContentGraph, b: ContentGraph, alignment: ContentAlignment, node: str) -> str:
    partners = alignment.partners.get(node, ())
    if len(partners) != 1 or b.nodes[node].moments is None:
        return ""
    theirs, ours = b.nodes[node], a.nodes[partners[0]]
    if theirs.moments is None or ours.moments is None or not is_reordered(ours, theirs):
        return ""
    tolerance = max(ours.tolerance, theirs.tolerance)
    for other in a:  # another node of the same content may have the order
        has_order = other.shape == theirs.shape and other.moments is not None and not is_reordered(other, theirs)
        if has_order and other.moments is not None and other.moments.agree(theirs.moments, tolerance):
            return ""
    return ours.id


def _ancestors(graph: ContentGraph, roots: Iterable[str]) -> dict[str, None]:
    found: dict[str, None] = {}
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node not in found:
            found[node] = None
            todo += graph.nodes[node].reads
    return found
