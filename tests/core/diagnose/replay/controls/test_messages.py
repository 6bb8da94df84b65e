"""Sources of messages: noted in a first context, the same in all later ones."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch.distributed as dist

from hashbench.core.diagnose.replay.controls import FixedSources


class Work:
    def __init__(self, source: int) -> None:
        self.source = source

    def _source_rank(self) -> int:
        return self.source


class Group:
    """What a group is asked for: a receive from any source takes from 2, then 1, then 2 …"""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.arrivals = itertools.cycle((2, 1))

    def from_any(self, tensors: Any, tag: int) -> Work:
        self.asked.append((tensors, "any", tag))
        return Work(next(self.arrivals))

    def recv(self, tensors: Any, source: int, tag: int) -> None:
        self.asked.append((tensors, source, tag))


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    monkeypatch.setattr(dist.ProcessGroup, "recv_anysource", Group.from_any)
    return Group()


def receive(group: Group, times: int) -> list[Any]:
    """Receive so often; return the sources that were asked for."""
    group.asked.clear()
    for _ in range(times):
        dist.ProcessGroup.recv_anysource(group, [], 5)
    return [source for _, source, _ in group.asked]


def test_later_contexts_receive_from_where_the_first_one_did(group: Group) -> None:
    sources = FixedSources()
    before = dist.ProcessGroup.recv_anysource
    assert sources.count is None
    asked = []

    for _ in range(3):
        with sources():
            asked.append(receive(group, 2))

    assert asked == [["any", "any"], [2, 1], [2, 1]]
    assert sources.count == 2
    assert dist.ProcessGroup.recv_anysource is before


def test_receives_beyond_those_that_are_known_are_from_any_source(group: Group) -> None:
    sources = FixedSources()
    asked = []

    for times in (1, 2):
        with sources():
            asked.append(receive(group, times))

    assert asked == [["any"], [2, "any"]]


def test_the_group_is_restored_after_an_error() -> None:
    before = dist.ProcessGroup.recv_anysource

    with pytest.raises(ValueError, match="stop"), FixedSources()():
        raise ValueError("stop")

    assert dist.ProcessGroup.recv_anysource is before


def test_torch_has_what_is_replaced() -> None:
    assert {"recv", "recv_anysource"} <= set(dir(dist.ProcessGroup))
    assert hasattr(dist.Work, "_source_rank")
