"""What a rank of the pool runs: a program, untraced or recorded, and what torch's flight recorder saw of it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d

import hashbench
from hashbench.core.trace.digest import digest
from tests.extensions.ranks.programs.base import Run
from tests.extensions.ranks.programs.table import PROGRAMS

_CALLS = 500
FLIGHT_RECORDER: Mapping[str, str] = {"TORCH_FR_BUFFER_SIZE": str(_CALLS)}
"""What a process needs in its environment for torch to count its collectives, and to keep as many as one run makes: the
time of a look grows with the number that is kept."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a program ran on one rank.

    Attributes:
        results: their digests, by name; a Python value as text.
        exchanged: name, process group (by its place among those that were used) and number of every collective,
            in order; then name, peer and tag of every message.
    """

    results: Mapping[str, str]
    exchanged: tuple[str, ...]


def run_untraced(rank: int, ranks: int, name: str, planted: bool, number: int, folder: Path) -> Ran:
    """Run a program."""
    run = _begun(rank, ranks, name, planted, number, folder)
    seen = _last_seen()
    with _counted_messages() as messages:
        results = PROGRAMS[name].run(run)
    return _ran(results, messages, seen)


def run_recorded(rank: int, ranks: int, name: str, planted: bool, number: int, folder: Path, into: Path) -> Ran:
    """Run a program and record it in the folder ``into``."""
    from hashbench.extensions.ranks.record import record_ranks

    run = _begun(rank, ranks, name, planted, number, folder)
    seen = _last_seen()
    with _counted_messages() as messages, record_ranks(into):
        results = PROGRAMS[name].run(run)
        for label, value in results.items():
            if not isinstance(value, nn.Parameter):  # those of an optimizer are results
                hashbench.result(label, value)
    return _ran(results, messages, seen)


def _begun(rank: int, ranks: int, name: str, planted: bool, number: int, folder: Path) -> Run:
    run = Run(rank, ranks, planted, number, folder)
    before = PROGRAMS[name].before
    if before is not None:
        before(run)
    return run


@contextmanager
def _counted_messages() -> Iterator[list[str]]:
    """Note every message: torch's flight recorder has those of gloo not."""
    sent: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        plain = getattr(dist.ProcessGroup, name)

        def call(group: dist.ProcessGroup, tensors: Any, *where: int) -> Any:
            sent.append(f"{name} {where}")
            return plain(group, tensors, *where)

        return call

    with ExitStack() as stack:
        for name in ("send", "recv", "recv_anysource"):
            stack.enter_context(mock.patch.object(dist.ProcessGroup, name, noting(name)))
        yield sent


def _ran(results: Mapping[str, Any], messages: list[str], seen: int) -> Ran:
    places: dict[object, int] = {}
    made = [one for one in _flight_record() if one["record_id"] > seen]
    assert len(made) < _CALLS
    exchanged = tuple(
        f"{one['profiling_name']} in {places.setdefault(one['process_group'], len(places))}: "
        f"{one['collective_seq_id']} {one['p2p_seq_id']}"
        for one in made
    )
    return Ran({label: digest(value).word() for label, value in results.items()}, (*exchanged, *messages))


def _last_seen() -> int:
    """Number of the last collective in the flight recorder: the rank has run other programs, and not every torch can
    empty it."""
    return max((one["record_id"] for one in _flight_record()), default=-1)


def _flight_record() -> Sequence[Mapping[str, Any]]:
    dump = _distributed_c10d._dump_fr_trace(includeCollectives=True, includeStackTraces=False)
    entries: Sequence[Mapping[str, Any]] = pickle.loads(dump).get("entries", ())
    return entries
