"""Cut the traces of all ranks after the last step that every one of them has whole. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hashbench.errors import HashbenchError
from hashbench.records import Trace

_NAMES = ("first", "second")


@dataclass(frozen=True, slots=True)
class WholeSteps:
    """The traces of one or two runs, by global rank, as far as all of them go.

    Attributes:
        runs: the traces of each run.
        steps: first and last step; ``None`` if the runs were not recorded by steps.
        ended: sentences on the traces that end early, and what was left out.
    """

    runs: tuple[Mapping[int, Trace], ...]
    steps: tuple[int, int] | None = None
    ended: tuple[str, ...] = ()


def up_to_common_step(*runs: Mapping[int, Trace]) -> WholeSteps:
    """Cut all traces after the last step that all have, if any of them ended early or has other steps.

    Args:
        runs: one run, or the first and the second: traces by global rank.

    Raises:
        HashbenchError: they were recorded by steps, some ended early, and no step is whole in all of them.
    """
    numbers = [[step.number for step in trace.steps] for traces in runs for trace in traces.values()]
    ended = tuple(_ended(runs))
    by_steps = any(numbers)
    if not by_steps or (not ended and all(one == numbers[0] for one in numbers)):
        return WholeSteps(runs, (numbers[0][0], numbers[0][-1]) if by_steps else None, ended)
    common = sorted(set.intersection(*map(set, numbers)))
    everywhere = "all ranks of both runs" if len(runs) > 1 else "all ranks"
    if not common:
        raise HashbenchError(
            f"no step is whole on {everywhere}{': ' if ended else ''}{' '.join(ended)}".rstrip("."),
            consequence="nothing was compared",
            tip="Record for longer.",
        )
    last = common[-1]
    told = [*ended, *_other_steps(runs)] or ["Not all ranks have the same steps."]
    told.append(f"Compared up to the end of step {last}, the last that {everywhere} have whole.")
    cut = tuple({rank: cut_after(trace, last) for rank, trace in traces.items()} for traces in runs)
    return WholeSteps(cut, (common[0], last), tuple(told))


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


def _ended(runs: Sequence[Mapping[int, Trace]]) -> Iterator[str]:
    for run, traces in zip(_NAMES, runs, strict=False):
        of_run = f" of the {run} run" if len(runs) > 1 else ""
        for rank, trace in sorted(traces.items()):
            if trace.rank is not None and trace.rank.ended:
                after = f" after step {trace.steps[-1].number}" if trace.steps else ""
                yield f"Rank {rank}{of_run} ended early{after}: {trace.rank.ended}."


def _other_steps(runs: Sequence[Mapping[int, Trace]]) -> Iterator[str]:
    """Say how many steps each run has, if its ranks have as many and the runs do not."""
    counts = [{len(trace.steps) for trace in traces.values()} for traces in runs]
    if all(len(one) == 1 for one in counts) and counts[0] != counts[-1]:
        yield f"The first run has {counts[0].pop()} whole steps and the second {counts[-1].pop()}."
