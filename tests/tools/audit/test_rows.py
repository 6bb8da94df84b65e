"""What the audit decides: pure functions over plain values."""

from __future__ import annotations

import itertools

import pytest

from hashbench.core.diagnose.repro.torch_docs import BECOMES_DETERMINISTIC, RAISES
from hashbench.tools.audit.audit_table import AuditVerdict, Shown
from hashbench.tools.audit.cases import chosen_samples
from hashbench.tools.audit.rows import verdict

TABLE = {
    # documented, off, on, unfilled
    "nothing is documented and nothing is seen": ((), "identical;identical;identical", "as documented"),
    "it differs as documented": ((BECOMES_DETERMINISTIC,), "differs;identical;identical", "as documented"),
    "it differs and nothing says so": ((), "differs;identical;identical", "undocumented nondeterminism"),
    "it reads unwritten memory": ((), "follows memory;identical;follows memory", "undocumented nondeterminism"),
    "it raises as documented": ((RAISES,), "identical;raises;raises", "as documented"),
    "it differs and raises as documented": ((RAISES,), "differs;raises;raises", "as documented"),
    "one of two conditions explains a raise": (
        (BECOMES_DETERMINISTIC, RAISES), "differs;raises;raises", "as documented"),
    "one of two conditions explains a difference": (
        (BECOMES_DETERMINISTIC, RAISES), "differs;identical;identical", "as documented"),
    "it raises and nothing says so": ((), "identical;raises;raises", "raises"),
    "it raises although it should become deterministic": (
        (BECOMES_DETERMINISTIC,), "differs;raises;raises", "raises"),
    "it should raise and does not": ((RAISES,), "differs;identical;identical", "does not raise"),
    "it still differs": ((BECOMES_DETERMINISTIC,), "differs;differs;differs", "differs under the flag"),
    "it differs under the flag alone": ((), "identical;differs;identical", "differs under the flag"),
    "it differs under the flag without its filling": ((), "identical;identical;differs", "differs under the flag"),
    "it reads such memory under the flag": ((), "identical;follows memory;identical", "differs under the flag"),
    "it differs under the flag and fails without": ((), "raises;differs;differs", "differs under the flag"),
    "what is documented is unseen": (
        (BECOMES_DETERMINISTIC,), "identical;identical;identical", "documented but never seen here"),
    "a documented refusal is not seen": (
        (RAISES,), "identical;identical;identical", "documented but never seen here"),
    "it fails without the flag": ((), "raises;raises;raises", "fails"),
    "a documented refusal explains no failure without the flag": ((RAISES,), "raises;raises;raises", "fails"),
    "nothing was run": ((), "not run;not run;not run", "fails"),
    "nothing was run under the flag": ((), "identical;not run;not run", "raises"),
    "results cannot be compared": ((), "not comparable;identical;identical", "not comparable"),
    "results cannot be compared under the flag": ((), "identical;not comparable;identical", "not comparable"),
    "unwritten memory is handed out and differs": ((), "blank differs;identical;differs", "as documented"),
    "unwritten memory is handed out": ((), "blank follows memory;identical;follows memory", "as documented"),
    "the flag does not fill what is handed out": ((), "blank differs;differs;differs", "differs under the flag"),
    "the flag fills only a part": ((), "blank differs;follows memory;differs", "differs under the flag"),
    "handing out memory fails": ((), "blank raises;raises;raises", "fails"),
    "handing out memory is refused as documented": ((RAISES,), "blank identical;raises;raises", "as documented"),
    "handing out memory is refused": ((), "blank identical;raises;raises", "raises"),
}  # fmt: skip


@pytest.mark.parametrize(("listed", "seen", "expected"), TABLE.values(), ids=TABLE)
def test_the_verdict(listed: tuple[str, ...], seen: str, expected: str) -> None:
    off, on, unfilled = seen.removeprefix("blank ").split(";")

    assert verdict(listed, off=off, on=on, unfilled=unfilled, blank=seen.startswith("blank ")) == expected


def test_every_combination_has_a_verdict_and_none_that_was_not_measured_is_as_documented() -> None:
    for listed in ((), (BECOMES_DETERMINISTIC,), (RAISES,), (BECOMES_DETERMINISTIC, RAISES)):
        for off, on, unfilled in itertools.product(Shown, repeat=3):
            found = verdict(listed, off=off, on=on, unfilled=unfilled)
            assert isinstance(found, AuditVerdict)
            if off not in ("identical", "differs", "follows memory"):
                assert found != "as documented"


def test_a_word_that_is_no_measurement_is_refused() -> None:
    with pytest.raises(ValueError, match="'equal' is not a valid Shown"):
        verdict((), off="equal", on="identical", unfilled="identical")


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),
    [
        ([1, 2], 3, (0, 1)),
        ([1, 9, 1, 8, 1, 1], 4, (0, 1, 3, 5)),
        ([5, 5, 5, 5, 5], 3, (0, 1, 2)),
        ([1, 2, 3], 1, (2,)),
        ([0] * 100, 2, (0, 1)),
        ([], 3, ()),
    ],
)
def test_the_largest_samples_are_kept_and_others_spread_over_the_rest(sizes, most, expected) -> None:
    assert chosen_samples(sizes, most=most) == expected


def test_the_choice_of_samples_keeps_to_its_bound() -> None:
    for count, most in itertools.product(range(12), range(1, 12)):
        chosen = chosen_samples([(7 * number) % 5 for number in range(count)], most=most)
        assert list(chosen) == sorted(set(chosen))
        assert len(chosen) == min(count, most)
