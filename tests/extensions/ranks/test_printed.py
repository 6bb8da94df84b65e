"""What two runs print: results, but for clocks, durations, paths and addresses."""

from __future__ import annotations

import pytest

from hashbench.core.records import OpRecord, Ref, TensorDigest, Trace, TracedRank, TracedStep
from hashbench.extensions.ranks.find import find_across_ranks
from hashbench.extensions.ranks.printed import has_numbers, printed_differently

SAME = {
    "a duration": ("took 0.31 s", "took 0.4 s"),
    "a duration by its word": ("step_time: 0.31", "step_time: 0.29"),
    "a clock": ("[12:03:11.25] start", "[12:03:12.75] start"),
    "a date": ("2026-11-28T07:00:01 start", "2026-11-29T08:10:01 start"),
    "seconds since 1970": ("1795849455.13 start", "1795849461.3 start"),
    "a rate": ("loss 0.5, 13.2 it/s", "loss 0.5, 14.9 it/s"),
    "a throughput": ("1200 samples/s", "1310 samples/s"),
    "a path": ("saved to /tmp/run1/model.pt", "saved to /tmp/run2/model.pt"),
    "a relative path": ("saved to out/first/model.pt", "saved to out/second/model.pt"),
    "an address": ("<Net object at 0x7f01>", "<Net object at 0x7fab>"),
    "a process": ("pid 1204 began", "pid 1210 began"),
    "another order": ("a 1\nb 2\n", "b 2\na 1\n"),
    "nothing": ("", ""),
}
DIFFERENT = {
    "a loss": ("loss 0.5", "loss 0.6", "a number"),
    "a loss beside a clock": ("12:00:01 loss 0.5", "12:00:02 loss 0.6", "a number"),
    "the last digit": ("1.0000001", "1.0000002", "a number"),
    "a fraction": ("right 3/10", "right 4/10", "a number"),
    "a word": ("converged", "diverged", "the text"),
    "a line more": ("a 1", "a 1\na 1", "a line of one run alone"),
    "a sign": ("loss 0.5", "loss -0.5", "a number"),
    "not a number": ("loss 0.5", "loss nan", "the text"),
}


@pytest.mark.parametrize("case", SAME)
def test_what_is_no_result_is_left_out(case: str) -> None:
    assert printed_differently(0, *SAME[case]) == ()


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_differs_is_told_with_its_kind(case: str) -> None:
    first, second, kind = DIFFERENT[case]
    (found,) = printed_differently(0, first, second)
    assert found.kind == kind


def test_the_line_is_told() -> None:
    (found,) = printed_differently(2, "begin\nloss 1\nloss 2\nend\n", "begin\nloss 1\nloss 3\nend\n")
    assert (found.rank, found.line, found.first, found.second) == (2, 3, "loss 2", "loss 3")


def test_numbers_that_are_no_measures() -> None:
    assert has_numbers("done\nloss 3")
    assert not has_numbers("done in 3 s\n")


def _trace(value: str, stamp: str) -> dict[int, Trace]:
    """A kernel that wrote ``value`` from the same input, and a stamp; both are read out."""

    def op(name: str, *, reads: str = "", wrote: str = "", scalar: str = "") -> OpRecord:
        outputs = (TensorDigest("float32", (1,), (1,), wrote),) if wrote else ()
        inputs = (Ref("0", reads),) if reads else ()
        return OpRecord(name, "forward", None, "", name.split("#")[0], inputs, outputs=outputs, scalar=scalar)

    records = (
        op("aten.ones.default#0", wrote="1"),
        op("aten.mul.Tensor#0", reads="aten.ones.default#0", wrote=value),
        op("aten.sub.Tensor#0", reads="aten.ones.default#0", wrote=stamp),
        op("aten._local_scalar_dense.default#0", reads="aten.mul.Tensor#0", scalar=value),
        op("aten._local_scalar_dense.default#1", reads="aten.sub.Tensor#0", scalar=stamp),
    )
    return {0: Trace(records, rank=TracedRank(0, 1), steps=(TracedStep(0, len(records)),))}


def test_a_printed_number_leads_to_its_kernel_and_one_that_is_not_printed_does_not() -> None:
    first, second = _trace("0.123456", "17.5"), _trace("0.234567", "18.5")
    printed = printed_differently(0, "grad 0.1235", "grad 0.2346")
    verdict = find_across_ranks(first, second, printed=printed)
    assert [one.kernel for one in verdict.first] == ["aten.mul.Tensor"]
    assert [one.name for one in verdict.differing] == ["printed line 1"]
    unknown = find_across_ranks(first, second, printed=printed_differently(0, "x 5", "x 6"))
    assert (unknown.first, unknown.differing, unknown.equal) == ((), (), False)


@pytest.mark.parametrize(
    ("printed", "equal"), [(None, False), ((), True)], ids=["nothing was printed", "equal numbers were printed"]
)
def test_records_that_differ_are_no_agreement_where_nothing_is_a_result(printed: tuple[()] | None, equal: bool) -> None:
    verdict = find_across_ranks(_trace("0.5", "17.5"), _trace("0.5", "18.5"), printed=printed)
    assert verdict.benign
    assert verdict.equal == equal
