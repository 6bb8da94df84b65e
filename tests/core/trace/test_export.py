"""Programs that trace, transform or export a model under ``HashDebugTrace``: their result is as without it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hashbench import HashDebugTrace
from hashbench.core.trace.digest import digest

MODEL = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.BatchNorm1d(4)).eval()
X = torch.arange(12.0).reshape(3, 4)


def f(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x).sum()


def jit_graph() -> str:
    return re.sub(r"\.___torch_mangle_\d+", "", str(torch.jit.trace(MODEL, (X,)).graph))


def in_fake_mode() -> str:
    with FakeTensorMode():
        x = torch.empty(3, 4)
        return str((x @ x.T).sum())


def on_meta() -> str:
    with torch.device("meta"):
        return str(torch.nn.Linear(4, 4)(torch.ones(3, 4)).sum())


PROGRAMS: dict[str, Callable[[], Any]] = {
    "torch.export": lambda: str(torch.export.export(MODEL, (X,)).graph),
    "torch.export, strict": lambda: str(torch.export.export(MODEL, (X,), strict=True).graph),
    "torch.jit.trace": jit_graph,
    "torch.fx": lambda: torch.fx.symbolic_trace(MODEL).code,
    "make_fx": lambda: make_fx(f)(X).code,
    "make_fx, fake": lambda: make_fx(f, tracing_mode="fake")(X).code,
    "make_fx, symbolic": lambda: make_fx(f, tracing_mode="symbolic")(X).code,
    "functional_call": lambda: torch.func.functional_call(MODEL, dict(MODEL.named_parameters()), (X,)).tolist(),
    "vmap": lambda: torch.func.vmap(lambda x: MODEL(x[None])[0])(X).tolist(),
    "grad": lambda: torch.func.grad(f)(X).tolist(),
    "vmap of grad": lambda: torch.func.vmap(torch.func.grad(f))(X).tolist(),
    "jacrev": lambda: torch.func.jacrev(torch.sin)(X[0]).tolist(),
    "jvp": lambda: torch.func.jvp(torch.sin, (X,), (X,))[1].tolist(),
    "hessian": lambda: torch.func.hessian(f)(X[0]).tolist(),
    "functionalize": lambda: torch.func.functionalize(lambda x: x.clone().add_(1))(X).tolist(),
    "fake tensors": in_fake_mode,
    "meta tensors": on_meta,
}


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("options", [{}, {"hash_inputs": True, "model": MODEL, "inputs": X}], ids=["plain", "hashed"])
def test_the_result_is_as_without_a_trace(name: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    expected = PROGRAMS[name]()
    torch._dynamo.reset()
    with HashDebugTrace(**options) as trace:
        assert PROGRAMS[name]() == expected
    for record in trace.finish().records:
        assert record.blank or all(output.value for output in record.outputs)


def test_fake_tensors_are_neither_recorded_nor_hashed() -> None:
    with FakeTensorMode():
        fake = torch.empty(3, 4)
    with HashDebugTrace(inputs=fake) as trace:
        (fake + 1).relu()
        trace.add_result("fake", fake)
    assert trace.finish().records == ()
    assert trace.finish().results[0].digest == digest(fake)
    assert digest(fake).value == "fake"


EXPORTED = """
import torch
from hashbench import HashDebugTrace
with HashDebugTrace() as trace:
    exported = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(3, 2),))
    exported.module()(torch.ones(3, 2))
print("aten.addmm.default" in [record.op for record in trace])
"""


@pytest.mark.slow
def test_first_export_under_a_trace_does_not_crash() -> None:
    done = subprocess.run([sys.executable, "-c", EXPORTED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
