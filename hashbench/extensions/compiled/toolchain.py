"""Whether a backend can compile here: its name, and the C++ compiler that Inductor's code for the CPU needs."""

from __future__ import annotations

from hashbench.core.errors import HashbenchError
from hashbench.core.inductor.internals import backends
from hashbench.extensions.compiled.as_device.devices import INDUCTOR, device_of


def require_backend(backend: str, *, device: str) -> None:
    """Raise unless ``torch.compile`` has the backend, and what it needs for the device is there.

    Args:
        backend: name that ``torch.compile(backend=)`` takes.
        device: type of the model's device.

    Raises:
        HashbenchError: there is no such backend, or no C++ compiler.
    """
    known, device_of_code = backends(), device_of(backend)
    if backend.partition("@")[0] not in known:
        raise HashbenchError(
            f"unknown backend {backend!r}",
            consequence="nothing was compiled",
            tip="Choose one of torch.compiler.list_backends(), such as inductor, aot_eager or eager.",
        )
    missing = missing_compiler() if backend == INDUCTOR and device == "cpu" and device_of_code is None else ""
    if missing:
        raise HashbenchError(
            "no C++ compiler",
            consequence=f"{backend} cannot compile for the CPU ({missing})",
            tip="Install g++ or clang++, or set CXX to one.",
        )


def missing_compiler() -> str:
    """Return why Inductor finds no C++ compiler; empty if it does."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        return str(error)
    return ""
