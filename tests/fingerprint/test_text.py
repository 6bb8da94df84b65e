"""A verification as text."""

from __future__ import annotations

from hashbench.fingerprint import text
from hashbench.fingerprint.document import Fingerprints
from tests.fingerprint.fingerprint_helpers import PLANTED, planted, verified


def test_changes_are_shown_by_library(base: Fingerprints) -> None:
    with planted("silu", PLANTED["silu"]):
        verification = verified(base)

    environments = [{"packages": {"torch": version}, "threads": {"intra_op": 2}} for version in ("2.15.0", "2.15.1")]
    lines = text.verified_text(verification, recorded=environments[0], here=environments[1]).splitlines()

    assert lines[0] == f"1 of {verification.kernels} kernels changed (torch 2.15.0 -> 2.15.1)"
    assert lines[3].startswith("  aten.silu.default(float32[2,12,16])  forward; in net; ")
    assert lines[-1] == "Differences are the largest of the few elements of each output that are kept."
