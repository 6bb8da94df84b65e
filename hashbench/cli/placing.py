"""Which accelerators the workers of a command get, by what a child process tells of this machine.

A process that has asked CUDA anything cannot fork workers that use it, so this one never asks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from hashbench.cli.flags import say
from hashbench.devices import visibility


@dataclass(frozen=True, slots=True)
class Placed:
    """The ``environment``'s fingerprint; ``device`` as workers call theirs; the ``shares`` that they are given in turn
    (none on the CPU and on kinds that cannot be shared out)."""

    environment: dict[str, Any]
    device: str
    shares: tuple[visibility.Share, ...] = ()


def placed(device: str) -> Placed:
    """What workers on ``device`` get; says in a line each which devices are left out and which variable does not count.

    Raises:
        HashbenchError: the device is not here.
    """
    from hashbench.run.environment import collect_in_child
    from hashbench.sweep.executors.local import WORKER_VARIABLES

    environment = collect_in_child(device=device, variables=WORKER_VARIABLES)
    shares = visibility.shares(device, environment, os.environ)
    if not shares:
        return Placed(environment, device)
    for line in (
        visibility.left_out(device, environment),
        visibility.workspace_conflict(os.environ.get(visibility.WORKSPACE_VARIABLE)),
    ):
        if line:
            say(line, 0)
    # Each worker sees its own as number 0, so the rows of cuda:1 are rows of cuda.
    return Placed(environment, visibility.kind(device), shares)
