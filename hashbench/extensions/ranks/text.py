"""Format the verdict on two distributed runs as ``hashbench ranks diff`` prints it, and that on replicas as ``hashbench
ranks check`` does: at most ten lines, or one JSON document."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from hashbench.core.catalog import Origin
from hashbench.core.text import count, format_ranks, join_limited, shorten, when
from hashbench.extensions.ranks.replicas import UNREDUCED, ReplicaDifference, ReplicasVerdict
from hashbench.extensions.ranks.verdict import RankDivergence, RankHop, RankResult, RanksVerdict

MOST_LINES = 10
"""Number of lines of either text."""

_WIDTH = 18
_SHOWN = 4
_FIRSTS = 3
_UNKNOWN = 2
_VALUE = 60


def diff_text(verdict: RanksVerdict) -> str:
    """Return the output of ``hashbench ranks diff``."""
    return "\n".join(_diff_lines(verdict))


def diff_document(verdict: RanksVerdict) -> dict[str, Any]:
    """Return the JSON document of ``hashbench ranks diff --json``."""
    return {
        "equal": verdict.equal,
        "world_size": verdict.world_size,
        "first": [_divergence_document(one) for one in verdict.first],
        "later": [_divergence_document(one) for one in verdict.later],
        "differing": [dataclasses.asdict(one) for one in verdict.differing],
        "benign": {str(rank): number for rank, number in verdict.benign.items()},
        "missing": list(verdict.missing),
        "unknown": list(verdict.unknown),
        "ranks": list(verdict.ranks),
        "records": verdict.records,
        "steps": list(verdict.steps) if verdict.steps else None,
        "printed": [dataclasses.asdict(one) for one in verdict.printed],
    }


def check_text(verdict: ReplicasVerdict) -> str:
    """Return the output of ``hashbench ranks check``."""
    return "\n".join(_check_lines(verdict))


def check_document(verdict: ReplicasVerdict) -> dict[str, Any]:
    """Return the JSON document of ``hashbench ranks check --json``."""
    return {
        "equal": verdict.equal,
        "world_size": verdict.world_size,
        "differing": [dataclasses.asdict(one) for one in verdict.differing],
        "checked": [{"ranks": list(ranks), "parameters": number} for ranks, number in verdict.checked.items()],
        "inferred": list(verdict.inferred),
        "missing": list(verdict.missing),
        "unknown": list(verdict.unknown),
        "uncompared": list(verdict.uncompared),
        "local": [dataclasses.asdict(one) for one in verdict.local],
        "by_convention": list(verdict.by_convention),
        "steps": list(verdict.steps) if verdict.steps else None,
    }


def _divergence_document(found: RankDivergence) -> dict[str, Any]:
    """Return what is known of a divergence; ``rank``, ``origin``, ``kernel``, ``module``, ``iteration``, ``through``
    and ``missing`` in front."""
    known = dataclasses.asdict(found)
    front = ("rank", "origin", "kernel", "module", "iteration", "through", "missing", "hops")
    known["missing"] = list(found.missing)
    known["origin"] = str(found.origin)
    known["hops"] = [_hop_document(hop) for hop in found.hops]
    return {name: known[name] for name in front} | {name: value for name, value in known.items() if name not in front}


def _hop_document(hop: RankHop) -> dict[str, Any]:
    """Return a collective or message in the words of torch's flight recorder."""
    met = hop.call
    is_p2p = met is not None and met.destination >= 0
    return {
        "rank": hop.rank,
        "ranks": list(hop.ranks),
        "collective": hop.collective,
        "process_group": None if met is None else list(met.process_group),
        "is_p2p": is_p2p,
        "collective_seq_id": None if met is None or is_p2p else met.number,
        "p2p_seq_id": met.number if met is not None and is_p2p else None,
    }


# ------------------------------------------------------------------------------------------------- two runs


def _diff_lines(verdict: RanksVerdict) -> Iterator[str]:
    if len(verdict.first) == 1:
        yield from _only_first(verdict.first[0])
    elif verdict.first:
        yield f"first divergences of {len(verdict.first)} ranks, which no collective orders:"
        yield from (f"  {_place(one)}{_in_brackets(_with_arguments(one))}" for one in verdict.first[:_FIRSTS])
        yield from _more(len(verdict.first) - _FIRSTS)
    elif verdict.printed:
        more = f", and {count(len(verdict.printed) - 1, 'more line')}" if len(verdict.printed) > 1 else ""
        yield _line("prints differ", f"{verdict.printed[0].words()}{more}")
        if not verdict.differing:
            yield _line("not known", "which op it came from: no number that the program has read from a tensor fits")
    elif verdict.equal:
        yield f"Both runs are equal on every rank: {_compared(verdict)}."
    else:
        yield f"Nothing that was compared differs, and not all was compared: {_compared(verdict)}."
    if verdict.differing:
        yield _line("results", _results(verdict.differing))
    if verdict.later:
        yield _line("later", join_limited([_place(one) for one in verdict.later], 2))
    if verdict.benign:
        told = ", ".join(f"{number} on rank {rank}" for rank, number in list(verdict.benign.items())[:_SHOWN])
        more = " and more" if len(verdict.benign) > _SHOWN else ""
        yield _line("benign", f"records that differ without reaching a result: {told}{more}")
    yield from _unknown(verdict.unknown)


def _only_first(found: RankDivergence) -> Iterator[str]:
    yield _line("first divergence", _place(found))
    yield _line("what differs", _with_arguments(found))
    if found.steered_by is not None:
        steering = found.steered_by
        origin = f", which came from {steering.kernel}" if steering.kernel else ""
        yield _line("read before", f"{steering.record} returned {steering.first} and {steering.second}{origin}")
    if found.through:
        yield _line("through", found.through)


def _place(found: RankDivergence) -> str:
    """Return ``rank 1, kernel aten.index_put_.default in net.0 (backward, iteration 3, train.py:12 step)``."""
    what = found.kernel or found.node
    kind = found.origin if found.origin in (Origin.KERNEL, Origin.COLLECTIVE) else f"{found.origin} at"
    inside = f" inside {found.inside}" if found.inside else ""
    module = f" in {found.module}" if found.module else ""
    return f"rank {found.rank}, {kind} {what}{inside}{module}" + _in_brackets(
        when(found.phase, found.iteration), found.source
    )


def _with_arguments(found: RankDivergence | ReplicaDifference) -> str:
    """Return what differs and, if these are arguments in brackets, both values."""
    values = {shorten(one, _VALUE): None for one in (found.first, found.second) if one.startswith("(")}
    return f"{found.detail}: {' and '.join(values)}" if len(values) == 2 else found.detail


def _results(differing: Sequence[RankResult]) -> str:
    """Return which results differ where: ``w, b and 3 more on ranks 0, 1, from step 2 on``."""
    names = list(dict.fromkeys(one.name for one in differing))
    ranks = sorted({one.rank for one in differing})
    steps = [one.step for one in differing if one.step is not None]
    first = f", from step {min(steps)} on" if steps else ""
    return f"{join_limited(names, _SHOWN)} on {format_ranks(ranks)}{first}"


def _compared(verdict: RanksVerdict) -> str:
    return f"{format_ranks(verdict.ranks)}, {count(verdict.records, 'record')} of each run{_steps(verdict.steps)}"


# ------------------------------------------------------------------------------------------------- replicas


def _check_lines(verdict: ReplicasVerdict) -> Iterator[str]:
    checked = "; ".join(
        f"{count(number, 'parameter')} on {format_ranks(ranks)}"
        for ranks, number in list(verdict.checked.items())[:_SHOWN]
    )
    if verdict.differing:
        yield from _difference(verdict.differing)
    elif verdict.checked:
        yield f"{_agreement(verdict)}: {checked}{_steps(verdict.steps)}."
    if verdict.local:
        names, again = join_limited([one.name for one in verdict.local], _SHOWN), verdict.local[0].again
        steps = join_limited(["the end" if step is None else f"step {step}" for step in again], _SHOWN)
        yield _line("local steps", f"{names}: apart in between, made equal on all ranks before {steps}")
    if verdict.by_convention:
        yield _line(
            "convention", f"{join_limited(verdict.by_convention, _SHOWN)}: a replica, as it is plain beside DTensors"
        )
    if verdict.inferred:
        yield _line("inferred", f"{join_limited(verdict.inferred, _SHOWN)}: a replica, as its gradient is reduced")
    if verdict.missing:
        yield _line("not known", f"no trace of {format_ranks(verdict.missing)}")
    yield from _unknown(verdict.unknown)
    if verdict.uncompared and not verdict.differing:
        parted = "equal on all ranks at first, and not later; nothing shows whether these are replicas"
        yield _line("not compared", f"{join_limited(verdict.uncompared, _SHOWN)}: {parted}")


def _agreement(verdict: ReplicasVerdict) -> str:
    """Return the headline of replicas of which none differs."""
    if verdict.uncompared:
        return "Replicas that are known agree, others that may be replicas do not"
    if not verdict.equal:
        return "Replicas that were compared agree"
    return "Replicas agree where they are made equal" if verdict.local else "Replicas agree"


def _difference(differing: Sequence[ReplicaDifference]) -> Iterator[str]:
    first = differing[0]
    since = "" if first.step is None else f" since step {first.step}"
    yield _line("replicas differ", f"{first.name} on {format_ranks(first.ranks)}{since}")
    if first.minority:
        yield _line("minority", format_ranks(first.minority))
    if first.written_by:
        yield _line("written by", first.written_by)
    if first.origin:
        of = "" if first.origin == UNREDUCED else _place_of(first)
        yield _line("origin", f"{first.origin}{of}: {_with_arguments(first)}")
    if len(differing) > 1:
        yield _line("also", join_limited([one.name for one in differing[1:]], _SHOWN))


def _place_of(found: ReplicaDifference) -> str:
    where = f" in {found.module}" if found.module else ""
    return f", rank {found.rank}, {found.kernel or found.node}{where}" + _in_brackets(
        when(found.phase, found.iteration), found.source
    )


# ---------------------------------------------------------------------------------------------------- words


def _line(name: str, value: str) -> str:
    return f"{name + ':':{_WIDTH}}{value}"


def _unknown(sentences: Sequence[str]) -> Iterator[str]:
    for number, sentence in enumerate(sentences[:_UNKNOWN]):
        more = len(sentences) - _UNKNOWN if number == _UNKNOWN - 1 else 0
        yield _line("not known", sentence + (f" And {more} more." if more > 0 else ""))


def _more(number: int) -> Iterator[str]:
    if number > 0:
        yield f"  and {number} more"


def _steps(steps: tuple[int, int] | None) -> str:
    if steps is None:
        return ""
    return f", step {steps[0]}" if steps[0] == steps[1] else f", steps {steps[0]} to {steps[1]}"


def _in_brackets(*parts: str) -> str:
    text = ", ".join(filter(None, parts))
    return f" ({text})" if text else ""
