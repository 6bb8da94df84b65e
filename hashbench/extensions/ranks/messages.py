"""Say whether what entered on a rank outside torch may have come from another rank: by an object, or a number, that it
received before.

A trace does not see what Python does with what it reads. A difference that enters on a rank from outside, or a
generator in another state, may follow from any message that differs and was read before. It is taken to follow from it
where nothing else of that rank can be its source: no difference entered on the rank before the first such message came.
That is a guess: a rank that was told the time by another one, and then reads its own clock, leaves the same trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hashbench.core.catalog import Origin
from hashbench.core.divergence.describe import entered_at
from hashbench.core.divergence.slice import Slice
from hashbench.core.text import format_ranks
from hashbench.extensions.ranks.walk import BY_PYTHON, Candidate, JudgedRanks, RankNode

BY_MESSAGE = BY_PYTHON | {Origin.RNG}
"""Origins of what may follow from a message: its value, the op that is run, a seed."""


@dataclass(frozen=True, slots=True)
class Messages:
    """What other ranks made outside torch and a rank received before a difference entered there.

    Attributes:
        sent: what was made, at the ranks that made it.
        own: the rank had differences of its own before the first of these came.
    """

    sent: tuple[Candidate, ...] = ()
    own: bool = False

    @property
    def explain(self) -> bool:
        """True if nothing but these messages can be the source."""
        return bool(self.sent) and not self.own


def messages_before(judged: JudgedRanks, candidate: Candidate, behind: Slice[RankNode]) -> Messages:
    """Return the messages from which a difference may follow; ``behind`` is what leads to it by way of Python."""
    rank = candidate.at.rank
    entered = [entry for entry in judged.candidates(behind) if entry.at != candidate.at]
    sent = tuple(
        candidate for candidate in entered if candidate.at.rank != rank and candidate.source.origin in BY_MESSAGE
    )
    if not sent:
        return Messages()
    came = min(_arrivals(judged, candidate, behind), default=float("inf"))
    own = len(sent) < len(entered) or any(place <= came for place in _entered_on(judged, candidate))
    return Messages(sent, own)


def as_sent(judged: JudgedRanks, candidate: Candidate, receiver: Candidate) -> Candidate:
    """Return a difference that was made outside torch and sent, with what it is to explain at its receiver."""
    what = entered_at(judged.differences[receiver.at.rank].runs, receiver.source)
    rank = receiver.at.rank
    reason = f"{candidate.source.detail}, and sent: nothing else that was traced on rank {rank} explains {what} there"
    detail = f"{reason}, unless rank {rank} made that outside torch itself"
    return replace(candidate, source=replace(candidate.source, detail=detail))


def in_doubt(candidate: Candidate, messages: Messages) -> Candidate:
    """Return a difference of a rank that has others of its own, with the ranks from which it may come as well."""
    ranks = format_ranks(sorted({candidate.at.rank for candidate in messages.sent}))
    detail = f"{candidate.source.detail}; it may also follow from what {ranks} sent before, which differs"
    return replace(candidate, source=replace(candidate.source, detail=detail))


def _arrivals(judged: JudgedRanks, candidate: Candidate, behind: Slice[RankNode]) -> Iterator[float]:
    """Yield the places where data of other ranks that lead to a candidate by way of Python came."""
    rank = candidate.at.rank
    for _, received in judged.python_links(candidate.at):
        if received is not None:
            yield judged.place(received)
    for at, before in behind.reached.items():
        if at.rank == rank and not at.is_contribution and any(node.rank != rank for node in before):
            yield judged.place(at)


def _entered_on(judged: JudgedRanks, candidate: Candidate) -> Iterator[float]:
    """Yield the places of the other differences that entered on the rank of a candidate."""
    rank, differences = candidate.at.rank, judged.differences[candidate.at.rank]
    for node, source in differences.sources.items():
        at = RankNode(rank, node)
        if source != candidate.source and judged.exchange_at(at) is None:
            yield judged.place(at)
    for at in judged.differing_contributions(rank):
        if at != candidate.at:
            yield judged.place(at)
