"""Find the first divergence of two runs of a distributed program: the rank and the kernel, or the collective. Pure: no
torch, no files.

The two traces of each rank are judged as those of any program (``introduce``), with the collectives left open; one walk
over all ranks (``walk``) decides these from the contributions of each rank. The earliest difference of each rank is a
candidate. Ranks have no common clock: a candidate is *first* unless the data of another one may have reached it through
collectives (``rank_order``). Several may be first.

A read of a collective's output before the program waited for it (origin ``unwaited``) is first where nothing else is:
the traces agree, since they waited, and untraced runs may not.

A rank that ended early leaves whole steps: all ranks are judged up to the last step that all of them have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from hashbench.core.catalog import Origin
from hashbench.core.divergence.align import pair
from hashbench.core.divergence.collective_calls import calls_in_channels, group_word
from hashbench.core.divergence.describe import early_divergence, unseen
from hashbench.core.divergence.introduce import Differences, find_differences
from hashbench.core.errors import HashbenchError
from hashbench.core.records import Result, Trace
from hashbench.core.trace.file import refuse_different
from hashbench.extensions.ranks.choice import DifferingResult, choose_candidates, order_of, unpreceded
from hashbench.extensions.ranks.printed import PrintedDifference, with_printed_results
from hashbench.extensions.ranks.verdict import RankDivergence, RankResult, RanksVerdict
from hashbench.extensions.ranks.walk import JudgedRanks, missing_words
from hashbench.extensions.ranks.whole_steps import results_by_step, up_to_common_step


def find_across_ranks(
    first: Mapping[int, Trace],
    second: Mapping[int, Trace],
    *,
    world_size: int | None = None,
    printed: Sequence[PrintedDifference] | None = None,
) -> RanksVerdict:
    """Return the verdict on two runs that should be identical, of which each rank left a trace.

    Args:
        first, second: traces by global rank.
        world_size: number of ranks. Default: as the traces say, else one more than the largest rank.
        printed: lines that ranks print differently, which are results; ``None``: nobody looked at what they print.

    Raises:
        HashbenchError: nothing can be compared: no rank has a trace in both runs, the world sizes, tracers or
            programs differ, a trace is that of another rank, or no step is whole everywhere.
    """
    size = _world_size(first, second, world_size)
    if printed:
        first, second = with_printed_results(first, second, printed)
    ranks = tuple(sorted({*first} & {*second}))
    _refuse_what_is_not_comparable(first, second, ranks)
    whole = up_to_common_step({rank: first[rank] for rank in ranks}, {rank: second[rank] for rank in ranks})
    missing = tuple(rank for rank in range(size) if rank not in ranks)
    unknown = [*_missing_traces(first, second, missing), *whole.ended]
    by_rank: dict[int, Differences] = {}
    for rank in ranks:
        old, new = (traces[rank] for traces in whole.runs)
        if old is not new and old != new:
            by_rank[rank] = find_differences(pair(old, new), ranks_known=True)
    foreign = [rank for rank, differences in by_rank.items() if _has_no_pair(differences)]
    if foreign and len(foreign) == len(ranks):
        raise HashbenchError(
            "the two runs have no op in common",
            consequence="they are of other programs, and nothing was compared",
            tip="Give two recordings of one program.",
        )
    unknown += [f"Rank {rank}: its two traces have no op in common." for rank in foreign]
    compared = [rank for rank in ranks if rank not in foreign]
    old_run, new_run = ({rank: traces[rank] for rank in compared} for traces in whole.runs)
    judged = JudgedRanks(
        old_run, new_run, {rank: differences for rank, differences in by_rank.items() if rank in compared}
    )
    unknown += [unseen(differences.runs) for differences in judged.differences.values() if differences.runs.opaque]
    if by_rank and not whole.ended:
        unknown += [*_unequal_calls(judged)]
    pairs = {rank: tuple(_differing_results(rank, differences)) for rank, differences in judged.differences.items()}
    chosen = choose_candidates(judged, pairs)
    if chosen.benign and printed is None and not any(map(_has_results, (*old_run.values(), *new_run.values()))):
        unknown.append(_UNDECLARED)
    return RanksVerdict(
        size,
        chosen.first or tuple(_early_reads(judged)),
        chosen.later,
        tuple(_first_steps(result.result for several in pairs.values() for result in several)),
        missing,
        tuple(unknown),
        chosen.benign,
        tuple(compared),
        sum(len(trace.records) for trace in judged.first.values()),
        whole.steps,
        tuple(printed or ()),
    )


_UNDECLARED = (
    "Nothing is a result, and records differ: no optimizer stepped, no hashbench.result was called, and no printed "
    "number was kept."
)


def _has_results(trace: Trace) -> bool:
    return any(results_by_step(trace).values())


# ---------------------------------------------------------------------------------------------------- refusals


def _world_size(first: Mapping[int, Trace], second: Mapping[int, Trace], world_size: int | None) -> int:
    """Return the number of ranks; refuse two world sizes, and a trace of another rank."""
    sizes: dict[int, str] = {} if world_size is None else {world_size: "the program"}
    for run, traces in (("the first run", first), ("the second run", second)):
        for rank, trace in sorted(traces.items()):
            if trace.rank is None:
                continue
            if trace.rank.rank != rank:
                raise HashbenchError(
                    f"the trace of rank {rank} of {run} is that of rank {trace.rank.rank}",
                    consequence="nothing was compared",
                    tip="Give the traces as they were recorded.",
                )
            sizes.setdefault(trace.rank.world_size, run)
    if len(sizes) > 1:
        raise HashbenchError(
            f"world sizes differ: {' and '.join(f'{run} has {size}' for size, run in sizes.items())}",
            consequence="nothing was compared",
            tip="Give two recordings of one program on as many ranks.",
        )
    return max([*sizes, *(rank + 1 for rank in (*first, *second))], default=0)


def _refuse_what_is_not_comparable(
    first: Mapping[int, Trace], second: Mapping[int, Trace], ranks: Sequence[int]
) -> None:
    if not ranks:
        raise HashbenchError(
            "no rank has a trace in both runs", consequence="nothing was compared", tip="Record both runs again."
        )
    tracers = dict.fromkeys(trace.tracer for traces in (first, second) for _, trace in sorted(traces.items()))
    for tracer in tracers:
        refuse_different(next(iter(tracers)), tracer)
    if not any(traces[rank].records or traces[rank].results for rank in ranks for traces in (first, second)):
        raise HashbenchError(
            "the traces are empty",
            consequence="nothing was compared, which is not the same as equal",
            tip="Check that the program ran any torch op while it was recorded.",
        )


def _missing_traces(first: Mapping[int, Trace], second: Mapping[int, Trace], missing: Sequence[int]) -> Iterator[str]:
    gone = {rank: (rank not in first, rank not in second) for rank in missing}
    for where, run in (
        ((True, True), "either run"),
        ((True, False), "the first run"),
        ((False, True), "the second run"),
    ):
        ranks = [rank for rank, absent in gone.items() if absent == where]
        if ranks:
            yield f"{missing_words(ranks, ()).capitalize()} in {run}."


def _has_no_pair(differences: Differences) -> bool:
    """Return True if both runs of a rank have records, and none of them correspond."""
    runs = differences.runs
    both = bool(runs.first.records and runs.second.records)
    return both and all(None in records for records in runs.records.values())


def _unequal_calls(judged: JudgedRanks) -> Iterator[str]:
    """Say where the ranks of one run did not call the collectives of a group as often."""
    for run, calls in zip(("first", "second"), judged.calls, strict=True):
        counts = {rank: calls_in_channels(call) for rank, call in calls.items()}
        groups = dict.fromkeys(channel for count in counts.values() for channel in count if channel.source < 0)
        for group in groups:
            made = {rank: counts[rank].get(group, 0) for rank in group.process_group if rank in counts}
            if len(set(made.values())) > 1:
                numbers = ", ".join(f"rank {rank} {number}" for rank, number in made.items())
                yield (
                    f"In the {run} run the ranks issued different numbers of collectives on "
                    f"{group_word(group.process_group, group.ordinal)} ({numbers}): a rank stopped early, or its "
                    "trace is of another run."
                )
                break


# ----------------------------------------------------------------------------------------------------- results


def _differing_results(rank: int, differences: Differences) -> Iterator[DifferingResult]:
    """Yield the results of a rank that differ, after each step that both runs have and at the end."""
    first, second = (results_by_step(run) for run in (differences.runs.first, differences.runs.second))
    for step, results in first.items():
        if step not in second or results == second[step]:
            continue
        old, new = ({result.name: result for result in after} for after in (results, second[step]))
        for name in dict.fromkeys([*old, *new]):
            a, b = old.get(name), new.get(name)
            if _digest(a) != _digest(b):
                yield DifferingResult(RankResult(rank, name, step), a, b)


def _digest(result: Result | None) -> object:
    return None if result is None else result.digest


def _first_steps(results: Iterable[RankResult]) -> Iterator[RankResult]:
    """Yield of each result that of the first step after which it differs."""
    seen: set[tuple[int, str]] = set()
    for result in results:
        if (result.rank, result.name) not in seen:
            seen.add((result.rank, result.name))
            yield result


# ------------------------------------------------------------------------------------------------- early reads


def _early_reads(judged: JudgedRanks) -> list[RankDivergence]:
    """Return the reads of a collective's output before the program waited for it, the first of each rank, of which none
    comes behind another one."""
    places: dict[int, float] = {}
    found: dict[int, RankDivergence] = {}
    for rank, first in judged.first.items():
        second = judged.second[rank]
        reads = tuple(dict.fromkeys([*first.early_reads, *second.early_reads]))
        if not reads:
            continue
        runs = judged.differences[rank].runs if rank in judged.differences else pair(first, second)
        early = [early_divergence(runs, read, Origin.UNWAITED) for read in reads]
        earliest = min(early, key=lambda divergence: runs.position.get(divergence.node, 0))
        places[rank] = runs.position.get(earliest.node, 0)
        found[rank] = RankDivergence.of(earliest, rank)
    if len(found) < 2:
        return list(found.values())
    order = order_of(judged)
    kept = unpreceded({rank: order.reached_from({rank: place}) for rank, place in places.items()}, places)
    return [found[rank] for rank in kept]
