"""OpenMP regions are limited to one thread, and the limit is restored."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import pytest
import torch

from hashbench.core.inductor import openmp
from hashbench.core.inductor.openmp import library_of, one_thread_in

OPENMP = torch.backends.openmp.is_available()


def levels() -> int:
    return int(ctypes.CDLL(None).omp_get_max_active_levels())


@pytest.mark.skipif(not OPENMP, reason="this torch was built without OpenMP")
@pytest.mark.parametrize("path", ["", "/nowhere.so", torch._C.__file__])
def test_limit_is_zero_inside_and_restored(path: str) -> None:
    before, inside = levels(), -1
    with suppress(ZeroDivisionError), one_thread_in(path):
        inside = levels()
        raise ZeroDivisionError
    assert (inside, levels()) == (0, before)
    assert before > 0


def test_each_runtime_is_limited_once() -> None:
    paths = {library._name for library in openmp._runtimes(torch._C.__file__)}
    assert len(paths) == len(openmp._runtimes(torch._C.__file__)) <= 2


def test_no_runtime_is_said_before_anything_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_SET", "no_such_function")
    with pytest.raises(LookupError, match="no OpenMP runtime"):
        one_thread_in("")


def test_library_is_that_of_a_built_in_function() -> None:
    assert library_of(torch._C._get_cpu_capability) == torch._C.__file__
    assert library_of(len) == library_of(lambda: None) == library_of([].append) == ""
