"""Devices that code can be generated for without one: what Inductor asks of their drivers. Pure; imports no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hashbench.core.errors import HashbenchError


@dataclass(frozen=True, slots=True)
class NamedDevice:
    """A device by its compute capability; the properties that are no capability's are those of a common card.

    Attributes:
        capability: compute capability times ten: 90 is that of an H100.
        name: of the card.
        multi_processor_count: number of streaming multiprocessors.
        max_threads_per_multi_processor: as CUDA has it.
        shared_memory_per_block_optin: bytes.
        shared_memory_per_multiprocessor: bytes.
        L2_cache_size: bytes.
        total_memory: bytes.
    """

    capability: int
    name: str
    multi_processor_count: int
    max_threads_per_multi_processor: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    L2_cache_size: int
    total_memory: int
    regs_per_multiprocessor: int = 65536
    max_threads_per_block: int = 1024
    warp_size: int = 32
    shared_memory_per_block: int = 49152

    @property
    def major(self) -> int:
        """First number of the compute capability."""
        return self.capability // 10

    @property
    def minor(self) -> int:
        """Second number of the compute capability."""
        return self.capability % 10

    @property
    def gcnArchName(self) -> str:  # noqa: N802 - as CUDA has it
        """Architecture of an AMD card: it is none."""
        return ""

    def __str__(self) -> str:
        return f"cuda:{self.capability}"


_KIB, _MIB, _GIB = 1024, 1024**2, 1024**3

_CARDS = (
    NamedDevice(70, "Tesla V100", 80, 2048, 96 * _KIB, 96 * _KIB, 6 * _MIB, 16 * _GIB),
    NamedDevice(75, "Tesla T4", 40, 1024, 64 * _KIB, 64 * _KIB, 4 * _MIB, 16 * _GIB),
    NamedDevice(80, "NVIDIA A100", 108, 2048, 163 * _KIB, 164 * _KIB, 40 * _MIB, 80 * _GIB),
    NamedDevice(86, "NVIDIA A10", 72, 1536, 99 * _KIB, 100 * _KIB, 6 * _MIB, 24 * _GIB),
    NamedDevice(89, "NVIDIA L4", 58, 1536, 99 * _KIB, 100 * _KIB, 48 * _MIB, 24 * _GIB),
    NamedDevice(90, "NVIDIA H100", 132, 2048, 227 * _KIB, 228 * _KIB, 50 * _MIB, 80 * _GIB),
    NamedDevice(100, "NVIDIA B200", 148, 2048, 227 * _KIB, 228 * _KIB, 126 * _MIB, 180 * _GIB),
)

DEVICES: Mapping[str, NamedDevice] = MappingProxyType({str(card): card for card in _CARDS})
"""By name: ``cuda:90`` and others."""


INDUCTOR, _AT = "inductor", "@"


def backend_as(backend: str, device: str) -> str:
    """Return the name of a backend that generates code for a device which is not there: ``inductor@cuda:90``."""
    return f"{backend}{_AT}{device}" if backend and device and _AT not in backend else backend


def device_of(backend: str) -> NamedDevice | None:
    """Return the device that a backend of this name generates code for; ``None``: that of the model.

    Raises:
        HashbenchError: there is no such device, the backend makes no code for one, or Triton is not installed.
    """
    compiler, at, name = backend.partition(_AT)
    if not at:
        return None
    if compiler != INDUCTOR:
        raise HashbenchError(
            "--as requires --backend inductor",
            consequence=f"{compiler or 'eager mode'} makes no code for {name}",
            tip="Leave --as out, or give --backend inductor.",
        )
    if name not in DEVICES:
        raise HashbenchError(
            f"{name!r} is not a device that code can be made for",
            consequence="nothing was run",
            tip=f"Give --as its compute capability, one of {', '.join(DEVICES)}.",
        )
    if importlib.util.find_spec("triton") is None:
        raise HashbenchError(
            "Triton is not installed",
            consequence=f"no code can be made for {name}",
            tip="Install it: pip install triton, or leave --as out.",
        )
    return DEVICES[name]
