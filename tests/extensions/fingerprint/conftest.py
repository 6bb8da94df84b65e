"""Fixtures for tests of fingerprints."""

from __future__ import annotations

import pytest

from hashbench.extensions.fingerprint.document import Fingerprints
from hashbench.extensions.fingerprint.measure import record
from tests.extensions.fingerprint.fingerprint_helpers import step


@pytest.fixture(scope="module")
def base() -> Fingerprints:
    return record(step, name="net")
