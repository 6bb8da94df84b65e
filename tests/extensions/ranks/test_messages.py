"""What is said of a difference that may follow from an object of another rank."""

from __future__ import annotations

import pytest

from tests.core.divergence.rank_runs import judge_ranks

SENT = """
    rank 0:
        b = recv !input/9=e peer=1 -> p|P
        {own}
        mul input/0 (3 | 4) => r|R
    rank 1:
        b = set_ !input/5 (<UntypedStorage>) -> blank
        send b@p|P peer=0
        relu input/0 => r
"""
TIMES = """
    rank 0:
        b = set_ !input/5 (<UntypedStorage>) -> blank
        b = all_gather !input/8 b@q|Q -> g|G
        mul input/0 (3 | 4) => r|R
    rank 1:
        b = set_ !input/5 (<UntypedStorage>) -> blank
        b = all_gather !input/8 b@p|P -> g|G
        relu input/0 => r
"""
MADE = "memory that this op adopted was written outside torch"
EXPLAINED = (
    f"{MADE}, and sent: nothing else that was traced on rank 0 explains aten.mul.default there, "
    "unless rank 0 made that outside torch itself"
)
ARGUMENT = "a non-tensor argument differs"


@pytest.mark.parametrize(
    ("lines", "detail"),
    [
        (
            SENT.format(own="relu input/1 -> a"),
            EXPLAINED,
        ),
        (TIMES, f"{ARGUMENT}; it may also follow from what rank 1 sent before, which differs"),
    ],
    ids=["nothing else on the receiver can be outside", "the receiver has told a time of its own before"],
)
def test_what_a_message_explains_and_what_it_may_explain_is_said(lines: str, detail: str) -> None:
    (first,) = judge_ranks(lines).first
    assert first.detail == detail
