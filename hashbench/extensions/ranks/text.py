"""Report on two distributed runs, and on the replicas of one run."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from hashbench.core.catalog import Origin
from hashbench.core.divergence.text import place, steered_by
from hashbench.core.finding import NAMES, Finding, document, few
from hashbench.core.text import count, format_ranks, in_brackets, shorten, when
from hashbench.extensions.ranks.notes import NamedCall, Repro
from hashbench.extensions.ranks.replicas import UNREDUCED, ReplicaDifference, ReplicasVerdict
from hashbench.extensions.ranks.verdict import RankDivergence, RankHop, RankResult, RanksVerdict

_VALUE = 60
"""Maximum characters of the value of an argument."""


# ------------------------------------------------------------------------------------------------- two runs


def diff_finding(
    verdict: RanksVerdict,
    *,
    repro: Repro | None = None,
    replicas: ReplicasVerdict | None = None,
    with_lines: str = "",
) -> Finding:
    """Return the report of two distributed runs.

    Args:
        verdict: on the two.
        repro: of the first kernel or collective.
        replicas: of the first run, where the two are equal.
        with_lines: command that makes both runs with source lines; proposed where the first divergence has none.
    """
    is_checked = replicas is not None and bool(replicas.checked or replicas.uncompared)
    same = replicas is None or not is_checked or (replicas.equal and not replicas.uncompared)
    differs = bool(verdict.first or verdict.differing or verdict.printed or (replicas and replicas.differing))
    part = None if replicas is None else check_finding(replicas)
    of_repro = {} if repro is None else dataclasses.asdict(repro)
    if of_repro:
        of_repro["repeat_with"] = of_repro.pop("command")
    data = _diff_data(verdict) | of_repro
    return Finding(
        headline=_diff_headline(verdict),
        facts=(*_diff_facts(verdict), ("repro", "" if repro is None else repro.reproduced)),
        notes=verdict.unknown,
        next=_commands(verdict, repro, with_lines),
        parts=() if part is None else (part,),
        equal=verdict.equal and same,
        differs=differs,
        data=data | ({} if part is None else {"replicas": document(part)}),
    )


def _commands(verdict: RanksVerdict, repro: Repro | None, with_lines: str) -> tuple[str, ...]:
    lines = with_lines if any(not found.source for found in verdict.first[:1]) else ""
    if lines or (repro is not None and repro.command):
        return tuple(filter(None, ["" if repro is None else repro.command, lines]))
    kernels = [found for found in verdict.first if found.origin == Origin.KERNEL]
    return tuple(command for found in (kernels or verdict.first)[:1] for command in _recorded_again(found))


def _recorded_again(found: RankDivergence | ReplicaDifference) -> tuple[str, ...]:
    """Return the command that records the script once more, with the call of a kernel, or with source lines where none
    is known."""
    if found.origin == Origin.KERNEL:
        more = ["--capture", NamedCall(found.node, found.rank).word()]
    elif found.source:
        return ()
    else:
        more = ["--source-lines"]
    words = ["-m", "hashbench", "ranks", "record", "-o", "C", *more]
    return (f"torchrun … {shlex.join(words)} -- <the same script>",)


def _diff_headline(verdict: RanksVerdict) -> str:
    if len(verdict.first) == 1:
        return f"The runs diverge: {_place(verdict.first[0])}"
    if verdict.first:
        return f"The runs diverge on {len(verdict.first)} ranks, and no collective orders these divergences"
    if verdict.printed:
        more = f", and {count(len(verdict.printed) - 1, 'more line')}" if len(verdict.printed) > 1 else ""
        return f"Printed lines differ: {verdict.printed[0].words()}{more}"
    if verdict.equal:
        return f"Both runs are equal on every rank: {_compared(verdict)}"
    return f"Nothing that was compared differs, and not all was compared: {_compared(verdict)}"


def _diff_facts(verdict: RanksVerdict) -> Iterator[tuple[str, str]]:
    if len(verdict.first) == 1:
        yield from _only_first(verdict.first[0])
    else:
        for found in verdict.first[:NAMES]:
            yield f"rank {found.rank}", f"{place(found)}: {_with_arguments(found)}"
        yield "further ranks", few([str(found.rank) for found in verdict.first[NAMES:]])
    if verdict.printed and not (verdict.first or verdict.differing):
        yield "not known", "which op it came from: no number that the program has read from a tensor fits"
    yield "results", _results(verdict.differing)
    yield "later", few([_place(found) for found in verdict.later])
    benign = few([f"{number} on rank {rank}" for rank, number in verdict.benign.items()])
    yield "benign", f"records that differ without reaching a result: {benign}" if benign else ""


def _only_first(found: RankDivergence) -> Iterator[tuple[str, str]]:
    yield "first divergence", found.node
    yield "what differs", _with_arguments(found)
    yield steered_by(found)
    yield "through", found.through


def _place(found: RankDivergence) -> str:
    """Return ``rank 1, kernel aten.index_put.default in net.0 (backward, iteration 3, train.py:12 step)``."""
    return f"rank {found.rank}, {place(found)}"


def _with_arguments(found: RankDivergence | ReplicaDifference) -> str:
    """Return what differs and, if these are arguments in brackets, both values."""
    values = {shorten(value, _VALUE): None for value in (found.first, found.second) if value.startswith("(")}
    return f"{found.detail}: {' and '.join(values)}" if len(values) == 2 else found.detail


def _results(differing: Sequence[RankResult]) -> str:
    """Return which results differ where: ``w, b and 3 more on ranks 0, 1, from step 2 on``."""
    if not differing:
        return ""
    names = list(dict.fromkeys(result.name for result in differing))
    ranks = sorted({result.rank for result in differing})
    steps = [result.step for result in differing if result.step is not None]
    first = f", from step {min(steps)} on" if steps else ""
    return f"{few(names)} on {format_ranks(ranks)}{first}"


def _compared(verdict: RanksVerdict) -> str:
    return f"{format_ranks(verdict.ranks)}, {count(verdict.records, 'record')} of each run{_steps(verdict.steps)}"


# ------------------------------------------------------------------------------------------------- replicas


def check_finding(verdict: ReplicasVerdict) -> Finding:
    """Return the report of the replicas of one run."""
    return Finding(
        headline=_check_headline(verdict),
        facts=tuple(_check_facts(verdict)),
        notes=verdict.unknown,
        next=tuple(command for found in verdict.differing[:1] for command in _recorded_again(found)),
        equal=verdict.equal,
        differs=bool(verdict.differing),
        data=_check_data(verdict),
    )


def _check_headline(verdict: ReplicasVerdict) -> str:
    if verdict.differing:
        first = verdict.differing[0]
        since = "" if first.step is None else f" since step {first.step}"
        return f"Replicas differ: {first.name} on {format_ranks(first.ranks)}{since}"
    if not verdict.checked:
        return "No replica was compared"
    checked = few(
        [f"{count(number, 'parameter')} on {format_ranks(ranks)}" for ranks, number in verdict.checked.items()]
    )
    return f"{_agreement(verdict)}: {checked}{_steps(verdict.steps)}"


def _agreement(verdict: ReplicasVerdict) -> str:
    """Return the verdict on replicas of which none differs."""
    if verdict.uncompared:
        return "Replicas that are known agree, others that may be replicas do not"
    if not verdict.equal:
        return "Replicas that were compared agree"
    return "Replicas agree where they are made equal" if verdict.local else "Replicas agree"


def _check_facts(verdict: ReplicasVerdict) -> Iterator[tuple[str, str]]:
    if verdict.differing:
        yield from _difference(verdict.differing)
    if verdict.local:
        steps = few(["the end" if step is None else f"step {step}" for step in verdict.local[0].again])
        names = few([found.name for found in verdict.local])
        yield "local steps", f"{names}: apart in between, made equal on all ranks before {steps}"
    if verdict.by_convention:
        yield "convention", f"{few(verdict.by_convention)}: a replica, as it is plain beside DTensors"
    if verdict.inferred:
        yield "inferred", f"{few(verdict.inferred)}: a replica, as its gradient is reduced"
    if verdict.missing:
        yield "not known", f"no trace of {format_ranks(verdict.missing)}"
    if verdict.uncompared and not verdict.differing:
        drifted = "equal on all ranks at first, and not later; nothing shows whether these are replicas"
        yield "not compared", f"{few(verdict.uncompared)}: {drifted}"


def _difference(differing: Sequence[ReplicaDifference]) -> Iterator[tuple[str, str]]:
    first = differing[0]
    yield "minority", format_ranks(first.minority) if first.minority else ""
    yield "written by", first.written_by
    if first.origin:
        where = "" if first.origin == UNREDUCED else _place_of(first)
        yield "origin", f"{first.origin}{where}: {_with_arguments(first)}"
    yield "also", few([found.name for found in differing[1:]])


def _place_of(found: ReplicaDifference) -> str:
    where = f" in {found.module}" if found.module else ""
    return f", rank {found.rank}, {found.kernel or found.node}{where}" + in_brackets(
        when(found.phase, found.iteration), found.source
    )


def _steps(steps: tuple[int, int] | None) -> str:
    if steps is None:
        return ""
    return f", step {steps[0]}" if steps[0] == steps[1] else f", steps {steps[0]} to {steps[1]}"


# ---------------------------------------------------------------------------------------------------- as plain values


def _diff_data(verdict: RanksVerdict) -> dict[str, Any]:
    return {
        "world_size": verdict.world_size,
        "first": [_divergence_document(found) for found in verdict.first],
        "later": [_divergence_document(found) for found in verdict.later],
        "differing": [dataclasses.asdict(result) for result in verdict.differing],
        "benign": {str(rank): number for rank, number in verdict.benign.items()},
        "missing": list(verdict.missing),
        "unknown": list(verdict.unknown),
        "ranks": list(verdict.ranks),
        "records": verdict.records,
        "steps": list(verdict.steps) if verdict.steps else None,
        "printed": [dataclasses.asdict(line) for line in verdict.printed],
    }


def _check_data(verdict: ReplicasVerdict) -> dict[str, Any]:
    return {
        "world_size": verdict.world_size,
        "differing": [dataclasses.asdict(found) for found in verdict.differing],
        "checked": [{"ranks": list(ranks), "parameters": number} for ranks, number in verdict.checked.items()],
        "inferred": list(verdict.inferred),
        "missing": list(verdict.missing),
        "unknown": list(verdict.unknown),
        "uncompared": list(verdict.uncompared),
        "local": [dataclasses.asdict(found) for found in verdict.local],
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
