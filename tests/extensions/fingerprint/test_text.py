"""A verification as text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hashbench.core.finding import Table
from hashbench.extensions.fingerprint import text
from hashbench.extensions.fingerprint.document import Fingerprints
from hashbench.extensions.fingerprint.verify import CHANGED, SAME, Checked, summary
from tests.extensions.fingerprint.fingerprint_helpers import PLANTED, planted, verified


@pytest.mark.slow
def test_changes_are_shown_by_library(base: Fingerprints) -> None:
    with planted("silu", PLANTED["silu"]):
        verification = verified(base)

    environments = [{"packages": {"torch": version}, "threads": {"intra_op": 2}} for version in ("2.15.0", "2.15.1")]
    found = text.finding_of(verification, recorded=environments[0], here=environments[1], command="hashbench again")
    (by_op,) = found.parts

    assert found.headline == f"1 of {verification.kernels} kernels changed"
    assert dict(found.facts)["environment"] == "torch 2.15.0 -> 2.15.1"
    assert found.table is not None
    assert [row[0].partition("; ")[0] for row in found.table.rows] == [
        "ATen native",
        "  aten.silu.default(float32[2,12,16])",
        "    forward",
    ]
    assert by_op.table == Table("", ("op", "calls"), (("aten.silu.default", "1 of 1 call"),))
    assert (len(found.notes), found.next) == (2, ("hashbench again",))


def test_calls_are_summed_by_op(base: Fingerprints) -> None:
    """Two models share the kernels; one calls each of them twice as often."""
    twice = tuple(replace(kernel, calls=2 * kernel.calls) for kernel in base.models[0].kernels)
    both = replace(base, models=(base.models[0], replace(base.models[0], name="other", kernels=twice)))
    adds = {kernel.op: sum(each.calls for each in twice if each.op == kernel.op) for kernel in twice}
    first = next(kernel for kernel in twice if [each.op for each in twice].count(kernel.op) > 1)
    numbers = [CHANGED if kernel.signature() == first.signature() else SAME for kernel in (*twice, *twice)]
    verification = summary(both, [Checked(number, status) for number, status in enumerate(numbers)])

    assert text.changed_calls(verification) == [(first.op, first.calls * 3 // 2, adds[first.op] * 3 // 2)]


def test_unchanged_kernels_need_no_summary(base: Fingerprints) -> None:
    verification = summary(base, [Checked(number, SAME) for number in range(base.kernels)])
    assert text.changed_calls(verification) == []
    found = text.finding_of(verification, recorded={}, here={}, command="hashbench again")
    assert (found.equal, found.differs, found.parts, found.notes, found.next) == (True, False, (), (), ())
    assert dict(found.facts)["environment"] == "the same as recorded"
