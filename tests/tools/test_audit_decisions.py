"""What the audit decides: pure functions over plain values."""

from __future__ import annotations

import re

import pytest

from hashbench.errors import HashbenchError
from hashbench.results.audit_table import VERDICTS
from hashbench.tools.audit.choice import chosen_ops, chosen_samples, groups_of
from hashbench.tools.audit.verdict import MEASURED, promises, verdict

NOTHING = "not listed"
ELSEWHERE = "not listed for cpu (deterministic under the flag: torch.bmm when called on sparse-dense CUDA tensors)"
DETERMINISTIC = "deterministic under the flag: torch.Tensor.put_ with accumulate=True"
RAISES = "raises under the flag: torch.nn.MaxUnpool2d"
BOTH = f"{DETERMINISTIC}; raises under the flag: torch.Tensor.put_ when accumulate=False"

TABLE = {
    # documented, off, on, unfilled
    "nothing is documented and nothing is seen": (NOTHING, "identical identical identical", "as documented"),
    "only other devices are documented": (ELSEWHERE, "identical identical identical", "as documented"),
    "it differs as documented": (DETERMINISTIC, "differs identical identical", "as documented"),
    "it differs and nothing says so": (NOTHING, "differs identical identical", "undocumented nondeterminism"),
    "other devices explain nothing": (ELSEWHERE, "differs identical identical", "undocumented nondeterminism"),
    "it reads unwritten memory": (NOTHING, "follows memory;identical;follows memory", "undocumented nondeterminism"),
    "it raises as documented": (RAISES, "identical raises raises", "as documented"),
    "it differs and raises as documented": (RAISES, "differs raises raises", "as documented"),
    "one of two conditions explains a raise": (BOTH, "differs raises raises", "as documented"),
    "one of two conditions explains a difference": (BOTH, "differs identical identical", "as documented"),
    "it raises and nothing says so": (NOTHING, "identical raises raises", "raises"),
    "it raises although it should become deterministic": (DETERMINISTIC, "differs raises raises", "raises"),
    "it should raise and does not": (RAISES, "differs identical identical", "does not raise"),
    "it still differs": (DETERMINISTIC, "differs differs differs", "differs under the flag"),
    "it differs under the flag alone": (NOTHING, "identical differs identical", "differs under the flag"),
    "it differs under the flag without its filling": (NOTHING, "identical identical differs", "differs under the flag"),
    "it reads such memory under the flag": (NOTHING, "identical;follows memory;identical", "differs under the flag"),
    "it differs under the flag and fails without": (NOTHING, "raises differs differs", "differs under the flag"),
    "what is documented is unseen": (DETERMINISTIC, "identical identical identical", "documented but never seen here"),
    "a documented refusal is not seen": (RAISES, "identical identical identical", "documented but never seen here"),
    "it fails without the flag": (NOTHING, "raises raises raises", "fails"),
    "a documented refusal explains no failure without the flag": (RAISES, "raises raises raises", "fails"),
    "nothing was run": (NOTHING, "not run;not run;not run", "fails"),
    "nothing was run under the flag": (NOTHING, "identical;not run;not run", "raises"),
    "results cannot be compared": (NOTHING, "not comparable;identical;identical", "not comparable"),
    "results cannot be compared under the flag": (NOTHING, "identical;not comparable;identical", "not comparable"),
}  # fmt: skip


@pytest.mark.parametrize(("documented", "seen", "expected"), TABLE.values(), ids=TABLE)
def test_the_verdict(documented: str, seen: str, expected: str) -> None:
    off, on, unfilled = seen.split(";") if ";" in seen else seen.split()

    assert verdict(documented, off=off, on=on, unfilled=unfilled) == expected


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (("differs", "identical", "differs"), "as documented"),
        (("follows memory", "identical", "follows memory"), "as documented"),
        (("differs", "differs", "differs"), "differs under the flag"),
        (("differs", "follows memory", "differs"), "differs under the flag"),
        (("raises", "raises", "raises"), "fails"),
    ],
)
def test_memory_that_is_handed_out_unwritten_is_no_finding_where_the_flag_fills_it(seen, expected) -> None:
    assert verdict(NOTHING, off=seen[0], on=seen[1], unfilled=seen[2], blank=True) == expected


def test_every_combination_has_a_verdict_and_none_that_was_not_measured_is_as_documented() -> None:
    for documented in (NOTHING, ELSEWHERE, DETERMINISTIC, RAISES, BOTH):
        for off in MEASURED:
            for on in MEASURED:
                for unfilled in MEASURED:
                    found = verdict(documented, off=off, on=on, unfilled=unfilled)
                    assert found in VERDICTS
                    if off not in ("identical", "differs", "follows memory"):
                        assert found != "as documented"


def test_a_word_that_is_no_measurement_is_refused() -> None:
    with pytest.raises(ValueError, match="'equal' is no measurement"):
        verdict(NOTHING, off="equal", on="identical", unfilled="identical")


def test_what_torchs_documentation_promises() -> None:
    assert promises(BOTH) == {"deterministic under the flag", "raises under the flag"}
    assert promises(ELSEWHERE) == promises(NOTHING) == promises("torch's text could not be read") == frozenset()


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
    for count in range(12):
        for most in range(1, 12):
            found = chosen_samples([(7 * place) % 5 for place in range(count)], most=most)
            assert len(set(found)) == len(found) == min(count, most)
            assert list(found) == sorted(found)


OPS = [("op_db", "put"), ("op_db", "index_put"), ("stress", "put"), ("op_db", "sum")]


def test_ops_are_chosen_by_name_and_by_expression() -> None:
    assert chosen_ops(OPS, only=[], filters=[]) == tuple(OPS)
    assert chosen_ops(OPS, only=["put"], filters=[]) == (("op_db", "put"), ("stress", "put"))
    assert chosen_ops(OPS, only=["sum"], filters=["^index"]) == (("op_db", "index_put"), ("op_db", "sum"))


@pytest.mark.parametrize(
    ("only", "filters", "said"),
    [
        (["putt"], [], "no op called 'putt'.*Did you mean put"),
        ([], ["("], "no regular expression"),
        ([], ["^zzz"], "no op matches"),
    ],
)
def test_a_choice_of_nothing_is_refused(only, filters, said) -> None:
    with pytest.raises(HashbenchError, match=said):
        chosen_ops(OPS, only=only, filters=filters)


def test_groups_hold_every_op_once() -> None:
    ops = [("op_db", str(number)) for number in range(95)]

    groups = groups_of(ops, size=40)

    assert [len(group) for group in groups] == [32, 32, 31]
    assert sorted(op for group in groups for op in group) == sorted(ops)
    assert re.fullmatch(r"0 3 6 .*", " ".join(name for _, name in groups[0]))
