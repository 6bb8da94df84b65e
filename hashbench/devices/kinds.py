"""Registry of digest functions by device type, with fallback to torch's own ops.

Those of hashbench are in :data:`BUILT_IN`; an installed package brings others by the entry-point group
``hashbench.devices``. ``docs/devices.md`` says what such a function must do.
"""

from __future__ import annotations

import functools
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
    return tuple(DeviceKind(point.value, (point.name,), functools.partial(_load_point, point)) for point in points)


def _load_point(point: EntryPoint, _device: torch.device) -> Accumulate:
    return point.load().accumulate  # type: ignore[no-any-return]


def _load_triton(device: torch.device) -> Accumulate:
    if importlib.util.find_spec("triton") is None:
        raise Unfit("it is not installed")
    if device.type == "cuda" and not torch.version.hip:
        capability = torch.cuda.get_device_capability(device)
        if capability < _OLDEST_FOR_TRITON:
            needed, present = (".".join(map(str, version)) for version in (_OLDEST_FOR_TRITON, capability))
            raise Unfit(f"needs compute capability {needed}, this card has {present}")
    from hashbench.devices import triton_kernel

    return triton_kernel.accumulate


BUILT_IN = (DeviceKind("triton", ("cuda", "xpu"), _load_triton),)
"""``cuda`` is ROCm too."""
