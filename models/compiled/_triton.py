"""How Inductor prints Triton code, changed in one place: what the faults of the files ``triton_*.py`` have in common.

Nothing here touches lowerings, decompositions or passes, which C++ shares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from _planted import Patches

Printer = Callable[..., Any]
"""Prints one op from the names of its arguments."""


def printed_as(patches: Patches, op: str, wrong: Callable[[Printer], Printer]) -> None:
    """Print the virtualized ``op`` by ``wrong(right)``, where ``right`` is torch's own printer of it."""
    import torch._inductor.lowering  # noqa: F401  registers which ops are routed by dtype
    from torch._inductor.codegen.triton import TritonKernelOverrides

    TritonKernelOverrides._setup_libdevice_routing()  # done once a process, and what it wraps stays
    patches.attribute(TritonKernelOverrides, op, staticmethod(wrong(getattr(TritonKernelOverrides, op))))


def method_as(patches: Patches, name: str, wrong: Callable[[Printer], Printer]) -> None:
    """Replace a method of the class that prints kernels by ``wrong(right)``."""
    from torch._inductor.codegen.triton import TritonKernel

    patches.attribute(TritonKernel, name, wrong(getattr(TritonKernel, name)))


def source_as(patches: Patches, change: Callable[[str], str]) -> None:
    """Change the finished source of every kernel."""
    method_as(patches, "codegen_kernel", lambda right: lambda self, name=None: change(right(self, name)))
