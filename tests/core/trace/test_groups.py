"""Process groups told by ranks and by order of creation, however a call names them and whatever they are called."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from hashbench.core.trace.groups import RankGroup, RankGroups


@pytest.fixture
def world() -> Iterator[Any]:
    """The default group of rank 2 of four, which exchanges nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_group_is_its_global_ranks_in_its_order(world: Any) -> None:
    groups = RankGroups()
    assert groups.of([world]) == RankGroup((0, 1, 2, 3), 0, own=2)
    assert groups.of([dist.new_group([0, 2])]) == RankGroup((0, 2), 0, own=1)
    assert groups.of([dist.new_group([3, 2], use_local_synchronization=True)]).own in (0, 1)


def test_groups_of_the_same_ranks_are_numbered_in_order_of_creation(world: Any) -> None:
    first, other, second = dist.new_group([1, 2]), dist.new_group([0, 2]), dist.new_group([1, 2])
    everyone = dist.new_group([0, 1, 2, 3])
    groups = RankGroups()
    assert [groups.of([group]).ordinal for group in (second, everyone, other, first, world)] == [1, 1, 0, 0, 0]


def test_group_made_anew_has_the_next_number(world: Any) -> None:
    groups = RankGroups()
    first = dist.new_group([1, 2])
    assert groups.of([first]).ordinal == 0
    dist.destroy_process_group(first)
    del first
    gc.collect()
    assert groups.of([dist.new_group([1, 2])]).ordinal == 1
    assert groups.of([world]).ordinal == 0


def test_group_that_no_call_used_counts_too(world: Any) -> None:
    groups = RankGroups()
    unused = dist.new_group([1, 2])
    assert groups.of([world]).ordinal == 0
    dist.destroy_process_group(unused)
    assert groups.of([dist.new_group([1, 2])]).ordinal == 1


@pytest.mark.usefixtures("world")
def test_numbers_do_not_depend_on_groups_of_an_earlier_run() -> None:
    def numbers() -> list[int]:
        groups = RankGroups()
        made = [dist.new_group([1, 2]) for _ in range(2)]
        found = [groups.of([group]).ordinal for group in made]
        for group in made:
            dist.destroy_process_group(group)
        return found

    assert numbers() == numbers() == [0, 1]


def test_object_keeps_no_group_alive(world: Any) -> None:
    groups = RankGroups()
    group = dist.new_group([1, 2])
    groups.of([group])
    groups.of([world])
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert len(groups._known) == 1


def test_group_that_torch_does_not_list_has_no_ranks() -> None:
    lone = dist.ProcessGroup(dist.HashStore(), 0, 1)
    assert RankGroups().of([lone]) == RankGroup((), 0, own=0)
    assert RankGroups().of(["no such group"]) == RankGroup()
    assert RankGroups().of([]) == RankGroup()
    assert RankGroups().of(["", [4, 5]]) == RankGroup((4, 5))


# ----------------------------------------------------------------------------------- what this needs from inside torch


def test_torch_resolves_the_name_of_a_group(world: Any) -> None:
    assert RankGroups().of([world.group_name]) == RankGroup((0, 1, 2, 3), 0, own=2)


def test_torch_unboxes_a_group(world: Any) -> None:
    assert RankGroups().of([world.boxed()]) == RankGroup((0, 1, 2, 3), 0, own=2)


@pytest.mark.usefixtures("world")
def test_torch_finds_a_group_by_tag_and_ranks() -> None:
    dist.new_group([1, 2])
    second = c10d._new_group_with_tag([1, 2], pg_tag="mine")
    assert RankGroups().of(["user:mine", [1, 2]]).ordinal == 1
    assert second is not None


def test_torch_lists_groups_in_order_of_creation(world: Any) -> None:
    made = [dist.new_group([2]) for _ in range(12)]
    assert list(c10d._world.pg_names) == [world, *made]


def test_ranks_of_a_group_are_counted_from_its_own() -> None:
    group = RankGroup((4, 6), own=1)
    assert [group.global_rank(rank) for rank in (0, 1, 2, -1, None)] == [4, 6, None, None, None]
