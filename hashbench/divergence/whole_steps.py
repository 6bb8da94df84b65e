"""Cut the traces of all ranks after the last step that every one of them has whole. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hashbench.errors import HashbenchError
from hashbench.records import Trace


@dataclass(frozen=True, slots=True)
class WholeSteps:
    """The traces of two runs, by global rank, as far as all of them go.

    Attributes:
        first, second: the traces.
        steps: first and last step; ``None`` if the runs were not recorded by steps.
        ended: sentences on the traces that end early, and what was left out.
    """

    first: Mapping[int, Trace]
    second: Mapping[int, Trace]
    steps: tuple[int, int] | None = None
    ended: tuple[str, ...] = ()


def up_to_common_step(first: Mapping[int, Trace], second: Mapping[int, Trace]) -> WholeSteps:
    """Cut all traces after the last step that all have, if any of them ended early or has other steps.

    Raises:
        HashbenchError: they were recorded by steps, some ended early, and no step is whole in all of them.
    """
    traces = [*first.values(), *second.values()]
    numbers = [[step.number for step in trace.steps] for trace in traces]
    ended = tuple(_ended({"first": first, "second": second}))
    by_steps = any(numbers)
    if not by_steps or (not ended and all(one == numbers[0] for one in numbers)):
        return WholeSteps(first, second, (numbers[0][0], numbers[0][-1]) if by_steps else None, ended)
    common = sorted(set.intersection(*map(set, numbers)))
    if not common:
        raise HashbenchError(
            f"no step is whole on all ranks of both runs{': ' if ended else ''}{' '.join(ended)}".rstrip("."),
            consequence="nothing was compared",
            tip="Record both runs for longer.",
        )
    last = common[-1]
    told = [*ended, *_other_steps({"first": first, "second": second})] or ["Not all ranks have the same steps."]
    told.append(f"Compared up to the end of step {last}, the last that all ranks of both runs have whole.")
    return WholeSteps(
        {rank: cut_after(trace, last) for rank, trace in first.items()},
        {rank: cut_after(trace, last) for rank, trace in second.items()},
        (common[0], last),
        tuple(told),
    )


def cut_after(trace: Trace, number: int) -> Trace:
    """Return the trace up to the end of step ``number``, which it has; how it ended is dropped."""
    steps = tuple(step for step in trace.steps if step.number <= number)
    end = steps[-1].position
    records = trace.records[:end]
    ids = {record.id for record in records}
    results = {result.name for result in steps[-1].results}
    written = {result.source for step in steps for result in step.results}
    return replace(
        trace,
        records=records,
        leaves=tuple(leaf for leaf in trace.leaves if leaf.position < end or leaf.id in written),
        results=steps[-1].results,
        marks=tuple(mark for mark in trace.marks if mark.position <= end),
        early_reads=tuple(
            read
            for read in trace.early_reads
            if read.collective in ids and read.reader in (results if read.is_result else ids)
        ),
        rank=None if trace.rank is None else replace(trace.rank, ended=""),
        steps=steps,
    )


def _ended(runs: Mapping[str, Mapping[int, Trace]]) -> Iterator[str]:
    for run, traces in runs.items():
        for rank, trace in sorted(traces.items()):
            if trace.rank is not None and trace.rank.ended:
                after = f" after step {trace.steps[-1].number}" if trace.steps else ""
                yield f"Rank {rank} of the {run} run ended early{after}: {trace.rank.ended}."


def _other_steps(runs: Mapping[str, Mapping[int, Trace]]) -> Iterator[str]:
    """Say how many steps each run has, if its ranks have as many and the runs do not."""
    counts = {run: {len(trace.steps) for trace in traces.values()} for run, traces in runs.items()}
    first, second = counts["first"], counts["second"]
    if len(first) == len(second) == 1 and first != second:
        yield f"The first run has {first.pop()} whole steps and the second {second.pop()}."
