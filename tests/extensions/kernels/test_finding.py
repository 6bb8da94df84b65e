"""What is said of a kernel; all texts: ``tests/golden/expected/kernels.txt``."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hashbench.core.finding import as_json
from hashbench.extensions.kernels.finding import FAULTS, finding_by_dtype, finding_of, headline_of
from hashbench.extensions.kernels.verdict import (
    Fault,
    FaultKind,
    KernelOutcome,
    RoundingVerdict,
    TriedVariation,
    VariationOutcome,
)
from tests.extensions.kernels.verdicts import LOST, OUTPUT, RIGHT, SCALED, VERDICTS, WRONG


def text_of(verdict: RoundingVerdict) -> str:
    return " ".join(str(finding_of(verdict)).split())


@pytest.mark.parametrize("name", VERDICTS)
def test_only_what_is_wrong_differs_and_what_is_not_known_is_not_equal(name: str) -> None:
    verdict = VERDICTS[name]
    finding = finding_of(verdict)
    assert finding.equal is (verdict.outcome is KernelOutcome.WITHIN_ROUNDING)
    assert finding.differs is (verdict.outcome is KernelOutcome.WRONG)


def test_every_outcome_has_a_verdict() -> None:
    assert {verdict.outcome for verdict in VERDICTS.values()} == set(KernelOutcome)


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        (RIGHT, "Within rounding: 1.3 units at [3, 17], 1.4 times nearer to float64 than the reference ("),
        (VERDICTS["equal"], "Within rounding: equal to the reference bit by bit (bfloat16)"),
        (VERDICTS["by accumulation in bfloat16"], "4 times farther from float64 than the reference (bfloat16, acc"),
        (WRONG, "Wrong: lost elements of a sum in rows 96 to 127 (bfloat16, variation sizes)"),
        (VERDICTS["a gradient"], "Wrong gradient of input 0: scaled by 1.01 in column 0 (bfloat16)"),
        (VERDICTS["several faults"], "Wrong: scaled by 1.01 (bfloat16); and 3 other faults"),
        (VERDICTS["a kernel that raises"], "Wrong: it raised: IndexError: index 1021 is out of bounds (float32, v"),
        (VERDICTS["not known"], "Not known whether the kernel is right: the reference has no float64 kernel"),
        (replace(RIGHT, outputs=()), "Within rounding"),
        (replace(WRONG, faults=(replace(LOST, where="where input 0 < 0"),)), "of a sum where input 0 < 0 ("),
        (replace(RIGHT, outputs=(OUTPUT, replace(OUTPUT, name="output.1", ratio=2.0))), "2 units at [3, 17] of outp"),
    ],
)  # fmt: skip
def test_the_first_line_has_verdict_place_and_measure(verdict: RoundingVerdict, said: str) -> None:
    assert said in headline_of(verdict)


@pytest.mark.parametrize("kind", FaultKind)
def test_every_kind_of_fault_is_said_in_words(kind: FaultKind) -> None:
    headline = headline_of(replace(WRONG, faults=(Fault(kind),)))
    assert headline.startswith("Wrong: ")
    assert len(headline) > len("Wrong:  (bfloat16)")


def test_a_fault_is_told_with_place_example_and_doubt() -> None:
    text = text_of(WRONG)
    assert "lost elements of a sum: the last 5 of 1021 terms, up to 400 000 units, with the variation sizes" in text
    assert "rows 96 to 127, 25 % of the elements" in text
    assert "zeros but 1.0 at [0, 6]: [0] is 0 instead of 1" in text
    assert "not certain: a mask that hides them does the same" in text


def test_each_variation_has_its_line_with_what_was_varied_or_why_not() -> None:
    table = finding_of(RIGHT).table
    assert table is not None
    assert [row[0] for row in table.rows] == ["given", "sizes", "strides", "denormals", "float32", "tiny", "nan"]
    said = {row[0]: row[1:] for row in table.rows}
    assert said["strides"] == ("refused by the kernel", "", "AssertionError: x must be contiguous")
    assert said["sizes"] == ("within rounding", "2.1", "1024 became 1021")
    assert "There was no time for tiny" in text_of(RIGHT)


def test_a_reason_of_many_words_is_cut_in_the_table_and_whole_in_json() -> None:
    long = TriedVariation("sizes", VariationOutcome.REFUSED, reason="no\n" + 200 * "x")
    finding = finding_of(replace(RIGHT, variations=(long,)))
    assert finding.table is not None
    assert len(finding.table.rows[0][3]) < 80
    assert "\n" not in finding.table.rows[0][3]
    assert json.loads(as_json(finding))["variations"][0]["reason"] == long.reason


def test_faults_beyond_the_first_are_counted() -> None:
    text = text_of(VERDICTS["several faults"])
    assert f"It is wrong in 4 ways, of which {FAULTS} are shown" in text
    assert "where 2: where input 0 < 0" in text
    assert "it differs from call to call" not in text


def test_the_document_has_everything_but_pictures_in_numbers_that_json_has() -> None:
    document = json.loads(
        as_json(finding_of(VERDICTS["several faults"])), parse_constant=lambda word: pytest.fail(word)
    )
    assert document["outcome"] == "wrong"
    assert [fault["kind"] for fault in document["faults"]][2:] == ["writes its inputs", "differs from call to call"]
    assert document["faults"][1]["example"]["inputs"] == ["float32[1, 7], zeros but 1.0 at [0, 6]"]
    gradient = document["outputs"][1]
    assert (gradient["ratio"], gradient["got"], gradient["wanted"]) == ("inf", "nan", "(0.5+0.25j)")
    assert "picture" not in gradient
    assert document["variations"][2]["outcome"] == "refused by the kernel"


# ---------------------------------------------------------------------------------------------------- by dtype


def test_dtypes_have_a_row_each_and_those_that_are_not_right_their_report() -> None:
    verdicts = {"float32": VERDICTS["equal"], "bfloat16": WRONG, "float16": VERDICTS["not known"]}
    finding = finding_by_dtype(verdicts)
    assert finding.headline == "Wrong in bfloat16; not known in float16; within rounding in float32"
    assert (finding.equal, finding.differs) == (False, True)
    assert finding.table is not None
    rows = {row[0]: row[1:] for row in finding.table.rows}
    assert rows["float32"] == ("within rounding", "0", "", "equal", "")
    assert rows["bfloat16"][:3] == ("wrong: lost elements of a sum", "400\u202f000", "rows 96 to 127, sizes")
    assert rows["float16"][0].startswith("not known: the reference has no float64 kernel")
    assert [part.headline.split(":")[0] for part in finding.parts] == ["Wrong", "Not known whether the kernel is right"]
    assert set(json.loads(as_json(finding))["dtypes"]) == set(verdicts)


@pytest.mark.parametrize(
    ("names", "equal", "differs"),
    [
        (("within rounding", "equal"), True, False),
        (("within rounding", "not known"), False, False),
        (("not known", "a gradient"), False, True),
    ],
)
def test_dtypes_are_right_together_or_not(names: tuple[str, str], equal: bool, differs: bool) -> None:
    finding = finding_by_dtype({name: VERDICTS[name] for name in names})
    assert (finding.equal, finding.differs) == (equal, differs)


def test_a_scale_that_units_hide_is_told_by_its_factor() -> None:
    finding = finding_by_dtype({"bfloat16": replace(WRONG, faults=(SCALED,))})
    assert finding.table is not None
    assert finding.table.rows[0][1] == "wrong: scaled by 1.01"
