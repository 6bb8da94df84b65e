"""Program: compile a sum twice, with the smallest and with the largest block that autotuning tries; print how the
kernels of the two compilations compare."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch

from hashbench import HashDebugTrace
from hashbench.core.inductor.internals import CapturedGraphs, reset_dynamo, without_graph_caches
from hashbench.extensions.compiled.compilations import _cache_in
from hashbench.extensions.compiled.compiled_kernels import ListedKernel
from hashbench.extensions.compiled.kernel_list import KernelList
from hashbench.extensions.compiled.observed import KernelWatcher
from hashbench.extensions.compiled.sources import compare
from tests.core.inductor import interpreted


def program(x: torch.Tensor) -> torch.Tensor:
    return (x * 1.5).sum(-1)


def kernels(x: torch.Tensor, choose: Callable[..., Any]) -> tuple[ListedKernel, ...]:
    """The kernels of one compilation, whose configuration is chosen among those of Inductor."""
    from torch._inductor.runtime import triton_heuristics

    right, found = triton_heuristics.cached_autotune, KernelList()

    def chosen(size_hints: Any, configs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        return right(size_hints, [choose(configs, key=lambda one: one.kwargs["R0_BLOCK"])], *args, **kwargs)

    reset_dynamo()
    options = {"max_autotune": True, "compile_threads": 1, "dynamic_scale_rblock": False}
    with (
        tempfile.TemporaryDirectory() as folder,
        _cache_in(folder),
        patch.object(triton_heuristics, "cached_autotune", chosen),
        CapturedGraphs() as hooks,
        without_graph_caches(),
    ):
        compiled = torch.compile(program, options=options)
        compiled(x)
        with HashDebugTrace(watcher=KernelWatcher(hooks.graphs, found)):
            compiled(x)
    return found.result()


def main(device: str) -> None:
    interpreted.prepare(device)
    x = torch.randn(4, 5_000, generator=torch.Generator().manual_seed(0)).to(device)
    difference = compare(kernels(x, min), kernels(x, max))
    first = difference.first
    print(json.dumps({"sources": len(difference.by_source), "what": "" if first is None else first.what}))


if __name__ == "__main__":
    main(*sys.argv[1:])
