"""Fixtures of the tests of stress: those of the checks that it extends."""

from tests.core.check.conftest import _from_the_first_run, free_memory_given_back

__all__ = ["_from_the_first_run", "free_memory_given_back"]
