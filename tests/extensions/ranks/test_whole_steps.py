"""Traces of several ranks are cut after the last step that all have, only where one of them ended early. No torch here.

A case names, for each rank, the steps that its trace has and, behind a slash, how the rank ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.core.records import EarlyRead, Trace, TracedRank
from hashbench.extensions.ranks.whole_steps import cut_after, results_by_step, up_to_common_step
from tests.core.divergence.rank_runs import rank_traces

STEP = " p = add_ !{0} input/{1} -> p{1}\n result p p{1} as w\n step\n"


def run(*ranks: str) -> Mapping[int, Trace]:
    """Traces of ranks with these steps, such as ``0-2`` or ``0-1/SIGKILL``; each step has one record."""
    made = {}
    for rank, words in enumerate(ranks):
        steps, _, ended = words.partition("/")
        begin, end = map(int, steps.split("-")) if steps else (0, -1)
        lines = "".join(STEP.format("p" if step > begin else "parameter/w", step) for step in range(begin, end + 1))
        trace = rank_traces(f"rank 0:\n{lines} relu input/9 -> tail\n")[0]
        numbered = tuple(replace(step, number=step.number + begin) for step in trace.steps)
        made[rank] = replace(trace, steps=numbered, rank=TracedRank(rank, len(ranks), ended))
    return made


@pytest.mark.parametrize(
    ("ranks", "steps", "kept"),
    [
        (("0-2", "0-2"), (0, 2), (4, 4)),
        (("0-2", "0-1"), (0, 2), (4, 3)),
        (("0-2", ""), (0, 2), (4, 1)),
        (("", ""), None, (1, 1)),
        (("2-3", "2-3"), (2, 3), (3, 3)),
        (("0-2/SIGKILL", "0-2"), (0, 2), (3, 3)),
        (("0-2", "0-1/SIGKILL"), (0, 1), (2, 2)),
        (("0-2", "", "0-0/SIGKILL"), (0, 0), (1, 1, 1)),
        (("2-4", "2-3/SIGTERM"), (2, 3), (2, 2)),
        (("/SIGKILL", ""), None, (1, 1)),
    ],
)
def test_what_is_kept(ranks: tuple[str, ...], steps: tuple[int, int] | None, kept: tuple[int, ...]) -> None:
    whole = up_to_common_step(run(*ranks))
    assert whole.steps == steps
    assert tuple(len(trace.records) for trace in whole.runs[0].values()) == kept


@pytest.mark.parametrize("ranks", [("0-2", "/SIGKILL"), ("0-1/SIGKILL", "2-3")])
def test_without_a_step_that_all_have_nothing_is_compared(ranks: tuple[str, ...]) -> None:
    with pytest.raises(HashbenchError, match=r"no step is whole on all ranks: Rank \d ended early"):
        up_to_common_step(run(*ranks))


def test_a_rank_that_ended_early_is_told_by_run() -> None:
    whole = up_to_common_step(run("0-1", "0-1"), run("0-1", "0-0/ValueError: no group."))
    assert whole.ended == (
        "Rank 1 of the second run ended early after step 0: ValueError: no group.",
        "Compared up to the end of step 0, the last that all ranks of both runs have whole.",
    )


def test_what_belongs_to_later_steps_is_cut() -> None:
    trace = run("0-2/SIGKILL")[0]
    ids = [record.id for record in trace.records]
    early = EarlyRead(ids[0], ids[1]), EarlyRead(ids[1], ids[2])
    kept = cut_after(replace(trace, early_reads=early), 1)
    assert [leaf.id for leaf in trace.leaves] == ["parameter/w", "input/0", "input/1", "input/2", "input/9"]
    assert [leaf.id for leaf in kept.leaves] == ["parameter/w", "input/0", "input/1"]
    assert kept.early_reads == early[:1]
    assert (kept.results, kept.rank) == (trace.steps[1].results, TracedRank(0, 1))


def test_results_are_those_of_steps_and_of_the_end() -> None:
    trace = run("2-3")[0]
    assert list(results_by_step(trace)) == [2, 3, None]
    assert results_by_step(trace)[2] == trace.steps[0].results
