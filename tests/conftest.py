"""Shared by all tests."""

from __future__ import annotations

import os

# Tests of several processes share two cores with each other; OpenMP threads that spin while they wait make that ten
# times slower. Must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
