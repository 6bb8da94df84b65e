"""Which node of dynamo's graphs first computes what eager mode does not?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hashbench.core.inductor.nodes import NodeFacts
from hashbench.extensions.compiled.dynamo_graphs import StaleNode, first_stale
from hashbench.extensions.compiled.ladder import Semantic, climb
from tests.extensions.compiled.steps import Norms, OnRounding, Step, ZeroGradient, made, step_of

SCALES = [1.0]
"""The scale of the model now: what a user's configuration may hold."""


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def assumed_number() -> float:
    return SCALES[-1]


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def assumed_tensor() -> torch.Tensor:
    return torch.full((4,), SCALES[-1], dtype=torch.float64)


class Scaled(Norms):
    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) + 1.0
        return (y * self.scale()).relu()


def scheduled(scale: Any, *, changes: bool) -> Step:
    """Two steps of a model, between which its scale changes."""

    def run(backend: Any, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        torch._dynamo.reset()
        SCALES[:] = [2.0]
        model = made(lambda: Scaled(scale)).to(dtype or torch.float32)
        called = model if backend is None else torch.compile(model, backend=backend)
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(dtype or torch.float32)
        first = called(x)
        SCALES[:] = [3.0 if changes else 2.0]
        return {"first": first.detach(), "second": called(x).detach()}

    return run


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "constant"),
    [
        pytest.param(assumed_number, "2.0", id="a number"),
        pytest.param(assumed_tensor, "assumed_tensor_0", id="a tensor, which is a node"),
    ],
)
def test_a_stale_constant_is_found(scale: Any, constant: str) -> None:
    run = scheduled(scale, changes=True)
    ladder = climb(run, backends=("eager",))
    assert (ladder.stage, ladder.semantic, ladder.rungs[0].result) == ("dynamo", Semantic.YES, "second")
    assert ladder.rungs[0].error is not None
    assert ladder.rungs[0].error > 1e3
    stale = first_stale(run)
    assert stale is not None
    assert (stale.graph, stale.node, stale.constants) == (1, "mul", (constant,))
    assert "y * self.scale()" in stale.facts.source


@pytest.mark.parametrize(
    ("op", "source", "constants", "words"),
    [
        ("operator.mul", "/a b/wrong.py:7 y = y * 1.01", ("1.01",), "wrong.py:7 multiplies by 1.01"),
        ("operator.iadd", "wrong.py:7", ("1",), "wrong.py:7 adds 1"),
        ("operator.mul", "wrong.py:7 y * y", (), "wrong.py:7 calls operator.mul"),
        ("torch.clamp", "/x/wrong.py:9 clamp(y, 0, 2)", ("0", "2"), "wrong.py:9 calls torch.clamp with 0 and 2"),
        ("torch.clamp", "", ("0.3",), "Net.act calls torch.clamp with 0.3"),
    ],
)
def test_the_finding_in_words(op: str, source: str, constants: tuple[str, ...], words: str) -> None:
    stale = StaleNode(1, "y_1", NodeFacts(op, "Net.act", source), constants)
    assert str(stale) == f"{words} where eager mode does not (y_1 of graph 1)"


@pytest.mark.slow
@pytest.mark.parametrize("scale", [assumed_number, assumed_tensor])
def test_a_constant_that_is_one_is_right(scale: Any) -> None:
    run = scheduled(scale, changes=False)
    ladder = climb(run, backends=("eager",))
    assert (ladder.stage, ladder.rungs[0].error) == ("", 0.0)
    assert first_stale(run) is None


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shape"), [(Norms, (6, 8)), (OnRounding, (6, 8)), (ZeroGradient, (2, 3, 8, 8))])
def test_a_right_model_has_none(kind: Any, shape: tuple[int, ...]) -> None:
    assert first_stale(step_of(made(kind), [torch.randn(shape)], times=2)) is None


@pytest.mark.slow
def test_two_graphs_after_a_break() -> None:
    class Broken(Norms):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(self.inner(x))
            torch._dynamo.graph_break()
            return self.outer(y) * assumed_number()

    def run(backend: Any, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        SCALES[:] = [1.0] if backend is None else [1.5]
        return step_of(made(Broken), [torch.ones(2, 8)], training=False)(backend, dtype)

    stale = first_stale(run)
    assert isinstance(stale, StaleNode)
    assert (stale.graph, stale.node, stale.constants) == (1, "mul", ("1.5",))
