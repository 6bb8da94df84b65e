"""Native traces and programs in a process of their own, shared by the tests of the native tracer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from hashbench import HashDebugTrace
from hashbench.core.records import Trace


@torch.library.custom_op("hashbench_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


def traced(compute: Callable[[], Any], **options: Any) -> tuple[Trace, Any]:
    with HashDebugTrace(tracer="native", **options) as trace:
        found = compute()
    return trace.finish(), found


def names(trace: Trace) -> list[str]:
    return [record.op for record in trace.records]


def alone(program: str) -> None:
    """Run it in a process of its own, whose memory is overwritten as soon as it is given back."""
    environment = {**os.environ, "MALLOC_PERTURB_": "85"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]
