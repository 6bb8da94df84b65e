"""Each test is named after the internal of torch that has moved if it fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hashbench.extensions.compiled import aot


def _compiled(backend: aot.Backend) -> torch.Tensor:
    aot.reset()
    weight = torch.full((3,), 2.0, requires_grad=True)

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.elu(x * weight)

    torch.compile(model, backend=backend)(torch.ones(3)).sum().backward()
    aot.reset()
    assert weight.grad is not None
    return weight.grad


@pytest.mark.slow
def test_torch_dynamo_reset_forgets_what_was_compiled() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(graph)
        return graph(*inputs)

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    compiled = torch.compile(double, backend=aot.dynamo_backend(count))
    compiled(torch.ones(2))
    compiled(torch.ones(2))
    aot.reset()
    compiled(torch.ones(2))
    assert len(graphs) == 3
    assert graphs[0] is graphs[1] is not graphs[2]
    aot.reset()


@pytest.mark.slow
def test_torch_dynamo_backends_common_aot_autograd_gives_both_graphs_undecomposed() -> None:
    ops: dict[str, list[str]] = {}

    def keep(phase: str) -> aot.GraphRun:
        def run(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            assert not torch.is_grad_enabled()
            ops[phase] = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
            return torch.fx.Interpreter(graph).run(*inputs)

        return run

    gradient = _compiled(aot.aot_backend(keep("forward"), keep("backward")))
    assert gradient.tolist() == [1.0, 1.0, 1.0]
    assert "aten.elu.default" in ops["forward"]
    assert "aten.elu_backward.default" in ops["backward"]


def test_torch_inductor_decomposition_select_decomp_table_is_by_op_overload() -> None:
    table = aot.decomposition_table()
    decomposed = table[torch.ops.aten.elu.default](torch.tensor([-1.0, 1.0]))
    torch.testing.assert_close(decomposed, torch.nn.functional.elu(torch.tensor([-1.0, 1.0])))


def test_the_table_is_the_one_that_a_changed_entry_is_seen_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a decomposition that is wrong in this process is the one that is checked."""
    from torch._inductor import config
    from torch._inductor.decomposition import decompositions

    with config.patch(fallback_random=True):
        monkeypatch.setitem(decompositions, torch.ops.aten.elu.default, abs)
        assert aot.decomposition_table()[torch.ops.aten.elu.default] is abs


def test_torch_inductor_lowering_is_there_for_decompositions() -> None:
    values, _ = aot.decomposition_table()[torch.ops.aten.max_pool2d_with_indices.default](
        torch.ones(1, 1, 4, 4), [2, 2]
    )
    assert values.shape == (1, 1, 2, 2)
