"""Program: trace the first and the second call of a function that Inductor compiles to Triton; print both traces."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch

from hashbench import HashDebugTrace
from hashbench.core.inductor.internals import without_graph_caches
from hashbench.core.trace import file
from tests.core.inductor import interpreted


def program(x: torch.Tensor, y: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    seen.add_(1)
    return ((x * y).relu() @ y.T).sum(0)


def traced(compiled: Callable[..., torch.Tensor], tracer: str, device: str) -> str:
    x, y = (torch.linspace(-first, first, 48, device=device).reshape(6, 8) for first in (1, 2))
    seen = torch.zeros(6, device=device)
    with without_graph_caches(), HashDebugTrace(tracer=tracer, inputs=[x, y, seen]) as trace:
        trace.add_result("output", compiled(x, y, seen))
    return file.dumps(trace.finish())


def main(tracer: str, device: str) -> None:
    interpreted.prepare(device)
    compiled = torch.compile(program, options={"max_autotune_pointwise": True})  # several configurations
    sys.stdout.write(json.dumps([traced(compiled, tracer, device) for _ in range(2)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
