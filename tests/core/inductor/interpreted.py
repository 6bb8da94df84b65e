"""Let Inductor write Triton kernels for a CPU, and Triton's interpreter run them: real modules, and the real
``CachingAutotuner``, without a GPU. For programs that are started with ``TRITON_INTERPRET=1``."""

from __future__ import annotations

from types import SimpleNamespace


def write_triton_for_the_cpu() -> None:
    """From now on, for as long as this process lives."""
    import torch._inductor.config as inductor
    import triton
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    inductor.cpu_backend = "triton"
    inductor.compile_threads = 1
    triton_helpers.set_driver_to_cpu = lambda: None
    target = GPUTarget("cuda", 90, 32)  # some target that this Triton knows: nothing is compiled for it
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))
