"""The report of a pair of traces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hashbench.core.divergence import find
from hashbench.core.divergence.text import PairVerdict, finding_of
from hashbench.core.records import EarlyRead
from tests.core.divergence.runs import Run

RUNS = "a = relu input/0 -> a\nb = put a -> b|B\nc = sum b => c|C\nd = neg a -> d"


def verdict_of(lines: str) -> PairVerdict:
    return find(Run(lines).trace(), Run(lines, second=True).trace())


def test_a_divergence_is_named_with_its_facts() -> None:
    found = finding_of(verdict_of(RUNS), commands=["hashbench diff a b --context 10"])
    facts = dict(found.facts)
    assert found.headline == "The runs diverge: kernel aten.put.default in Net (forward, iteration 0)"
    assert facts["first divergence"] == "forward.0/Net/aten.put.default#0"
    assert (facts["origin"], facts["kernel"], facts["module"]) == ("kernel", "aten.put.default", "Net")
    assert (facts["phase"], facts["results"]) == ("forward, iteration 0", "output")
    assert "forward op" not in facts, "a fact without a value has no line"
    assert (found.equal, found.differs, found.next) == (False, True, ("hashbench diff a b --context 10",))
    assert found.data["divergence"]["node"] == facts["first divergence"]


@pytest.mark.parametrize(("context", "shown"), [(0, "records 1 to 1"), (1, "records 0 to 2"), (9, "records 0 to 3")])
def test_an_excerpt_is_a_unified_diff_around_it(context: int, shown: str) -> None:
    table = finding_of(verdict_of(RUNS), context=context).table
    assert table is not None
    assert table.title == f"{shown} (- first run, + second run):"
    excerpt = [line for (line,) in table.rows]
    changed = [line[:2] for line in excerpt if line[0] in "-+"]
    assert changed == ["- ", "+ "] * (1 if context == 0 else 2)
    assert len(excerpt) == {0: 2, 1: 5, 9: 6}[context], "an equal record has one line"


def test_equal_traces_are_said_to_be_with_their_size() -> None:
    found = finding_of(verdict_of("a = relu input/0 => a\nb = neg a -> b"))
    assert (found.headline, found.equal) == ("The traces are equal: 2 records, 1 result", True)


def test_what_reaches_no_result_is_listed() -> None:
    found = finding_of(verdict_of("a = relu input/0 => a\nb = put input/0 -> b|B"))
    assert (found.equal, found.differs) == (False, True)
    assert found.headline == "No divergence reaches a result (2 records, 1 result compared)"
    assert dict(found.facts) == {
        "benign": "1 record differs without reaching a result: forward.0/Net/aten.put.default#0"
    }


def test_the_scalar_that_chose_the_branch_is_shown() -> None:
    lines = "n = bincount input/0 -> n|N\n_local_scalar_dense n scalar=3|4\ny = relu|gelu input/0 => y|Y"
    steered = dict(finding_of(verdict_of(lines)).facts)["steered by"]
    assert "returned 3 and 4, which came from aten.bincount.default" in steered


def test_many_early_reads_are_cut() -> None:
    trace = Run("a = relu input/0 => a").trace()
    reads = tuple(EarlyRead(f"c10d.allreduce_.default#{index}", f"reader{index}") for index in range(12))
    found = finding_of(replace(find(trace, trace), early_reads=reads))
    assert [name for name, _ in found.facts] == ["early read", "early read", "early reads"]
    assert len(found.data["early_reads"]) == 12, "the document has all"


def test_verdicts_are_equal_whatever_the_traces() -> None:
    one, other = verdict_of("a = relu input/0 => a"), verdict_of("a = relu input/0 => a\nb = neg a -> b")
    assert one == other
    assert one != verdict_of(RUNS)
