"""Fills of one memory in another order: which are paired, and which leave the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hashbench.core.divergence.fills import pair_fills
from hashbench.core.records import OpRecord, Ref, TensorDigest

ZEROED = [f"forward//aten.zero_.default#{number}" for number in range(2)]


def run_of(*memories: str) -> tuple[OpRecord, ...]:
    """A run that zeroes a part for each word: ``a4`` is memory ``a`` at offset 4; ``a?`` reads all of it, ``a-`` is a
    view."""
    last = {name: f"input/{name}" for name in "ab"}
    records = []
    for number, (name, part) in enumerate(memories):
        reads = part in "?-"
        op = "aten.sum.default" if reads else "aten.zero_.default"
        ref = Ref("0", last[name], 0 if reads else int(part), written=not reads)
        record = OpRecord(f"forward//{op}#{number}", "forward", None, "", op, (ref,), outputs=written(part))
        last[name] = last[name] if reads else record.id
        records.append(record)
    return tuple(records)


def written(part: str) -> tuple[TensorDigest, ...]:
    size = 1 + ord(part) % 2
    return () if part == "-" else (TensorDigest("float32", (size,), (1,), f"zeros {size}"),)


def is_fill(_: OpRecord, ref: Ref) -> bool:
    return ref.written


def in_order(first: Sequence[OpRecord], second: Sequence[OpRecord]) -> list[tuple[int | None, int | None]]:
    return [(index, index) for index in range(min(len(first), len(second)))]


def told(first: Sequence[OpRecord], second: Sequence[OpRecord]) -> tuple[list[int | None], dict[int, str]]:
    """The partners of the records of the first run, and by their index what :attr:`PairedFills.reordered` has."""
    fills = pair_fills(first, second, in_order(first, second), is_fill)
    at = {record.id: index for index, record in enumerate(first)}
    return [b for _, b in fills.pairs], {at[node]: before for node, before in fills.reordered.items()}


def test_parts_of_one_memory_in_another_order_leave_the_same_after_the_last() -> None:
    assert told(run_of("a0", "a4", "a7"), run_of("a4", "a7", "a0")) == ([0, 1, 2], {0: "", 1: "", 2: ZEROED[0]})


def test_parts_of_two_memories_are_paired_by_memory() -> None:
    assert told(run_of("a0", "b0", "a4"), run_of("b0", "a0", "a4")) == ([1, 0, 2], {})
    partners, reordered = told(run_of("a0", "b0", "a4", "b5"), run_of("b5", "a4", "b0", "a0"))
    assert partners == [1, 0, 3, 2]
    assert reordered == {0: "", 1: "", 2: ZEROED[0], 3: ZEROED[1]}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("a0", "a4"), ("a0", "a4")),  # the same order
        (("a0", "a4"), ("a0", "a5")),  # another part
        (("a0", "a4"), ("a4", "a4")),  # one part twice
        (("a0", "b4"), ("b0", "a4")),  # each memory has another part
        (("a0", "a4"), ("a0", "b4")),  # another memory
        (("a0", "a4", "a5"), ("a5", "a4")),  # one more
        (("a0", "a?", "a4"), ("a4", "a?", "a0")),  # what is read between differs
    ],
)
def test_what_fills_otherwise_stays_as_it_is_paired(first: Sequence[str], second: Sequence[str]) -> None:
    a, b = run_of(*first), run_of(*second)
    assert told(a, b) == ([index for _, index in in_order(a, b)], {})


def test_a_view_between_reads_nothing() -> None:
    assert told(run_of("a0", "a-", "a4"), run_of("a4", "a-", "a0")) == ([0, 1, 2], {0: "", 2: ZEROED[0]})


WORDS = [f"{name}{part}" for name in "ab" for part in range(10)]
ORDERS = st.lists(st.sampled_from(WORDS), min_size=8, max_size=8, unique=True)


@given(ORDERS.flatmap(lambda some: st.tuples(st.just(some), st.permutations(some))))
def test_any_order_is_paired_one_to_one(orders: tuple[list[str], list[str]]) -> None:
    first, second = (run_of(*order) for order in orders)
    partners, reordered = told(first, second)
    assert sorted(partners, key=str) == sorted(range(8), key=str)
    for a, b in enumerate(partners):
        assert b is not None
        moved = first[a].inputs[0].offset != second[b].inputs[0].offset
        assert moved == (a in reordered)
