"""Find the first divergence of two traces: where the difference entered that reached the results. Pure: no torch, no
files.

The two runs are aligned (``compare.align``). Each pair of records is judged: it *introduced* a difference (with an
origin), only propagated one, or agrees (``introduce``). A backward slice from the differing results collects the nodes
that differ; the first introduction in it is the divergence (``choose``). Records that differ outside the slice are
benign.

The first of these that differs decides the origin:

=========================================================== ==========================================================
model inputs, before the first op                           ``input``
parameters or buffers, before the first op                  ``state``
a global setting of torch changed by a run                  ``settings`` (restored before the next run, and reported)
generator state at a seeded op                              ``rng``
another leaf, or a non-tensor argument                      ``outside``
an input's content against its last recorded write          ``outside`` (a write that bypassed the dispatcher)
an input is another record's output than in the first run   ``sequence``
the next op, or the end of one trace                        ``sequence``
outputs of an op whose inputs are equal                     ``kernel``
outputs of a collective, or anything downstream of one      ``ranks`` (no kernel is named), unless its group has one
                                                            rank
=========================================================== ==========================================================

Details:

* Blank memory: an op that reads an unwritten allocation is not blamed; the allocation is
  (``aten.empty.memory_format``), also where later writes filled only a part. Ops that overwrite without reading
  (``copy_``, ``uniform_``) stop the slice.
* Views write nothing: a view that the runs took differently is blamed at its first read or write, or when it is itself
  a result.
* Places: a write to another part of a memory (offset, shape, strides) leaves another memory, however equal what it
  wrote. Parts that both runs wrote in another order leave the same. Without hashed inputs a write that changed nothing
  counts as a change, and so does one beside what is read, unless it ends before that.
* Order of fills: parts of one memory that both runs fill alike, unread in between, leave the same in any order.
* Strides: content is hashed in memory order, so equal digests with other strides are different tensors; the detail
  shows both.
* Draws: numbers that a generator in a different state drew, and that no op read, are read by Python, perhaps. They are
  named before a value or an order behind them, which may as well come from elsewhere; the detail says both.
* Scalars: a value from ``.item()`` among a later op's arguments is an edge. Where another op follows, the last
  differing scalar is named in ``steered_by``.
* Inside an op that calls others (native tracer): a difference that enters there (a tensor, an argument, the order of
  calls, a generator) is blamed on the outer op if both runs called it alike; the detail names the inner call.
* Settings are read when a run starts, at each iteration, and when it ends; a difference counts from the earlier
  reading.
* A result that differs although its last recorded writer agrees was written by code that bypassed the dispatcher.
* Collectives: a kernel is named only where none of its inputs came through a collective, and where no collective came
  before it or inputs were hashed.
* Early reads of a collective's output are ``ranks``, at the reader, where the traces agree in all else.
* Memory that is only filled (``out=``, a DDP bucket, a buffer of ``all_gather``) counts as an allocation.
* Traces without results are judged by their first differing record.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from hashbench.core.catalog import Origin
from hashbench.core.divergence.align import SECOND, PairedRuns, pair
from hashbench.core.divergence.choose import ChosenSource, choose_source
from hashbench.core.divergence.describe import divergence_at, early_divergence, unseen
from hashbench.core.divergence.introduce import Differences, find_differences
from hashbench.core.divergence.text import PairVerdict
from hashbench.core.errors import HashbenchError
from hashbench.core.records import Trace
from hashbench.core.trace.file import refuse_different


def find(
    first: Trace, second: Trace, *, differing: Sequence[str] | None = None, draws_first: bool = True
) -> PairVerdict:
    """Return the verdict on a pair of runs; its text is what ``hashbench diff`` prints.

    Args:
        first, second: the traces of two runs that should be identical.
        differing: names of the results that differ, where the caller compared them itself. Default: those whose
            digests differ. Traces without results (of a plain ``HashDebugTrace``) are judged by every record.
        draws_first: name a draw that differs and that no op read, such as the order of a DataLoader, before an order or
            a value from outside torch behind it. False where experiments tell them apart.

    Equal traces still have a divergence where either of them read a collective's output early: the trace waited for the
    collective, and the program does not.

    Raises:
        HashbenchError: a trace is empty, so that nothing would be compared, or they are of different tracers.
    """
    refuse_different(first.tracer, second.tracer)
    _refuse_empty(first, "first")
    _refuse_empty(second, "second")
    runs = pair(first, second)
    names = tuple(_differing_results(first, second) if differing is None else differing)
    differences = find_differences(runs)
    return _verdict(differences, choose_source(differences, names, draws_first=draws_first), names)


def _refuse_empty(trace: Trace, name: str) -> None:
    if not trace.records and not trace.results:
        raise HashbenchError(
            f"the {name} trace is empty",
            consequence="nothing was compared, which is not the same as equal",
            tip="Check that the code under the trace ran any torch op in this thread.",
        )


def _differing_results(first: Trace, second: Trace) -> Iterator[str]:
    old, new = ({result.name: result.digest for result in run.results} for run in (first, second))
    return (name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name))


# ------------------------------------------------------------------------------------------------- the verdict


def _verdict(differences: Differences, choice: ChosenSource, differing: tuple[str, ...]) -> PairVerdict:
    runs, first, second = differences.runs, differences.runs.first, differences.runs.second
    nodes: Iterable[str] = runs.records
    if runs.opaque and choice.source is not None:  # whether what lies behind reaches a result is not known
        nodes = itertools.takewhile(lambda node: node != runs.opaque, nodes)
    idle = (differences.differs | differences.elsewhere) - choice.reached
    early = tuple(dict.fromkeys([*first.early_reads, *second.early_reads]))
    divergence = None if choice.source is None else divergence_at(runs, choice.source, choice.steered_by)
    if divergence is None and early:
        divergence = early_divergence(runs, early[0], Origin.RANKS)
    return PairVerdict(
        differing,
        divergence,
        tuple(node for node in nodes if node in idle and runs.wrote(node)),
        unseen(runs),
        leaves=tuple(leaf.removeprefix(SECOND) for leaf in _differing_leaves(runs) if leaf not in choice.reached),
        early_reads=early,
        first=first,
        second=second,
    )


def _differing_leaves(runs: PairedRuns) -> Iterator[str]:
    """Yield the leaves that differ between the traces or exist in one of them only."""
    for node, (a, b) in runs.leaves.items():
        if a is None or b is None or (a.kind, a.digest, a.initial) != (b.kind, b.digest, b.initial):
            yield node
