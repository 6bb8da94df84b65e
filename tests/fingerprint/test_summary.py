"""Results of equal kernels are merged across models."""

from __future__ import annotations

from dataclasses import replace

from hashbench.fingerprint.document import Fingerprints
from hashbench.fingerprint.verify import CHANGED, Checked, summary


def test_equal_kernels_of_models_are_merged(base: Fingerprints) -> None:
    two = replace(base, models=(base.models[0], replace(base.models[0], name="other")))
    results = [Checked(number, CHANGED) for number in range(two.kernels)]

    verification = summary(two, results)

    assert len(verification.changed) == base.kernels == verification.kernels
    assert verification.changed[0].models == ("net", "other")
