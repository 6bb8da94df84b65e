"""What this machine has for workers: cores and memory, as far as this process may use them."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_MIB = 2**20
_CONTROL_GROUPS = (
    # (limit, use, what counts as used but is given back when asked for), of version 2 and of version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def cores() -> tuple[int, ...]:
    """The numbers of the logical cores that this process may use. Those that share a physical core, then those of one
    package, stand beside each other, so that a slice of them has as little as possible in common with the rest."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return tuple(sorted(allowed, key=_place))


def _place(core: int) -> tuple[int, int, int]:
    """Package, physical core, number; Linux alone tells the first two."""
    topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        package, physical = (int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return 0, core, core
    return package, physical, core


def divided(cores: tuple[int, ...], *, workers: int) -> tuple[tuple[int, ...], ...]:
    """The cores of each of ``workers`` workers: as many for each, since the number of threads is a condition under
    which results are compared. What is left over stays free. With more workers than cores, they share."""
    size = len(cores) // workers
    if not size:
        return tuple((cores[worker % len(cores)],) for worker in range(workers))
    return tuple(cores[worker * size : (worker + 1) * size] for worker in range(workers))


def available_memory_mib() -> float:
    """Memory that new processes can take without making the system swap, in MiB: psutil's ``available``, or what the
    control group of a container leaves, if that is less."""
    left = [float(psutil.virtual_memory().available), *_left_in_groups()]
    return max(0.0, min(left)) / _MIB


def _left_in_groups() -> list[float]:
    left = []
    for limit_file, use_file, cached in _CONTROL_GROUPS:
        try:
            limit, use = int(Path(limit_file).read_text()), int(Path(use_file).read_text())  # "max": there is none
            statistics = dict(line.split() for line in Path(use_file).with_name("memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        left.append(float(limit - use + int(statistics.get(cached, 0))))
    return left
