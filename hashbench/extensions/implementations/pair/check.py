"""Compare two implementations: align both in float64, and then find where rounding parts in their own dtype."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from hashbench.core.divergence.content import Parting
from hashbench.core.errors import HashbenchError
from hashbench.core.text import join_limited
from hashbench.extensions.implementations.pair.places import columns, joined, parted_place
from hashbench.extensions.implementations.pair.rounded import (
    SHOWN,
    compared_gradients,
    compared_results,
    content_pairs,
    first_apart,
    low_pair,
    rounded_place,
)
from hashbench.extensions.implementations.pair.running import naming, recorded
from hashbench.extensions.implementations.pair.settled import (
    MOST_PARTED,
    ComparedSides,
    SettledSides,
    SideFailedError,
    drawn,
    settle,
)
from hashbench.extensions.implementations.pair.shards import fitted
from hashbench.extensions.implementations.pair.sides import Side, build
from hashbench.extensions.implementations.pair.verdict import ImplementationsVerdict, PairOutcome
from hashbench.extensions.implementations.verdict import WeightsVerdict
from hashbench.extensions.implementations.weights import compare_models

__all__ = ["Side", "compare_implementations"]

Progress = Callable[[str], None]


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
        HashbenchError: a side cannot be built, raises in its own dtype, or has no results to compare.
    """
    say = progress or (lambda _: None)
    seconds: dict[str, float] = {}
    held, why = _weights(a, b, seed, seconds, say) if weights else (None, "not asked for")
    started = time.perf_counter()
    try:
        settled = settle(a, b, seed, say)
    except SideFailedError as failed:
        with naming(failed.name):
            recorded(a if failed.name == "(a)" else b, seed, wide=False)
        reason = f"in float64 alone {failed.name} raised {failed.said}"
        return ImplementationsVerdict(PairOutcome.NOT_KNOWN, reason, weights=held, weights_reason=why)
    seconds["float64"] = time.perf_counter() - started
    started = time.perf_counter()
    compared = settled.compared
    if unread := _unread(compared):
        verdict = ImplementationsVerdict(PairOutcome.NOT_KNOWN, unread)
    elif settled.partings:
        verdict = _mistake(settled)
    elif settled.undecided:
        verdict = _undecided(settled)
    else:
        verdict = _rounding(a, b, seed, compared, say)
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
        notes=settled.notes,
    )


# ---------------------------------------------------------------------------------------------------- the steps


def _weights(
    a: Side, b: Side, seed: int, seconds: dict[str, float], say: Progress
) -> tuple[WeightsVerdict | None, str]:
    if max(a.ranks, b.ranks) > 1:
        return None, "a side runs on several ranks: weights are compared where ops read them"
    say("compare weights")
    started = time.perf_counter()
    with naming("(a)"):
        ours = build(a, seed).model
    with naming("(b)"):
        theirs = build(b, seed).model
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


def _mistake(settled: SettledSides) -> ImplementationsVerdict:
    """Describe where two functions part."""
    compared, partings = settled.compared, settled.mistakes or settled.partings
    if not any(parting.a or parting.b for parting in partings):
        return ImplementationsVerdict(PairOutcome.NOT_KNOWN, _unexplained(compared, partings))
    parted = tuple(parted_place(compared.a, compared.b, parting, *settled.values) for parting in partings[:MOST_PARTED])
    if not settled.mistakes:
        return ImplementationsVerdict(PairOutcome.NOT_KNOWN, drawn(compared.b, partings[0].b[0]), parted=parted)
    return ImplementationsVerdict(PairOutcome.MISTAKE, parted=parted)


def _unread(compared: ComparedSides) -> str:
    """Say that an output has no elements that were read: it may not count as equal."""
    for name in compared.names:
        texts = []
        for run in (compared.a, compared.b):
            node = run.graph.nodes[run.graph.results[name]]
            texts.append((node.moments is None, run.outputs[node.id].text))
        if any(unread for unread, _ in texts):
            return f"{name} is {texts[0][1]} in (a) and {texts[1][1]} in (b), of which nothing could be compared"
    return ""


def _unexplained(compared: ComparedSides, partings: Sequence[Parting]) -> str:
    """Say that results differ behind which nothing was found."""
    names = tuple(dict.fromkeys(name for parting in partings for name in parting.results))
    for name in names:
        ours, theirs = (run.graph.results.get(name) for run in (compared.a, compared.b))
        if ours is not None and theirs is not None:
            one, other = compared.a.outputs[ours].text, compared.b.outputs[theirs].text
            if compared.a.graph.nodes[ours].numel != compared.b.graph.nodes[theirs].numel:
                return f"{name} has {one} in (a) and {other} in (b): say by outputs which elements correspond"
    return f"no op was found behind {join_limited(names) or 'the results'}"


def _undecided(settled: SettledSides) -> ImplementationsVerdict:
    """Describe draws that differ, and choices between equal values."""
    compared = settled.compared
    parted = tuple(
        replace(parted_place(compared.a, compared.b, Parting((each.a,), (each.b,), ()), {}, {}), note=sentence)
        for each, sentence in settled.undecided[:MOST_PARTED]
    )
    return ImplementationsVerdict(PairOutcome.NOT_KNOWN, settled.reason, parted=parted)


def _rounding(a: Side, b: Side, seed: int, compared: ComparedSides, say: Progress) -> ImplementationsVerdict:
    """Find where two runs of the same function part in their own dtype."""
    wide = compared.a, compared.b
    say("run (a) in its own dtype")
    with naming("(a)"):
        first = recorded(a, seed, wide=False)
    say("run (b) in its own dtype")
    with naming("(b)"):
        second = recorded(b, seed, wide=False)
    first = fitted(first, second.results, {ours: theirs for theirs, ours in compared.names.items()})
    second = fitted(second, first.results, compared.names)
    pair = low_pair(wide, (first, second))
    dtype = next((str(value.dtype).removeprefix("torch.") for value in second.results.values()), "")
    pairs = content_pairs(pair, compared.alignment)
    results = compared_results(first, second, compared.names) + compared_gradients(pair, pairs)
    apart = first_apart(pair, pairs)[:SHOWN]
    if not apart:
        if all(result.units == 0 for result in results):
            return ImplementationsVerdict(PairOutcome.EQUAL, results=results, dtype=dtype)
        return ImplementationsVerdict(PairOutcome.ROUNDING, results=results, dtype=dtype)
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
    return ImplementationsVerdict(PairOutcome.ROUNDING, parted=parted, results=results, dtype=dtype)
