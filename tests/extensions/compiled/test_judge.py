"""The judge of kernels, on graphs and calls written by hand, and on what Inductor compiles."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import getgeneratorlocals
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hashbench.core.inductor.graphs import BufferRead, BufferWrite, CompiledGraph, KernelCall
from hashbench.core.inductor.internals import CapturedGraphs
from hashbench.core.run.rounding import LIMIT
from hashbench.core.trace.api import HashDebugTrace
from hashbench.extensions.compiled.evaluate import NotEvaluated
from hashbench.extensions.compiled.judge import JudgedBuffer, KernelJudge, KernelJudgement, content_digest, fitted
from hashbench.extensions.compiled.memory import LostInput
from hashbench.extensions.compiled.observed import KernelWatcher
from hashbench.extensions.compiled.program import compiling
from tests.extensions.compiled.steps import show

aten = torch.ops.aten
X = torch.linspace(-2, 3, 24).reshape(4, 6)


def graph_of(
    function: Callable[..., Any], *inputs: Any, buffers: Mapping[str, str], backward: bool = False
) -> CompiledGraph:
    """A traced graph; ``buffers`` names the node of each."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    nodes = {node.name: node for node in module.graph.nodes}
    return CompiledGraph("t.py", module, {key: nodes[name] for key, name in buffers.items()}, backward=backward)


def read(tensor: torch.Tensor, buffer: str = "") -> BufferRead:
    return BufferRead(buffer, content_digest(tensor), tensor.data_ptr(), tensor.nbytes)


def write(buffer: str, tensor: torch.Tensor) -> BufferWrite:
    return BufferWrite(buffer, tensor, content_digest(tensor), tensor.data_ptr(), tensor.nbytes)


def call(
    kernel: str, reads: Sequence[torch.Tensor] = (), *, last: Sequence[str] | None = None, **writes: torch.Tensor
) -> KernelCall:
    return KernelCall(
        f"id of {kernel}",
        kernel,
        reads=tuple(read(item) for item in reads),
        writes=tuple(write(*item) for item in writes.items()),
        last=frozenset(writes if last is None else last),
    )


def judged(graph: CompiledGraph, inputs: Sequence[Any], *calls: KernelCall) -> KernelJudgement:
    judge = KernelJudge()
    show(judge, graph, inputs, *calls).close()
    return judge.result()


def exp_sum(x: torch.Tensor) -> torch.Tensor:
    return x.exp().sum(1)


EXP_SUM = {"buf0": "exp", "buf1": "sum_1"}


@pytest.fixture
def exp_graph() -> CompiledGraph:
    return graph_of(exp_sum, X, buffers=EXP_SUM)


def test_right_kernels_are_clean(exp_graph: CompiledGraph) -> None:
    exp, total = X.exp(), X.exp().sum(1)
    found = judged(exp_graph, [X], call("first", [X], buf0=exp), call("second", [exp], buf1=total))
    assert [(item.node, item.kernel, item.buffer, item.op) for item in found.buffers] == [
        ("id of first", "first", "buf0", "aten.exp.default"),
        ("id of second", "second", "buf1", "aten.sum.dim_IntList"),
    ]
    assert (found.kernels, found.checked, found.first_beyond(), found.lost) == (2, 1.0, None, ())
    assert [item.nodes for item in found.buffers] == [1, 1]
    assert {item.phase for item in found.buffers} == {"forward"}


def test_a_wrong_kernel_is_blamed_and_what_follows_from_it_is_not(exp_graph: CompiledGraph) -> None:
    exp = X.exp() * (1 + 1e-3)
    found = judged(exp_graph, [X], call("first", [X], buf0=exp), call("second", [exp], buf1=exp.sum(1)))
    wrong = found.first_beyond()
    assert wrong is not None
    assert (wrong.kernel, wrong.behind, wrong.lost) == ("first", (), False)
    assert wrong.ratio > 1000
    assert wrong.relative_error == pytest.approx(1e-3, rel=0.01)
    assert found.buffers[1].ratio < 2
    assert found.largest is wrong


def test_the_phase_is_that_of_the_graph() -> None:
    graph = graph_of(exp_sum, X, buffers=EXP_SUM, backward=True)
    assert judged(graph, [X], call("first", [X], buf0=X.exp())).buffers[0].phase == "backward"


def test_a_buffer_is_judged_after_its_last_writer(exp_graph: CompiledGraph) -> None:
    zeros, exp = torch.zeros_like(X), X.exp()
    found = judged(
        exp_graph,
        [X],
        call("fills", buf0=zeros, last=[]),
        call("adds", [X, zeros], buf0=exp),
        call("s", buf1=exp.sum(1)),
    )
    assert [item.kernel for item in found.buffers] == ["adds", "s"]
    assert found.first_beyond() is None
    assert found.checked == 1.0


def test_buffers_of_one_kernel_are_judged_from_what_it_read(exp_graph: CompiledGraph) -> None:
    exp = X.exp() * (1 + 1e-3)
    found = judged(exp_graph, [X], call("both", [X], buf0=exp, buf1=exp.sum(1)))
    assert all(item.ratio > 100 for item in found.buffers)
    assert [item.nodes for item in found.buffers] == [1, 2]


def test_a_buffer_without_a_node_is_covered_by_the_next() -> None:
    graph = graph_of(exp_sum, X, buffers={"buf1": "sum_1"})
    exp = X.exp() * (1 + 1e-3)
    found = judged(graph, [X], call("first", [X], buf0=exp), call("second", [exp], buf1=exp.sum(1)))
    assert dict(found.unchecked) == {"no origin node": 1}
    assert found.checked == 0.5
    wrong = found.first_beyond()
    assert wrong is not None
    assert (wrong.kernel, wrong.behind, wrong.nodes) == ("second", ("first",), 2)


def test_an_unnamed_buffer_counts(exp_graph: CompiledGraph) -> None:
    unnamed = KernelCall("1", "first", writes=(write("", X.exp()),))
    assert dict(judged(exp_graph, [X], unnamed).unchecked) == {"no origin node": 1}


# ------------------------------------------------------------------------------------------------------- memory


def two_sums(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    exp = x.exp()
    return exp.sum(1), x.sin(), exp.sum(0)


TWO_SUMS = {"buf0": "exp", "buf1": "sum_1", "buf2": "sin", "buf3": "sum_2"}


@pytest.fixture
def reused() -> KernelJudgement:
    """The memory of buf0 is used for buf2 although buf3 is still to be computed from it."""
    graph, memory = graph_of(two_sums, X, buffers=TWO_SUMS), X.exp()
    judge = KernelJudge()
    seen = show(judge, graph, [X])
    seen.send(call("exp", [X], buf0=memory))
    seen.send(call("sum 1", [memory], buf1=memory.sum(1)))
    memory.copy_(X.sin())
    seen.send(call("sin", [X], buf2=memory))
    seen.send(call("sum 0", [memory], buf3=memory.sum(0)))
    seen.close()
    return judge.result()


def test_a_live_buffer_that_is_reused_is_not_the_readers_fault(reused: KernelJudgement) -> None:
    assert reused.lost == (LostInput("sum 0", "buf0", "exp", "sin", "id of sin"),)
    assert reused.buffers[-1].lost
    assert reused.buffers[-1].ratio > 1000
    assert reused.first_beyond() is None


def test_a_renamed_buffer_is_found_by_its_content() -> None:
    graph, exp = graph_of(two_sums, X, buffers=TWO_SUMS), X.exp()
    wrong = exp.sum(0) * 1.01
    found = judged(graph, [X], call("exp", [X], buf0=exp), call("sum 0", [exp.clone()], buf3=wrong))
    assert found.lost == ()
    assert found.first_beyond() is found.buffers[1]


def test_a_kernel_that_does_not_read_what_is_there_is_to_blame() -> None:
    graph, exp = graph_of(two_sums, X, buffers=TWO_SUMS), X.exp()
    found = judged(graph, [X], call("exp", [X], buf0=exp), call("sum 0", [X], buf3=X.sum(0)))
    assert found.lost == ()
    assert found.first_beyond() is found.buffers[1]


def test_an_input_that_a_kernel_wrote_over_is_evaluated_as_it_was() -> None:
    memory = X.clone()
    judge = KernelJudge()
    seen = show(judge, graph_of(two_sums, X, buffers=TWO_SUMS), [memory])
    memory.copy_(X.exp())
    seen.send(call("exp in place", [X], buf0=memory))
    seen.send(call("sin", [memory], buf2=memory.sin()))
    seen.close()
    found = judge.result()
    assert [item.ratio <= LIMIT for item in found.buffers] == [True, False]
    assert found.lost == (LostInput("sin", "x_1", "caller", "exp in place", "id of exp in place"),)


def test_a_result_that_is_overwritten_before_it_is_returned() -> None:
    memory = X.exp().sum(1)
    judge = KernelJudge()
    seen = show(judge, graph_of(two_sums, X, buffers=TWO_SUMS), [X])
    seen.send(call("exp", [X], buf0=X.exp()))
    seen.send(call("sum 1", [X.exp()], buf1=memory))
    memory.fill_(0)
    seen.send(call("scratch", buf9=memory))
    seen.close()
    assert judge.result().lost == (LostInput("return", "buf1", "sum 1", "scratch", "id of scratch"),)


def test_memory_that_is_written_again_with_the_same_content_is_not_lost() -> None:
    memory = X.exp().sum(1)
    judge = KernelJudge()
    seen = show(judge, graph_of(two_sums, X, buffers=TWO_SUMS), [X])
    seen.send(call("sum 1", [X], buf1=memory))
    seen.send(call("again", buf9=memory))
    seen.close()
    assert judge.result().lost == ()


# ------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_every_floating_dtype(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    graph = graph_of(exp_sum, x, buffers=EXP_SUM)
    wide = x.double().exp()
    right = judged(graph, [x], call("both", [x], buf0=wide.to(dtype), buf1=wide.sum(1).to(dtype)))
    assert right.first_beyond() is None
    wrong = judged(graph, [x], call("both", [x], buf0=(wide * 1.5).to(dtype), buf1=wide.sum(1).to(dtype)))
    assert wrong.first_beyond() is wrong.buffers[0]


@pytest.mark.parametrize("shape", [(24,), (2, 2, 6), (4, 6)], ids=str)
def test_a_buffer_of_another_shape_holds_the_elements_in_order(
    exp_graph: CompiledGraph, shape: tuple[int, ...]
) -> None:
    found = judged(exp_graph, [X], call("exp", [X], buf0=X.exp().reshape(shape)), call("s", [], buf1=X.exp().sum(1)))
    assert found.first_beyond() is None
    assert found.checked == 1.0


def test_strides_do_not_matter(exp_graph: CompiledGraph) -> None:
    transposed = X.exp().T.contiguous().T
    assert judged(exp_graph, [X], call("exp", [X], buf0=transposed)).first_beyond() is None


def test_a_buffer_with_other_elements_is_not_checked(exp_graph: CompiledGraph) -> None:
    found = judged(exp_graph, [X], call("exp", [X], buf0=torch.ones(5)), call("s", [], buf1=X.exp().sum(1)))
    assert dict(found.unchecked) == {"shape": 1}
    assert found.buffers[0].nodes == 2  # from the input: what could not be read is not relied on
    assert found.first_beyond() is None


def test_a_buffer_in_another_order_of_memory_does_not_fit() -> None:
    with pytest.raises(NotEvaluated, match="shape"):
        fitted(torch.ones(4, 6).T, (24,))
    with pytest.raises(NotEvaluated, match="layout"):
        fitted(torch.ones(4, 6).to_sparse(), (4, 6))


def test_integers_must_be_equal() -> None:
    graph = graph_of(lambda x: x.argmax(1), X, buffers={"buf0": "argmax"})
    assert judged(graph, [X], call("k", [X], buf0=X.argmax(1))).buffers[0].ratio == 0
    assert judged(graph, [X], call("k", [X], buf0=X.argmin(1))).buffers[0].ratio == math.inf


def test_an_index_among_equal_numbers_is_rounding() -> None:
    x = torch.tensor([[1.0, 1.0, 0.0]])
    graph = graph_of(lambda x: (x * 3).argmax(1), x, buffers={"buf0": "argmax"})
    assert judged(graph, [x], call("k", [x], buf0=torch.tensor([1]))).first_beyond() is None
    assert judged(graph, [x], call("k", [x], buf0=torch.tensor([2]))).first_beyond() is not None


def test_rounding_before_a_step_is_rounding() -> None:
    x = torch.full((3000,), 0.25)
    x[3] = 0.1
    graph = graph_of(lambda x: (x * 5).round(), x, buffers={"buf0": "round_1"})
    other = (x * 5).round()
    other[3] = 1 - other[3]  # 0.5 goes either way
    assert judged(graph, [x], call("k", [x], buf0=other)).first_beyond() is None
    other[4] += 1  # 1.25 stays 1
    assert judged(graph, [x], call("k", [x], buf0=other)).first_beyond() is not None


def test_nan_where_the_reference_has_none(exp_graph: CompiledGraph) -> None:
    exp = X.exp()
    exp[0, 0] = math.nan
    assert judged(exp_graph, [X], call("k", [X], buf0=exp)).buffers[0].ratio == math.inf


def test_zero_size_and_complex() -> None:
    x = torch.empty(0, 6)
    assert judged(graph_of(exp_sum, x, buffers=EXP_SUM), [x], call("k", [x], buf0=x.exp())).checked == 1.0
    z = torch.complex(X, X)
    graph = graph_of(lambda x: x.exp(), z, buffers={"buf0": "exp"})
    assert judged(graph, [z], call("k", [z], buf0=z.exp())).first_beyond() is None
    assert judged(graph, [z], call("k", [z], buf0=z.exp().conj().resolve_conj())).first_beyond() is not None


def test_an_input_that_is_mutated_is_judged_by_what_is_copied_to_it() -> None:
    def update(x: torch.Tensor) -> torch.Tensor:
        x.copy_(x * 2)
        return x.sin()

    graph = graph_of(update, X.clone(), buffers={"buf0": "sin"})
    right = judged(graph, [X], call("k", [X], buf0=(X * 2).sin(), x_1=X * 2))
    assert (right.first_beyond(), right.checked) == (None, 1.0)
    wrong = judged(graph, [X], call("k", [X], buf0=(X * 2).sin(), x_1=X * 3)).first_beyond()
    assert wrong is not None
    assert wrong.buffer == "x_1"


def test_a_copy_of_an_input_is_judged() -> None:
    graph = graph_of(exp_sum, X, buffers={"buf0": "x_1", **{"buf1": "exp"}})
    found = judged(graph, [X], call("pads", [X], buf0=X.clone()), call("k", [X], buf1=X.exp()))
    assert (found.first_beyond(), found.checked) == (None, 1.0)
    wrong = judged(graph, [X], call("pads", [X], buf0=X + 1)).first_beyond()
    assert wrong is not None
    assert wrong.nodes == 0


def test_random_values_are_not_checked_but_read() -> None:
    graph = graph_of(lambda x: (torch.rand_like(x) + x).exp(), X, buffers={"buf0": "rand_like", "buf1": "exp"})
    noise = torch.rand(4, 6)
    found = judged(graph, [X], call("rand", [], buf0=noise), call("k", [noise, X], buf1=(noise + X).exp()))
    assert dict(found.unchecked) == {"random": 1}
    assert found.first_beyond() is None
    assert [item.buffer for item in found.buffers] == ["buf1"]


def test_a_value_fused_with_a_random_one_is_not_checked() -> None:
    graph = graph_of(lambda x: torch.rand_like(x) + x, X, buffers={"buf0": "add"})
    assert dict(judged(graph, [X], call("k", [X], buf0=X)).unchecked) == {"random": 1}


def test_sizes_are_inputs_too() -> None:
    graph = torch.fx.Graph()
    size, x = graph.placeholder("s0"), graph.placeholder("x")
    view = graph.call_function(aten.view.default, (x, [size, -1]))
    graph.output(graph.call_function(aten.exp.default, (view,)))
    module = torch.fx.GraphModule({}, graph)
    node = module.graph.output_node().all_input_nodes[0]
    compiled = CompiledGraph("t.py", module, {"buf0": node})
    assert judged(compiled, [2, X], call("k", [X], buf0=X.exp().view(2, 12))).first_beyond() is None


# ------------------------------------------------------------------------------------------------------- the judge


def test_what_torch_cannot_compare_does_not_end_the_step(exp_graph: CompiledGraph) -> None:
    with patch("hashbench.extensions.compiled.judge.measure", side_effect=NotImplementedError("not for uint16")):
        found = judged(exp_graph, [X], call("k", [X], buf0=X.exp()))
    assert dict(found.unchecked) == {"raised": 1}


def test_nothing_written_is_nothing_checked() -> None:
    empty = KernelJudge().result()
    assert (empty.checked, empty.largest, empty.first_beyond(), empty.kernels) == (0.0, None, None, 0)


def test_values_are_dropped_once_no_node_needs_them() -> None:
    graph = graph_of(lambda x: x.exp().sin().cos(), X, buffers={"buf0": "exp", "buf1": "sin", "buf2": "cos"})
    judge = KernelJudge()
    seen = show(judge, graph, [X])

    def held() -> list[str]:
        return sorted(node.name for node in getgeneratorlocals(seen)["running"]._recorded)

    assert held() == ["x_1"]
    seen.send(call("a", [X], buf0=X.exp()))
    assert held() == ["exp"]
    seen.send(call("b", [X.exp()], buf1=X.exp().sin()))
    assert held() == ["sin"]
    seen.send(call("c", [X.exp().sin()], buf2=X.exp().sin().cos()))
    assert held() == []
    seen.close()


def test_an_input_is_kept_until_its_last_reader() -> None:
    judge = KernelJudge()
    seen = show(judge, graph_of(two_sums, X, buffers=TWO_SUMS), [X])
    seen.send(call("exp", [X], buf0=X.exp()))
    assert {node.name for node in getgeneratorlocals(seen)["running"]._recorded} == {"x_1", "exp"}
    seen.close()


def test_a_value_that_could_not_be_taken_leaves_what_it_is_evaluated_from() -> None:
    judge = KernelJudge()
    seen = show(judge, graph_of(exp_sum, X, buffers=EXP_SUM), [X])
    seen.send(call("exp", [X], buf0=torch.ones(5)))
    assert [node.name for node in getgeneratorlocals(seen)["running"]._recorded] == ["x_1"]
    seen.close()


def test_no_tensor_is_kept_after_the_call(exp_graph: CompiledGraph) -> None:
    exp = X.exp() * 2
    alive = weakref.ref(exp)
    judge = KernelJudge()
    seen = show(judge, exp_graph, [X])
    seen.send(call("k", [X], buf0=exp, buf1=exp.sum(1)))
    seen.close()
    del exp
    gc.collect()
    assert alive() is None


def test_graphs_are_judged_one_after_the_other_and_inside_each_other(exp_graph: CompiledGraph) -> None:
    judge = KernelJudge()
    for _ in range(2):
        outer = show(judge, exp_graph, [X], call("k", [X], buf0=X.exp()))
        show(judge, exp_graph, [X + 1], call("inner", [X + 1], buf0=(X + 1).exp())).close()
        outer.send(call("l", [X.exp()], buf1=X.exp().sum(1)))
        outer.close()
    found = judge.result()
    assert (found.kernels, len(found.buffers), found.first_beyond()) == (6, 6, None)


def test_the_first_beyond_is_the_first_call_and_not_the_largest() -> None:
    buffers = tuple(
        JudgedBuffer("", name, "", "", "", "", "forward", ratio, lost=lost)
        for name, ratio, lost in [("a", 1.0, False), ("b", 99.0, True), ("c", 50.0, False), ("d", 1e9, False)]
    )
    found = KernelJudgement(buffers)
    assert [getattr(found.first_beyond(limit), "kernel", None) for limit in (0.5, 16, 60, 1e10)] == [
        "a",
        "c",
        "d",
        None,
    ]
    assert found.largest is buffers[3]
    assert found.checked == 1.0
    assert KernelJudgement(buffers, unchecked={"random": 12}).checked == 0.25


# ------------------------------------------------------------------------------------------------------- Inductor


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = torch.nn.Linear(24, 40), torch.nn.LayerNorm(40), torch.nn.Linear(40, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.b(torch.nn.functional.gelu(self.norm(self.a(x))))
        return result


def compiled_step(dtype: torch.dtype) -> KernelJudgement:
    """Judge a training step of an MLP."""
    torch.manual_seed(0)
    model, x = Mlp().to(dtype), torch.randn(32, 24, dtype=dtype)
    judge = KernelJudge()
    with compiling(), CapturedGraphs() as hooks:
        graphs = hooks.graphs
        compiled = torch.compile(model)
        compiled(x).square().mean().backward()
        with HashDebugTrace(watcher=KernelWatcher(graphs, judge)):
            compiled(x).square().mean().backward()
    return judge.result()


@pytest.fixture
def wrong_rsqrt() -> Iterator[None]:
    from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides

    def off(original: Callable[[Any], str]) -> staticmethod[[Any], str]:
        return staticmethod(lambda x: f"({original(x)} * decltype({x})(1.001))")

    with (
        patch.object(CppOverrides, "rsqrt", off(CppOverrides.rsqrt)),
        patch.object(CppVecOverrides, "rsqrt", off(CppVecOverrides.rsqrt)),
    ):
        yield


BOTH = [torch.float32, pytest.param(torch.float64, marks=pytest.mark.exhaustive)]
"""The same graphs: float64 alone takes as long again."""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_a_compiled_model_is_clean(dtype: torch.dtype) -> None:
    found = compiled_step(dtype)
    assert found.largest is not None
    assert found.largest.ratio < LIMIT
    assert found.lost == ()
    assert found.checked >= 0.8
    assert {item.phase for item in found.buffers} == {"forward", "backward"}
    gelu = next(item for item in found.buffers if item.op == "aten.gelu.default")
    assert "gelu(self.norm(self.a(x)))" in gelu.source


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.usefixtures("wrong_rsqrt")
def test_a_wrong_lowering_is_named(dtype: torch.dtype) -> None:
    found = compiled_step(dtype).first_beyond()
    assert found is not None
    assert found.ratio > (100 if dtype is torch.float32 else 1000)
    assert found.relative_error == pytest.approx(1e-3, rel=0.1)
    assert (found.op, found.module, found.phase) == ("aten.native_layer_norm.default", "norm", "forward")
    assert found.kernel.startswith("cpp_fused")
    assert found.behind == ()
