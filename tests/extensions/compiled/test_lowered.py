"""Inductor's IR, evaluated by torch, is what eager computes; and which stage made a kernel's output wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everywhere
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import lowerings
from torch._inductor.ops_handler import OpsHandler
from torch._inductor.virtualized import V

from hashbench.core.inductor.internals import last_writer
from hashbench.extensions.compiled import indices, tensor_ops
from hashbench.extensions.compiled.lowered import NotComputed, evaluate, reads, stage_of
from tests.extensions.compiled.lowering import Lowering, lower, lower_compiled

pytestmark = pytest.mark.slow  # together, and the first of them alone: TorchInductor's lowering takes seconds

nan, inf = math.nan, math.inf
aten = torch.ops.aten


def _normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "softmax": (lambda x: x.softmax(-1), (_normal(4, 33),)),
    "layer norm": (lambda x: F.layer_norm(x, (33,)), (_normal(4, 33),)),
    "variance": (lambda x: x.var((0, 2)), (_normal(4, 5, 6),)),
    "gelu": (F.gelu, (_normal(40),)),
    "maximum of NaN": (torch.maximum, (torch.tensor([nan, 1.0]), torch.tensor([0.0, nan]))),
    "fmax of NaN": (torch.fmax, (torch.tensor([nan, 1.0]), torch.tensor([0.0, nan]))),
    "argmax of ties": (lambda x: x.argmax(1), (torch.tensor([[1, 3, 3, 0], [2, 2, 2, 2]]),)),
    "argmin of NaN": (lambda x: x.argmin(1), (torch.tensor([[1, nan, 0, nan], [2, 2, 2, 2]]),)),
    "max with index": (lambda x: x.max(1), (_normal(4, 33),)),
    "argmax of all": (lambda x: x.argmax(), (_normal(4, 33),)),
    "any and all": (lambda x: (x.any(1), x.all(0)), (torch.tensor([[0, 1], [0, 0]]),)),
    "product": (lambda x: x.prod(1), (_normal(4, 9),)),
    "long sum": (lambda x: x.sum(), (_normal(300, 70, dtype=torch.float64),)),
    "int sum of bool": (lambda x: (x > 0).sum(0), (_normal(4, 9),)),
    "floor division": (lambda a, b: a // b, (torch.tensor([7, -7, 7, -7]), torch.tensor([2, 2, -2, -2]))),
    "truncated division": (
        lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        (torch.tensor([7, -7, 7, -7]), torch.tensor([2, 2, -2, -2])),
    ),
    "true division of ints": (lambda a, b: a / b, (torch.tensor([7, -7, 1]), torch.tensor([2, 3, 3]))),
    "remainder": (lambda a, b: a % b, (torch.tensor([7, -7, 7, -7]), torch.tensor([4, 4, -4, -4]))),
    "fmod": (torch.fmod, (torch.tensor([7.5, -7.5, 7.5, -7.5]), torch.tensor([2.0, 2.0, -2.0, -2.0]))),
    "round half to even": (torch.round, (torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5]),)),
    "bits": (lambda a: (a << 2) ^ (a >> 1) & ~a | 3, (torch.tensor([7, -7, 100, -1]),)),
    "uint8 wraps": (lambda a: a + a, (torch.tensor([200, 100, 255], dtype=torch.uint8),)),
    "uint8 constant": (lambda a: a - 1, (torch.tensor([200, 0, 255], dtype=torch.uint8),)),
    "bool logic": (
        lambda a, b: (a & ~b, a ^ b, a.logical_or(b)),
        (torch.tensor([True, False]), torch.tensor([True, True])),
    ),
    "cast to int": (lambda x: x.to(torch.int32), (torch.tensor([1.9, -1.9, 0.0]),)),
    "bitcast": (lambda x: (x * 2).view(torch.int32) + 1, (_normal(9),)),
    "bitcast of bfloat16": (lambda x: (x * 2).view(torch.int16) + 1, (_normal(9, dtype=torch.bfloat16),)),
    "frexp": (lambda x: torch.frexp(x), (_normal(9),)),
    "special": (
        lambda x: (torch.lgamma(x), torch.erf(x), torch.rsqrt(x), torch.special.i1(x)),
        (_normal(9).abs() + 0.1,),
    ),
    "where": (lambda x: torch.where(x > 0, x, 1), (_normal(9),)),
    "padding": (lambda x: F.pad(x, (1, 2, 3, -1), value=7.0), (_normal(4, 5),)),
    "concatenation": (lambda x: torch.cat([x.exp(), x[1:] * 2], 0), (_normal(4, 5),)),
    "views": (lambda x: x.t()[1:, ::2].flip(0).roll(1, 1) + 1, (_normal(6, 5),)),
    "reshape of a transposed": (lambda x: x.t().reshape(3, 10).exp(), (_normal(6, 5),)),
    "strided input": (lambda x: x.exp().sum(1), (_normal(6, 5).t(),)),
    "channels last": (lambda x: F.max_pool2d(x, 2) * 2, (_normal(2, 3, 4, 4).to(memory_format=torch.channels_last),)),
    "broadcast": (lambda x, y: x + y, (_normal(6, 1), _normal(5))),
    "expanded input": (lambda x: x * 2, (_normal(6, 1).expand(6, 5),)),
    "negative indices": (lambda x, i: x[i], (_normal(4, 5), torch.tensor([0, -1, 2]))),
    "gather": (lambda x, i: x.gather(1, i), (_normal(4, 5), torch.tensor([[0, 4], [1, 1], [2, 0], [3, 3]]))),
    "embedding": (lambda w, i: F.embedding(i, w) * 2, (_normal(9, 5), torch.tensor([[0, 8], [3, 3]]))),
    "accumulating index_put": (
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        (_normal(4, 5), torch.tensor([0, -1, 0]), _normal(3, 5)),
    ),
    "index_put": (lambda x, i, v: x.index_put((i,), v), (_normal(4, 5), torch.tensor([0, -1]), _normal(2, 5))),
    "scatter_add": (
        lambda x, i, v: x.scatter_add(0, i, v),
        (_normal(4, 3), torch.tensor([[0, 1, 0], [0, 3, 3]]), _normal(2, 3)),
    ),
    "embedding backward": (
        lambda g, i: aten.embedding_dense_backward(g, i, 5, -1, False),
        (_normal(3, 4), torch.tensor([1, 1, 4])),
    ),
    "slice assignment": (lambda x: x.slice_scatter(torch.ones(2, 5), 0, 1, 3), (_normal(4, 5),)),
    "mutation": (lambda x: (x.mul(2).add_(1).mul_(x), x + 1), (_normal(4, 5),)),
    "arange": (lambda x: x + torch.arange(9) // 2, (_normal(9),)),
    "upsampling": (lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"), (_normal(1, 2, 5, 4),)),
    "convolution and norm": (
        lambda x, w: F.relu(F.batch_norm(F.conv2d(x, w), None, None, training=True)),
        (_normal(2, 3, 6, 6), _normal(4, 3, 3, 3)),
    ),
    "scalar input": (lambda x: x * 2 + 1, (torch.tensor(3.0),)),
    "half": (lambda x: (x * 3).exp(), (_normal(9, dtype=torch.float16),)),
}


SCATTER = {"cpp.fallback_scatter_reduce_sum": False}
"""Scatters are else no loops on CPUs with several threads."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_ir_computes_what_eager_computes(name: str) -> None:
    program, inputs = PROGRAMS[name]
    lowered = lower(program, inputs, **SCATTER)
    assert lowered.computed()
    results = program(*(x.clone() for x in inputs))
    expected = [results] if isinstance(results, torch.Tensor) else list(results)
    for float64 in (False, True):
        for value, wanted in zip(lowered.outputs(float64=float64), expected, strict=True):
            assert value.dtype == (torch.float64 if float64 and wanted.is_floating_point() else wanted.dtype)
            _close(value, wanted)


def _close(value: torch.Tensor, wanted: torch.Tensor) -> None:
    near = {torch.float64: 1e-9, torch.bfloat16: 0.02, torch.float16: 0.02}.get(wanted.dtype, 1e-4)
    shaped = value.reshape(wanted.shape).to(wanted.dtype)
    torch.testing.assert_close(shaped, wanted, equal_nan=True, rtol=near, atol=near / 10)


def test_in_float64_nothing_is_rounded() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return ((x + 0.1).to(torch.bfloat16).float() * 3).sin()

    x = _normal(9)
    wide = x.double()
    assert torch.equal(lower(program, (x,)).outputs(float64=True)[0], ((wide + 0.1) * 3).sin())


def test_low_precision_is_computed_in_float32() -> None:
    x = torch.ones(4, dtype=torch.bfloat16)
    value = lower(lambda x: (x + 0.001) - 1, (x,)).outputs()[0]
    assert value.dtype == torch.bfloat16
    torch.testing.assert_close(value, torch.full((4,), 0.001, dtype=torch.bfloat16))


# what is read


def _softmax() -> Lowering:
    return lower(lambda x: x.softmax(-1), (_normal(4, 33),))


def test_buffers_that_are_not_given_are_computed() -> None:
    lowered = _softmax()
    *others, last = lowered.computed()
    assert others
    assert set(lowered.values()) == set(lowered.inputs)
    torch.testing.assert_close(
        evaluate(last, lowered.values(), graph=lowered.graph), lowered.inputs["arg0_1"].softmax(-1)
    )


def test_buffers_that_are_given_are_read() -> None:
    lowered = _softmax()
    *_, total, last = lowered.computed()
    values = {**lowered.values(), total.get_name(): torch.full((4, 1), 2.0)}
    x = lowered.inputs["arg0_1"]
    expected = (x - x.amax(-1, keepdim=True)).exp() / 2
    torch.testing.assert_close(evaluate(last, values, graph=lowered.graph), expected)
    assert reads(last, lowered.graph) == tuple(sorted(reads(last, lowered.graph)))
    assert total.get_name() in reads(last, lowered.graph)


def test_strides_of_the_given_values_do_not_matter() -> None:
    lowered = lower(lambda x: x.t().exp(), (_normal(3, 4),))
    x = lowered.inputs["arg0_1"]
    view = torch.empty(4, 3).t().copy_(x)
    assert view.stride() != x.stride()
    (buffer,) = lowered.computed()
    again = evaluate(buffer, {"arg0_1": view}, graph=lowered.graph)
    assert torch.equal(again, evaluate(buffer, {"arg0_1": x}, graph=lowered.graph))


def _mutation() -> Lowering:
    """``x`` is filled twice over, and read before, between and after."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = x * 10
        x.add_(1)
        between = x * 10
        x.mul_(2)
        return before, between, x * 10

    return lower(program, (_normal(4),))


def test_a_mutated_buffer_is_read_in_the_version_of_its_reader() -> None:
    lowered = _mutation()
    x = lowered.inputs["arg0_1"]
    before, between, after = lowered.outputs()
    for value, wanted in ((before, x * 10), (between, (x + 1) * 10), (after, (x + 1) * 20)):
        torch.testing.assert_close(value, wanted)


def test_the_version_that_a_buffer_reads_has_the_name_of_its_writer() -> None:
    lowered = lower(lambda x: x.index_put((torch.tensor([1]),), torch.ones(1), accumulate=True) * 2, (_normal(4),))
    filled, mutating, reader = lowered.computed()
    assert isinstance(mutating.layout, ir.MutationLayoutSHOULDREMOVE)
    assert filled.get_name() in reads(mutating, lowered.graph)
    assert mutating.get_name() in reads(reader, lowered.graph)
    given = {**lowered.values(), mutating.get_name(): torch.arange(4.0)}
    assert torch.equal(evaluate(reader, given, graph=lowered.graph), torch.arange(4.0) * 2)


def test_the_value_of_a_node_that_fills_and_mutates_is_that_of_the_last_writer() -> None:
    lowered = lower(lambda x: x.index_put((torch.tensor([1]),), torch.ones(1)), (_normal(4),))
    filled, mutating = lowered.computed()
    assert filled.get_origin_node() is not None
    assert last_writer(filled, lowered.graph) is mutating
    node = lowered.nodes[filled.get_origin_node()]
    assert torch.equal(evaluate(mutating, lowered.values(), graph=lowered.graph), node)
    assert not torch.equal(evaluate(filled, lowered.values(), graph=lowered.graph), node)


def test_a_buffer_that_another_node_mutates_keeps_its_own_value() -> None:
    lowered = lower(lambda x: x.diagonal_scatter(torch.zeros(3)), (_normal(3, 3),))
    filled = lowered.computed()[0]
    assert last_writer(filled, lowered.graph) is filled


# sizes that are symbols


def test_sizes_are_taken_from_the_shapes_of_the_values() -> None:
    lowered = lower_compiled(lambda x: (x + x.shape[0]).softmax(0), (_normal(7, 5),), dynamic=True)
    (name,) = (name for name, value in lowered.graph.graph_inputs.items() if isinstance(value, ir.TensorBox))
    last = lowered.computed()[-1]
    for x in (_normal(7, 5), _normal(11, 3)):
        value = evaluate(last, {name: x}, graph=lowered.graph)
        torch.testing.assert_close(value, (x + x.shape[0]).softmax(0))


def test_a_size_that_is_not_known_is_named() -> None:
    lowered = lower_compiled(lambda x: x + 1, (_normal(7, 5),), dynamic=True)
    (buffer,) = lowered.computed()
    with pytest.raises(NotComputed, match="the size s"):
        evaluate(buffer, {}, graph=lowered.graph)
    (name,) = (name for name, value in lowered.graph.graph_inputs.items() if isinstance(value, ir.TensorBox))
    symbols = {str(free): 7 for size in buffer.get_size() for free in size.free_symbols}
    given = evaluate(buffer, {name: torch.zeros(7, 7)}, graph=lowered.graph, sizes=symbols)
    assert torch.equal(given, torch.ones(7, 7))


# what is not evaluated


def _refusal(lowered: Lowering, values: dict[str, torch.Tensor] | None = None) -> str:
    with pytest.raises(NotComputed) as caught:
        evaluate(lowered.computed()[-1], lowered.values() if values is None else values, graph=lowered.graph)
    return str(caught.value)


def test_random_numbers_are_not_evaluated() -> None:
    assert _refusal(lower(lambda x: torch.rand_like(x) + x, (_normal(4),), fallback_random=False)) == "random numbers"


def test_the_result_of_an_extern_kernel_must_be_given() -> None:
    lowered = lower(lambda x: (x @ x).exp(), (_normal(4, 4),))
    assert _refusal(lowered, dict(lowered.inputs)).startswith("the value of buf0 (ExternKernelOut) is needed")
    torch.testing.assert_close(lowered.outputs()[0], (lowered.inputs["arg0_1"] @ lowered.inputs["arg0_1"]).exp())


def test_an_extern_kernel_is_no_loop() -> None:
    lowered = lower(lambda x: x @ x, (_normal(4, 4),))
    (product,) = lowered.graph.buffers
    with pytest.raises(NotComputed, match="ExternKernelOut is no loop"):
        evaluate(product, lowered.values(), graph=lowered.graph)


def test_an_index_out_of_range_is_said() -> None:
    lowered = lower(lambda x, i: x[i], (_normal(4), torch.tensor([0, 3])))
    values = lowered.values()
    (index,) = (name for name, value in values.items() if value.dtype == torch.int64)
    assert "out of range" in _refusal(lowered, {**values, index: torch.tensor([0, 4])})


def test_several_values_for_one_element_are_no_value() -> None:
    lowered = lower(lambda x, i, v: x.index_put((i,), v), (_normal(4), torch.tensor([0, 1]), torch.tensor([1.0, 2.0])))
    values = lowered.values()
    (index,) = (name for name, value in values.items() if value.dtype == torch.int64)
    assert "several values" in _refusal(lowered, {**values, index: torch.tensor([1, 1])})


def test_a_value_of_another_shape_is_said() -> None:
    assert _refusal(_softmax(), {"arg0_1": torch.zeros(3)}) == "arg0_1 has shape (3,), in the IR (4, 33)"


def test_large_domains_are_not_evaluated() -> None:
    with patch.object(indices, "LARGEST_DOMAIN", 100):
        assert _refusal(_softmax()) == "132 iterations"


def test_an_error_of_torch_is_a_reason() -> None:
    def fail(*_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("what torch says\nand more")

    with patch.object(tensor_ops, "_FUNCTIONS", {**tensor_ops._FUNCTIONS, "exp": fail}):
        assert _refusal(lower(torch.exp, (_normal(4),))) == "RuntimeError: what torch says"


def test_out_of_memory_is_raised() -> None:
    def fail(*_: torch.Tensor) -> torch.Tensor:
        raise MemoryError

    lowered = lower(torch.exp, (_normal(4),))
    with patch.object(tensor_ops, "_FUNCTIONS", {"exp": fail}), pytest.raises(MemoryError):
        evaluate(lowered.computed()[0], lowered.values(), graph=lowered.graph)


def test_an_evaluation_leaves_nothing_behind() -> None:
    lowered = _softmax()
    values = lowered.values()
    before = (V.get_ops_handler(), ir.FlexibleLayout.allow_indexing, {n: v.clone() for n, v in values.items()})
    graph = lowered.graph
    with V.set_graph_handler(graph):
        evaluate(lowered.computed()[-1], values, graph=graph)
        with pytest.raises(NotComputed):
            evaluate(lowered.computed()[-1], {}, graph=graph)
        assert V.graph is graph
    assert type(V.get_ops_handler()) is type(before[0])
    assert ir.FlexibleLayout.allow_indexing == before[1]
    assert all(torch.equal(values[name], value) for name, value in before[2].items())


# internals of torch


def test_this_torch_has_every_internal_that_is_used() -> None:
    for owner, names in (
        (ir, "Buffer ComputedBuffer ConcatKernel NonOwningLayout MutationLayoutSHOULDREMOVE FlexibleLayout Layout"),
        (ir, "Pointwise Reduction"),
        (ir.FlexibleLayout, "allow_indexing"),
        (ir.ComputedBuffer, "get_store_function has_store_function get_read_writes get_origin_node get_mutation_names"),
        (ir.MutationLayoutSHOULDREMOVE, "get_buffer real_layout"),
        (ir.Reduction, "get_pointwise_size get_reduction_size"),
        (GraphLowering, "try_get_buffer compile_to_module"),
        (OpsHandler, "load store store_reduction reduction masked indirect_indexing bucketize index_expr"),
    ):
        for name in names.split():
            assert hasattr(owner, name), f"{owner.__name__}.{name}"
    graph = _softmax().graph
    for name in ("buffers", "constants", "graph_inputs", "graph_outputs", "module", "sizevars"):
        assert hasattr(graph, name), name


# the stage

TRUTH = {
    # reference, IR, kernel, allowed: stage
    "all agree": ([1.0, 2.0], [1.0, 2.0], [1.0, 2.0], 1e-6, ""),
    "within what rounding explains": ([1.0, 2.0], [1.0, 2.0], [1.0, 2.1], 0.2, ""),
    "the kernel alone is wrong": ([1.0, 2.0], [1.0, 2.0], [1.0, 2.1], 1e-6, "codegen"),
    "the kernel does as the IR, which is wrong": ([1.0, 2.0], [1.0, 2.1], [1.0, 2.1], 1e-6, "lowering"),
    "both wrong, each in its way": ([1.0, 2.0], [1.0, 2.1], [1.0, 2.9], 1e-6, "lowering"),
    "the IR is wrong at one of two": ([1.0, 2.0], [1.0, 2.1], [1.1, 2.1], 1e-6, "lowering"),
    "the IR is wrong elsewhere": ([1.0, 2.0], [1.5, 2.0], [1.0, 2.1], 1e-6, "codegen"),
    "the IR is wrong and the kernel is not": ([1.0, 2.0], [1.5, 2.0], [1.0, 2.0], 1e-6, ""),
    "the IR is less wrong than rounding explains": ([1.0, 2.0], [1.0, 2.00001], [1.0, 2.1], 1e-3, "codegen"),
    "NaN from all": ([nan], [nan], [nan], 0.0, ""),
    "NaN from the kernel": ([1.0], [1.0], [nan], 1.0, "codegen"),
    "NaN from the IR and the kernel": ([1.0], [nan], [nan], 1.0, "lowering"),
    "NaN lost by the kernel": ([nan], [nan], [1.0], 1.0, "codegen"),
    "NaN lost by the IR": ([nan], [1.0], [1.0], 1.0, "lowering"),
    "infinities": ([inf, -inf], [inf, -inf], [inf, -inf], 0.0, ""),
    "infinity of the other sign": ([inf], [inf], [-inf], inf, "codegen"),
    "overflow of the kernel's dtype": ([1e40], [1e40], [inf], 0.0, ""),
    "nothing": ([], [], [], 0.0, ""),
}


@pytest.mark.parametrize("case", TRUTH)
def test_stage(case: str) -> None:
    reference, lowered, kernel, allowed, stage = TRUTH[case]
    wide = torch.tensor(reference, dtype=torch.float64), torch.tensor(lowered, dtype=torch.float64)
    if case == "infinity of the other sign":
        allowed = 1.0
    assert stage_of(*wide, torch.tensor(kernel, dtype=torch.float32), allowed) == stage


@pytest.mark.parametrize(
    ("reference", "lowered", "kernel", "stage"),
    [([1, 2], [1, 2], [1, 2], ""), ([1, 2], [1, 2], [1, 3], "codegen"), ([1, 2], [1, 3], [1, 3], "lowering")],
)
def test_stage_of_integers_is_exact(reference: list[int], lowered: list[int], kernel: list[int], stage: str) -> None:
    assert stage_of(torch.tensor(reference), torch.tensor(lowered), torch.tensor(kernel), 10.0) == stage


def test_what_rounding_explains_may_differ_by_element() -> None:
    reference = torch.tensor([1.0, 1.0], dtype=torch.float64)
    kernel = torch.tensor([1.5, 1.5])
    assert stage_of(reference, reference, kernel, torch.tensor([1.0, 1.0])) == ""
    assert stage_of(reference, reference, kernel, torch.tensor([1.0, 0.1])) == "codegen"


# planted mistakes


@pytest.fixture
def wrong_rsqrt() -> Iterator[None]:
    right = lowerings[aten.rsqrt.default]
    mul = lowerings[aten.mul.Tensor]
    with patch.dict(lowerings, {aten.rsqrt.default: lambda x: mul(right(x), 1.001)}):
        yield


def _judged(lowered: Lowering, kernel: torch.Tensor, reference: torch.Tensor) -> str:
    ours, own = lowered.outputs(float64=True)[0], lowered.outputs()[0]
    allowed = 16 * (own.double() - ours).abs() + 1e-6 * reference.abs()
    return stage_of(reference, ours, kernel, allowed)


def _rsqrt(x: torch.Tensor) -> torch.Tensor:
    return x.rsqrt() + x.exp()


@pytest.mark.usefixtures("wrong_rsqrt")
def test_a_wrong_lowering_is_in_the_ir() -> None:
    x = _normal(64).abs() + 0.1
    lowered = lower(_rsqrt, (x,))
    assert _judged(lowered, lowered.outputs()[0], _rsqrt(x.double())) == "lowering"


def test_a_clean_twin_is_right() -> None:
    x = _normal(64).abs() + 0.1
    lowered = lower(_rsqrt, (x,))
    assert _judged(lowered, lowered.outputs()[0], _rsqrt(x.double())) == ""


def test_a_less_exact_formula_is_no_mistake() -> None:
    x = _normal(4, 64) + 1000
    right = lowerings[aten.mul.Tensor]

    def one_pass(x: torch.Tensor) -> torch.Tensor:
        return (x * x).mean(1) - x.mean(1) ** 2

    lowered = lower(one_pass, (x,))
    exact = x.double().var(1, correction=0)
    kernel = lowered.outputs()[0]
    assert (kernel.double() - exact).abs().max() > 1e-3
    assert _judged(lowered, kernel, exact) == ""
    with patch.dict(lowerings, {aten.mul.Tensor: lambda a, b: right(right(a, b), 1.001)}):
        wrong = lower(one_pass, (x,))
    assert _judged(wrong, wrong.outputs()[0], exact) == "lowering"


@pytest.mark.usefixtures("wrong_rsqrt")
def test_a_wrong_lowering_that_is_compiled_is_in_the_ir() -> None:
    x = _normal(64).abs() + 0.1
    lowered = lower_compiled(_rsqrt, (x,), run=True)
    assert _judged(lowered, lowered.results[0], _rsqrt(x.double())) == "lowering"


def test_wrong_code_is_not_in_the_ir() -> None:
    from torch._inductor.codegen.cpp import CppVecOverrides

    x = _normal(64).abs() + 0.1
    with patch.object(CppVecOverrides, "exp", staticmethod(lambda x: f"({x}.exp() * decltype({x})(1.001f))")):
        lowered = lower_compiled(_rsqrt, (x,), run=True)
    assert _judged(lowered, lowered.results[0], _rsqrt(x.double())) == "codegen"


def test_a_compiled_clean_twin_is_right() -> None:
    x = _normal(64).abs() + 0.1
    lowered = lower_compiled(_rsqrt, (x,), run=True)
    assert _judged(lowered, lowered.results[0], _rsqrt(x.double())) == ""
