"""On which device a captured call is replayed, where that of its capture is not here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch


def devices_here() -> dict[str, int]:
    """How many devices there are of each kind that is numbered; empty on a machine that has none."""
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {} if current is None else {current.type: torch.accelerator.device_count()}


def substitutes(named: Iterable[str], here: Mapping[str, int]) -> dict[str, str]:
    """For a device that is ``named`` and not ``here``, the first of its kind.

    A call that names several devices of a kind is not moved: with two of them made one it would be another call. Nor is
    one whose kind is missing altogether. The device that neither is here nor has a substitute is refused where it is
    used.
    """
    numbers: dict[str, set[str]] = defaultdict(set)
    for name in named:
        kind, colon, number = name.partition(":")
        if colon and number.isdecimal():
            numbers[kind].add(number)
    return {
        f"{kind}:{number}": f"{kind}:0"
        for kind, found in numbers.items()
        if len(found) == 1
        for number in found
        if 0 < here.get(kind, 0) <= int(number)
    }


def named_in(document: Any) -> set[str]:
    """The devices of tensors, memories, generators and arguments in this part of a ``call.json``."""
    found: set[str] = set()
    todo = [document]
    while todo:
        value = todo.pop()
        if isinstance(value, list):
            todo += value
        elif isinstance(value, dict):
            todo += value.values()
            if isinstance(value.get("device"), str):
                found.add(value["device"])
    return found
