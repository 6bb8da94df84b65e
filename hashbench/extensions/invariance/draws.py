"""Find the call that left a generator in another state than in the other run, by the states before and after each call.
Pure: no torch."""

from __future__ import annotations

from dataclasses import dataclass

from hashbench.extensions.invariance.judged import RowRun


@dataclass(frozen=True, slots=True)
class Drawer:
    """The call after which a generator state differs.

    Attributes:
        node: id of its record in the smaller run; "" if unknown.
        how: what differs.
    """

    node: str
    how: str


def drawer_before(other: RowRun, reference: RowRun, nodes: tuple[str, str], names: tuple[str, str]) -> Drawer:
    """Return the first call at which the draws from one generator part, of all before a call of ``other`` and its
    counterpart in ``reference`` (``nodes``: their ids). ``names`` are those of the two runs."""
    here, there = _draws(other, nodes[0]), _draws(reference, nodes[1])
    pairs = zip(here, there, strict=False)
    common = next(
        (at for at, (first, twin) in enumerate(pairs) if other.calls[first].drew != reference.calls[twin].drew),
        min(len(here), len(there)),
    )
    if common < min(len(here), len(there)):
        each, twin = other.calls[here[common]].drew, reference.calls[there[common]].drew
        if each is not None and twin is not None and each.before == twin.before:
            return Drawer(here[common], "it draws another amount of them")
    elif common < len(here):
        return Drawer(here[common], f"{names[0]} draws more often than {names[1]}")
    elif common:
        return Drawer(here[-1], f"{names[1]} draws more often than {names[0]}")
    return Drawer("", "it draws from a generator that was seeded by it, or drawn from by other code than torch's ops")


def uneven_draws(other: RowRun, reference: RowRun, *, turned: bool) -> tuple[str, ...]:
    """Return the draws of ``other`` if which item gets which numbers may differ between the runs, else nothing.

    A loop over items draws for each in turn, so that no single call is given another state than its counterpart, and
    items get numbers by their order. Both may be innocent: numbers that reach no output, or that every item shares.
    """
    here, there = _drawing(other), _drawing(reference)
    return here if len(here) != len(there) or (turned and len(here) > 1) else ()


def _drawing(run: RowRun) -> tuple[str, ...]:
    """Return the records of the calls that drew, in order."""
    calls = ((record.id, run.calls.get(record.id)) for record in run.trace.records)
    return tuple(node for node, call in calls if call is not None and call.drew is not None)


def _draws(run: RowRun, node: str) -> list[str]:
    """Return the calls that drew from the generator of a call before it, in order: each left the state from which the
    next one drew."""
    left: dict[int, str] = {}
    before: dict[str, str] = {}
    for record in run.trace.records:
        drew = run.calls[record.id].drew if record.id in run.calls else None
        if drew is not None:
            before[record.id] = left.get(drew.before, "")
            left[drew.after] = record.id
    chain: list[str] = []
    while node := before[node]:
        chain.append(node)
    return chain[::-1]
