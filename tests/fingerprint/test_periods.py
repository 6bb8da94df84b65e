"""One period of numbers is mapped many times: little memory, no leaks, and a fallback."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hashbench.fingerprint import periods, values
from hashbench.fingerprint.measure import record
from hashbench.fingerprint.periods import Periods, can_repeat


def test_growing_keeps_modified_numbers() -> None:
    arena = values.Arena()
    arena.shared(4000, torch.float32, values=values.ANY, number=0)[0] ^= 1
    arena.shared(2**30, torch.float32, values=values.ANY, number=0)
    assert not arena.is_intact()


@pytest.mark.slow
def test_any_size_takes_one_period_of_memory() -> None:
    period = np.arange(values.PERIOD, dtype=np.uint32)
    repeated = Periods(period)
    small = repeated.room(4096, begin=16)
    large = repeated.room(2**30, begin=0).view(np.uint32)
    assert np.array_equal(large, np.resize(period, len(large)))
    large[-1] = 0  # in the last period, and so in all
    assert np.flatnonzero(large == 0).tolist()[1] == (len(large) - 1) % values.PERIOD
    assert not repeated.is_intact()
    del repeated
    assert small.view(np.uint32)[0] == 16  # who has memory keeps it


def test_no_descriptor_or_mapping_leaks() -> None:
    def held() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), Path("/proc/self/maps").read_text().count(
            "hashbench numbers"
        )

    before = held()
    arena = values.Arena()
    arena.shared(2**28, torch.float32, values=values.ANY, number=0)
    assert held()[0] == before[0] + 1
    assert held()[1] > before[1]
    del arena
    assert held() == before


def refused(*_: object) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.mark.parametrize("memfd", [None, refused])
def test_without_mapping_results_are_the_same(
    memfd: Callable[..., int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = torch.ones(2 * values.SHARED // 4)
    with_shared = record(lambda: large.sum(), name="sum")
    if memfd:
        monkeypatch.setattr(os, "memfd_create", memfd)
    else:
        monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(values, "Periods", None)
    assert not values.Arena(shares=True).shares
    assert record(lambda: large.sum(), name="sum").models == with_shared.models


def test_can_repeat_maps_little(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = []
    original = periods._map_over
    monkeypatch.setattr(periods, "_map_over", lambda *of: mapped.append(of) or original(*of))
    values.Arena(shares=True)
    assert 0 < len(mapped) < 10


def test_periods_fill_whole_pages() -> None:
    assert all(can_repeat(page, numbers=values.PERIOD) for page in (4096, 16384, 65536))
    assert not can_repeat(3 * 4096, numbers=values.PERIOD)
