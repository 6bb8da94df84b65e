"""Cut the traces of all ranks after the last step that every one of them has whole. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hashbench.core.errors import HashbenchError
from hashbench.core.records import Result, Trace

_NAMES = ("first", "second")


@dataclass(frozen=True, slots=True)
class WholeSteps:
    """The traces of one or two runs, by global rank, as far as all of them go.

    Attributes:
        runs: the traces of each run.
        steps: first and last step of any trace; ``None`` if the runs were not recorded by steps.
        ended: sentences on the traces that end early, and what was left out.
    """

    runs: tuple[Mapping[int, Trace], ...]
    steps: tuple[int, int] | None = None
    ended: tuple[str, ...] = ()


def up_to_common_step(*runs: Mapping[int, Trace]) -> WholeSteps:
    """Cut all traces after the last step that all have, if any of them ended early.

    Traces that all ended by themselves are whole: ranks may make other numbers of steps, as with uneven batches, and so
    may two runs, as where a loss decides when to stop. A rank without an optimizer has no steps, and is never cut.

    Args:
        runs: one run, or the first and the second: traces by global rank.

    Raises:
        HashbenchError: they were recorded by steps, some ended early, and no step is whole in all of them.
    """
    traces = [trace for run in runs for trace in run.values()]
    ended = tuple(_ended(runs))
    numbers = [{step.number for step in trace.steps} for trace in traces if trace.steps or _ended_early(trace)]
    every = set().union(*numbers)
    if not every or not ended:
        return WholeSteps(runs, (min(every), max(every)) if every else None, ended)
    common = set.intersection(*numbers)
    everywhere = "all ranks of both runs" if len(runs) > 1 else "all ranks"
    if not common:
        raise HashbenchError(
            f"no step is whole on {everywhere}: {' '.join(ended)}".rstrip("."),
            consequence="nothing was compared",
            tip="Record for longer.",
        )
    last = max(common)
    sentence = f"Compared up to the end of step {last}, the last that {everywhere} have whole."
    cut = tuple({rank: cut_after(trace, last) if trace.steps else trace for rank, trace in run.items()} for run in runs)
    return WholeSteps(cut, (min(common), last), (*ended, sentence))


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


def results_by_step(trace: Trace) -> dict[int | None, tuple[Result, ...]]:
    """Return the results of a trace after each step and, under ``None``, at its end."""
    return {**{step.number: step.results for step in trace.steps}, None: trace.results}


def _ended_early(trace: Trace) -> bool:
    return trace.rank is not None and bool(trace.rank.ended)


def _ended(runs: Sequence[Mapping[int, Trace]]) -> Iterator[str]:
    for run, traces in zip(_NAMES, runs, strict=False):
        of_run = f" of the {run} run" if len(runs) > 1 else ""
        for rank, trace in sorted(traces.items()):
            if trace.rank is not None and trace.rank.ended:
                after = f" after step {trace.steps[-1].number}" if trace.steps else ""
                yield f"Rank {rank}{of_run} ended early{after}: {trace.rank.ended.rstrip('.')}."
