"""Format the verdict on a pair of traces as ``hashbench diff`` prints it: the first divergence, and the records around
it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hashbench.core.divergence.align import align
from hashbench.core.records import Divergence, EarlyRead, Trace, Verdict
from hashbench.core.text import count, join_limited, when
from hashbench.core.trace.file import record_line, short_digest, writer_text

_SHOWN = 10


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PairVerdict(Verdict):
    """A verdict with its two traces, printed as by ``hashbench diff``. Equality ignores the traces.

    Attributes:
        leaves: ids of leaves that differ between the traces and reach no result.
        early_reads: reads of a collective's output before its Work was done, in either trace.
        first, second: the traces.
    """

    leaves: tuple[str, ...] = field(default=(), kw_only=True)
    early_reads: tuple[EarlyRead, ...] = field(default=(), kw_only=True)
    first: Trace = field(kw_only=True)
    second: Trace = field(kw_only=True)

    def __str__(self) -> str:
        return self.text()

    @property
    def equal(self) -> bool:
        """True if nothing differs, whether or not it reaches a result, and nothing may differ untraced."""
        return not (self.divergence or self.differing or self.benign or self.leaves or self.early_reads)

    def text(self, *, context: int = 3) -> str:
        """Return the output of ``hashbench diff``. ``context`` is the number of records shown before and after."""
        return "\n".join(_diff_lines(self.first, self.second, self, context))


def _diff_lines(first: Trace, second: Trace, verdict: PairVerdict, context: int) -> Iterator[str]:
    if verdict.divergence is None:
        yield _summary_of_equal(first, verdict)
    else:
        yield from divergence_lines(verdict.divergence)
        yield ""
        yield from _excerpt(first, second, verdict.divergence, context)
    if verdict.unseen:
        yield ""
        yield verdict.unseen
    if verdict.early_reads:
        yield ""
        yield f"{count(len(verdict.early_reads), 'read')} of a collective's output before its Work was done:"
        yield from (f"  {_early_read(read)}" for read in verdict.early_reads[:_SHOWN])
        yield from (f"  and {more} more" for more in [len(verdict.early_reads) - _SHOWN] if more > 0)
    if verdict.differing:
        yield ""
        yield f"{_differing(verdict.differing, 'result')}: {join_limited(verdict.differing, _SHOWN)}"
    if verdict.benign:
        yield ""
        benign = join_limited(verdict.benign, _SHOWN)
        yield f"{_differing(verdict.benign, 'record')} without reaching a result: {benign}"
    if verdict.leaves:
        yield ""
        which = "1 leaf differs" if len(verdict.leaves) == 1 else f"{len(verdict.leaves)} leaves differ"
        yield f"{which} without reaching a result: {join_limited(verdict.leaves, _SHOWN)}"


def _early_read(read: EarlyRead) -> str:
    reader = f"result {read.reader}" if read.is_result else read.reader
    return f"{reader} reads {read.collective}{f' at {read.source}' if read.source else ''}"


def _differing(names: Sequence[str], word: str) -> str:
    return f"{count(len(names), word)} {'differs' if len(names) == 1 else 'differ'}"


def _summary_of_equal(first: Trace, verdict: PairVerdict) -> str:
    compared = f"{count(len(first.records), 'record')}, {count(len(first.results), 'result')}"
    if not verdict.equal:
        return f"No divergence reaches a result ({compared} compared)."
    return f"The traces are equal: {compared}."


def divergence_lines(divergence: Divergence) -> Iterator[str]:
    """Yield the facts of a divergence, one a line."""
    facts = (
        ("first divergence", divergence.node),
        ("origin", divergence.origin),
        ("kernel", divergence.kernel),
        ("module", divergence.module),
        ("phase", when(divergence.phase, divergence.iteration)),
        ("forward op", divergence.forward_op),
        ("source line", divergence.source),
        ("what differs", divergence.detail),
        ("first run", divergence.first),
        ("second run", divergence.second),
    )
    yield from (f"{name + ':':18}{value}" for name, value in facts if value)
    if (steering := divergence.steered_by) is not None:
        origin = f", which came from {steering.kernel}" if steering.kernel else ""
        yield f"{'steered by:':18}{steering.record} returned {steering.first} and {steering.second}{origin}"


def _excerpt(first: Trace, second: Trace, divergence: Divergence, context: int) -> Iterator[str]:
    """Yield a unified diff of the records around the divergence."""
    pairs = align(first.records, second.records)
    records = [
        [None if at is None else trace.records[at] for trace, at in zip((first, second), pair, strict=True)]
        for pair in pairs
    ]
    named = [n for n, pair in enumerate(records) if any(record and record.id == divergence.node for record in pair)]
    named += [n for n, (a, _) in enumerate(pairs) if a == divergence.op_index]
    if not named:
        return
    low, high = max(0, named[0] - context), min(len(pairs), named[0] + context + 1)
    writers = [_writers(first), _writers(second)]
    yield f"records {low} to {high - 1} (- first run, + second run):"
    for pair in records[low:high]:
        lines = [record and record_line(record, known) for record, known in zip(pair, writers, strict=True)]
        if lines[0] == lines[1]:
            yield f"  {lines[0]}"
        else:
            yield from (f"{sign} {line}" for sign, line in zip("-+", lines, strict=True) if line is not None)


def _writers(trace: Trace) -> dict[str, str]:
    """Map the id of each leaf and record to its text in lines of its readers."""
    digits = {leaf.id: leaf.digest.value[:8] for leaf in trace.leaves}
    digits |= {record.id: short_digest(record.outputs) for record in trace.records if record.outputs}
    return {node: writer_text(node, shown) for node, shown in digits.items()}
