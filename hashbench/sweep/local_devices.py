"""Which accelerators the workers of this machine get, by what a child process tells of them.

A process that has asked CUDA anything cannot fork workers that use it, so this one never asks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from hashbench.devices import visibility
from hashbench.run import environment as fingerprints
from hashbench.sweep.executors.local import WORKER_VARIABLES


@dataclass(frozen=True, slots=True)
class LocalDevices:
    """The ``environment``'s fingerprint; ``device`` as workers call theirs; the ``assignments`` that they are given in
    turn (none on the CPU and on kinds that cannot be shared out); ``notes`` for the user, a line each."""

    environment: dict[str, Any]
    device: str
    assignments: tuple[visibility.DeviceAssignment, ...] = ()
    notes: tuple[str, ...] = ()


def local_devices(device: str) -> LocalDevices:
    """What workers on ``device`` get; its notes say which devices are left out and which variable does not count.

    Raises:
        HashbenchError: the device is not here.
    """
    environment = fingerprints.collect_in_child(device=device, variables=WORKER_VARIABLES)
    assignments = visibility.assignments(device, environment, os.environ)
    if not assignments:
        return LocalDevices(environment, device)
    notes = (
        visibility.left_out(device, environment),
        visibility.workspace_conflict(os.environ.get(visibility.WORKSPACE_VARIABLE)),
    )
    # Each worker sees its own as number 0, so the rows of cuda:1 are rows of cuda.
    return LocalDevices(environment, visibility.kind(device), assignments, tuple(filter(None, notes)))
