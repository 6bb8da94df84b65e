"""The checks as plain functions, for unittest, a script or a notebook; the fixtures of pytest call them as well.

Each returns where nothing differs, and raises :class:`CheckFailedError` otherwise, an ``AssertionError`` whose text is
the report. Importing this package imports no torch.
"""

from __future__ import annotations

from hashbench.testing.asserts import Asserts
from hashbench.testing.kernel import assert_within_rounding, within_rounding
from hashbench.testing.model import assert_same_model
from hashbench.testing.options import CheckFailedError
from hashbench.testing.weights import assert_same_weights

_PLAIN = Asserts()

assert_runs_equal = _PLAIN.assert_runs_equal
assert_batch_invariant = _PLAIN.assert_batch_invariant
assert_compiled_equals_eager = _PLAIN.assert_compiled_equals_eager
assert_ranks_deterministic = _PLAIN.assert_ranks_deterministic
assert_kernels_unchanged = _PLAIN.assert_kernels_unchanged

__all__ = [
    "CheckFailedError",
    "assert_batch_invariant",
    "assert_compiled_equals_eager",
    "assert_kernels_unchanged",
    "assert_ranks_deterministic",
    "assert_runs_equal",
    "assert_same_model",
    "assert_same_weights",
    "assert_within_rounding",
    "within_rounding",
]
