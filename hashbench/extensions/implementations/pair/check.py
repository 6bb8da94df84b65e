"""Compare two implementations: align both in float64, and then find where rounding parts in their own dtype."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from hashbench.core.divergence.content import ContentAlignment, ContentGraph, Parting
from hashbench.core.divergence.content_align import align_contents
from hashbench.core.divergence.content_walk import find_partings
from hashbench.core.errors import HashbenchError, named_line
from hashbench.extensions.implementations.pair.order import other_order, with_order
from hashbench.extensions.implementations.pair.places import columns, joined, parted_place
from hashbench.extensions.implementations.pair.record import RecordedRun
from hashbench.extensions.implementations.pair.rounded import (
    SHOWN,
    compared_results,
    content_pairs,
    first_apart,
    low_pair,
    rounded_place,
)
from hashbench.extensions.implementations.pair.running import recorded
from hashbench.extensions.implementations.pair.shards import fitted
from hashbench.extensions.implementations.pair.sides import GRADIENT, Side, build, common_names
from hashbench.extensions.implementations.pair.verdict import ImplementationsVerdict, Outcome
from hashbench.extensions.implementations.verdict import WeightsVerdict
from hashbench.extensions.implementations.weights import compare_models

__all__ = ["Side", "compare_implementations"]

Progress = Callable[[str], None]

MOST_PARTED = 8
"""Independent places that are looked at."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Both sides in float64.

    Attributes:
        a, b: the runs.
        names: name in (a) of each compared output of (b).
        left: names of outputs that one side lacks.
        alignment: which contents correspond.
    """

    a: RecordedRun
    b: RecordedRun
    names: Mapping[str, str]
    left: tuple[str, ...]
    alignment: ContentAlignment


def compare_implementations(
    a: Side, b: Side, *, seed: int = 1337, weights: bool = True, progress: Progress | None = None
) -> ImplementationsVerdict:
    """Say whether two implementations compute the same function, and where they part.

    Both run in float64, where rounding vanishes, and what their ops leave is aligned by content. If all results agree
    there, both run in their own dtype, where the first aligned contents whose bits differ are where rounding parts.

    Args:
        a, b: the sides; (a) is the one that counts as right in words.
        seed: of the generators before anything is built, and before each run.
        weights: compare what both hold as well, if both are modules.
        progress: called with what is done now.

    Raises:
        HashbenchError: a side has no results to compare.
    """
    say = progress or (lambda _: None)
    seconds: dict[str, float] = {}
    held, why = _weights(a, b, seed, seconds, say) if weights else (None, "not asked for")
    started = time.perf_counter()
    try:
        compared = _in_float64(a, b, seed, say)
    except HashbenchError:
        raise
    except Exception as error:  # whatever a model raises
        reason = f"a run in float64 raised {named_line(error)}"
        return ImplementationsVerdict(Outcome.NOT_KNOWN, reason, weights=held, weights_reason=why)
    seconds["float64"] = time.perf_counter() - started
    say("walk back")
    graphs = compared.a.graph, compared.b.graph, compared.alignment
    partings = tuple(with_order(*graphs, parting) for parting in find_partings(*graphs)) or other_order(*graphs)
    started = time.perf_counter()
    verdict = _mistake(a, b, seed, compared, partings, say) if partings else _rounding(a, b, seed, compared, say)
    seconds["own dtype"] = time.perf_counter() - started
    partners = compared.alignment.partners
    ops = {node.id for node in compared.b.graph if node.op}
    fallbacks = {**compared.a.fallbacks}
    for op, count in compared.b.fallbacks.items():
        fallbacks[op] = fallbacks.get(op, 0) + count
    return replace(
        verdict,
        weights=held,
        weights_reason=why,
        aligned=(len(ops & partners.keys()), len(ops)),
        fallbacks=fallbacks or None,
        left=compared.left,
        columns=(columns(compared.a), columns(compared.b)),
        joined=joined(compared.a, compared.b, compared.alignment),
        seconds=seconds,
    )


# ---------------------------------------------------------------------------------------------------- the steps


def _weights(
    a: Side, b: Side, seed: int, seconds: dict[str, float], say: Progress
) -> tuple[WeightsVerdict | None, str]:
    if max(a.ranks, b.ranks) > 1:
        return None, "a side runs on several ranks: weights are compared where ops read them"
    say("compare weights")
    started = time.perf_counter()
    ours, theirs = build(a, seed).model, build(b, seed).model
    if not all(isinstance(model, torch.nn.Module) for model in (ours, theirs)):
        return None, "a side is no torch.nn.Module"
    try:
        return _without_lone_buffers(compare_models(ours, theirs), ours, theirs), ""
    except HashbenchError as error:
        return None, error.consequence
    finally:
        seconds["weights"] = time.perf_counter() - started


def _without_lone_buffers(held: WeightsVerdict, ours: torch.nn.Module, theirs: torch.nn.Module) -> WeightsVerdict:
    """Return the verdict without buffers that one side alone has: masks, frequencies, counters. The runs show whether
    the other side computes them."""
    names = [{name for name, _ in model.named_buffers()} for model in (ours, theirs)]
    kept = tuple(
        each
        for each in held.differences
        if each.kind != "missing" or not (set(each.a) <= names[0] and set(each.b) <= names[1])
    )
    return replace(held, differences=kept)


def _in_float64(a: Side, b: Side, seed: int, say: Progress) -> Compared:
    say("run (a) in float64")
    first = recorded(a, seed, wide=True)
    say("run (b) in float64")
    second = recorded(b, seed, wide=True)
    names, left = common_names(first.graph.results, second.graph.results)
    if not names:
        raise HashbenchError(
            "cannot compare these implementations",
            consequence=f"(a) returns {_listed(first)} and (b) returns {_listed(second)}: no output is in both",
            tip="Say what is compared, by outputs or outputs_a and outputs_b.",
        )
    say("align")
    one, other = _renamed(first.graph, second.graph, names)
    alignment = align_contents(one, other)
    return Compared(replace(first, graph=one), replace(second, graph=other), names, left, alignment)


def _renamed(a: ContentGraph, b: ContentGraph, names: Mapping[str, str]) -> tuple[ContentGraph, ContentGraph]:
    """Return both graphs with the same name for each compared output, and with all gradients."""
    theirs = {name: node for name, node in b.results.items() if name in names or name.startswith(GRADIENT)}
    ours = {name: a.results[wanted] for name, wanted in names.items()}
    ours |= {name: node for name, node in a.results.items() if name.startswith(GRADIENT)}
    return ContentGraph(a.nodes, ours), ContentGraph(b.nodes, theirs)


def _listed(run: RecordedRun) -> str:
    return ", ".join(run.graph.results) or "no tensor"


def _mistake(
    a: Side, b: Side, seed: int, compared: Compared, partings: tuple[Parting, ...], say: Progress
) -> ImplementationsVerdict:
    """Describe where two functions part."""
    if not any(parting.a or parting.b for parting in partings):
        reached = ", ".join(dict.fromkeys(name for parting in partings for name in parting.results))
        return ImplementationsVerdict(Outcome.NOT_KNOWN, f"no op was found behind {reached or 'the results'}")
    say("read the values where they part")
    shown = partings[:MOST_PARTED]
    ours, theirs = (
        recorded(side, seed, wide=True, keep=frozenset(keep)).values
        for side, keep in (
            (a, [node for parting in shown for node in parting.a[:1]]),
            (b, [node for parting in shown for node in parting.b[:1]]),
        )
    )
    parted = tuple(parted_place(compared.a, compared.b, parting, ours, theirs) for parting in shown)
    return ImplementationsVerdict(Outcome.MISTAKE, parted=parted)


def _rounding(a: Side, b: Side, seed: int, compared: Compared, say: Progress) -> ImplementationsVerdict:
    """Find where two runs of the same function part in their own dtype."""
    wide = compared.a, compared.b
    say("run (a) in its own dtype")
    first = recorded(a, seed, wide=False)
    say("run (b) in its own dtype")
    second = recorded(b, seed, wide=False)
    first = fitted(first, second.results, {ours: theirs for theirs, ours in compared.names.items()})
    second = fitted(second, first.results, compared.names)
    pair = low_pair(wide, (first, second))
    results = compared_results(first, second, compared.names)
    dtype = next((str(value.dtype).removeprefix("torch.") for value in second.results.values()), "")
    pairs = content_pairs(pair, compared.alignment)
    apart = first_apart(pair, pairs)[:SHOWN]
    if not apart:
        if all(result.units == 0 for result in results):
            return ImplementationsVerdict(Outcome.EQUAL, results=results, dtype=dtype)
        return ImplementationsVerdict(Outcome.ROUNDING, results=results, dtype=dtype)
    say("read the values where rounding parts")
    keep = (
        frozenset(other for node in apart for part in pairs.alternatives[node] for other in part),
        frozenset(pairs.own[node] for node in apart),
    )
    ours, theirs = (
        recorded(side, seed, wide=False, keep=nodes).values for side, nodes in zip((a, b), keep, strict=True)
    )
    exact = recorded(b, seed, wide=True, keep=frozenset(apart)).values
    parted = tuple(rounded_place(pair, pairs, node, ours, theirs, exact.get(node)) for node in apart)
    return ImplementationsVerdict(Outcome.ROUNDING, parted=parted, results=results, dtype=dtype)
