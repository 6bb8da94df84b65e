"""Process groups in a form that is the same in every run, and on each of their ranks.

The name of a group is a counter, which differs where other groups were made before. A group is told by the global ranks
of its members, in its order, and by its number among the groups of the same ranks in order of creation. Every rank
creates groups in the same order; the number counts those that a trace saw alive, so a group made anew has the next one.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_LAUNCHERS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
"""Variables with rank and number of ranks, by launcher: torchrun and others, srun."""


def rank_of(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return rank and number of ranks as torch.distributed has them, or else the launcher's variables; ``None`` if
    neither tells."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    for names in _LAUNCHERS:
        texts = [environment.get(name, "") for name in names]
        if all(text.isdecimal() for text in texts):
            rank, size = map(int, texts)
            if rank < size:
                return rank, size
    return None


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A process group.

    Attributes:
        ranks: global ranks of its members, in its order; empty if torch does not know them.
        ordinal: its number among the groups of these ranks, in order of creation.
        own: rank of this process within it; ``None`` if unknown.
    """

    ranks: tuple[int, ...] = ()
    ordinal: int = 0
    own: int | None = None

    def global_rank(self, rank: int | None) -> int | None:
        """Return the global rank of the member of this rank within the group; ``None`` if unknown."""
        return self.ranks[rank] if rank is not None and 0 <= rank < len(self.ranks) else None


class RankGroups:
    """Process groups that a trace has seen, in order of creation."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[ProcessGroup, RankGroup] = weakref.WeakKeyDictionary()
        self._counts: dict[tuple[int, ...], int] = {}

    def see(self) -> None:
        """Number the groups that exist now and were not seen before."""
        if not torch.distributed.is_available():
            return
        from torch.distributed.distributed_c10d import _world, get_process_group_ranks

        for group in list(_world.pg_names):  # in order of creation
            if group not in self._known:
                ranks = tuple(get_process_group_ranks(group))
                ordinal = self._counts.get(ranks, 0)
                self._counts[ranks] = ordinal + 1
                self._known[group] = RankGroup(ranks, ordinal, group.rank())

    def of(self, named: Sequence[Any]) -> RankGroup:
        """Return the group that a call names: by an object, by its name, or by a tag and global ranks.

        A group that torch does not list has no ranks.
        """
        group = _resolved(named)
        if group is None:
            ranks = next((value for value in named if isinstance(value, (list, tuple))), ())
            return RankGroup(tuple(ranks))
        known = self._known.get(group)
        if known is None:
            self.see()
            known = self._known.get(group) or RankGroup(own=group.rank())
        return known


def _resolved(named: Sequence[Any]) -> ProcessGroup | None:
    """Return the process group; ``None`` if torch does not find it."""
    from torch._C._distributed_c10d import _resolve_process_group
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import _find_pg_by_ranks_and_tag

    first = named[0] if named else None
    try:
        if isinstance(first, torch.ScriptObject):
            return ProcessGroup.unbox(first)
        if len(named) > 1 and isinstance(first, str):
            return _find_pg_by_ranks_and_tag(first, list(named[1]))
        if isinstance(first, str):
            return _resolve_process_group(first)  # type: ignore[arg-type]
    except (KeyError, LookupError, RuntimeError, TypeError, ValueError):
        return None
    return first if isinstance(first, ProcessGroup) else None
