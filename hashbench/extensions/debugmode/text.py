"""Report on two logs of DebugMode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hashbench.core.divergence.text import divergence_facts, place, unified
from hashbench.core.finding import Finding, Table, few
from hashbench.core.io import to_json
from hashbench.core.text import count, join_limited
from hashbench.extensions.debugmode.find import LogVerdict
from hashbench.extensions.debugmode.log import Hashes, LoggedCall
from hashbench.extensions.debugmode.pairing import PairedCall, Sameness

_HASHES = 4
_DEEPEST_SHOWN = 20


def finding_of(verdict: LogVerdict, *, context: int = 3) -> Finding:
    """Return the report of two logs. ``context`` is the number of calls shown before and after."""
    divergence, table = verdict.divergence, None
    if divergence is not None and verdict.at is not None:
        table = _excerpt(verdict.pairs, verdict.at, context)
    groups = tuple((label, f"{heading}: {few(names)}") for label, heading, names in _groups(verdict) if names)
    return Finding(
        headline=_summary(verdict) if divergence is None else f"The runs diverge: {place(divergence)}",
        facts=(*(() if divergence is None else divergence_facts(divergence)), *groups),
        table=table,
        notes=(*(() if divergence is None else (_agreement(verdict),)), *verdict.limits),
        equal=verdict.equal,
        differs=not verdict.equal,
        data={
            "divergence": None if divergence is None else to_json(divergence),
            "alone": [[pair.node for pair in pairs] for pairs in verdict.alone],
            **{name: list(getattr(verdict, name)) for name in ("later", "independent", "unread", "benign")},
            "hashes": list(verdict.hashes),
        },
    )


def _groups(verdict: LogVerdict) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yield the lists of calls with their labels and headings."""
    for run, pairs in zip(("first", "second"), verdict.alone, strict=True):
        yield f"{run} run alone", count(len(pairs), "call"), [pair.node for pair in pairs]
    later, unread = count(len(verdict.later), "call"), count(len(verdict.unread), "differing output")
    yield "later", f"{later} with a different output", verdict.later
    own = f"{len(verdict.independent)} of them with equal inputs by hash: sources of their own"
    yield "independent", own, verdict.independent
    yield "unread", f"{unread}, read by no later call (results, or benign)", verdict.unread
    yield "benign", f"{count(len(verdict.benign), 'call')} with a difference, and none in the output", verdict.benign


def _summary(verdict: LogVerdict) -> str:
    outputs, inputs, mute = verdict.hashes
    compared = f"{count(len(verdict.pairs), 'call')}; hashes: {outputs} of outputs, {inputs} of inputs"
    if mute:
        compared += f", {mute} of which (NaN, infinite, an xor of 0) say nothing"
    return f"{'The logs agree' if verdict.equal else 'No call leaves anything else'}: {compared}"


def _agreement(verdict: LogVerdict) -> str:
    """Return how many of the calls that both runs made agree."""
    both = [pair for pair in verdict.pairs if pair.first is not None and pair.second is not None]
    hashed = [pair for pair in both if pair.outputs is not Sameness.UNKNOWN]
    same = sum(pair.outputs is Sameness.SAME for pair in hashed)
    return f"Of {count(len(both), 'call')} that both runs made, {len(hashed)} can be compared and {same} left the same."


def _excerpt(pairs: Sequence[PairedCall], at: int, context: int) -> Table:
    """Return a unified diff of the calls around the divergence, as DebugMode shows them."""
    low, high = max(0, at - context), min(len(pairs), at + context + 1)
    lines = ([None if call is None else _line(call) for call in (pair.first, pair.second)] for pair in pairs[low:high])
    return unified(f"calls {low} to {high - 1}", lines)


def _line(call: LoggedCall) -> str:
    arguments = f"({call.arguments})" if "::" in call.name or call.arguments else ""
    output = f" -> {call.output}" if call.output else ""
    hashes = [f"{word} {_few(found)}" for word, found in (("read", call.inputs), ("left", call.outputs)) if found]
    comment = f"  # {', '.join(hashes)}" if hashes else ""
    return f"{'  ' * min(call.depth, _DEEPEST_SHOWN)}{call.name}{arguments}{output}{comment}"


def _few(hashes: Hashes) -> str:
    return "[" + join_limited([f"{name}: {value}" if name else value for name, value in hashes.items()], _HASHES) + "]"
