"""Report on a pair of traces: the first divergence, and the records around it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hashbench.core.catalog import CANDIDATES, CAUSES, Origin
from hashbench.core.divergence.align import align
from hashbench.core.finding import NAMES, WIDTH, Facts, Finding, Table, as_text, few
from hashbench.core.io import to_json
from hashbench.core.records import Divergence, EarlyRead, Trace, Verdict
from hashbench.core.text import count, in_brackets, when
from hashbench.core.trace.file import record_line, short_digest, writer_text


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

    def text(self, *, context: int = 3, width: int = WIDTH) -> str:
        """Return the output of ``hashbench diff``. ``context`` is the number of records shown before and after."""
        return as_text(finding_of(self, context=context), width=width)


def finding_of(verdict: PairVerdict, *, context: int = 3, commands: Iterable[str] = ()) -> Finding:
    """Return the report of a pair of traces.

    Args:
        verdict: on the pair.
        context: number of records shown before and after the divergence.
        commands: what to run next.
    """
    divergence = verdict.divergence
    facts = () if divergence is None else divergence_facts(divergence)
    return Finding(
        headline=_headline(verdict),
        facts=(*facts, *_further_facts(verdict)),
        table=None if divergence is None else _excerpt(verdict.first, verdict.second, divergence, context),
        notes=tuple(filter(None, [verdict.unseen])),
        next=tuple(commands),
        equal=verdict.equal,
        differs=not verdict.equal,
        data={
            "divergence": None if divergence is None else to_json(divergence),
            "differing": list(verdict.differing),
            "benign": list(verdict.benign),
            "leaves": list(verdict.leaves),
            "early_reads": to_json(verdict.early_reads),
        },
    )


def _headline(verdict: PairVerdict) -> str:
    compared = f"{count(len(verdict.first.records), 'record')}, {count(len(verdict.first.results), 'result')}"
    if verdict.divergence is not None:
        return f"The runs diverge: {place(verdict.divergence)}"
    if not verdict.equal:
        return f"No divergence reaches a result ({compared} compared)"
    return f"The traces are equal: {compared}"


def place(divergence: Divergence) -> str:
    """Return ``kernel aten.index_put_.default in net.0 (backward, iteration 3, train.py:12 step)``."""
    what = divergence.kernel or divergence.node
    named = divergence.origin in (Origin.KERNEL, Origin.COLLECTIVE)
    inside = f" inside {divergence.inside}" if divergence.inside else ""
    module = f" in {divergence.module}" if divergence.module else ""
    where = in_brackets(when(divergence.phase, divergence.iteration), divergence.source)
    return f"{divergence.origin}{'' if named else ' at'} {what}{inside}{module}{where}"


def divergence_facts(divergence: Divergence) -> Facts:
    """Return what is known of a divergence."""
    return (
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
        steered_by(divergence),
    )


def candidate_facts(divergence: Divergence) -> Facts:
    """Return what may have caused a divergence of which no call was repeated, and what to do about the first of these.

    A heuristic: the origin alone suggests them; an experiment decides.
    """
    names = CANDIDATES[divergence.origin]
    known = CAUSES[names[0]]
    advice = f"{known.advice.format(named=known.unnamed)}." if len(names) <= NAMES else ""
    found = few([CAUSES[name].words for name in names])
    return (("candidates", f"{found} (no experiment was made)"), ("advice", advice))


def steered_by(divergence: Divergence) -> tuple[str, str]:
    """Return the number that chose what ran, as a fact; without a text if none is known."""
    steering = divergence.steered_by
    if steering is None:
        return "steered by", ""
    origin = f", which came from {steering.kernel}" if steering.kernel else ""
    return "steered by", f"{steering.record} returned {steering.first} and {steering.second}{origin}"


def _further_facts(verdict: PairVerdict) -> Iterator[tuple[str, str]]:
    """Yield what else differs, or was read too early."""
    yield "results", few(verdict.differing)
    yield "benign", _unreached(verdict.benign, "record")
    yield "leaves", _unreached(verdict.leaves, "leaf", "leaves")
    for read in verdict.early_reads[:NAMES]:
        reader = f"result {read.reader}" if read.is_result else read.reader
        source = f" at {read.source}" if read.source else ""
        yield "early read", f"{reader} reads {read.collective}{source} before its Work was done"
    if len(verdict.early_reads) > NAMES:
        yield "early reads", f"{len(verdict.early_reads)} in all"


def _unreached(names: Sequence[str], word: str, words: str = "") -> str:
    if not names:
        return ""
    number = f"1 {word} differs" if len(names) == 1 else f"{len(names)} {words or word + 's'} differ"
    return f"{number} without reaching a result: {few(names)}"


def _excerpt(first: Trace, second: Trace, divergence: Divergence, context: int) -> Table | None:
    """Return a unified diff of the records around the divergence."""
    pairs = align(first.records, second.records)
    records = [
        [None if at is None else trace.records[at] for trace, at in zip((first, second), pair, strict=True)]
        for pair in pairs
    ]
    named = [n for n, pair in enumerate(records) if any(record and record.id == divergence.node for record in pair)]
    named += [n for n, (a, _) in enumerate(pairs) if a == divergence.op_index]
    if not named:
        return None
    low, high = max(0, named[0] - context), min(len(pairs), named[0] + context + 1)
    writers = [_writers(first), _writers(second)]
    lines = (
        [None if record is None else record_line(record, known) for record, known in zip(pair, writers, strict=True)]
        for pair in records[low:high]
    )
    return unified(f"records {low} to {high - 1}", lines)


def unified(what: str, pairs: Iterable[Sequence[str | None]]) -> Table:
    """Return a unified diff of pairs of lines, of which one may be absent."""
    lines: list[str] = []
    for first, second in pairs:
        if first == second:
            lines.append(f"  {first}")
        else:
            lines += [f"{sign} {line}" for sign, line in (("-", first), ("+", second)) if line is not None]
    return Table.of_lines(f"{what} (- first run, + second run):", lines)


def _writers(trace: Trace) -> dict[str, str]:
    """Map the id of each leaf and record to its text in lines of its readers."""
    digits = {leaf.id: leaf.digest.value[:8] for leaf in trace.leaves}
    digits |= {record.id: short_digest(record.outputs) for record in trace.records if record.outputs}
    return {node: writer_text(node, shown) for node, shown in digits.items()}
