"""Generated kernels for tests: stand-ins in Python, and one that torch's compiler makes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hashbench.core.diagnose.calls.call import CapturedCall
from hashbench.core.diagnose.calls.capture import capture
from hashbench.core.trace.api import HashDebugTrace
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.generated import GeneratedKernel
from hashbench.core.trace.op_schema import OpPlan

SOURCE = 'extern "C" void kernel(const float* in_ptr0, float* out_ptr0) { out_ptr0[0] = 2 * in_ptr0[0]; }\n'


@dataclass(eq=False)
class FakeKernel:
    """A kernel that combines what it computes of its input in any order, on one thread in one.

    ``types``, ``source``: of a kernel that it does not resemble. ``filled``: it is given memory that nothing wrote, and
    leaves its second element as it is.
    """

    combine: Callable[[np.ndarray[Any, Any]], float]
    ordered: bool = False
    openmp: bool = True
    source: str = SOURCE
    types: tuple[str, ...] = ("const float*", "float*")
    filled: tuple[int, ...] = ()
    config: str = ""

    def __post_init__(self) -> None:
        self.plan = OpPlan("cpp_fused_fake_0", call=self, written=(1,), writes_arguments=True, filled=self.filled)

    def __call__(self, values: torch.Tensor, out: torch.Tensor) -> None:
        order = list(range(values.numel()))
        if not self.ordered:
            random.SystemRandom().shuffle(order)
        out[0] = self.combine(torch.nn.functional.gelu(values).numpy()[order])

    def single_thread(self) -> Any:
        if not self.openmp:
            raise LookupError("no OpenMP runtime is loaded whose threads could be limited")
        return self._single()

    @contextmanager
    def _single(self) -> Iterator[None]:
        before, self.ordered = self.ordered, True
        try:
            yield
        finally:
            self.ordered = before


def added(values: np.ndarray[Any, Any]) -> float:
    return float(np.add.accumulate(values, dtype=np.float32)[-1])


def last(values: np.ndarray[Any, Any]) -> float:
    return float(values[-1])


TRITON = """
import triton
import triton.language as tl
from torch._inductor.runtime import triton_heuristics, triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
triton_helpers.set_driver_to_gpu()

@triton_heuristics.pointwise(
    size_hints={'x': 4}, filename=__file__,
    triton_meta={'signature': {'in_ptr0': '*fp32', 'out_ptr0': '*fp32', 'XBLOCK': 'constexpr'}, 'constants': {},
        'device': DeviceProperties(type='cuda', index=0, multi_processor_count=132, cc=90, warp_size=32)},
    inductor_meta={'grid_type': 'FixedGrid', 'fixed_grid': ['1', '1', '1'], 'mutated_arg_names': []},
)
@triton.jit
def cpp_fused_fake_0(in_ptr0, out_ptr0, XBLOCK : tl.constexpr):
    index = tl.arange(0, 2)
    tl.store(out_ptr0 + index, tl.load(in_ptr0 + index) + XBLOCK)
"""
TRITON_CONFIG = "triton.Config({'XBLOCK': 4096}, num_warps=4, num_stages=1)"


def triton_kernel() -> FakeKernel:
    """A kernel whose source is Triton: it adds its block size to two values."""
    return FakeKernel(added, source=TRITON, types=("*fp32", "*fp32"), config=TRITON_CONFIG)


def call_of(kernel: FakeKernel, count: int = 300) -> CapturedCall:
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))
    return capture(kernel, (values, torch.zeros(2)), {}, limit_bytes=2**20)


ROWS, BINS = 400_000, 20


class Scatter(torch.nn.Module):
    """Adds many values to few bins: compiled for several threads, with atomic additions in one generated kernel."""

    def __init__(self, *, accumulate: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(ROWS, generator=generator))
        self.register_buffer("bins", torch.randint(0, BINS, (ROWS,), generator=generator))
        self.accumulate = accumulate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = torch.nn.functional.gelu(self.weight * x)
        if not self.accumulate:
            return values * 2
        return torch.zeros(BINS).index_put((self.bins,), values, accumulate=True)


class Captor(TraceCallback):
    """Captures the last call of a generated kernel."""

    def __init__(self) -> None:
        self.call: CapturedCall | None = None

    def before(self, node: str, func: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        if isinstance(func, GeneratedKernel):
            self.call = capture(func, args, kwargs, limit_bytes=2**28)


def captured_kernel(function: Callable[..., Any], *inputs: torch.Tensor) -> CapturedCall:
    """Compile a function and capture the call of its generated kernel; compiled code is left for the caller to drop."""
    compiled, captor = torch.compile(function), Captor()
    with torch.no_grad(), HashDebugTrace(watcher=captor):
        compiled(*inputs)
    assert captor.call is not None
    return captor.call
