"""The first kernel whose rows differ although this item's rows of all its inputs are equal. Pure: no torch.

Two runs are compared call by call, by the digests of the rows of all that each call read and wrote (``judged``). A call
is an *origin* where all that it read is equal for the items that both runs have, and something that it wrote is not.
From the outputs that differ we walk back through reads that differ: the origins reached are the sources, the first of
them is the kernel. Origins that are not reached are benign.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hashbench.core.divergence.slice import backward_slice
from hashbench.core.records import OpRecord
from hashbench.extensions.invariance.draws import drawer_before, uneven_draws
from hashbench.extensions.invariance.judged import JudgedCall, RowEffect, RowRuns, reads_by_view
from hashbench.extensions.invariance.match import Match


@dataclass(frozen=True)
class RowComparison:
    """Two runs, compared.

    Attributes:
        runs: the two.
        differing: names of the results that differ.
        sources: ids, in the other run, of the records in which a difference entered that reached a result, in order.
        detail: what is special about the sources, or why there is none.
        drawn: the runs differ by the states of the generators from which their calls draw.
        may_be_drawn: the first source draws, and which item gets which numbers may differ between the runs.
    """

    runs: RowRuns
    differing: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    detail: str = ""
    drawn: bool = False
    may_be_drawn: bool = False

    @property
    def benign(self) -> tuple[str, ...]:
        """Ids of the records that changed items' rows without effect on a result."""
        return tuple(
            node
            for node in self._beside(RowEffect.ORIGIN)
            if any(match.sizes and not match.equal for match in self.runs.judged[node].written)
        )

    @property
    def not_attributable(self) -> tuple[str, ...]:
        """Ids of the records whose effect on the rows of an item is unknown."""
        return tuple(self._beside(RowEffect.UNKNOWN))

    @property
    def couples_items(self) -> bool:
        """Whether the first source makes an item depend on others by definition, not by the order of sums."""
        call = self.runs.judged[self.sources[0]] if self.sources else None
        if call is None or not call.reference:
            return False
        reduces = any(m.sizes for m in call.read.values()) and all(m.equal or m.sizes is None for m in call.written)
        return call.effect is not RowEffect.ORIGIN or bool(call.coupled) or reduces

    def _beside(self, effect: RowEffect) -> Iterator[str]:
        """Yield the calls with this effect that are no sources."""
        return (node for node, call in self.runs.judged.items() if call.effect is effect and node not in self.sources)


def find_sources(runs: RowRuns, differing: Sequence[str]) -> RowComparison:
    """Find where a difference entered that reached the results named."""
    compared = RowComparison(runs, tuple(differing))
    if not differing:
        return compared
    reached = _reached(compared, strictly=False)
    origins = tuple(node for node in reached if _is_source(runs, node))
    if not origins:
        sources, detail = _without_origin(compared, reached)
        return _by_draws(replace(compared, sources=sources, detail=detail))
    call = runs.judged[origins[0]]
    drawn = call.redrawn and call.effect is RowEffect.ORIGIN
    sources, detail = (_with_drawer if drawn else _with_detail)(compared, origins)
    found = replace(compared, sources=sources, detail=detail, drawn=drawn)
    return found if drawn or (call.effect is RowEffect.ORIGIN and not runs.subset.turned) else _by_draws(found)


def _by_draws(found: RowComparison) -> RowComparison:
    """Put a draw before sources that no call of equal rows shows, if numbers that the runs draw unevenly reached the
    results that differ, or a number that Python read."""
    runs = found.runs
    uneven = uneven_draws(runs.other, runs.reference, turned=runs.subset.turned)
    if not uneven or runs.subset.together:
        return found
    results = runs.other.trace.results
    roots = [runs.unit(result.source) for result in results if result.name in found.differing]
    roots += [record.id for record in runs.records.values() if not record.outputs]  # item() and its like

    def edges(node: str) -> Iterator[str]:
        return (runs.unit(ref.source) for ref in runs.records[node].inputs)

    reached = backward_slice(roots, edges, runs.records.__contains__).reached
    first = next((node for node in map(runs.unit, uneven) if node in reached), "")
    if not first:
        return found
    there = len(uneven_draws(runs.reference, runs.other, turned=runs.subset.turned))
    names, how = _names(runs), f"draws {len(uneven)} times"
    both = f"each run {how}" if runs.subset.turned else f"{names[0]} {how}, {names[1]} {there} times"
    detail = f"which random numbers an item gets may follow from the other items: {both}"
    return replace(found, sources=tuple(dict.fromkeys((first, *found.sources))), detail=detail, may_be_drawn=True)


def _reached(compared: RowComparison, *, strictly: bool) -> Sequence[str]:
    """Return the calls from which a difference may have reached the results that differ, in order; ``strictly``: or
    rows at another place."""
    runs, judged = compared.runs, compared.runs.judged

    def equal(match: Match) -> bool:
        return match.strictly_equal if strictly else match.surely_equal

    def edges(node: str) -> Iterator[str]:
        call, record = judged[node], runs.records[node]
        if call.effect is RowEffect.ORIGIN and not strictly:
            return
        if not call.reference:
            yield from _unclean(runs, node)
        # An item's rows that are equal here, and reach a reader that sees others, were written by an earlier call
        # into the same memory.
        wrote_equal = call.written and all(map(equal, call.written))
        for ref in record.inputs:
            if (ref.argument in call.read and not equal(call.read[ref.argument])) or (ref.written and wrote_equal):
                yield runs.unit(ref.source)

    results = runs.other.trace.results
    roots = (runs.unit(result.source) for result in results if result.name in compared.differing)
    reached = backward_slice(roots, edges, judged.__contains__).reached
    return [node for node in judged if node in reached]


def _is_source(runs: RowRuns, node: str) -> bool:
    call = runs.judged[node]
    return call.effect is RowEffect.ORIGIN or _parts(runs, node) or bool(reads_by_view(runs, node))


def _parts(runs: RowRuns, node: str) -> bool:
    """Return True if only the smaller run makes this call, on equal inputs. Masks and positions of tokens do not count:
    they are made in other ways for other numbers of tokens."""
    if runs.subset.together and (not runs.records[node].inputs or _made_before(runs, node)):
        return False
    return not runs.judged[node].reference and not _unclean(runs, node)


def _unclean(runs: RowRuns, node: str) -> list[str]:
    """Return the calls that wrote what a call read, and may have left other rows than their counterparts."""
    writers = dict.fromkeys(runs.unit(ref.source) for ref in runs.records[node].inputs)
    known = (writer for writer in writers if writer in runs.judged and writer != node)
    return [writer for writer in known if runs.judged[writer].effect is not RowEffect.SAME]


def _made_before(runs: RowRuns, node: str) -> str:
    """Return the id of what a call reads from before its run and the reference lacks, else ""."""
    sources = (ref.source for ref in runs.records[node].inputs)
    return next((source for source in sources if source not in runs.leaves[0] and source not in runs.records), "")


# --------------------------------------------------------------------------------------------- what is said of it

_Said = tuple[tuple[str, ...], str]
"""The sources, and the detail of the first."""


def _with_drawer(compared: RowComparison, origins: tuple[str, ...]) -> _Said:
    """Put the call that drew another amount of random numbers before a source that differs only by these."""
    runs = compared.runs
    first, twin = runs.records[origins[0]], compared.runs.judged[origins[0]].reference
    drawer = drawer_before(runs.other, runs.reference, (first.id, twin), _names(runs))
    node = runs.unit(drawer.node) if drawer.node else first.id
    before = f", so that the generator stands elsewhere before {_named(first)}" if node != first.id else ""
    detail = f"random numbers differ by the {runs.varied}: {drawer.how}{before}"
    return tuple(dict.fromkeys((node, *origins))), detail


def _with_detail(compared: RowComparison, origins: tuple[str, ...]) -> _Said:
    runs, first = compared.runs, origins[0]
    views = [runs.other.views.get(first, {}).get(path, ()) for path in reads_by_view(runs, first)]
    if views:
        through = ", ".join(dict.fromkeys(op for chain in views for op in chain)) or "a view"
        return origins, f"through {through} it reads memory that holds different content for another {runs.varied}"
    return origins, runs.judged[first].coupled or _instead_of(runs, first)


def _instead_of(runs: RowRuns, node: str) -> str:
    """Name the ops that only the reference calls, if only the smaller run makes this call, else return ""."""
    if runs.judged[node].reference:
        return ""
    alone = runs.references.keys() - set(runs.counterparts.values())
    module = runs.records[node].module
    ops = dict.fromkeys(
        record.op
        for record in runs.references.values()
        if record.id in alone and record.module == module and record.outputs
    )
    return f"{_names(runs)[1]} calls different ops here ({', '.join([*ops][:4]) or 'none'})"


def _without_origin(compared: RowComparison, reached: Sequence[str]) -> _Said:
    """Return the call that permutes rows, or why no call is named."""
    runs, judged, together = compared.runs, compared.runs.judged, compared.runs.subset.together
    strict = [] if together else _reached(compared, strictly=True)
    moved = next((node for node in strict if _permutes_rows_first(judged[node])), "")
    hidden = any(match.grouped for node in reached for match in judged[node].written)
    if moved and not hidden:
        return (moved,), "it gives an item other items' rows, or as many as there are items"
    first = next((node for node in reached if judged[node].effect is not RowEffect.SAME), "")
    there, here = runs.uneven.get(first.rpartition("#")[0], (0, 0))
    if together and min(there, here) > 1:
        loop = f"a loop makes {there} calls like {first} in the one run and {here} in the other"
        return (), f"not attributable: {loop}, and which of them are for the same tokens is not known"
    older = next((node for node in reached if _made_before(runs, node)), "")
    if older and together:
        return (), f"what {older} reads was made by an earlier run, and is not what the reference has in its place"
    unknown = next((node for node in reached if judged[node].effect is RowEffect.UNKNOWN), "")
    if unknown:
        return (), f"which rows belong to which item is not known from {unknown} on"
    return (), _shown_by_view(compared) or "no call differs whose rows could be followed to the outputs"


def _permutes_rows_first(call: JudgedCall) -> bool:
    return all(m.strictly_equal for m in call.read.values()) and not all(m.strictly_equal for m in call.written)


def _shown_by_view(compared: RowComparison) -> str:
    """Describe the result that is a view of other memory, else return ""."""
    for result in compared.runs.other.trace.results:
        node = compared.runs.unit(result.source)
        call = compared.runs.judged.get(node) if result.name in compared.differing else None
        if call is not None and call.reference and all(match.strictly_equal for match in call.written):
            return f"{result.name} is a view, and shows other memory of what {node} left"
    return ""


def _names(runs: RowRuns) -> tuple[str, str]:
    """Return what the smaller run and the reference are called."""
    some, of_all = runs.subset.size, runs.subset.batch
    if runs.subset.together:
        return f"the run of {some} tokens", f"the run of {of_all} tokens"
    return f"a batch of {some}", f"a batch of {of_all}"


def _named(record: OpRecord) -> str:
    """Format ``aten.rand.default in Model.step``."""
    return f"{record.op} in {record.module}" if record.module else record.op


# ----------------------------------------------------------------------------------- where no call alone shows it


@dataclass(frozen=True, slots=True)
class Entry:
    """The place where a difference is read that no single call shows: only the smaller run makes the first source, or
    it reads a view of other memory.

    Attributes:
        reads: ``(record, its counterpart, argument)`` in which both runs read what differs.
        results: names of results that are the difference themselves.
        before: ``(record, its counterpart)`` of those that wrote what the source read.
        node: the source that only the smaller run makes; "" for a view.
    """

    reads: tuple[tuple[str, str, str], ...]
    results: tuple[str, ...] = ()
    before: tuple[tuple[str, str], ...] = ()
    node: str = ""


def entry_of(found: RowComparison) -> Entry | None:
    """Return where the difference of the first source is read; ``None`` where experiments on its call can tell."""
    runs, judged = found.runs, found.runs.judged
    if not found.sources or found.drawn or found.may_be_drawn or runs.subset.together or runs.subset.turned:
        return None
    first = found.sources[0]
    writers = dict.fromkeys(runs.unit(ref.source) for ref in runs.records[first].inputs)
    before = tuple((node, judged[node].reference) for node in writers if node in judged and judged[node].reference)
    if paths := reads_by_view(runs, first):
        return Entry(tuple((first, judged[first].reference, path) for path in paths), (), before)
    if judged[first].reference:
        return None
    inside, reads = _first_readers(runs, first)
    results = (result.name for result in runs.other.trace.results if runs.unit(result.source) in inside)
    return Entry(reads, tuple(name for name in results if name in found.differing), before, first)


def _first_readers(runs: RowRuns, first: str) -> tuple[set[str], tuple[tuple[str, str, str], ...]]:
    """Return the calls of the smaller run alone that follow from one of them, and where calls of both runs read what
    these left."""
    inside, reads = {first}, []
    for record in runs.records.values():
        fed = [ref for ref in record.inputs if runs.unit(ref.source) in inside]
        known = runs.judged.get(record.id)
        if known is not None and known.reference:
            reads += [(record.id, known.reference, ref.argument) for ref in fed if ref.argument in known.read]
        elif fed or runs.unit(record.id) in inside:
            inside.add(record.id)
    return inside, tuple(reads)


# ------------------------------------------------------------------------------------------------------ what is said


@dataclass(frozen=True, slots=True)
class RowDifference:
    """Distance between rows that should be equal; ``None`` without a number (not floating point, not measured).

    Attributes:
        max_abs: largest absolute difference.
        max_relative: largest relative difference.
        max_ulp: largest distance in representable values.
    """

    max_abs: float | None = None
    max_relative: float | None = None
    max_ulp: int | None = None


@dataclass(frozen=True, slots=True)
class BatchFinding:
    """The kernel by which results depend on the batch, between a run of ``batch`` items and one of the first ``size``.

    Attributes:
        size: items of the smaller run.
        batch: items of the reference.
        kernel: name of the op; "" if no kernel can be named, ``detail`` then says why.
        record: id of its record.
        module: where it was called.
        source_line: file and line of the call.
        shapes: of its tensor arguments at ``size``: ``(1,256)x(256,512)``.
        reference_shapes: the same at ``batch``.
        difference: distance of its rows.
        sources: ids of all records in which a difference entered that reached an output, the named one first.
        benign: ids of those that reached none.
        not_attributable: number of records whose rows cannot be assigned to items.
        detail: what is special about the kernel, or why there is none.
        coupled: whether it couples items by definition: it reduces over the batch, permutes its rows, or takes a number
            or a generator that depends on the batch.
        drawn: whether the kernel, or the first call behind it that differs, drew random numbers from another generator
            state.
        may_be_drawn: whether the kernel draws, and which item gets which numbers may differ between the runs.
        entry: where the difference is read, if no single call shows it.
        call: the captured call at ``batch``; ``None`` if it could not be captured.
        pair: the call as both runs made it (:class:`~hashbench.extensions.invariance.call_pair.CallPair`), if the first
            items of ``call`` alone do not differ from the rest.
    """

    size: int
    batch: int
    kernel: str = ""
    record: str = ""
    module: str = ""
    source_line: str = ""
    shapes: str = ""
    reference_shapes: str = ""
    difference: RowDifference = RowDifference()
    sources: tuple[str, ...] = ()
    benign: tuple[str, ...] = ()
    not_attributable: int = 0
    detail: str = ""
    coupled: bool = False
    drawn: bool = False
    may_be_drawn: bool = False
    entry: Entry | None = None
    call: Any = field(default=None, compare=False, repr=False)
    pair: Any = field(default=None, compare=False, repr=False)
