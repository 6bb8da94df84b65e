"""Environment variables for accelerators: visible devices of a worker, and cuBLAS's workspace configuration. Pure.

CUDA, ROCm and Level Zero read them once, when a process initializes them; a worker gets its own before that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hashbench.core.text import join_limited

WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"

_REPEATABLE_WORKSPACES = (":4096:8", ":16:8")
"""Values under which cuBLAS gives the same bits for the same call on any stream: NVIDIA's documentation of cuBLAS,
"Results Reproducibility". ``torch.use_deterministic_algorithms`` accepts these and refuses all others."""

_VISIBLE = {"cuda": ("CUDA_VISIBLE_DEVICES",), "xpu": ("ZE_AFFINITY_MASK",)}
_VISIBLE_ROCM = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Variables that limit a process to some devices. The first is set for workers; if a user has not set it, the next one
counts. ROCm renumbers the devices left by ``ROCR_VISIBLE_DEVICES``, so that one is kept as it is."""

SHARE_OF_MEMORY = 0.9
"""Fraction of a device's memory that its workers may use together."""


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """One device for workers.

    Attributes:
        variables: environment by which a process sees this device alone, as number 0.
        memory_mib: memory budget of its workers together, in MiB (``None``: unknown).
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    memory_mib: float | None = None


def kind(device: str) -> str:
    """Return ``cuda`` for ``cuda:1``."""
    return device.partition(":")[0]


def assignments(
    device: str, fingerprint: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[DeviceAssignment, ...]:
    """Return the devices that workers on ``device`` are assigned in turn, one each.

    A ``device`` with a number is that one alone. Without a number it is every device of the same model as the first:
    results of another GPU model are results of another machine. Numbers are those visible to this process, so devices
    that a user made visible, as numbers or UUIDs, are the ones shared out.

    Args:
        device: ``cuda``, ``cuda:1``, ``xpu`` …; ``()`` for the CPU and kinds without such a variable.
        fingerprint: result of :func:`hashbench.core.run.environment.collect` for this device.
        environment: environment variables of the process that collected it.
    """
    names, devices = _visible(device, fingerprint), _devices(fingerprint)
    if not names or not devices:
        return ()
    given = next((environment[name] for name in names if name in environment), None)
    # The driver stops at the first listed entry that is no device: there may be more entries.
    entries = [str(number) for number in range(len(devices))] if given is None else given.split(",")
    if (number := _number(device)) is not None:
        wanted = [number] if number < len(devices) else []
    else:
        wanted = [index for index, other in enumerate(devices) if _model(other) == _model(devices[0])]
    memories = [facts.get("memory_mib") for facts in devices]
    return tuple(
        DeviceAssignment(
            {names[0]: entries[index].strip()},
            None if (memory := memories[index]) is None else SHARE_OF_MEMORY * float(memory),
        )
        for index in wanted
        if index < len(entries)
    )


def freest(count: int, taken: Iterable[int | None]) -> int | None:
    """Return the first of ``count`` devices with the fewest running workers; ``taken`` lists the device of each worker.
    ``None`` if there is no device."""
    workers = Counter(taken)
    return min(range(count), key=lambda device: workers[device], default=None)


def left_out(device: str, fingerprint: Mapping[str, Any]) -> str:
    """Describe in one line the visible devices that are not used; ``""`` if there are none."""
    if not _visible(device, fingerprint) or _number(device) is not None:
        return ""
    used, *others = [str(facts.get("name", "")) for facts in _devices(fingerprint)] or [""]
    unused = sorted({*others} - {used})
    if not unused:
        return ""
    return f"only devices like {used} are used, not {join_limited(unused)}: sweep those by number, as {device}:1"


def _visible(device: str, fingerprint: Mapping[str, Any]) -> tuple[str, ...]:
    if kind(device) == "cuda" and fingerprint.get("torch", {}).get("hip_build"):
        return _VISIBLE_ROCM
    return _VISIBLE.get(kind(device), ())


def _devices(fingerprint: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    devices: Sequence[Mapping[str, Any]] = fingerprint.get("device", {}).get("each", ())
    return devices


def _number(device: str) -> int | None:
    number = device.partition(":")[2]
    return int(number) if number else None


def _model(facts: Mapping[str, Any]) -> tuple[Any, Any]:
    return facts.get("name"), facts.get("capability")


# ------------------------------------------------------------------------------------------------------ cuBLAS


def workspace_config(given: str | None) -> str:
    """Return the ``CUBLAS_WORKSPACE_CONFIG`` to use: the user's (``given``; ``None`` if unset) if cuBLAS is
    deterministic under it, else the value that ``benchmarks/dynamo`` sets."""
    return given if given is not None and given in _REPEATABLE_WORKSPACES else _REPEATABLE_WORKSPACES[0]


def workspace_conflict(given: str | None) -> str:
    """Describe in one line that a user's value is overridden; ``""`` if it is not."""
    wanted = workspace_config(given)
    if given is None or given == wanted:
        return ""
    return f"{WORKSPACE_VARIABLE}={given} lets cuBLAS differ from call to call: {wanted} is in force instead"
