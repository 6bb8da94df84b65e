"""Whose memory a kernel read: truth tables on calls written by hand. Addresses are small numbers."""

from __future__ import annotations

import pytest

from hashbench.core.inductor.graphs import BufferRead
from hashbench.extensions.compiled.memory import (
    Access,
    LeftContent,
    LostInput,
    behind,
    lost_inputs,
    overlap,
    overwriter,
    writer_of,
)


def at(address: int, digest: str, nbytes: int = 4) -> BufferRead:
    return BufferRead("", digest, address, nbytes)


def access(name: str, reads: list[BufferRead], writes: dict[str, BufferRead], recorded: str | None = None) -> Access:
    left = tuple(LeftContent(buffer, to.digest, 0, to.address, to.nbytes) for buffer, to in writes.items())
    return Access(
        f"id of {name}", name, tuple(reads), left, frozenset(writes if recorded is None else recorded.split())
    )


X, A, B = at(100, "x"), at(200, "a"), at(300, "b")
INPUT = LeftContent("x", "x", -1, 100, 4)
LEFT_A = LeftContent("buf0", "a", 0, 200, 4)
MAKES_A = access("makes a", [X], {"buf0": A})


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        pytest.param(at(100, "", 8), at(104, "", 8), True, id="partly"),
        pytest.param(at(100, "", 4), at(104, "", 4), False, id="side by side"),
        pytest.param(at(100, "", 16), at(104, "", 4), True, id="inside"),
        pytest.param(at(0, "", 400), at(104, "", 4), False, id="unknown address"),
        pytest.param(at(104, "", 0), at(100, "", 16), False, id="zero-size"),
    ],
)
def test_overlap(first: BufferRead, second: BufferRead, expected: bool):
    assert overlap(first, second) is expected
    assert overlap(second, first) is expected


def test_the_writer_is_the_last_one():
    again = access("again", [X], {"buf1": at(200, "c")})
    assert writer_of(A, [MAKES_A, again]) == (1, again.writes[0])
    assert writer_of(A, [MAKES_A]) == (0, MAKES_A.writes[0])
    assert writer_of(X, [MAKES_A]) is None


def test_without_addresses_the_writer_is_found_by_content():
    assert writer_of(BufferRead("", "a"), [MAKES_A]) == (0, MAKES_A.writes[0])
    assert writer_of(BufferRead("", ""), [MAKES_A]) is None


OVERWRITES = access("overwrites", [X], {"buf1": at(200, "other")})


@pytest.mark.parametrize(
    ("reads", "needed", "accesses", "overwritten_by"),
    [
        pytest.param([A], [LEFT_A], [MAKES_A], None, id="it read what was left"),
        pytest.param([at(200, "other")], [LEFT_A], [MAKES_A, OVERWRITES], "overwrites", id="written over"),
        pytest.param([at(400, "a")], [LEFT_A], [MAKES_A, OVERWRITES], None, id="a copy elsewhere was read"),
        pytest.param([B], [LEFT_A], [MAKES_A], None, id="never read, and not written over: the kernel's fault"),
        pytest.param([], [LEFT_A], [MAKES_A, OVERWRITES], None, id="nobody knows what it read"),
        pytest.param(
            [at(200, "third")],
            [LEFT_A],
            [MAKES_A, OVERWRITES, access("last", [X], {"buf2": at(202, "third")})],
            "last",
            id="the last that wrote over it",
        ),
        pytest.param([at(100, "other")], [INPUT], [access("w", [], {"buf0": at(100, "other")})], "w", id="an input"),
        pytest.param(
            [at(200, "other")],
            [LeftContent("buf1", "later", 1, 200, 4)],
            [MAKES_A, OVERWRITES],
            None,
            id="memory is written before what is needed",
        ),
        pytest.param(
            [at(204, "part")],
            [LeftContent("buf0", "a", 0, 200, 8)],
            [access("makes a", [X], {"buf0": at(200, "a", 8)})],
            None,
            id="a part of a buffer is read",
        ),
        pytest.param(
            [at(300, "between")],
            [LEFT_A],
            [MAKES_A, access("no node", [A], {"buf9": at(300, "between")}, recorded=""), OVERWRITES],
            None,
            id="memory reused after its last reader, whose own result has no node",
        ),
        pytest.param(
            [at(300, "between")],
            [LEFT_A],
            [MAKES_A, OVERWRITES, access("no node", [at(200, "other")], {"buf9": at(300, "between")}, recorded="")],
            "overwrites",
            id="written over before a kernel whose own result has no node",
        ),
    ],
)
def test_lost_inputs(
    reads: list[BufferRead], needed: list[LeftContent], accesses: list[Access], overwritten_by: str | None
):
    found = lost_inputs("reader", reads, needed, accesses)
    assert [item.overwritten_by for item in found] == ([overwritten_by] if overwritten_by else [])


def test_a_lost_input_says_who_left_it():
    lost = lost_inputs("reader", [at(200, "other")], [LEFT_A], [MAKES_A, OVERWRITES])
    assert lost == (LostInput("reader", "buf0", "makes a", "overwrites", "id of overwrites"),)
    lost = lost_inputs("reader", [at(100, "y")], [INPUT], [access("w", [], {"buf0": at(100, "y")})])
    assert lost == (LostInput("reader", "x", "caller", "w", "id of w"),)


def test_what_stands_behind_ends_at_recorded_values():
    accesses = [
        access("recorded", [X], {"buf0": A}),
        access("first piece", [A], {"buf1": B}, recorded=""),
        access("second piece", [B], {"buf2": at(400, "c")}, recorded=""),
        access("unrelated", [X], {"buf3": at(500, "d")}, recorded=""),
    ]
    assert behind([at(400, "c")], accesses) == (1, 2)
    assert behind([A], accesses) == ()


def test_a_kernel_that_updates_its_own_memory_does_not_stand_behind_itself():
    accesses = [
        access("fills", [], {"buf0": at(200, "zeros")}, recorded=""),
        access("adds", [at(200, "zeros")], {"buf0": A}, recorded=""),
    ]
    assert behind([A], accesses) == (0, 1)


def test_the_overwriter_comes_after_the_writer():
    assert overwriter(LeftContent("buf0", "a", 1, 200, 4), [OVERWRITES, MAKES_A]) is None
    assert overwriter(LEFT_A, [MAKES_A, OVERWRITES]) is OVERWRITES
