"""What ``hashbench diff`` prints of a pair of traces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hashbench.core.divergence import find
from hashbench.core.divergence.text import PairVerdict
from hashbench.core.records import EarlyRead
from tests.core.divergence.runs import Run

RUNS = "a = relu input/0 -> a\nb = put a -> b|B\nc = sum b => c|C\nd = neg a -> d"


def verdict_of(lines: str) -> PairVerdict:
    return find(Run(lines).trace(), Run(lines, second=True).trace())


def test_a_divergence_is_named_with_its_facts() -> None:
    text = str(verdict_of(RUNS))
    assert text.startswith("first divergence: forward.0/Net/aten.put.default#0\n")
    assert "origin:           kernel\nkernel:           aten.put.default\nmodule:           Net\n" in text
    assert "phase:            forward, iteration 0\n" in text
    assert "\n1 result differs: output" in text
    assert "forward op" not in text, "a fact without a value has no line"


@pytest.mark.parametrize(("context", "shown"), [(0, "records 1 to 1"), (1, "records 0 to 2"), (9, "records 0 to 3")])
def test_an_excerpt_is_a_unified_diff_around_it(context: int, shown: str) -> None:
    lines = verdict_of(RUNS).text(context=context).splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("records "))
    assert lines[head] == f"{shown} (- first run, + second run):"
    excerpt = lines[head + 1 : lines.index("", head)]
    changed = [line[:2] for line in excerpt if line[0] in "-+"]
    assert changed == ["- ", "+ "] * (1 if context == 0 else 2)
    assert len(excerpt) == {0: 2, 1: 5, 9: 6}[context], "an equal record has one line"


def test_equal_traces_are_said_to_be_with_their_size() -> None:
    verdict = verdict_of("a = relu input/0 => a\nb = neg a -> b")
    assert verdict.equal
    assert str(verdict) == "The traces are equal: 2 records, 1 result."


def test_what_reaches_no_result_is_listed() -> None:
    verdict = verdict_of("a = relu input/0 => a\nb = put input/0 -> b|B")
    assert not verdict.equal
    assert str(verdict).splitlines() == [
        "No divergence reaches a result (2 records, 1 result compared).",
        "",
        "1 record differs without reaching a result: forward.0/Net/aten.put.default#0",
    ]


def test_the_scalar_that_chose_the_branch_is_shown() -> None:
    text = str(
        verdict_of("n = bincount input/0 -> n|N\n_local_scalar_dense n scalar=3|4\ny = relu|gelu input/0 => y|Y")
    )
    assert "steered by:       " in text
    assert "returned 3 and 4, which came from aten.bincount.default" in text


def test_many_early_reads_are_cut() -> None:
    trace = Run("a = relu input/0 => a").trace()
    reads = tuple(EarlyRead(f"c10d.allreduce_.default#{index}", f"reader{index}") for index in range(12))
    text = str(replace(find(trace, trace), early_reads=reads))
    assert "12 reads of a collective's output before its Work was done:" in text
    assert "  reader9 reads c10d.allreduce_.default#9\n  and 2 more" in text
    assert "reader10" not in text


def test_verdicts_are_equal_whatever_the_traces() -> None:
    one, other = verdict_of("a = relu input/0 => a"), verdict_of("a = relu input/0 => a\nb = neg a -> b")
    assert one == other
    assert one != verdict_of(RUNS)
