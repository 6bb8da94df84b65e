"""The first divergence of two traces as text: both records, their neighbours, the module, and what differed."""

from __future__ import annotations

from collections.abc import Iterator

from hashbench.divergence.align import align
from hashbench.records import Divergence, OpRecord, Trace, Verdict
from hashbench.text import a_few
from hashbench.trace.file import record_line, short_digest

_SHOWN = 10


def as_text(first: Trace, second: Trace, verdict: Verdict, *, context: int = 3) -> str:
    """What ``hashbench diff`` prints. ``context`` is the number of records shown before and after."""
    return "\n".join(_lines(first, second, verdict, context))


def _lines(first: Trace, second: Trace, verdict: Verdict, context: int) -> Iterator[str]:
    if verdict.divergence is None:
        yield _summary_of_equal(first, verdict)
    else:
        yield from _divergence_lines(verdict.divergence)
        yield ""
        yield from _excerpt(first, second, verdict.divergence, context)
    if verdict.differing:
        yield ""
        yield f"{len(verdict.differing)} results differ: {a_few(verdict.differing, _SHOWN)}"
    if verdict.benign:
        yield ""
        yield f"{len(verdict.benign)} records differ without reaching a result: {a_few(verdict.benign, _SHOWN)}"


def _summary_of_equal(first: Trace, verdict: Verdict) -> str:
    if verdict.benign:
        return f"No divergence reaches a result ({len(first.records)} records, {len(first.results)} results compared)."
    return f"The traces are equal: {len(first.records)} records, {len(first.results)} results."


def _divergence_lines(found: Divergence) -> Iterator[str]:
    facts = (
        ("first divergence", found.node),
        ("origin", found.origin),
        ("kernel", found.kernel),
        ("module", found.module),
        ("phase", f"{found.phase}, iteration {found.iteration}" if found.phase else ""),
        ("forward op", found.forward_op),
        ("source line", found.source),
        ("what differs", found.detail),
        ("first run", found.first),
        ("second run", found.second),
    )
    yield from (f"{name + ':':18}{value}" for name, value in facts if value)
    if found.steered_by is not None:
        steering = found.steered_by
        origin = f", which came from {steering.kernel}" if steering.kernel else ""
        yield f"{'steered by:':18}{steering.record} returned {steering.first} and {steering.second}{origin}"


def _excerpt(first: Trace, second: Trace, found: Divergence, context: int) -> Iterator[str]:
    """A unified diff of the records around the divergence."""
    pairs = align(first.records, second.records)
    ids = [{record.id for record in (_at(first, a), _at(second, b)) if record is not None} for a, b in pairs]
    places = [place for place, names in enumerate(ids) if found.node in names]
    if not places:
        places = [place for place, (a, _) in enumerate(pairs) if a == found.op_index]
    if not places:
        return
    low, high = max(0, places[0] - context), min(len(pairs), places[0] + context + 1)
    digits = [_digits(first), _digits(second)]
    yield f"records {low} to {high - 1} (- first run, + second run):"
    for place in range(low, high):
        a, b = (_at(trace, index) for trace, index in zip((first, second), pairs[place], strict=True))
        line_a = None if a is None else record_line(a, digits[0])
        line_b = None if b is None else record_line(b, digits[1])
        if line_a == line_b and line_a is not None:
            yield f"  {line_a}"
        else:
            yield from (f"{sign} {line}" for sign, line in (("-", line_a), ("+", line_b)) if line is not None)


def _at(trace: Trace, index: int | None) -> OpRecord | None:
    return None if index is None else trace.records[index]


def _digits(trace: Trace) -> dict[str, str]:
    digits = {leaf.id: leaf.digest.value[:8] for leaf in trace.leaves}
    for record in trace.records:
        if record.outputs:
            digits[record.id] = short_digest(record.outputs)
    return digits
