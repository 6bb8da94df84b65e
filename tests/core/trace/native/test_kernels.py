"""Calls that are not dispatched become records like those of the Python tracer, most of them made in C++."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hashbench.core.native.library import is_recorded
from hashbench.core.records import Trace
from hashbench.core.trace.callbacks import TraceOptions
from hashbench.core.trace.digest import digest
from hashbench.core.trace.generated import allocation_plan
from hashbench.core.trace.mode import TracingMode
from hashbench.core.trace.native import make_tracer
from hashbench.core.trace.native.tracer import NativeTracer
from hashbench.core.trace.op_schema import OpPlan
from hashbench.core.trace.tracer import native_unavailable

pytestmark = pytest.mark.skipif(native_unavailable() is not None, reason="the native tracer cannot be built here")


def _double(x: torch.Tensor, out: torch.Tensor, *_: Any) -> None:
    torch.mul(x, 2, out=out)


def _kernel(call: Callable[..., Any] = _double) -> OpPlan:
    return OpPlan("cpp_fused_mul_0", call=call, written=(1,), writes_arguments=True, module="Net.fc")


def _recorded(plan: OpPlan, args: Sequence[Any]) -> tuple[NativeTracer, Trace]:
    with make_tracer(TraceOptions()) as tracer:
        tracer.recorded(plan, args)
        args[1].neg()
    return tracer, tracer.built()[0]


def _in_python(plan: OpPlan, args: Sequence[Any]) -> Trace:
    with TracingMode(TraceOptions()) as mode:
        assert mode._compiled is not None
        mode._compiled._tracing.recorded(plan, args)
        args[1].neg()
    return mode.built()[0]


X = torch.arange(6.0).reshape(2, 3)
WHOLE = {
    "contiguous": lambda: (X, torch.zeros(2, 3)),
    "transposed": lambda: (X.t(), torch.zeros(3, 2)),
    "transposed and written": lambda: (X, torch.zeros(3, 2).t()),
    "with numbers": lambda: (X, torch.zeros(2, 3), 7, -1),
    "parameter": lambda: (torch.nn.Parameter(X, requires_grad=False), torch.zeros(2, 3)),
    "read and written": lambda: (lambda both: (both, both))(torch.ones(2, 3)),
}
OTHERS = {
    "part of a leaf": lambda: (X[:, 1], torch.zeros(2)),
    "written part of a leaf": lambda: (X, torch.zeros(3, 3)[:2]),
    "conjugated": lambda: (torch.ones(2, dtype=torch.complex64).conj(), torch.zeros(2, dtype=torch.complex64)),
    "float": lambda: (X, torch.zeros(2, 3), 0.5),
    "many": lambda: (X, torch.zeros(2, 3), *range(63)),
}


@pytest.mark.parametrize("name", [*WHOLE, *OTHERS])
def test_trace_is_that_of_the_python_tracer(name: str) -> None:
    made = (WHOLE | OTHERS)[name]
    tracer, trace = _recorded(_kernel(), made())
    expected = _in_python(_kernel(), made())
    assert trace.records == expected.records
    assert [(leaf.kind, leaf.digest) for leaf in trace.leaves] == [(leaf.kind, leaf.digest) for leaf in expected.leaves]
    assert trace.records[0].module == "Net.fc"
    assert bool(tracer.nodes.records or tracer.nodes.leaves) == (name in OTHERS)


def test_use_counts_are_as_without_a_trace() -> None:
    x, out = torch.ones(2), torch.zeros(2)
    counts = []
    plan = _kernel(lambda x, out: counts.append((x._use_count(), out._use_count())))
    plan.call(x, out)
    _recorded(plan, (x, out))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("collects", [False, True])
def test_kernel_runs_without_recording_and_garbage_collection(collects: bool) -> None:
    seen = []
    (gc.enable if collects else gc.disable)()
    try:
        with make_tracer(TraceOptions()) as tracer:
            tracer.recorded(_kernel(lambda *_: seen.append((gc.isenabled(), is_recorded()))), (X, torch.zeros(2, 3)))
            seen.append((gc.isenabled(), is_recorded()))
    finally:
        gc.enable()
    assert seen == [(False, False), (collects, True)]


def test_kernel_that_raises_has_no_record() -> None:
    def fails(*_: Any) -> None:
        raise KeyboardInterrupt

    args = X, torch.zeros(2, 3)
    with make_tracer(TraceOptions()) as tracer:
        with pytest.raises(KeyboardInterrupt):
            tracer.recorded(_kernel(fails), args)
        X.neg()
    assert [record.op for record in tracer.built()[0].records] == ["aten.neg.default"]
    assert tracer.raw.failed_op == "cpp_fused_mul_0"


def test_allocation_is_recorded_with_its_arguments() -> None:
    plan = allocation_plan("empty_strided_cpu", torch.empty_strided)
    with make_tracer(TraceOptions()) as tracer:
        tensor = torch.zeros(3, 2, dtype=torch.float64).t()
        assert tracer.add_allocation(plan, tensor)
        assert not tracer.add_allocation(plan, tensor.to_sparse())
        tensor.neg()
    records = [one for one in tracer.built()[0].records if one.op.startswith("inductor")]
    (output,) = records[0].outputs
    assert [one.arguments for one in records] == ["[2, 3], [1, 2], torch.float64"]
    assert (output.dtype, output.shape, output.stride, output.value) == ("float64", (2, 3), (1, 2), "")
    assert tracer.built()[0].records[-1].inputs[0].source == records[0].id


def test_transposed_leaf_of_an_op_is_hashed_in_c() -> None:
    weight = X.t()
    with make_tracer(TraceOptions()) as tracer:
        torch.mm(weight, torch.ones(2, 2))
    assert (tracer.nodes.records, tracer.nodes.leaves) == ([], {})
    assert tracer.built()[0].leaves[0].digest == digest(weight)


def test_a_trace_with_kernels_has_no_cheap_token() -> None:
    tracer, _ = _recorded(_kernel(), WHOLE["contiguous"]())
    assert tracer.content() == b""
