"""What running every op again costs: one training step under ``BitwiseEquivalenceMode``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping

import torch

from benchmarks.overhead import Arm, NoOp, interleaved, multiples
from benchmarks.table import Table
from benchmarks.workloads import WORKLOADS
from hashbench.tools.bitwise import BitwiseEquivalenceMode

ARMS: Mapping[str, Arm] = {
    "no mode": contextlib.nullcontext,
    "no-op mode": NoOp,
    "2 runs": BitwiseEquivalenceMode,
    "3 runs": functools.partial(BitwiseEquivalenceMode, runs=3),
    "2 runs, no schema believed": functools.partial(BitwiseEquivalenceMode, trust_schema=False),
}


def measure(*, seconds: float) -> list[Table]:
    """One row for each workload: time as a multiple of the step without a mode.

    Args:
        seconds: measure each workload for about so long, at least five repetitions.
    """
    torch.manual_seed(0)
    measured = {name: interleaved(make(), seconds=seconds, arms=ARMS) for name, make in WORKLOADS.items()}
    return [multiples(measured, title="One training step with every op run again, as a multiple of the plain step")]
