"""Environment variables for accelerators: which devices a worker sees, and cuBLAS's workspace configuration. Pure.

CUDA, ROCm and Level Zero read them once, when a process starts to use them; a worker gets its own before that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hashbench.text import a_few

WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"

_REPEATABLE_WORKSPACES = (":4096:8", ":16:8")
"""Values under which cuBLAS gives the same bits for the same call on any stream: NVIDIA's documentation of cuBLAS,
"Results Reproducibility". ``torch.use_deterministic_algorithms`` accepts these and refuses all others."""

_VISIBLE = {"cuda": ("CUDA_VISIBLE_DEVICES",), "xpu": ("ZE_AFFINITY_MASK",)}
_VISIBLE_ROCM = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Variables by which a process sees some devices only. The first is the one that is set for a worker; where a user has
not set it, the next one counts. ROCm numbers what ``ROCR_VISIBLE_DEVICES`` leaves, so that one stays as it is."""

SHARE_OF_MEMORY = 0.9
"""Of a device's memory: what its workers may be expected to take together."""


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """One device for workers: the environment ``variables`` by which a process sees it alone, as number 0, and what
    its workers may take of its memory together (``None``: not known)."""

    variables: Mapping[str, str] = field(default_factory=dict)
    memory_mib: float | None = None


def kind(device: str) -> str:
    """``cuda`` of ``cuda:1``."""
    return device.partition(":")[0]


def assignments(
    device: str, fingerprint: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[DeviceAssignment, ...]:
    """The devices that workers on ``device`` are given, one each, in turn.

    A ``device`` with a number is that one alone. Without a number it is all that are like the first one: rows of
    another model of GPU are results of another machine. The numbers are those that this process sees, so whatever a
    user has made visible, as numbers or UUIDs, is what there is to share out.

    Args:
        device: ``cuda``, ``cuda:1``, ``xpu`` …; the CPU and kinds without such a variable give none.
        fingerprint: as :func:`hashbench.run.environment.collect` tells it, for this device.
        environment: the variables of the process for which that was told.
    """
    names, devices = _visible(device, fingerprint), _devices(fingerprint)
    if not names or not devices:
        return ()
    given = next((environment[name] for name in names if name in environment), None)
    # Of what a user lists, the driver stops at the first entry that is not a device: there may be more entries.
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
    """Of ``count`` devices the first with the fewest workers, where each that runs has ``taken`` one; ``None`` where
    there is no device."""
    workers = Counter(taken)
    return min(range(count), key=lambda device: workers[device], default=None)


def left_out(device: str, fingerprint: Mapping[str, Any]) -> str:
    """One line on the devices that are there and not used; empty where there is nothing to say."""
    if not _visible(device, fingerprint) or _number(device) is not None:
        return ""
    used, *others = [str(facts.get("name", "")) for facts in _devices(fingerprint)] or [""]
    unused = sorted({*others} - {used})
    if not unused:
        return ""
    return f"only devices like {used} are used, not {a_few(unused)}: sweep those by number, as {device}:1"


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
    """What ``CUBLAS_WORKSPACE_CONFIG`` has to be where a user has set it to ``given`` (``None``: not at all): that, if
    cuBLAS then repeats itself, else what ``benchmarks/dynamo`` sets."""
    return given if given is not None and given in _REPEATABLE_WORKSPACES else _REPEATABLE_WORKSPACES[0]


def workspace_conflict(given: str | None) -> str:
    """One line where a user's value is not the one that counts; empty where it is, or where there is none."""
    wanted = workspace_config(given)
    if given is None or given == wanted:
        return ""
    return f"{WORKSPACE_VARIABLE}={given} lets cuBLAS differ from call to call: {wanted} is in force instead"
