"""Which record of one run corresponds to which of another: properties over random runs, and a few pictures."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hashbench.core.divergence import align as alignment
from hashbench.core.divergence.align import align
from hashbench.core.records import OpRecord


def run_of(ops: list[str] | str) -> tuple[OpRecord, ...]:
    """A run with one record for every op, named as a run names them."""
    counts: Counter[str] = Counter()
    records = []
    for op in ops:
        records.append(OpRecord(f"forward.0/Net/{op}#{counts[op]}", "forward", 0, "Net", op))
        counts[op] += 1
    return tuple(records)


def picture(first: str, second: str) -> str:
    """Matched ops as they are, ``-x`` for one that only the first run has, ``+x`` for the second."""
    a, b = run_of(first), run_of(second)
    shown = []
    for i, j in align(a, b):
        shown.append(a[i].op if i is not None and j is not None else f"-{a[i].op}" if i is not None else f"+{b[j].op}")
    return " ".join(shown)


def calling(*inner: str) -> tuple[OpRecord, ...]:
    """A run of an op ``x`` for each word; the letters of the word are what it calls, recorded before it."""
    ops = run_of([op for word in inner for op in f"{word}x"])
    callers = [number for number, word in enumerate(inner) for _ in word + "x"]
    xs = [record.id for record in ops if record.op == "x"]
    return tuple(
        record if record.op == "x" else replace(record, inside=xs[number])
        for record, number in zip(ops, callers, strict=True)
    )


def with_arguments(text: str) -> tuple[OpRecord, ...]:
    """A run with a record for each pair of letters, an op and its argument."""
    run = run_of(text[::2])
    return tuple(replace(record, arguments=argument) for record, argument in zip(run, text[1::2], strict=True))


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("a1b1", "a2c1a1b1", [(None, 0), (None, 1), (0, 2), (1, 3)]),
        ("a2c1a1b1", "a1b1", [(0, None), (1, None), (2, 0), (3, 1)]),
        ("a1b1", "a1c1a1b1", [(0, 0), (None, 1), (None, 2), (1, 3)]),  # either is as good
        ("a1b1", "a2c1a3b1", [(0, 0), (None, 1), (None, 2), (1, 3)]),
        ("a1b2a3b4", "a9b9a1b2a3b4", [(None, 0), (None, 1), (0, 2), (1, 3), (2, 4), (3, 5)]),
        ("a1b2a3b4", "a1b2a9b9a3b4", [(0, 0), (1, 1), (None, 2), (None, 3), (2, 4), (3, 5)]),
        ("a1b2a3b4", "a1b2a3b4a9b9", [(0, 0), (1, 1), (2, 2), (3, 3), (None, 4), (None, 5)]),
        ("a7b2a3b4", "a9b9a8b2a3b4", [(0, 0), (None, 1), (None, 2), (1, 3), (2, 4), (3, 5)]),
    ],
)
def test_what_one_run_alone_did_lies_where_the_others_agree(
    first: str, second: str, pairs: list[tuple[int | None, int | None]]
) -> None:
    assert align(with_arguments(first), with_arguments(second)) == pairs


WITH_ARGUMENTS = st.lists(st.sampled_from(["a1", "a2", "b1", "b2"]), max_size=11).map("".join)


@settings(max_examples=200)
@given(WITH_ARGUMENTS, WITH_ARGUMENTS)
def test_no_pair_is_lost_where_others_agree_more(first: str, second: str) -> None:
    runs = [with_arguments(text) for text in (first, second)]
    pairs, plain = align(*runs), align(run_of(first[::2]), run_of(second[::2]))
    for side in range(2):
        assert [pair[side] for pair in pairs if pair[side] is not None] == list(range(len(runs[side])))
    agreed = [
        sum(None not in pair and runs[0][pair[0]].arguments == runs[1][pair[1]].arguments for pair in some)  # type: ignore[index]
        for some in (pairs, plain)
    ]
    assert agreed[0] >= agreed[1]
    assert len(pairs) == len(plain)
    assert all(runs[0][a].op == runs[1][b].op for a, b in pairs if a is not None and b is not None)


def test_inner_records_align_within_the_same_call() -> None:
    first, second = calling("aab", "ab", "b"), calling("ab", "aaab", "b")
    pairs = align(first, second)
    assert [record.op for record in first] == ["a", "a", "b", "x", "a", "b", "x", "b", "x"]
    assert pairs == [
        *((0, 0), (1, None), (2, 1), (3, 2)),
        *((4, 3), (None, 4), (None, 5), (5, 6), (6, 7)),
        *((7, 8), (8, 9)),
    ]


def test_calls_of_several_threads_are_aligned_as_they_come() -> None:
    mixed = calling("ab", "ab")
    first, second = (tuple(mixed[index] for index in order) for order in ((0, 3, 1, 4, 2, 5), (3, 0, 1, 4, 2, 5)))
    assert [pair for pair in align(first, second) if None not in pair] == [(index, index) for index in range(6)]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        pytest.param("abc", "abc", "a b c", id="equal runs"),
        pytest.param("", "ab", "+a +b", id="an empty run"),
        pytest.param("abc", "xabc", "+x a b c", id="inserted at the beginning"),
        pytest.param("abc", "abxc", "a b +x c", id="inserted in the middle"),
        pytest.param("abcx", "abc", "a b c -x", id="removed at the end"),
        pytest.param("abc", "axc", "a -b +x c", id="replaced"),
        pytest.param("xaby", "xacby", "x a +c b y", id="repeated neighbours stay matched"),
        pytest.param("ab", "cd", "-a -b +c +d", id="nothing in common"),
    ],
)
def test_alignment_reads_as(first: str, second: str, expected: str) -> None:
    assert picture(first, second) == expected


@pytest.mark.parametrize("limit", [400, 2, -1], ids=["exact", "both", "anchors"])
@settings(max_examples=200)
@given(first=st.text("abcde", max_size=30), second=st.text("abcde", max_size=30))
def test_every_index_occurs_once_and_in_order(
    limit: int, first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alignment, "EDIT_LIMIT", limit)
    a, b = run_of(first), run_of(second)
    pairs = align(a, b)
    assert [i for i, _ in pairs if i is not None] == list(range(len(a)))
    assert [j for _, j in pairs if j is not None] == list(range(len(b)))
    assert all(a[i].op == b[j].op for i, j in pairs if i is not None and j is not None)


def longest_common(first: str, second: str) -> int:
    row = [0] * (len(second) + 1)
    for x in first:
        diagonal = 0
        for place, y in enumerate(second, 1):
            diagonal, row[place] = row[place], diagonal + 1 if x == y else max(row[place], row[place - 1])
    return row[-1]


@settings(max_examples=200)
@given(st.text("abc", max_size=25), st.text("abc", max_size=25))
def test_as_many_records_are_matched_as_can_be(first: str, second: str) -> None:
    matched = sum(None not in pair for pair in align(run_of(first), run_of(second)))
    assert matched == longest_common(first, second)


def test_insertions_unmatch_nothing_else() -> None:
    rng = random.Random(3)
    first = [rng.choice("abcde") for _ in range(20_000)]
    second = list(first)
    for place in (1_000, 9_000, 19_000):
        second.insert(place, "x")
    started = time.process_time()
    pairs = align(run_of(first), run_of(second))
    assert time.process_time() - started < 1
    assert [second[j] for i, j in pairs if i is None and j is not None] == ["x"] * 3
    assert all(j is not None for _, j in pairs)
