"""Which pass changes what a graph computes?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hashbench.core.inductor.graphs import GraphPass
from hashbench.extensions.compiled.passes import (
    Change,
    NoValue,
    Passes,
    changed_nodes,
    first_wrong_pass,
    inputs_by_name,
    outputs_of,
)
from tests.extensions.compiled.steps import Norms, made, step_of

aten, prims = torch.ops.aten, torch.ops.prims

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

Edit = Callable[[torch.fx.Graph], None]


def traced(function: Callable[..., Any], *inputs: torch.Tensor) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def changed(name: str, before: torch.fx.GraphModule, edit: Edit) -> GraphPass:
    after = copy.deepcopy(before)
    edit(after.graph)
    after.graph.lint()
    after.recompile()
    return GraphPass(name, "post_grad_passes", before, after)


def node(graph: torch.fx.Graph, name: str) -> torch.fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def nothing(_: torch.fx.Graph) -> None:
    """Change no node."""


def replaces(name: str, target: Any, *extra: Any, **kwargs: Any) -> Edit:
    """Replace a node by a call of another op on its first argument."""

    def edit(graph: torch.fx.Graph) -> None:
        old = node(graph, name)
        with graph.inserting_before(old):
            new = graph.call_function(target, (old.args[0], *extra), kwargs)
        new.meta = dict(old.meta)
        old.replace_all_uses_with(new)
        graph.erase_node(old)

    return edit


def judged(step: GraphPass, *inputs: Any) -> Passes:
    return first_wrong_pass([step], inputs_by_name(step.before, inputs))


def gelu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (aten.gelu(x) * y).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("edit", "wrong"),
    [
        pytest.param(nothing, False, id="nothing"),
        pytest.param(replaces("gelu", aten.gelu.default), False, id="the same op again"),
        pytest.param(replaces("gelu", aten.gelu.default, approximate="tanh"), True, id="an approximation"),
        pytest.param(replaces("sum_1", aten.mean.dim, [-1]), True, id="mean for sum"),
        pytest.param(replaces("sum_1", aten.sum.dim_IntList, [0]), True, id="different shape"),
    ],
)
def test_the_first_wrong_pass(edit: Edit, wrong: bool, dtype: torch.dtype) -> None:
    inputs = X.to(dtype), Y.to(dtype)
    before = traced(gelu, *inputs)
    step = changed("edits", before, edit)
    right = changed("is right", before, nothing)
    found = first_wrong_pass([right, step, right], inputs_by_name(before, inputs))
    assert (found.wrong is not None, found.partly) == (wrong, ())
    assert found.evaluated == (1 if wrong else 3)
    if found.wrong is not None:
        assert (found.wrong.name, found.wrong.subsystem, found.wrong.result) == ("edits", "post_grad_passes", "sum_1")
        assert found.wrong.error > 1e-3


def test_a_clean_pass_changes_results_by_rounding_of_float64() -> None:
    def edit(graph: torch.fx.Graph) -> None:
        product = node(graph, "mul")
        product.args = (product.args[1], product.args[0])
        total = node(graph, "sum_1")
        with graph.inserting_before(total):
            wide = graph.call_function(aten.flip.default, (total.args[0], [-1]))
        total.args = (wide, *total.args[1:])

    assert judged(changed("sums backwards", traced(gelu, X, Y), edit), X, Y) == Passes(None, 1, ())


def test_nodes_that_a_pass_made_changed_and_removed() -> None:
    before = traced(gelu, X, Y)
    for one in before.graph.nodes:
        one.meta["nn_module_stack"] = {"key": ("L['self'].mlp", torch.nn.Module)}
        one.meta["stack_trace"] = 'File "model.py", line 7, in forward\n    y = gelu(x)'
    step = changed("swaps", before, replaces("gelu", aten.tanh.default))
    made_node, used, removed = changed_nodes(step)
    assert [(one.name, one.change) for one in (made_node, used, removed)] == [
        ("tanh_default", Change.MADE),
        ("mul", Change.FED),
        ("gelu", Change.REMOVED),
    ]
    assert (removed.facts.op, removed.facts.module) == ("aten.gelu.default", "mlp")
    assert removed.facts.source == "model.py:7 y = gelu(x)"


# --------------------------------------------------------------------------------------------------------- writing ops


def accumulates(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    copied = aten.clone(x)
    total = aten.add(copied, y)
    aten.copy_(x, total)
    return aten.mul(total, 2.0)


def in_place(graph: torch.fx.Graph) -> None:
    """Do what reinplacing does: the sum is written into the copy."""
    replaces("add", aten.add_.Tensor, next(n for n in graph.nodes if n.op == "placeholder" and n is not _first(graph)))(
        graph
    )


def _first(graph: torch.fx.Graph) -> torch.fx.Node:
    return next(iter(graph.nodes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_right_in_place_op_and_inputs_that_stay_as_they_were(dtype: torch.dtype) -> None:
    x, y = X.to(dtype, copy=True), Y.to(dtype, copy=True)
    step = changed("reinplaces", traced(accumulates, x, y), in_place)
    assert judged(step, x, y) == Passes(None, 1, ())
    assert torch.equal(x, X.to(dtype))
    assert torch.equal(y, Y.to(dtype))


def test_an_input_that_is_no_longer_written() -> None:
    def drops(graph: torch.fx.Graph) -> None:
        graph.erase_node(node(graph, "copy_"))

    step = changed("drops", traced(accumulates, X, Y), drops)
    found = judged(step, X, Y).wrong
    assert found is not None
    assert (found.result, found.nodes[-1].target) == (_first(step.before.graph).name, "aten.copy_.default")


def test_an_op_in_place_on_a_value_that_is_read_later() -> None:
    def later(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = aten.exp(x)
        return aten.mul(aten.add(first, y), first)

    step = changed("reinplaces too much", traced(later, X, Y), in_place)
    assert judged(step, X, Y).wrong is not None


def test_a_conversion_that_float64_makes_superfluous() -> None:
    """It neither rounds nor becomes another name of its argument."""

    def converts(x: torch.Tensor) -> torch.Tensor:
        rounded = prims.convert_element_type(aten.div(x, 3.0), torch.bfloat16)
        aten.mul_(rounded, 3.0)
        return aten.add(prims.convert_element_type(rounded, torch.float32), x)

    out, left = outputs_of(traced(converts, X), [X])
    torch.testing.assert_close(out, X.double() * 2, rtol=1e-15, atol=0)
    assert torch.equal(left, X.double())


# ----------------------------------------------------------------------------------------------------------- constants


def divided(x: torch.Tensor) -> torch.Tensor:
    return aten.mul(x, aten.div(aten.full([8], 1.0, dtype=x.dtype), 3.0))


@pytest.mark.parametrize(
    ("dtype", "value", "wrong"),
    [
        pytest.param(torch.float32, float(torch.tensor(1 / 3)), False, id="folded in float32"),
        pytest.param(torch.float32, 1 / 3, False, id="folded in float64"),
        pytest.param(torch.float32, 0.3330, True, id="wrong"),
        pytest.param(torch.float64, 1 / 3, False, id="float64"),
        pytest.param(torch.float64, 1 / 3 + 1e-6, True, id="wrong by 1e-6 in float64"),
    ],
)
def test_constant_folding(dtype: torch.dtype, value: float, wrong: bool) -> None:
    def folds(graph: torch.fx.Graph) -> None:
        quotient = node(graph, "div")
        with graph.inserting_before(quotient):
            constant = graph.call_function(aten.full.default, ([8], value), {"dtype": dtype})
        quotient.replace_all_uses_with(constant)
        graph.erase_node(quotient)

    found = judged(changed("folds", traced(divided, X.to(dtype)), folds), X.to(dtype))
    assert (found.wrong is not None) is wrong
    assert (found.evaluated == 1) or wrong or found.partly


def test_a_tensor_that_a_pass_folded() -> None:
    def folds(value: float) -> GraphPass:
        step = changed("folds", traced(divided, X), nothing)
        step.after.register_buffer("_frozen_param0", torch.full((8,), value))
        quotient = node(step.after.graph, "div")
        with step.after.graph.inserting_before(quotient):
            constant = step.after.graph.get_attr("_frozen_param0")
        quotient.replace_all_uses_with(constant)
        step.after.graph.erase_node(quotient)
        return step

    assert judged(folds(1 / 3), X).wrong is None
    found = judged(folds(0.334), X).wrong
    assert found is not None
    assert (found.nodes[0].target, found.nodes[0].change) == ("_frozen_param0", Change.MADE)


# ---------------------------------------------------------------------------------------------- what is not evaluated


def noisy(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return aten.add(x, aten.rand_like(x)), aten.mul(x, 2.0)


def test_a_random_op_that_stays_has_the_same_values() -> None:
    state = torch.get_rng_state()
    assert judged(changed("nothing", traced(noisy, X), nothing), X) == Passes(None, 1, ())
    assert torch.equal(torch.get_rng_state(), state)

    def two(x: torch.Tensor) -> torch.Tensor:
        return aten.sub(aten.rand_like(x), aten.rand_like(x))

    def reorders(graph: torch.fx.Graph) -> None:
        node(graph, "rand_like").prepend(node(graph, "rand_like_1"))

    assert judged(changed("reorders", traced(two, X), reorders), X) == Passes(None, 1, ())


def test_a_random_op_that_is_replaced_is_not_judged_and_the_rest_is() -> None:
    replaced = replaces("rand_like", aten.randn_like.default)
    found = judged(changed("other numbers", traced(noisy, X), replaced), X)
    assert (found.wrong, found.evaluated) == (None, 0)
    assert found.partly == (("other numbers", "aten.rand_like.default is random"),)

    def both(graph: torch.fx.Graph) -> None:
        replaced(graph)
        node(graph, "mul").args = (_first(graph), 2.5)

    wrong = judged(changed("both", traced(noisy, X), both), X).wrong
    assert wrong is not None
    assert wrong.result == "mul"


def test_a_random_op_inside_a_higher_order_one() -> None:
    before = traced(lambda x: aten.add(x, aten.rand_like(x)), X)
    inner = node(before.graph, "rand_like")

    def wraps(graph: torch.fx.Graph) -> None:
        old = node(graph, "rand_like")
        with graph.inserting_before(old):
            new = graph.call_function(called, (old.target, old.args[0]))
        old.replace_all_uses_with(new)
        graph.erase_node(old)

    found = judged(changed("wraps", before, wraps), X)
    assert (found.wrong, found.partly) == (None, (("wraps", f"{inner.target} is random"),))


def called(op: Any, x: torch.Tensor) -> torch.Tensor:
    """Call an op that is an argument, as a higher-order operator does."""
    found: torch.Tensor = op(x)
    return found


def test_inputs_that_are_not_known_leave_the_rest() -> None:
    """The joint graph of a training step, where only the forward ran."""

    def joint(primals: torch.Tensor, tangents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return aten.sin(primals), aten.mul(tangents, aten.cos(primals))

    before = traced(joint, X, Y)
    name = _first(before.graph).name
    right = first_wrong_pass([changed("right", before, nothing)], {name: X})
    assert (right.wrong, right.evaluated, len(right.partly)) == (None, 0, 1)
    wrong = first_wrong_pass([changed("wrong", before, replaces("sin", aten.cos.default))], {name: X})
    assert wrong.wrong is not None


def test_an_op_without_float64_is_judged_in_its_own_dtype(float32_op: Any) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return aten.mul(float32_op(x), 2.0)

    before = traced(model, X)
    name = next(n.name for n in before.graph.nodes if n.target is float32_op)
    assert isinstance(outputs_of(before, [X])[0], NoValue)
    right = judged(changed("right", before, nothing), X)
    assert (right.wrong, right.evaluated, right.partly) == (None, 1, ())
    assert judged(changed("wrong", before, replaces(name, aten.neg.default)), X).wrong is not None


@pytest.fixture
def float32_op() -> Iterator[Any]:
    library = torch.library.Library("hashbench_test_passes", "DEF")

    def kernel(x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32, "no kernel for float64"
        return x + 1

    library.define("only_float32(Tensor x) -> Tensor")
    library.impl("only_float32", kernel, "CPU")
    library.impl("only_float32", torch.empty_like, "Meta")
    yield torch.ops.hashbench_test_passes.only_float32.default
    library._destroy()


def test_rounding_of_a_graph_without_float64_is_no_mistake(float32_op: Any) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return aten.mul(aten.mul(float32_op(x), 0.1), 0.7)

    def reorders(graph: torch.fx.Graph) -> None:
        first, second = node(graph, "mul"), node(graph, "mul_1")
        first.args, second.args = (first.args[0], 0.7), (first, 0.1)

    found = judged(changed("reorders", traced(model, X), reorders), X)
    assert (found.wrong, found.partly) == (None, (("reorders", "mul_1 cannot be evaluated in float64"),))


def test_what_an_op_that_is_not_evaluated_writes_is_lost() -> None:
    def writes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        copied = aten.clone(x)
        aten.copy_(aten.view(copied, [-1]), aten.rand([32]))
        return copied, aten.neg(x)

    lost, kept, given = outputs_of(traced(writes, X), [X])
    assert isinstance(lost, NoValue)
    assert torch.equal(kept, -X.double())
    assert torch.equal(given, X.double())


def test_bits_of_a_dtype_are_not_evaluated_in_float64() -> None:
    def bits(x: torch.Tensor) -> torch.Tensor:
        return aten.view.dtype(x, torch.int32)

    assert isinstance(outputs_of(traced(bits, X), [X])[0], NoValue)
    found = judged(changed("nothing", traced(bits, X), nothing), X)
    assert (found.wrong, found.evaluated) == (None, 1)  # in its own dtype


def test_inputs_of_another_number() -> None:
    def adds(graph: torch.fx.Graph) -> None:
        with graph.inserting_after(_first(graph)):
            graph.placeholder("another")

    found = judged(changed("adds", traced(gelu, X, Y), adds), X, Y)
    assert found.partly == (("adds", "the pass changes the number of inputs or outputs"),)


def test_strides_are_those_of_the_trace() -> None:
    """In float64 a kernel may choose others, and a view of the traced ones raises."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return aten.view(aten.clone(x), [-1])

    before = traced(model, X)
    clone = node(before.graph, "clone")
    out, *_ = outputs_of(before, [X.t().contiguous().t()])
    assert torch.equal(out, X.double().flatten())
    del clone.meta["val"]
    assert isinstance(outputs_of(before, [X.t().contiguous().t()])[0], NoValue)


# ----------------------------------------------------------------------------------------------------- a real program


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_a_custom_pass_of_a_real_compilation(factor: float) -> None:
    """A pass of the user's after all others; the graph before and after it, and the inputs of the call."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    steps: list[GraphPass] = []

    def scales(graph: torch.fx.Graph) -> None:
        before = copy.deepcopy(graph.owning_module)
        for one in graph.find_nodes(op="call_function", target=aten.rsqrt.default):
            with graph.inserting_after(one):
                scaled = graph.call_function(aten.mul.Tensor, (one, factor))
            one.replace_all_uses_with(scaled, delete_user_cb=lambda user, scaled=scaled: user is not scaled)
            scaled.meta = dict(one.meta)
        steps.append(GraphPass("scales", "post_grad_passes", before, copy.deepcopy(graph.owning_module)))

    with (
        config.patch(post_grad_custom_post_pass=scales, fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        step_of(made(Norms), [torch.randn(6, 8)], training=False)("inductor", None)
    (step,) = steps
    holders = step.before.graph.find_nodes(op="placeholder")
    given = {one.name: torch.randn([int(size) for size in one.meta["val"].shape]) for one in holders}
    found = first_wrong_pass(steps, given)
    assert (found.wrong is not None) is (factor != 1.0)
    if found.wrong is not None:
        assert found.wrong.error > 100
        ops = {(one.change, one.facts.op, one.facts.module) for one in found.wrong.nodes}
        assert (Change.MADE, "aten.native_layer_norm.default", "norm") in ops
