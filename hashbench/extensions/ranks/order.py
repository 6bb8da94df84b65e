"""Order what happened on different ranks by their collectives alone: there is no common clock. Pure."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from hashbench.core.divergence.collective_calls import CollectiveCall, RankCalls, contributors_of


@dataclass(frozen=True)
class RankOrder:
    """The order of the records of all ranks of a run.

    Attributes:
        calls: the numbered collectives, by global rank.
        places: the place of each collective, by rank and call, in whatever order the places of that rank count.
    """

    calls: Mapping[int, RankCalls]
    places: Mapping[int, Mapping[CollectiveCall, float]]

    @functools.cached_property
    def _timelines(self) -> Mapping[int, tuple[list[float], list[CollectiveCall]]]:
        made = {}
        for rank, places in self.places.items():
            pairs = sorted((place, call) for call, place in places.items())
            made[rank] = [place for place, _ in pairs], [call for _, call in pairs]
        return made

    def reached_from(self, starts: Mapping[int, float]) -> Mapping[int, float]:
        """Return, by rank, the first place that data may have reached which these ranks had from these places on. Each
        collective is looked at once a rank."""
        reached = dict(starts)
        waiting = [(rank, place, float("inf")) for rank, place in starts.items()]
        while waiting:
            contributor, begin, end = waiting.pop()
            at, calls = self._timelines[contributor]
            for index in range(bisect_left(at, begin), bisect_left(at, end)):
                for taker in self._takers(contributor, calls[index]):
                    arrival = self.places[taker][calls[index]]
                    before = reached.get(taker, float("inf"))
                    if arrival < before:
                        reached[taker] = arrival
                        waiting.append((taker, arrival, before))
        return reached

    def _takers(self, contributor: int, call: CollectiveCall) -> list[int]:
        """Return the ranks that wait for ``contributor`` in a call."""
        ranks = (call.destination,) if call.source >= 0 else call.process_group
        takers = []
        for rank in ranks:
            record = self.calls[rank].records.get(call) if rank != contributor and rank in self.places else None
            collective = record.collective if record is not None else None
            waits = collective is not None and (
                collective.kind == "barrier" or call.source == contributor or contributor in contributors_of(collective)
            )
            takers += [rank] if waits else []
        return takers
