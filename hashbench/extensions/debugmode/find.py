"""Find the first call that differs between two logs of DebugMode. Pure: no torch, no files.

The calls are aligned as the records of traces are. Such a log has no writers, no results, no generator states and no
proof: only hashes, of inputs if it was made with ``hash_inputs=True``. So a call is judged by its own hashes, and by
whether an earlier call left the *pair of hashes* that it read:

======================================================== ============================================================
first call whose output differs                          ``origin``
======================================================== ============================================================
its inputs agree                                         ``kernel``, or ``rng`` if the op draws random numbers
an argument that is not a tensor differs                 ``outside``
calls of one run alone come before it, and may explain   ``sequence``, at the first of these calls
it read data of other ranks, or may have                 ``ranks``
an input differs that no call before it left             input, state or outside
its inputs were not hashed                               kernel, or what it reads
======================================================== ============================================================

* A call that only one run made is named, and not blamed where hashed inputs clear it. One that drew random numbers is
  blamed for what later draws leave.
* The hash of a collective is taken when its call returns, maybe before its data have come, and is not compared; that of
  ``wait_tensor`` is.
* Equal hashes that are NaN, infinite or an xor of 0 say nothing: neither equal nor different.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hashbench.core.catalog import Origin
from hashbench.core.errors import HashbenchError
from hashbench.core.records import Divergence, Steering
from hashbench.core.text import count, join_limited, listed
from hashbench.extensions.debugmode.log import TENSOR, DebugLog, LoggedCall, kind_of_hash, says_nothing
from hashbench.extensions.debugmode.pairing import PairedCall, Sameness, pair_calls

INPUTS_UNKNOWN = "kernel, or what it reads"
NOT_LOGGED = "input, state or outside"
"""Origins that a log leaves open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogVerdict:
    """The comparison of two logs.

    Attributes:
        divergence: the first call that differs; ``None`` if none shows a difference.
        pairs: all calls, aligned.
        at: index of the divergence in ``pairs``.
        later: further calls that left something else.
        independent: those of them whose inputs agree: sources of their own. Empty behind a call of one run alone.
        unread: calls whose differing outputs no later call read: results, or benign. Empty without input hashes.
        benign: calls that differ in what they read or where they stand, and not in what they leave.
        hashes: numbers of hashes compared: of outputs, of inputs, and of those that say nothing.
        limits: what these logs cannot tell, in sentences.
    """

    divergence: Divergence | None
    pairs: tuple[PairedCall, ...]
    at: int | None
    later: tuple[str, ...]
    independent: tuple[str, ...]
    unread: tuple[str, ...]
    benign: tuple[str, ...]
    hashes: tuple[int, int, int]
    limits: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """True if nothing differs. Equal hashes are no proof of equal tensors."""
        return not any(pair.differs for pair in self.pairs)

    @property
    def alone(self) -> tuple[tuple[PairedCall, ...], tuple[PairedCall, ...]]:
        """The calls that the first and the second run alone made."""
        lone = [pair for pair in self.pairs if pair.first is None or pair.second is None]
        return tuple(pair for pair in lone if pair.second is None), tuple(pair for pair in lone if pair.first is None)


def find(first: DebugLog, second: DebugLog, *, is_random: Callable[[str], bool] = lambda _: False) -> LogVerdict:
    """Return the verdict on the logs of two runs that should be identical.

    Args:
        first, second: the logs.
        is_random: tells by name (``aten::rand``) whether an op draws random numbers.

    Raises:
        HashbenchError: a log is empty, their hashes are of different functions, or there is no hash to compare and
            nothing else differs.
    """
    _refuse(first, second)
    if first.hashed_inputs != second.hashed_inputs:
        first, second = _without_inputs(first), _without_inputs(second)
    pairs = tuple(pair_calls(first.calls, second.calls))
    verdict = _verdict(pairs, first.hashed_inputs, is_random)
    if verdict.divergence is None and all(pair.outputs is Sameness.UNKNOWN for pair in pairs):
        raise HashbenchError(
            "the logs have no hashes in common that say anything",
            consequence=f"their {count(len(pairs), 'call')} agree, and what they computed was not compared",
            tip="Make both under `DebugMode.log_tensor_hashes(hash_inputs=True)`.",
        )
    return verdict


def _without_inputs(log: DebugLog) -> DebugLog:
    """Drop the hashes of inputs, which the other log lacks."""
    return DebugLog(tuple(replace(call, inputs=None) if call.inputs else call for call in log.calls))


def _refuse(first: DebugLog, second: DebugLog) -> None:
    for log, name in ((first, "first"), (second, "second")):
        if not log.calls:
            raise HashbenchError(
                f"the {name} log is empty",
                consequence="nothing was compared, which is not the same as equal",
                tip="Save it after the program ran under DebugMode.",
            )
    kinds = first.hash_kinds, second.hash_kinds
    if all(kinds) and kinds[0] != kinds[1]:
        words = [listed(sorted(map(_FUNCTIONS.__getitem__, kind))) for kind in kinds]
        raise HashbenchError(
            f"the logs have hashes of different functions: {words[0]}, and {words[1]}",
            consequence="nothing was compared",
            tip="Make both with one `hash_fn`.",
        )


_FUNCTIONS = {"float": "norm", "int": "hash_tensor", "other": "another function"}


# ------------------------------------------------------------------------------------------------------ verdict


def _verdict(pairs: tuple[PairedCall, ...], hashed_inputs: bool, is_random: Callable[[str], bool]) -> LogVerdict:
    shown = [index for index, pair in enumerate(pairs) if pair.shows]
    divergence, at = _choose(pairs, shown[0] if shown else None, is_random)
    further = [pairs[index] for index in shown if index != at]
    found = {index for index in (*shown, at) if index is not None}
    benign = [pair for index, pair in enumerate(pairs) if index not in found and pair.differs and not pair.alone]
    return LogVerdict(
        divergence=divergence,
        pairs=pairs,
        at=at,
        later=tuple(pair.node for pair in further),
        independent=tuple(pair.node for pair in further if pair.clear) if at in shown else (),
        unread=tuple(_unread(pairs, shown)) if hashed_inputs else (),
        benign=tuple(pair.node for pair in benign),
        hashes=_counted(pairs),
        limits=tuple(_limits(pairs, hashed_inputs)),
    )


def _counted(pairs: Iterable[PairedCall]) -> tuple[int, int, int]:
    """Count the hashes of outputs and of inputs that both logs have, and those of them that say nothing."""
    compared = {"outputs": 0, "inputs": 0}
    mute = 0
    for pair in pairs:
        for name in compared:
            a, b = (getattr(call, name) if call is not None else None for call in (pair.first, pair.second))
            common = [value for path, value in (a or {}).items() if path in (b or {})]
            compared[name] += len(common)
            mute += sum(map(says_nothing, common))
    return compared["outputs"], compared["inputs"], mute


def _unread(pairs: Sequence[PairedCall], shown: Sequence[int]) -> Iterator[str]:
    """Yield the calls whose differing outputs no later call reads."""
    last_read = {hashes: index for index, pair in enumerate(pairs) for hashes in pair.read.values()}
    for index in shown:
        if not any(last_read.get(hashes, -1) > index for hashes in pairs[index].left.values()):
            yield pairs[index].node


def _choose(
    pairs: Sequence[PairedCall], shown: int | None, is_random: Callable[[str], bool]
) -> tuple[Divergence | None, int | None]:
    """Return the first divergence and its index, given that of the first call that shows a difference."""
    alone = [index for index, pair in enumerate(pairs[:shown]) if pair.alone]
    if shown is None:
        return (_sequence(pairs, alone[0], None), alone[0]) if alone else (None, None)
    pair = pairs[shown]
    draws = [index for index in range(shown) if is_random(pairs[index].call.name)]
    lone_draws = [index for index in alone if index in draws]
    if lone_draws and (is_random(pair.call.name) or any(index not in alone for index in draws)):
        return _sequence(pairs, lone_draws[0], pair), lone_draws[0]
    if pair.clear and is_random(pair.call.name):
        detail = "a random op leaves something else: its generator differed, whose state no log has"
        return _divergence(pairs, shown, Origin.RNG, detail), shown
    if pair.clear:
        detail = "the output differs, and all that it was given agrees by hash"
        if draws:
            drew = pairs[draws[-1]].node
            detail += f" ({drew} before it drew random numbers: different ones may have the same hash)"
        return _divergence(pairs, shown, Origin.KERNEL, detail), shown
    exchange = _exchange_behind(pairs, shown)
    if exchange is not None:
        return _divergence(pairs, exchange, Origin.RANKS, _ranks_detail(pairs, exchange, pair)), exchange
    if alone and not _is_from_elsewhere(pair, [pairs[index] for index in alone]):
        return _sequence(pairs, alone[0], pair), alone[0]
    return _divergence(pairs, shown, *_given(pair)), shown


def _is_from_elsewhere(pair: PairedCall, alone: Sequence[PairedCall]) -> bool:
    """Return True if hashes show that nothing of what a call read was made by the calls of one run alone."""
    made = [
        {value for each in alone if (call := (each.first, each.second)[run]) is not None for value in _made(call)}
        for run in (0, 1)
    ]
    return bool(pair.read) and not any(a in made[0] or b in made[1] for a, b in pair.read.values())


def _made(call: LoggedCall) -> Iterator[str]:
    """Yield the hashes that a call left and had not read."""
    return (value for value in (call.outputs or {}).values() if value not in (call.inputs or {}).values())


def _given(pair: PairedCall) -> tuple[str, str]:
    """Return origin and sentence for a call that was given something else, or of which that is not known."""
    if not pair.arguments:
        return Origin.OUTSIDE, "an argument that is not a tensor has another value"
    if pair.inputs is Sameness.DIFFERENT:
        which = join_limited([f"argument {name}" for name in pair.read], 4)
        detail = (
            f"{which} differs, and no call before it left that: it is an input or parameter of the program, or was "
            "written by something that has no hash here"
        )
        return NOT_LOGGED, detail
    why = "was not hashed" if pair.call.inputs is None else "has hashes that say nothing"
    detail = (
        f"the output differs, no output before it does, and what it reads {why}: it is this call, or a parameter, "
        "input or write that has no hash here"
    )
    return INPUTS_UNKNOWN, detail


def _exchange_behind(pairs: Sequence[PairedCall], shown: int) -> int | None:
    """Return the index of the collective that brought a difference, or may have; ``None`` if none did.

    It is the call itself, or the last one before that left what the call read; if inputs were not hashed, the last that
    differs, else the last of all.
    """
    if pairs[shown].is_exchange:
        return shown
    before = [index for index in range(shown) if pairs[index].is_exchange]
    read = set(pairs[shown].read.values())
    brought = [index for index in before if not read.isdisjoint(pairs[index].left.values())]
    if brought or pairs[shown].inputs is Sameness.DIFFERENT:
        return brought[-1] if brought else None
    differing = [index for index in before if pairs[index].left]
    return next(reversed(differing or before), None)


def _ranks_detail(pairs: Sequence[PairedCall], exchange: int, shown: PairedCall) -> str:
    left = "left something else" if pairs[exchange].left else "agrees by its hash, taken when the call returned"
    after = "" if shown is pairs[exchange] else f", and {shown.node} after it differs"
    return (
        f"not traceable across ranks: {pairs[exchange].call.name} {left}{after}. Compare the logs of each rank, and "
        "look first at a rank whose verdict names no collective"
    )


def _sequence(pairs: Sequence[PairedCall], at: int, shown: PairedCall | None) -> Divergence:
    run = "first" if pairs[at].second is None else "second"
    after = (
        "all that both runs made agree" if shown is None else f"the first that both made and differs is {shown.node}"
    )
    detail = f"the {run} run alone makes this call; of the others, {after}"
    return _divergence(pairs, at, Origin.SEQUENCE, detail)


def _divergence(pairs: Sequence[PairedCall], at: int, origin: str, detail: str) -> Divergence:
    pair, call = pairs[at], pairs[at].call
    before = [call for call in pairs[:at] if call.first is not None]
    return Divergence(
        origin=origin,
        node=pair.node,
        kernel="" if origin == Origin.RANKS else call.name,
        op_index=len(before) if pair.first is not None else max(0, len(before) - 1),
        phase="",
        iteration=None,
        module=call.module,
        forward_op="",
        detail=detail,
        first=_shown(pair, 0, origin),
        second=_shown(pair, 1, origin),
        source=call.source,
        steered_by=_steering(pairs[:at]) if origin in (Origin.SEQUENCE, Origin.OUTSIDE) else None,
    )


def _shown(pair: PairedCall, run: int, origin: str) -> str:
    """Return what one run had there, in words."""
    call = (pair.first, pair.second)[run]
    if call is None:
        return "no such call"
    if origin == Origin.SEQUENCE:
        return f"{call.name}({call.arguments})"
    if origin == Origin.OUTSIDE:
        return f"({call.arguments})"
    hashes = pair.read if origin == NOT_LOGGED else pair.left
    return join_limited([f"{name or 'output'}: {values[run]}" for name, values in hashes.items()], 4) or call.output


def _steering(pairs: Sequence[PairedCall]) -> Steering | None:
    """Return the last call before, whose differing output is a number in words: the program may have gone by it."""
    for pair in reversed(pairs):
        a, b = pair.first, pair.second
        if a is not None and b is not None and a.output != b.output and not TENSOR.search(a.output + b.output):
            return Steering(pair.node, a.output, b.output)
    return None


# ------------------------------------------------------------------------------------------------------- limits


def _limits(pairs: Sequence[PairedCall], hashed_inputs: bool) -> Iterator[str]:
    """Yield what these logs cannot tell, in sentences."""
    values = [value for pair in pairs if pair.first for value in (pair.first.outputs or {}).values()]
    functions = set(map(kind_of_hash, values))
    if "float" in functions:
        yield "Equal L1 norms are no proof of equal tensors: they ignore signs and order, and round."
    if "int" in functions:
        yield "Equal values of hash_tensor are no proof of equal tensors: an xor ignores order, and equal pairs."
    if hashed_inputs:
        yield "The log has no writers and no results: who wrote what a call read is known by its hash alone."
    else:
        yield (
            "Inputs were not hashed in both runs, and the log has no writers: the first output that differs is the "
            "first in order. log_tensor_hashes(hash_inputs=True) tells an op from what it reads."
        )
    if any(pair.is_exchange for pair in pairs):
        yield "A collective is hashed when its call returns, maybe before its data have come, and was not compared."
