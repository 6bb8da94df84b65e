"""Backends that are not there, and a machine without a C++ compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch._inductor.config
from torch._inductor import cpp_builder

from hashbench.core.errors import HashbenchError
from hashbench.extensions.compiled import toolchain


@pytest.fixture
def without_compiler() -> Iterator[None]:
    cpp_builder.cpp_compiler_search.cache_clear()
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        yield
    cpp_builder.cpp_compiler_search.cache_clear()


def test_missing_compiler_is_told_in_one_line(without_compiler: None) -> None:  # noqa: ARG001
    assert "no-such-compiler" in toolchain.missing_compiler()
    with pytest.raises(HashbenchError, match="no C\\+\\+ compiler: inductor cannot compile for the CPU"):
        toolchain.require_backend("inductor", device="cpu")
    toolchain.require_backend("aot_eager", device="cpu")
    toolchain.require_backend("inductor", device="cuda")


def test_unknown_backend() -> None:
    with pytest.raises(HashbenchError, match="unknown backend 'inductr': nothing was compiled"):
        toolchain.require_backend("inductr", device="cpu")
