"""Where rounding grows on its way through a graph, on graphs and calls written by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hashbench.core.inductor.graphs import BufferWrite, CompiledGraph, KernelCall
from hashbench.extensions.compiled.amplification import SHOWN, Amplification, Amplified
from tests.extensions.compiled.steps import show

X = torch.linspace(0.1, 3, 24)


def graph_of(function: Callable[..., Any], *inputs: Any, buffers: Mapping[str, str]) -> CompiledGraph:
    module = make_fx(function, tracing_mode="fake")(*inputs)
    nodes = {node.name: node for node in module.graph.nodes}
    return CompiledGraph("t.py", module, {key: nodes[name] for key, name in buffers.items()})


def call(kernel: str, *, last: bool = True, **writes: torch.Tensor) -> KernelCall:
    names = frozenset(writes) if last else frozenset()
    return KernelCall(kernel, kernel, writes=tuple(BufferWrite(*item) for item in writes.items()), last=names)


def judged(graph: CompiledGraph, *calls: KernelCall, eager: bool = False) -> tuple[Amplified, ...]:
    amplification = Amplification(eager=eager)
    show(amplification, graph, [X], *calls)
    return amplification.result()


def cancels(x: torch.Tensor) -> torch.Tensor:
    return (x.exp() + 1000 - 1000).log()


CANCELS = {"buf0": "exp", "buf1": "sub", "buf2": "log"}


def steps() -> tuple[KernelCall, ...]:
    exp = X.exp()
    difference = exp + 1000 - 1000
    return call("exp", buf0=exp), call("cancels", buf1=difference), call("log", buf2=difference.log())


@pytest.mark.parametrize("eager", [False, True])
def test_where_digits_cancel_comes_first(eager: bool) -> None:
    first, *others = judged(graph_of(cancels, X, buffers=CANCELS), *steps(), eager=eager)
    assert (first.kernel, first.facts.op) == ("cancels", "aten.sub.Tensor")
    assert first.factor == pytest.approx(first.error / max(1.0, 0.5), rel=1)
    assert first.error > 20
    assert {one.kernel for one in others} == {"exp", "log"}
    assert all(one.factor < 5 for one in others)


def test_errors_are_in_units_of_the_own_dtype() -> None:
    graph = graph_of(lambda x: x.exp(), X, buffers={"buf0": "exp"})
    (one,) = judged(graph, call("exp", buf0=X.exp() * (1 + 1e-4)))
    assert one.error == pytest.approx(1e-4 * 2**24, rel=0.01)
    assert one.factor == one.error  # the input has an error of one unit


def test_eager_mode_is_measured_whatever_the_kernel_wrote() -> None:
    graph = graph_of(lambda x: x.exp(), X, buffers={"buf0": "exp"})
    (one,) = judged(graph, call("exp", buf0=X.exp() * 2), eager=True)
    assert one.error < 2


SKIPPED: dict[str, KernelCall] = {
    "no node": call("k", buf9=X),
    "a later call writes it": call("k", last=False, buf0=X),
    "integers": call("k", buf0=torch.arange(24)),
    "another size": call("k", buf0=X[:5]),
    "nothing": call("k", buf0=X[:0]),
}


@pytest.mark.parametrize("case", SKIPPED)
def test_what_cannot_be_measured_is_left_out(case: str) -> None:
    graph = graph_of(lambda x: x.exp(), X, buffers={"buf0": "exp"})
    assert judged(graph, SKIPPED[case]) == ()


def test_random_ops_are_left_out_and_zeros_have_no_error() -> None:
    graph = graph_of(lambda x: torch.rand_like(x) * 0 + x * 0, X, buffers={"buf0": "rand_like", "buf1": "mul_1"})
    (one,) = judged(graph, call("rand", buf0=X), call("zero", buf1=X * 0))
    assert (one.kernel, one.error) == ("zero", 0.0)


def test_only_the_largest_are_told() -> None:
    names = {f"buf{number}": f"exp_{number}" if number else "exp" for number in range(SHOWN + 2)}

    def many(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.exp() for _ in names]

    calls = [call(name, **{name: X.exp() * (1 + 1e-3 * number)}) for number, name in enumerate(names)]
    found = judged(graph_of(many, X, buffers=names), *calls)
    assert [one.kernel for one in found] == [f"buf{number}" for number in range(SHOWN + 1, 1, -1)]
