"""Which fault stands for which."""

from __future__ import annotations

import pytest

from hashbench.extensions.kernels.merge import merged, together
from hashbench.extensions.kernels.verdict import Fault, FaultKind, TriedVariation, VariationOutcome

BEYOND, SCALED = FaultKind.BEYOND_ROUNDING, FaultKind.SCALED


def test_the_given_inputs_stand_for_variations() -> None:
    (fault,) = merged([Fault(SCALED, "seeds"), Fault(BEYOND, "given", detail="by 3"), Fault(BEYOND, "sizes")])
    assert (fault.kind, fault.variation) == (BEYOND, "given")
    assert fault.detail == "by 3; also with seeds, sizes"


def test_among_variations_the_certain_kind_leads() -> None:
    faults = [Fault(BEYOND, "seeds"), Fault(SCALED, "sizes", doubt="few"), Fault(SCALED, "spikes")]
    (fault,) = merged(faults)
    assert fault.variation == "spikes"


def test_each_result_has_its_own() -> None:
    assert len(merged([Fault(SCALED), Fault(SCALED, output="output.1")])) == 2


def test_hidden_nan_is_another_fault_than_a_wrong_value() -> None:
    found = merged([Fault(FaultKind.NON_FINITE, "nan"), Fault(BEYOND, "seeds")])
    assert [fault.kind for fault in found] == [FaultKind.NON_FINITE, BEYOND]


@pytest.mark.parametrize("cause", [FaultKind.UNWRITTEN, FaultKind.STALE, FaultKind.CALLS_DIFFER])
def test_a_cause_explains_wrong_values_of_its_result(cause: FaultKind) -> None:
    assert [fault.kind for fault in merged([Fault(BEYOND), Fault(cause)])] == [cause]
    assert len(merged([Fault(BEYOND, output="other"), Fault(cause)])) == 2


def test_what_values_only_suggest_explains_no_other_values() -> None:
    guessed = Fault(FaultKind.UNWRITTEN, "sizes", doubt="an overflow may also make them")
    (fault,) = merged([guessed, Fault(FaultKind.LOST_ELEMENTS, "spikes")])
    assert (fault.kind, fault.detail) == (FaultKind.LOST_ELEMENTS, "also with sizes")


def test_faults_of_the_given_inputs_come_first_and_worse_ones_before_others() -> None:
    faults = [
        Fault(FaultKind.RAISED, "sizes"),
        Fault(BEYOND, output="b"),
        Fault(FaultKind.WRITES_INPUT, output="input 0"),
    ]
    assert [fault.kind for fault in merged(faults)] == [FaultKind.WRITES_INPUT, BEYOND, FaultKind.RAISED]


def test_results_and_gradients_are_one_row() -> None:
    right = TriedVariation("seeds", VariationOutcome.WITHIN_ROUNDING, 3.0, meaning="other values")
    wrong = TriedVariation("seeds", VariationOutcome.WRONG, 2.0)
    for pair in ((right, wrong), (wrong, right)):
        both = together(*pair)
        assert (both.outcome, both.ratio, both.meaning) == (VariationOutcome.WRONG, 3.0, "other values")
