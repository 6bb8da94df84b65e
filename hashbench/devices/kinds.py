"""Registry of digest functions by device type, with fallback to torch's own ops.

A kind of device is one function, ``accumulate(tensor, totals, place)``, in a file of its own: ``docs/devices.md`` says
what it must do. Those of hashbench are in :data:`BUILT_IN`; an installed package brings others by the entry-point group
``hashbench.devices``. A device without one, or one whose function cannot be used, gets torch's own ops, and
:class:`DigestPath` says why.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint, entry_points

import torch

from hashbench.devices import reference
from hashbench.errors import first_line

Accumulate = Callable[[torch.Tensor, torch.Tensor, int], None]
"""``accumulate(tensor, totals, place)``: adds the sum over the words of a dense tensor to ``totals[place]``, an
``int64``, on the device of both, without waiting for it."""

GROUP = "hashbench.devices"
FALLBACK = "torch ops"
_OLDEST_FOR_TRITON = (7, 0)


class Unfit(Exception):  # noqa: N818 – not an error: another function is taken
    """A function cannot be used for a device; the text says why."""


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """One function for some kinds of devices.

    Args:
        name: shown where users are told how digests are made.
        types: torch's names of the devices (``cuda``) that it is for.
        load: imports the function. Whatever it raises is the reason why the device does without.
    """

    name: str
    types: tuple[str, ...]
    load: Callable[[torch.device], Accumulate]


@dataclass(frozen=True, slots=True)
class DigestPath:
    """How digests are made on a device; a ``reason`` says why by nothing faster than torch's own ops."""

    name: str
    reason: str = ""

    def document(self) -> dict[str, str]:
        """For ``environment.json``."""
        return asdict(self)


def chosen(device: torch.device, *, built_in: tuple[DeviceKind, ...] | None = None) -> tuple[DigestPath, Accumulate]:
    """The fastest function for a device that can be loaded; what packages bring goes first."""
    reasons = []
    for kind in (*_from_packages(device.type), *(BUILT_IN if built_in is None else built_in)):
        if device.type not in kind.types:
            continue
        try:
            return DigestPath(kind.name), kind.load(device)
        except Exception as error:
            reasons.append(f"{kind.name}: {in_short(error)}")
    return DigestPath(
        FALLBACK, "; ".join(reasons) or f"nothing faster is known for {device.type}"
    ), reference.accumulate


def in_short(error: BaseException) -> str:
    """The first line of an error, with its type where it is none of ours."""
    text = first_line(error)
    return text if isinstance(error, Unfit) else f"{type(error).__name__}: {text}".removesuffix(": ")


def _from_packages(device_type: str) -> tuple[DeviceKind, ...]:
    points = sorted(entry_points(group=GROUP, name=device_type), key=lambda point: point.value)
    return tuple(_brought(point) for point in points)


def _brought(point: EntryPoint) -> DeviceKind:
    def load(_device: torch.device) -> Accumulate:
        function: Accumulate = point.load().accumulate
        return function

    return DeviceKind(point.value, (point.name,), load)


def _load_triton(device: torch.device) -> Accumulate:
    if importlib.util.find_spec("triton") is None:
        raise Unfit("it is not installed")
    if device.type == "cuda" and not torch.version.hip:
        found = torch.cuda.get_device_capability(device)
        if found < _OLDEST_FOR_TRITON:
            raise Unfit(f"needs compute capability {_dotted(_OLDEST_FOR_TRITON)}, this card has {_dotted(found)}")
    from hashbench.devices import triton_kernel

    return triton_kernel.accumulate


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


BUILT_IN = (DeviceKind("triton", ("cuda", "xpu"), _load_triton),)
"""``cuda`` is ROCm too."""
