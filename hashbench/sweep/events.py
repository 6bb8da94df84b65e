"""What a sweep tells while it runs: one of these for everything that happens."""

from __future__ import annotations

from dataclasses import dataclass

from hashbench.records import Row


@dataclass(frozen=True, slots=True)
class SweepOpened:
    """The sweep begins with ``done`` of ``total`` rows on disk; ``damaged`` row files were thrown away."""

    total: int
    done: int
    damaged: int


@dataclass(frozen=True, slots=True)
class SweepPlanned:
    """Up to ``workers`` models run at once, with ``threads`` threads each, on cores of their own where ``pinned``, and
    together within ``memory_mib`` (``None``: torch's own choice; whatever they take), on ``devices`` accelerators (0:
    on none, or whoever runs them knows). Of the ``waiting`` models, ``known`` are in the order of their times in
    ``times_from``."""

    workers: int
    threads: int | None
    pinned: bool
    memory_mib: float | None
    waiting: int
    known: int = 0
    times_from: str = ""
    devices: int = 0


@dataclass(frozen=True, slots=True)
class ModelStarted:
    """A worker begins with model ``name``."""

    name: str


@dataclass(frozen=True, slots=True)
class ModelFinished:
    """``row`` is on disk, as number ``done`` of ``total``. ``eta_seconds`` is the time left at the pace so far."""

    row: Row
    done: int
    total: int
    eta_seconds: float


@dataclass(frozen=True, slots=True)
class ModelRequeued:
    """``row`` is not believed, since other models ran beside it: the model runs again alone, after all others."""

    row: Row


Event = SweepOpened | SweepPlanned | ModelStarted | ModelFinished | ModelRequeued
