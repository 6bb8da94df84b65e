"""The columns of a model with ranks. Pure; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from hashbench.core.records import Facts


@dataclass(frozen=True, slots=True)
class RankFacts(Facts):
    """What a model with ranks shows beside its status.

    Attributes:
        rank: where the difference entered; ``None`` if none did, or that is unknown.
        world_size: number of ranks.
        group: global ranks of the process group of the collective that is to blame, or by which the difference came to
            other ranks first: ``0-1``.
        through: how it came to other ranks: ``rank 1: aten.mm -> allreduce_ #7 of 0-1 -> rank 0``.
    """

    rank: int | None = None
    world_size: int | None = None
    group: str = ""
    through: str = ""
