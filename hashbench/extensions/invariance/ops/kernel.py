"""The kernel of an op whose items' rows depend on their batch, located as that of a model is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from hashbench.core.records import Failure
from hashbench.core.run.outcome import Run
from hashbench.core.trace.api import HashDebugTrace
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.extensions.invariance.finding import BatchFinding
from hashbench.extensions.invariance.item_call import ItemCall, digests_of
from hashbench.extensions.invariance.layout import ItemSubset
from hashbench.extensions.invariance.locate import compare_rows, finding_of


def kernel_of(call: ItemCall, sizes: Sequence[int]) -> BatchFinding | None:
    """Find where the rows of the items came to differ from those among all at one of these numbers of items: the first
    and the last of them are tried, and the others where these name no kernel; without any number, at another place. The
    best of what is found has a call that can be repeated. ``None`` where runs fail, or no other place was found."""
    ends = [*dict.fromkeys([*sizes[:1], *sizes[-1:]])]
    tried = [range(size) for size in [*ends, *sizes[1:-1]]] if sizes else [*itertools.islice(_moved(call), 1)]
    named = None
    for number, chosen in enumerate(tried):
        if number >= len(ends) and named is not None and named.kernel:
            break
        found = located(call, chosen)
        if found is not None and found.call is not None:
            return found
        named = found if named is None or not named.kernel else named
    return named


def located(call: ItemCall, chosen: range) -> BatchFinding | None:
    """Find where a run of ``call`` on its items ``chosen``, which are not all, came to differ from one on all; ``None``
    where a run fails."""
    some = call.select(chosen)

    def run_at(size: int, watcher: TraceCallback) -> Run:
        trace = HashDebugTrace(watcher=watcher, tracer="python")
        with trace:
            left = (call if size == call.items else some).run()[0]
        results = dict(zip(_names(left), left, strict=True))
        for name, tensor in results.items():
            trace.add_result(name, tensor)
        return Run(trace.finish(), results)

    whole, part = call.run()[0], some.run()[0]
    differing = [
        name
        for name, there, here, axis in zip(_names(whole), whole, part, call.outputs, strict=True)
        if axis is not None
        and digests_of([there], [axis], call.items)[chosen.start : chosen.stop]
        != digests_of([here], [axis], len(chosen))
    ]
    if not differing:  # it follows from where its memory lies, too
        why = f"not attributable: in runs of their own the rows of {len(chosen)} items are those among {call.items}"
        return BatchFinding(len(chosen), call.items, detail=why)
    compared = compare_rows(run_at, ItemSubset(call.items, len(chosen), chosen.start), differing)
    found = compared if isinstance(compared, Failure) else finding_of(run_at, compared)
    return found if isinstance(found, BatchFinding) else None


def _names(left: list[torch.Tensor]) -> list[str]:
    return [f"output.{number}" for number in range(len(left))]


def _moved(call: ItemCall) -> Iterator[range]:
    """Choose items from one on, some of which come out differently when they are moved to the front: those before are
    left out."""
    reference = call.rows()
    for first in _shifts(call.items):
        if call.select(range(first, call.items)).rows() != reference[first:]:
            yield range(first, call.items)


def another_order(call: ItemCall) -> list[int]:
    """Return the items in an order in which some come out differently than in their own; backwards where none was
    found."""
    everybody, reference = [*range(call.items)], call.rows()
    orders = (everybody[first:] + everybody[:first] for first in _shifts(call.items))
    differing = (order for order in orders if call.select(order).rows() != tuple(reference[item] for item in order))
    return next(differing, everybody[::-1])


def _shifts(items: int) -> Iterator[int]:
    yield from sorted({1, 2, 3, items // 2, items - 1} & set(range(1, items)))
