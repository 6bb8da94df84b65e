"""Format the verdict on two logs of DebugMode as ``hashbench diff`` prints it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hashbench.core.divergence.text import divergence_lines
from hashbench.core.text import count, join_limited
from hashbench.extensions.debugmode.find import LogVerdict
from hashbench.extensions.debugmode.log import Hashes, LoggedCall
from hashbench.extensions.debugmode.pairing import PairedCall, Sameness

_SHOWN = 10
_HASHES = 4
_DEEPEST_SHOWN = 20


def text(verdict: LogVerdict, *, context: int = 3) -> str:
    """Return the output of ``hashbench diff``. ``context`` is the number of calls shown before and after."""
    return "\n".join(_lines(verdict, context))


def _lines(verdict: LogVerdict, context: int) -> Iterator[str]:
    if verdict.divergence is None:
        yield _summary(verdict)
    else:
        yield from divergence_lines(verdict.divergence)
        if verdict.at is not None:
            yield ""
            yield from _excerpt(verdict.pairs, verdict.at, context)
    for heading, names in _groups(verdict):
        if names:
            yield ""
            yield f"{heading}: {join_limited(names, _SHOWN)}"
    if verdict.divergence is not None:
        yield ""
        yield _agreement(verdict)
    yield ""
    yield from verdict.limits


def _groups(verdict: LogVerdict) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the lists of calls with their headings."""
    for run, pairs in zip(("first", "second"), verdict.alone, strict=True):
        yield f"{count(len(pairs), 'call')} of the {run} run alone", [pair.node for pair in pairs]
    yield f"{count(len(verdict.later), 'further call')} left something else", verdict.later
    yield f"{len(verdict.independent)} of them read the same by hash: sources of their own", verdict.independent
    unread = count(len(verdict.unread), "differing output")
    yield f"{unread}, read by no later call (results, or benign)", verdict.unread
    yield f"{count(len(verdict.benign), 'call')} with a difference, and none in what they leave", verdict.benign


def _summary(verdict: LogVerdict) -> str:
    outputs, inputs, mute = verdict.hashes
    compared = f"{count(len(verdict.pairs), 'call')}; hashes: {outputs} of outputs, {inputs} of inputs"
    if mute:
        compared += f", {mute} of which (NaN, infinite, an xor of 0) say nothing"
    return f"{'The logs agree' if verdict.equal else 'No call leaves anything else'}: {compared}."


def _agreement(verdict: LogVerdict) -> str:
    """Return how many of the calls that both runs made agree."""
    both = [pair for pair in verdict.pairs if pair.first is not None and pair.second is not None]
    hashed = [pair for pair in both if pair.outputs is not Sameness.UNKNOWN]
    same = sum(pair.outputs is Sameness.SAME for pair in hashed)
    return f"Of {count(len(both), 'call')} that both runs made, {len(hashed)} can be compared and {same} left the same."


def _excerpt(pairs: Sequence[PairedCall], at: int, context: int) -> Iterator[str]:
    """Yield a unified diff of the calls around the divergence, as DebugMode shows them."""
    low, high = max(0, at - context), min(len(pairs), at + context + 1)
    yield f"calls {low} to {high - 1} (- first run, + second run):"
    for pair in pairs[low:high]:
        lines = [None if call is None else _line(call) for call in (pair.first, pair.second)]
        if lines[0] == lines[1]:
            yield f"  {lines[0]}"
        else:
            yield from (f"{sign} {line}" for sign, line in zip("-+", lines, strict=True) if line is not None)


def _line(call: LoggedCall) -> str:
    arguments = f"({call.arguments})" if "::" in call.name or call.arguments else ""
    output = f" -> {call.output}" if call.output else ""
    hashes = [f"{word} {_few(found)}" for word, found in (("read", call.inputs), ("left", call.outputs)) if found]
    comment = f"  # {', '.join(hashes)}" if hashes else ""
    return f"{'  ' * min(call.depth, _DEEPEST_SHOWN)}{call.name}{arguments}{output}{comment}"


def _few(hashes: Hashes) -> str:
    return "[" + join_limited([f"{name}: {value}" if name else value for name, value in hashes.items()], _HASHES) + "]"
