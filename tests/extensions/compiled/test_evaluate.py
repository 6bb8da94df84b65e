"""Nodes of graphs evaluated from recorded values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from hashbench.core.run.distance import unit_roundoff
from hashbench.extensions.compiled.evaluate import (
    Evaluator,
    NotEvaluated,
    NoValueReason,
    Operands,
    Precision,
    subgraph_of,
    terms_of,
)

aten, prims = torch.ops.aten, torch.ops.prims
OWN, FLOAT64, ROUNDED = Precision.OWN, Precision.FLOAT64, Precision.ROUNDED


def traced(function: Callable[..., Any], *inputs: torch.Tensor) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def by_name(module: torch.fx.GraphModule) -> dict[str, torch.fx.Node]:
    return {node.name: node for node in module.graph.nodes}


def evaluate(
    module: torch.fx.GraphModule,
    node: torch.fx.Node,
    recorded: Mapping[torch.fx.Node, Any],
    precision: Precision = OWN,
    **options: Any,
) -> Any:
    operands = Operands(module.graph)
    return Evaluator(module, recorded, operands).value(subgraph_of(node, recorded, operands), precision, **options)


def last(module: torch.fx.GraphModule) -> torch.fx.Node:
    return module.graph.output_node().all_input_nodes[0]


def given(module: torch.fx.GraphModule, *inputs: Any) -> dict[torch.fx.Node, Any]:
    holders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return dict(zip(holders, inputs, strict=True))


X = torch.linspace(-2, 3, 24).reshape(4, 6)


def chain(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x * 0.3).sum(1)


# ------------------------------------------------------------------------------------------------------- which nodes


def test_a_subgraph_ends_at_recorded_nodes():
    module = traced(chain, X)
    nodes = by_name(module)
    recorded = given(module, X)
    operands = Operands(module.graph)
    whole = subgraph_of(last(module), recorded, operands)
    assert [node.name for node in whole.ops] == ["mul", "gelu", "sum_1"]
    assert whole.inputs == tuple(recorded)
    short = subgraph_of(last(module), {**recorded, nodes["mul"]: X}, operands)
    assert [node.name for node in short.ops] == ["gelu", "sum_1"]
    assert short.inputs == (nodes["mul"],)


def test_a_recorded_node_is_itself_evaluated():
    module = traced(chain, X)
    recorded = {**given(module, X), last(module): torch.zeros(4)}
    assert len(subgraph_of(last(module), recorded, Operands(module.graph)).ops) == 3


def test_an_input_is_its_recorded_value():
    module = traced(chain, X)
    recorded = given(module, X)
    assert evaluate(module, next(iter(recorded)), recorded) is X


def test_ops_are_in_an_order_that_can_be_evaluated():
    module = traced(lambda x: (x + 1) * (x.sum() + (x + 1).exp()), X)
    assert torch.equal(evaluate(module, last(module), given(module, X)), (X + 1) * (X.sum() + (X + 1).exp()))


def test_ten_thousand_ops_are_no_recursion():
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    for _ in range(10_000):
        node = graph.call_function(aten.neg.default, (node,))
    graph.output(node)
    module = torch.fx.GraphModule({}, graph)
    assert torch.equal(evaluate(module, last(module), given(module, X)), X)


# ------------------------------------------------------------------------------------------------------- precisions


def test_in_its_own_dtype_a_node_is_what_eager_mode_computes():
    module = traced(chain, X)
    assert torch.equal(evaluate(module, last(module), given(module, X)), chain(X))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_in_float64_a_node_is_what_eager_mode_computes_in_float64(dtype: torch.dtype):
    x = X.to(dtype)
    module = traced(chain, x)
    found = evaluate(module, last(module), given(module, x), FLOAT64)
    assert found.dtype is torch.float64
    assert torch.equal(found, chain(x.double()))


def test_casts_inside_a_graph_become_float64_too():
    module = traced(lambda x: (x.float().exp()).to(torch.bfloat16) + torch.ones(6, dtype=torch.float16), X.bfloat16())
    found = evaluate(module, last(module), given(module, X.bfloat16()), FLOAT64)
    assert torch.equal(found, X.bfloat16().double().exp() + 1)


def test_casts_to_integers_stay():
    module = traced(lambda x: x.to(torch.int32), X)
    assert evaluate(module, last(module), given(module, X), FLOAT64).dtype is torch.int32


def test_complex_numbers_become_complex128():
    z = torch.complex(X, X + 1)
    module = traced(lambda x: (x * x).to(torch.complex64), z)
    found = evaluate(module, last(module), given(module, z), FLOAT64)
    assert torch.equal(found, z.to(torch.complex128) ** 2)


def test_constants_are_read_from_the_module():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(aten.add.Tensor, (x, graph.get_attr("parts.one"))))
    root = torch.nn.Module()
    root.parts = torch.nn.Module()
    root.parts.one = torch.nn.Parameter(torch.ones(6))
    module = torch.fx.GraphModule(root, graph)
    found = evaluate(module, last(module), given(module, X))
    assert torch.equal(found, X + 1)
    assert not found.requires_grad


def test_sizes_pass_through():
    graph = torch.fx.Graph()
    size, x = graph.placeholder("s0"), graph.placeholder("x")
    half = graph.call_function(operator.floordiv, (size, 2))
    graph.output(graph.call_function(aten.view.default, (x, [half, -1])))
    module = torch.fx.GraphModule({}, graph)
    for precision in Precision:
        assert evaluate(module, last(module), given(module, 4, X), precision).shape == (2, 12)


def test_random_rounding_moves_each_value_by_a_unit_and_is_repeatable():
    module = traced(lambda x: x + 0, X)
    recorded = {**given(module, X)}
    exact = evaluate(module, last(module), recorded, FLOAT64)
    first = evaluate(module, last(module), recorded, ROUNDED, seed=1)
    units = ((first - exact).abs() / exact.abs() / unit_roundoff(torch.float32))[exact != 0]
    assert bool((units < 2.01).all())  # of the input and of the result
    assert bool((units > 0.9).any())
    assert torch.equal(first, evaluate(module, last(module), recorded, ROUNDED, seed=1))
    assert not torch.equal(first, evaluate(module, last(module), recorded, ROUNDED, seed=2))
    wider = evaluate(module, last(module), recorded, ROUNDED, seed=1, scale=16)
    assert torch.allclose(wider - exact, 16 * (first - exact), rtol=1e-4)


def test_random_rounding_is_that_of_the_own_dtype_and_leaves_the_global_generator():
    module = traced(lambda x: x + 0, X.bfloat16())
    recorded = given(module, X.bfloat16())
    before = torch.get_rng_state()
    apart = (evaluate(module, last(module), recorded, ROUNDED) - X.bfloat16().double()).abs().max()
    assert apart > 0.004
    assert torch.equal(before, torch.get_rng_state())


def test_views_round_nothing():
    module = traced(lambda x: x.view(24)[3:].unsqueeze(0), X)
    found = evaluate(module, last(module), given(module, X), ROUNDED)
    units = ((found - X.view(24)[3:].double()).abs() / X.view(24)[3:].abs() / unit_roundoff(torch.float32)).squeeze(0)
    assert bool((units.nan_to_num() < 1.01).all())


def test_the_rounding_of_a_sum_grows_with_the_root_of_its_terms():
    x = torch.zeros(2, 3600)
    x[:, 0] = 1
    module = traced(lambda x: x.sum(1), x)
    node = last(module)
    found = evaluate(module, node, given(module, x), ROUNDED)
    assert terms_of(node) == 3600
    units = (found - 1).abs() / unit_roundoff(torch.float32)
    assert bool(((units > 58.9) & (units < 61.1)).all())  # and the input by one
    wide = evaluate(module, node, given(module, x), ROUNDED, scale=1e9)
    assert bool((wide >= 0).all())  # never by more than a half


def test_ops_that_fold_nothing_have_one_term():
    module = traced(lambda x: (x + 1)[0].exp(), X)
    assert {terms_of(node) for node in module.graph.nodes} == {1}


def test_every_output_of_an_op_is_rounded():
    module = traced(lambda x: torch.var_mean(x, 1), X)
    recorded = given(module, X)
    for node in module.graph.output_node().all_input_nodes:
        exact, rounded = (evaluate(module, node, recorded, precision) for precision in (FLOAT64, ROUNDED))
        units = (rounded - exact).abs() / exact.abs() / unit_roundoff(torch.float32)
        assert bool((units > 0.5).any())


def test_complex_numbers_are_rounded_in_both_parts():
    z = torch.view_as_complex(torch.ones(50, 2))
    module = traced(lambda x: x * 1, z)
    found = evaluate(module, last(module), given(module, z), ROUNDED)
    assert found.dtype is torch.complex128
    assert bool(((found.real - 1) != (found.imag - 1)).any())


def test_values_are_shared_between_subgraphs():
    module = traced(lambda x: (x.exp() + 1, x.exp() + 2), X)
    calls: list[str] = []

    class Counting(dict[Any, Any]):
        def __getitem__(self, key: Any) -> Any:
            calls.append(str(key))
            return super().__getitem__(key)

    recorded, operands = Counting(given(module, X)), Operands(module.graph)
    evaluator = Evaluator(module, recorded, operands)
    for node in module.graph.output_node().all_input_nodes:
        evaluator.value(subgraph_of(node, recorded, operands), FLOAT64)
    assert len(calls) == 1


# ------------------------------------------------------------------------------------------------------- mutations


def test_ops_that_write_get_copies():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(aten.add_.Tensor, (x, 1)))
    module = torch.fx.GraphModule({}, graph)
    mine = X.clone()
    assert torch.equal(evaluate(module, last(module), given(module, mine)), X + 1)
    assert torch.equal(mine, X)


def mutated(reader_first: bool = False, view: bool = False) -> tuple[torch.fx.GraphModule, torch.fx.Node]:
    """``x.add_(1)``, and a reader of ``x`` or of a view that was taken before."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    seen = graph.call_function(aten.view.default, (x, [24])) if view else x
    if reader_first:
        reader = graph.call_function(aten.mul.Tensor, (seen, 2))
    graph.call_function(aten.add_.Tensor, (x, 1))
    if not reader_first:
        reader = graph.call_function(aten.mul.Tensor, (seen, 2))
    graph.output(reader)
    return torch.fx.GraphModule({}, graph), reader


def test_a_reader_before_a_mutation_reads_the_old_value():
    module, reader = mutated(reader_first=True)
    assert torch.equal(evaluate(module, reader, given(module, X)), X * 2)


def test_a_reader_after_a_mutation_reads_the_new_value():
    module, reader = mutated()
    assert torch.equal(evaluate(module, reader, given(module, X)), (X + 1) * 2)


def test_a_reader_of_a_view_that_was_mutated_is_not_evaluated():
    module, reader = mutated(view=True)
    with pytest.raises(NotEvaluated) as raised:
        evaluate(module, reader, given(module, X))
    assert raised.value.reason is NoValueReason.CHANGED


def test_the_last_write_to_an_input_is_known():
    module, _ = mutated()
    x, write = list(module.graph.nodes)[:2]
    assert Operands(module.graph).written == {x: write}


def test_an_out_argument_is_changed_memory():
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.call_function(aten.add.out, (x, 1), {"out": y})
    reader = graph.call_function(aten.mul.Tensor, (y, 2))
    graph.output(reader)
    module = torch.fx.GraphModule({}, graph)
    with pytest.raises(NotEvaluated, match="changed"):
        evaluate(module, reader, given(module, X, X))


# ------------------------------------------------------------------------------------------------------- no reference


def not_evaluated(module: torch.fx.GraphModule, *inputs: Any, precision: Precision = OWN) -> NoValueReason:
    with pytest.raises(NotEvaluated) as raised:
        evaluate(module, last(module), given(module, *inputs), precision)
    return raised.value.reason


def of_target(target: Any, *args: Any, **kwargs: Any) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(target, (graph.placeholder("x"), *args), kwargs))
    return torch.fx.GraphModule({}, graph)


def test_random_ops_have_no_reference():
    assert not_evaluated(of_target(aten.rand_like.default), X) is NoValueReason.RANDOM
    assert not_evaluated(of_target(aten.native_dropout.default, 0.5, True), X) is NoValueReason.RANDOM
    assert not_evaluated(of_target(aten.bernoulli.p, 0.5), X) is NoValueReason.RANDOM


def test_random_ops_of_inductor_have_no_reference():
    import torch._inductor.inductor_prims

    graph = torch.fx.Graph()
    graph.placeholder("x")
    seed = graph.call_function(prims.inductor_seed.default, (torch.device("cpu"),))
    graph.output(graph.call_function(prims.inductor_random.default, ([4, 6], seed, "rand")))
    assert not_evaluated(torch.fx.GraphModule({}, graph), X) is NoValueReason.RANDOM


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_attention_is_random_only_with_dropout(probability: float):
    q = torch.randn(1, 2, 4, 8)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    both = graph.call_function(op, (x, x, x, probability))
    graph.output(graph.call_function(operator.getitem, (both, 0)))
    module = torch.fx.GraphModule({}, graph)
    if probability:
        assert not_evaluated(module, q) is NoValueReason.RANDOM
    else:
        assert torch.equal(evaluate(module, last(module), given(module, q)), op(q, q, q)[0])


def test_uninitialized_memory_has_no_reference():
    assert not_evaluated(of_target(aten.empty_like.default), X) is NoValueReason.UNINITIALIZED


def test_python_functions_and_higher_order_ops_have_no_reference():
    assert not_evaluated(of_target(chain), X) is NoValueReason.UNKNOWN_OP
    assert not_evaluated(of_target(torch.ops.higher_order.cond), X) is NoValueReason.UNKNOWN_OP


def test_a_missing_value_is_named():
    module = traced(chain, X)
    with pytest.raises(NotEvaluated, match="not recorded: x_1") as raised:
        evaluate(module, last(module), {})
    assert raised.value.reason is NoValueReason.MISSING


def test_an_op_that_raises_says_so():
    with pytest.raises(NotEvaluated, match=r"aten.view.default: RuntimeError"):
        evaluate(module := of_target(aten.view.default, [5]), last(module), given(module, X))


def test_an_op_that_lacks_float64_says_so():
    module = of_target(torch.ops.aten._weight_int4pack_mm_for_cpu.default, X, 32, X)
    assert not_evaluated(module, X, precision=FLOAT64) is NoValueReason.NOT_IN_FLOAT64


def test_reading_bits_has_no_value_in_float64():
    module = traced(lambda x: x.view(torch.int32), X)
    assert torch.equal(evaluate(module, last(module), given(module, X)), X.view(torch.int32))
    assert not_evaluated(module, X, precision=FLOAT64) is NoValueReason.NOT_IN_FLOAT64


# ------------------------------------------------------------------------------------------------------- surroundings


def test_nobody_sees_the_ops():
    module = traced(chain, X)
    seen: list[Any] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watching():
        evaluate(module, last(module), given(module, X), ROUNDED)
    assert seen == []


def test_autocast_and_autograd_are_off():
    module = traced(lambda x: x @ x.T, X)
    mine = X.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = evaluate(module, last(module), given(module, mine))
    assert found.dtype is torch.float32
    assert not found.requires_grad
