"""Program: trace the first and the second call of a function that Inductor compiles to Triton; print both traces."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

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


def measuring_as_on_a_gpu() -> None:
    """Let each launch in the interpreter begin with what autotuning does on a GPU: calls on copies, and a cache that is
    cleared."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    run = CachingAutotuner.run

    def measured(autotuner: Any, *args: Any, stream: int, **others: Any) -> Any:
        copies, _ = autotuner.clone_args(*args)
        run(autotuner, *copies, stream=stream, **others)
        torch.empty(1000, dtype=torch.int8).zero_()
        return run(autotuner, *args, stream=stream, **others)

    CachingAutotuner.run = measured


def main(tracer: str, device: str) -> None:
    interpreted.prepare(device)
    if device == "cpu":
        measuring_as_on_a_gpu()
    compiled = torch.compile(program, options={"max_autotune_pointwise": True})  # several configurations
    sys.stdout.write(json.dumps([traced(compiled, tracer, device) for _ in range(2)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
