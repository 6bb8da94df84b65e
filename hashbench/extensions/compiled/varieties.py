"""The further compilations of ``--compilations N``: what each changes beside the first one. Pure; imports no torch.

The first compilation uses the cache and the process of the sweep. All are made from the same model and inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from hashbench.core.errors import HashbenchError


class Cache(StrEnum):
    """Which cache of the compiler a compilation finds.

    ``FRESH``: an empty temporary folder (``TORCHINDUCTOR_CACHE_DIR``, ``TRITON_CACHE_DIR``). ``WARM``: that of the
    compilation before, so that graphs are loaded and not compiled.
    """

    FRESH = "fresh"
    WARM = "warm"


@dataclass(frozen=True, slots=True)
class Variety:
    """What a compilation changes.

    Attributes:
        name: as results have it.
        meaning: in words.
        cache: which cache it finds. A change that is not part of its key needs a fresh one, or it loads what the first
            compilation made.
        variables: environment variables of a fresh process, which compiles and runs; empty: in this process.
        other_threads: another number of compile threads than the first compilation had.
        options: of ``torch._inductor.config``.
    """

    name: str
    meaning: str
    cache: Cache = Cache.FRESH
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    other_threads: bool = False
    options: Mapping[str, bool | int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def in_fresh_process(self) -> bool:
        """True if it compiles and runs in a process of its own."""
        return bool(self.variables)

    def options_beside(self, compile_threads: int) -> dict[str, bool | int]:
        """Return the options of ``torch._inductor.config`` where the first compilation had so many compile threads."""
        threads = {"compile_threads": 2 if compile_threads == 1 else 1} if self.other_threads else {}
        return {**self.options, **threads}


VARIETIES = (
    Variety("fresh cache", "compiled again with an empty cache"),
    Variety("warm cache", "loaded from the cache of the compilation before", cache=Cache.WARM),
    Variety(
        "fresh process",
        "compiled in a fresh process with another hash seed, so that sets have another order",
        variables=MappingProxyType({"PYTHONHASHSEED": "random"}),
    ),
    Variety("compile threads", "compiled with another number of compile threads", other_threads=True),
    Variety(
        "max_autotune",
        "compiled with max_autotune, which times several kernels and takes the fastest",
        options=MappingProxyType({"max_autotune": True}),
    ),
    Variety(
        "one thread",
        "compiled for one thread, which splits no reduction",
        options=MappingProxyType({"cpp.threads": 1}),
    ),
)
"""In the order in which ``--compilations`` adds them."""


def further(compilations: int) -> tuple[Variety, ...]:
    """Return what the compilations after the first one change.

    Raises:
        HashbenchError: ``compilations`` is less than 1, or more than there are.
    """
    most = 1 + len(VARIETIES)
    if not 1 <= compilations <= most:
        raise HashbenchError(
            f"--compilations {compilations} is not between 1 and {most}",
            consequence=f"there are {len(VARIETIES)} ways to compile again, and a repetition of one is no other",
            tip=f"Take at most {most}: {', '.join(variety.name for variety in VARIETIES)}.",
        )
    return VARIETIES[: compilations - 1]
