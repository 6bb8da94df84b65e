"""Program, started with ``TRITON_INTERPRET=1``: trace a function that Inductor compiles to Triton; print the trace."""

from __future__ import annotations

import sys

import torch

from hashbench import HashDebugTrace
from hashbench.core.inductor.internals import without_graph_caches
from hashbench.core.trace import file
from tests.core.inductor.interpreted import write_triton_for_the_cpu


def program(x: torch.Tensor, y: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    seen.add_(1)
    return ((x * y).relu() @ y.T).sum(0)


def main(tracer: str) -> None:
    write_triton_for_the_cpu()
    compiled = torch.compile(program)
    x, y, seen = torch.linspace(-1, 1, 48).reshape(6, 8), torch.linspace(0, 2, 48).reshape(6, 8), torch.zeros(6)
    with without_graph_caches(), HashDebugTrace(tracer=tracer, inputs=[x, y, seen]) as trace:
        trace.add_result("output", compiled(x, y, seen))
    sys.stdout.write(file.dumps(trace.finish()))


if __name__ == "__main__":
    main(*sys.argv[1:])
