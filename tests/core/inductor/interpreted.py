"""Let Inductor write Triton kernels for a CPU, and Triton's interpreter run them: real modules, and the real
``CachingAutotuner``, without a GPU. The same programs run on a GPU, where nothing is changed."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def environment(device: str) -> dict[str, str]:
    """Variables of a process whose programs call :func:`prepare` with this device."""
    return {**os.environ, **({"TRITON_INTERPRET": "1"} if device == "cpu" else {})}


def prepare(device: str) -> None:
    """Let Inductor write Triton on this device from now on, for as long as this process lives."""
    if device != "cpu":
        return
    import torch._inductor.config as inductor
    import triton
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    inductor.cpu_backend = "triton"
    inductor.compile_threads = 1
    triton_helpers.set_driver_to_cpu = lambda: None
    target = GPUTarget("cuda", 90, 32)  # some target that this Triton knows: nothing is compiled for it
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))
