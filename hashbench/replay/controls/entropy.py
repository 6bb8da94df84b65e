"""Deterministic entropy: what the operating system and unseeded generators give is the same at every entry."""

from __future__ import annotations

import _random
import hashlib
import itertools
import os
import random
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from hashbench.replay.controls.references import Substitute, changed, changed_type, substituted


@contextmanager
def constant_entropy() -> Iterator[Callable[[], None]]:
    """Every unseeded source of randomness gives the same stream of values after each entry. Gives a function that
    begins the stream anew, which is much quicker than another entry.

    Python's: ``os.urandom``, ``os.getrandom``, ``secrets``, ``uuid1`` and ``uuid4``, ``random.seed()``,
    ``random.Random()``, ``SystemRandom``, ``ssl.RAND_bytes``. NumPy's: ``default_rng()``, ``SeedSequence()``, unseeded
    bit generators, ``RandomState()``, ``numpy.random.seed()``. torch's: ``torch.seed()``, ``Generator.seed()``. Two
    values drawn one after the other still differ. Not reached: ``/dev/urandom`` opened as a file, and C code that asks
    the system itself.
    """
    stream = _Stream()
    substitutes = [Substitute(original, stream.take) for original in _byte_sources()]
    with ExitStack() as stack:
        stack.enter_context(substituted(substitutes, spared=("hashbench",)))
        stack.enter_context(changed_type(_random.Random, "seed", _seed_python(stream)))
        stack.enter_context(changed_type(torch._C.Generator, "seed", _seed_torch(stream)))
        if getattr(uuid, "_generate_time_safe", None) is not None:
            stack.enter_context(changed(uuid, "_generate_time_safe", lambda: (stream.take(16), None)))
        yield stream.begin


class _Stream:
    """Bytes that never repeat within one stream and are those of any other stream. Safe for threads."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Again from its first byte."""
        self._numbers = itertools.count()

    def take(self, size: int, flags: int = 0) -> bytes:  # noqa: ARG002 – as os.getrandom has it
        return hashlib.shake_256(next(self._numbers).to_bytes(8, "little")).digest(size)

    def integer(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")


def _byte_sources() -> list[Callable[..., bytes]]:
    """All else that Python and NumPy draw by themselves comes from the first, through ``random.SystemRandom``."""
    found: list[Any] = [os.urandom, getattr(os, "getrandom", None)]
    if "ssl" in sys.modules:
        found.append(sys.modules["ssl"].RAND_bytes)
    return [one for one in found if one is not None]


def _seed_python(stream: _Stream) -> Callable[..., None]:
    """Where ``random.Random``, its instances and the module's functions all end up."""
    original: Any = _random.Random.__dict__["seed"]

    def seed(self: random.Random, value: Any = None, /) -> None:
        original(self, stream.integer(32) if value is None else value)

    return seed


def _seed_torch(stream: _Stream) -> Callable[..., int]:
    def seed(self: torch.Generator) -> int:
        self.manual_seed(stream.integer(7))
        return self.initial_seed()

    return seed
