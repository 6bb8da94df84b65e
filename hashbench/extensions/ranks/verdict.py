"""The verdict on two runs of a distributed program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from hashbench.core.divergence.collective_calls import CollectiveCall
from hashbench.core.records import Divergence
from hashbench.extensions.ranks.printed import PrintedDifference


@dataclass(frozen=True, slots=True)
class RankHop:
    """A collective or message by which a difference came to other ranks.

    Attributes:
        rank: global rank that contributed the data; ``None`` where the difference entered in the collective.
        ranks: global ranks that received them.
        collective: its name, ``all_reduce``.
        call: its process group and number; ``None`` if they are not known.
    """

    rank: int | None
    ranks: tuple[int, ...]
    collective: str
    call: CollectiveCall | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDivergence(Divergence):
    """A divergence on one rank.

    Attributes:
        rank: global rank.
        through: how the difference came to other ranks, in words; empty if it came to none.
        hops: the same, collective by collective.
        missing: ranks without a trace, or without the call, that may be behind it.
    """

    rank: int
    through: str = ""
    hops: tuple[RankHop, ...] = ()
    missing: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        found: Divergence,
        rank: int,
        *,
        through: str = "",
        hops: tuple[RankHop, ...] = (),
        missing: tuple[int, ...] = (),
    ) -> RankDivergence:
        """Return a divergence with its rank."""
        known = {field.name: getattr(found, field.name) for field in fields(Divergence)}
        return cls(**known, rank=rank, through=through, hops=hops, missing=missing)


@dataclass(frozen=True, slots=True)
class RankResult:
    """A result that differs on a rank.

    Attributes:
        rank: global rank.
        name: of the result.
        step: the first step after which it differs; ``None`` at the end of a run that was not recorded by steps.
    """

    rank: int
    name: str
    step: int | None


@dataclass(frozen=True, slots=True)
class RanksVerdict:
    """The comparison of two runs of a distributed program.

    Attributes:
        world_size: number of ranks.
        first: the divergences that no other one may have caused; several where no collective orders them.
        later: further divergences of other ranks, which have a cause of their own, behind one of the first.
        differing: results that differ.
        missing: ranks without a trace in both runs.
        unknown: sentences on what could not be judged; empty if everything was.
        benign: number of records that differ without reaching a result, by rank; ranks without any are left out.
        ranks: ranks that were compared.
        records: number of records compared, of all ranks.
        steps: first and last step compared; ``None`` if the runs were not recorded by steps.
        printed: lines that ranks print differently.
    """

    world_size: int
    first: tuple[RankDivergence, ...] = ()
    later: tuple[RankDivergence, ...] = ()
    differing: tuple[RankResult, ...] = ()
    missing: tuple[int, ...] = ()
    unknown: tuple[str, ...] = ()
    benign: Mapping[int, int] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    records: int = 0
    steps: tuple[int, int] | None = None
    printed: tuple[PrintedDifference, ...] = ()

    @property
    def equal(self) -> bool:
        """True if all ranks of both runs are there to their end, and nothing differs that reaches a result."""
        return not (self.first or self.differing or self.missing or self.unknown or self.printed)
