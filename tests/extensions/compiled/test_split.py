"""Whether lowering or code generation made a buffer wrong: real IR, and what a kernel might have written."""

from __future__ import annotations

import pytest
import torch

from hashbench.core.inductor.graphs import BufferWrite, CompiledGraph, KernelCall
from hashbench.core.run.rounding import LIMIT
from hashbench.extensions.compiled.split import StageSplit, _explained
from tests.extensions.compiled.steps import show

X = torch.linspace(-2, 3, 24).reshape(4, 6)


def explained(exact: list[float], own: list[float], dtype: torch.dtype = torch.float32) -> list[float]:
    found: list[float] = _explained(torch.tensor(exact, dtype=torch.float64), torch.tensor(own), dtype).tolist()
    return found


def test_allowed_is_what_the_own_dtype_loses_and_no_less_than_one_rounding() -> None:
    unit = 2.0**-24
    first, second = explained([1.0, 1.0], [1.0, 1.5])
    mean = (0.25 / 2) ** 0.5
    assert first == pytest.approx(unit + mean, rel=1e-6)
    assert second == pytest.approx(0.5 + mean, rel=1e-6)
    assert explained([4.0], [4.0]) == pytest.approx([8 * unit])
    assert explained([4.0], [4.0], torch.bfloat16) == pytest.approx([8 * 2.0**-8])
    assert _explained(torch.tensor([3]), torch.tensor([3]), torch.int64).tolist() == [0.0]


def gelu_and_sum(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.nn.functional.gelu(x)
    return wide, wide.sum(1)


def compiled() -> CompiledGraph:
    from tests.extensions.compiled.lowering import lower

    lowered = lower(gelu_and_sum, (X,), interpret=False).graph
    nodes = {one.get_name(): one.get_origin_node() for one in lowered.buffers}
    buffers = {one.get_name(): one for one in lowered.buffers}
    known = {name: node for name, node in nodes.items() if node is not None}
    assert isinstance(lowered.module, torch.fx.GraphModule)
    return CompiledGraph("t.py", lowered.module, known, buffers, lowering=lowered)


@pytest.fixture(scope="module")
def graph() -> CompiledGraph:
    return compiled()


def split(graph: CompiledGraph, written: torch.Tensor, *, buffer: str = "buf0", node: str = "k") -> StageSplit:
    split = StageSplit("k", buffer)
    total = torch.nn.functional.gelu(X).sum(1)
    writes = (BufferWrite("buf0", written), BufferWrite("buf1", total))
    called = KernelCall(node, "cpp_fused_gelu_sum_0", writes=writes, last=frozenset({"buf0", "buf1"}))
    show(split, graph, [X], called)
    return split


RIGHT = torch.nn.functional.gelu(X)


@pytest.mark.slow
@pytest.mark.parametrize(("written", "stage"), [(RIGHT, ""), (RIGHT * 1.01, "codegen"), (RIGHT.abs(), "codegen")])
def test_what_the_ir_does_not_say_is_code_generation(graph: CompiledGraph, written: torch.Tensor, stage: str) -> None:
    found = split(graph, written)
    assert found.stage == stage
    assert [one.op for one in found.ops] == ["aten.gelu.default"]
    assert found.expected is not None
    exact = torch.nn.functional.gelu(X.double())
    torch.testing.assert_close(found.expected.reference, exact)
    assert bool((RIGHT.double() - exact).abs().le(LIMIT * found.expected.allowed).all())


@pytest.mark.slow
def test_what_the_ir_says_is_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import lowering

    erf = torch.ops.aten.erf.default
    right, multiply = lowering.lowerings[erf], lowering.lowerings[torch.ops.aten.mul.Tensor]
    monkeypatch.setitem(lowering.lowerings, erf, lambda *args, **kwargs: multiply(right(*args, **kwargs), 1.1))
    made = X * 0.5 * (1 + 1.1 * torch.erf(X / 2**0.5))
    assert split(compiled(), made).stage == "lowering"


@pytest.mark.slow
def test_what_cannot_be_told(graph: CompiledGraph) -> None:
    assert split(graph, RIGHT * 2, node="another").stage == ""
    assert split(graph, RIGHT * 2, node="another").expected is None
    assert split(graph, RIGHT[:2]).expected is None  # another size
    without = CompiledGraph("t.py", graph.module, graph.nodes, {}, lowering=graph.lowering)
    assert split(without, RIGHT * 2).expected is None
