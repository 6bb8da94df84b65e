"""Where two executions first differ, decided on records written by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from hashbench.core.records import Leaf, OpRecord, Ref, Result, TensorDigest, Trace
from hashbench.tools.numeric.compare import compare_values
from hashbench.tools.numeric.counterparts import correspondence
from hashbench.tools.numeric.first_difference import _in_one_shape, find
from hashbench.tools.numeric.report import CommonRecord, FirstDifference, Rule

CLOSE = 0.5
"""Values that are at most so far apart are within tolerance."""


def trace(*ops: str, leaves: dict[str, float] | None = None, results: dict[str, str] | None = None) -> Trace:
    """A trace from lines ``module op value = what it reads``; ids are ``module/op``, of leaves ``parameter/w``.

    A value of ``view`` writes nothing, one of ``blank`` is an allocation.
    """
    known = {"x": 1.0} | (leaves or {})
    records = []
    for line in ops:
        left, _, right = line.partition("=")
        module, op, value = left.split()
        name, _, arguments = op.partition("(")
        records.append(
            OpRecord(
                f"{module}/{op}",
                "backward" if module.startswith("back") else "forward",
                0,
                module.removeprefix("back."),
                name,
                inputs=tuple(Ref(str(n), source(word, known)) for n, word in enumerate(right.split())),
                arguments=arguments.rstrip(")"),
                outputs=() if value == "view" else (digest(value),),
                blank=value == "blank",
            )
        )
    last = records[-1].id
    return Trace(
        tuple(records),
        leaves=tuple(
            Leaf(source(name, known), kind_of(name), digest(str(value)), first_reader(source(name, known), records))
            for name, value in known.items()
        ),
        results=tuple(Result(n, digest("0"), s) for n, s in (results or {"out": last}).items()),
    )


def first_reader(node: str, records: list[OpRecord]) -> int:
    return next((n for n, record in enumerate(records) if any(ref.source == node for ref in record.inputs)), 0)


def kind_of(name: str) -> str:
    return "input" if name == "x" else "parameter"


def source(word: str, leaves: dict[str, float]) -> str:
    return f"{kind_of(word)}/{word}" if word in leaves else word


def digest(value: str) -> TensorDigest:
    return TensorDigest("float32", (1,), (1,), value)


def first_difference(first: Trace, second: Trace, level: str = "tolerance") -> FirstDifference:
    values = [
        {item.id: item.outputs[0].value for item in one.records if item.outputs}
        | {item.id: item.digest.value for item in one.leaves}
        for one in (first, second)
    ]

    def differ(a: str, b: str) -> bool:
        return abs(float(values[0][a]) - float(values[1][b])) > (CLOSE if level == "tolerance" else 0)

    return find(first, second, level=level, differ=differ, differing=("out",))


W, X = "a conv 1 = x w", "e extra 9 = d/linear"
PLAIN = (W, "b norm 2 = a/conv", "c relu 3 = b/norm", "d linear 4 = c/relu v")
LEAVES = {"w": 1.0, "v": 1.0}
VIEWS = ("a view view = x", "a empty blank =")


def case(first: Sequence[str], second: Sequence[str], expected: str, **changed: float) -> tuple[Trace, Trace, str]:
    """Two executions of the same leaves, but for those ``changed`` in the second, and kind, op and module expected."""
    return trace(*first, leaves=LEAVES), trace(*second, leaves=LEAVES | changed), expected


CASES = {
    "a kernel that differs": case(
        PLAIN, [W, "b norm 9 = a/conv", "c relu 9 = b/norm", "d linear 9 = c/relu v"], "op norm b"
    ),
    "a wrong weight": case(
        PLAIN,
        ["a conv 9 = x w", "b norm 9 = a/conv", "c relu 9 = b/norm", "d linear 9 = c/relu v"],
        "parameter conv a",
        w=9.0,
    ),
    "a fold that heals before a wrong weight": case(
        PLAIN,
        ["a conv 7 = x w", "c relu 3.1 = a/conv", "d linear 9 = c/relu v"],
        "parameter linear d",
        w=7.0,
        v=8.0,
    ),
    "a fold that is wrong": case(
        PLAIN, ["a conv 7 = x w", "c relu 8 = a/conv", "d linear 9 = c/relu v"], "parameter conv a", w=7.0
    ),
    "an op in place of another": case(PLAIN, [*PLAIN[:3], "d quantized 9 = c/relu q"], "replaced linear d", q=1.0),
    "an op that only the second runs": case(PLAIN, [*PLAIN, X], "only after extra e"),
    "an op that only the first runs": case([*PLAIN, X], PLAIN, "only before extra e"),
    "another argument": case(["a scale(2) 2 = x"], ["a scale(3) 3 = x"], "op scale a"),
    "an input that differs": case(["a scale 2 = x"], ["a scale 9 = x"], "input scale a", x=9.0),
    "no record that explains it": case(PLAIN, PLAIN, "unseen  "),
    "views and allocations, which leave nothing": case(
        [*VIEWS, "a scale 2 = x a/empty"], ["a scale 9 = x"], "op scale a"
    ),
    "views and allocations of both": case(
        [*VIEWS, "a scale 2 = x a/empty"], [*VIEWS, "a scale 9 = x a/empty"], "op scale a"
    ),
    "a kernel that differs beside an op of one execution alone": case(
        ["a extra 1 = x", "b scale 2 = x", "c add 3 = b/scale a/extra"],
        ["b scale 8 = x", "c add 9 = b/scale x"],
        "op scale b",
    ),
    "a module path that only one execution knows": case(
        ["a conv 1 = x", "b relu 2 = a/conv"], ["all conv 1 = x", "all relu 9 = all/conv"], "op relu b"
    ),
    "a difference that does not reach the result": case(
        ["a noise 1 = x", "b scale 2 = x"], ["a noise 9 = x", "b scale 9 = x"], "op scale b"
    ),
}


@pytest.mark.parametrize(("first", "second", "expected"), CASES.values(), ids=CASES)
def test_executions_first_differ_at(first: Trace, second: Trace, expected: str) -> None:
    found = first_difference(first, second)
    assert f"{found.kind} {found.op} {found.module}" == expected


def compiled(made: Trace, *nodes: str) -> Trace:
    """The trace in which these records stand for compiled code."""
    records = [replace(one, opaque="compiled code") if one.id in nodes else one for one in made.records]
    return replace(made, records=tuple(records))


EAGER = ("a conv 1 = x", "m one 2 = a/conv", "m two 3 = m/one", "d view view = m/two", "d last 4 = m/two")


COMPILED = (
    "a conv 1 = x",
    "m torch.compile {} = a/conv",
    "d view view = m/torch.compile",
    "d last 9 = m/torch.compile",
)
ONE_AND_TWO = ("one in m", "two in m")


def with_compiled(*values: str) -> Trace:
    """The trace in which compiled code left ``values``, in place of two ops of ``EAGER``."""
    return compiled(trace(*(line.format(*values) for line in COMPILED)), "m/torch.compile")


def test_of_compiled_code_no_op_is_blamed_but_the_records_around_it_are_named() -> None:
    for first, second in ((trace(*EAGER), with_compiled("7")), (with_compiled("7"), trace(*EAGER))):
        found = first_difference(first, second)
        assert (found.kind, found.op) == ("between", "")
        assert found.last_before == CommonRecord("conv", "a", "forward", 0, "a/conv", "a/conv")
        assert found.first_after == CommonRecord("last", "d", "forward", 0, "d/last", "d/last")
        assert {found.unmatched_before, found.unmatched_after} == {ONE_AND_TWO, ("torch.compile in m",)}


def test_a_fused_op_that_is_recorded_is_named_as_compiled_code_is_not() -> None:
    second = trace("a conv 1 = x", "m fused 7 = a/conv", "d view view = m/fused", "d last 9 = m/fused")
    assert first_difference(trace(*EAGER), second).kind == "only before"
    assert first_difference(trace(*EAGER), compiled(second, "m/fused")).kind == "between"


def test_compiled_code_that_agrees_is_not_blamed_for_what_comes_after_it() -> None:
    second = with_compiled("3.1")
    tolerance, bitwise = (first_difference(trace(*EAGER), second, level) for level in ("tolerance", "bitwise"))
    assert (tolerance.kind, tolerance.op, tolerance.module) == ("op", "last", "d")
    assert bitwise.kind == "between"
    assert (bitwise.aligned, bitwise.only_before, bitwise.only_after) == (3, 1, 0)  # compiled code is no op


def test_an_op_outside_of_compiled_code_is_named_beside_it() -> None:
    second = compiled(trace("a conv 9 = x", *(line.format("9") for line in COMPILED[1:])), "m/torch.compile")
    found = first_difference(trace(*EAGER), second)
    assert (found.kind, found.op, found.module) == ("op", "conv", "a")


def test_a_model_that_is_compiled_whole_differs_between_the_ends_of_the_trace() -> None:
    found = first_difference(trace(*EAGER), compiled(trace("all torch.compile 9 = x"), "all/torch.compile"))
    assert (found.kind, found.last_before, found.first_after) == ("between", None, None)
    assert found.detail == "not known at which op: between the input x, which agrees, and out"


def test_no_op_is_blamed_that_the_backward_of_compiled_code_may_hide() -> None:
    first = trace("a conv 1 = x", "m one 2 = a/conv", "back.d mul 4 = m/one", "back.m div 5 = back.d/mul")
    lines = ("a conv 1 = x", "m torch.compile 2 = a/conv", "back.d mul 4 = m/torch.compile")
    for last in ((), ("back.all f.out 9 = back.d/mul",)):
        found = first_difference(first, compiled(trace(*lines, *last), "m/torch.compile"), "bitwise")
        assert (found.kind, found.phase, found.first_after) == ("between", "backward", None)
        assert found.last_before is not None
        assert found.last_before.op == "mul"


OUT = ("a aten.addmm.default 1 = x", "b aten.relu.default 2 = a/aten.addmm.default")


def test_an_out_variant_corresponds_to_the_op_that_it_is_a_variant_of() -> None:
    innocent = trace("a aten.addmm.out 1 = x", "b aten.relu.default 9 = a/aten.addmm.out")
    guilty = trace("a aten.addmm.out 9 = x", "b aten.relu.default 9 = a/aten.addmm.out")
    relu, addmm = first_difference(trace(*OUT), innocent), first_difference(trace(*OUT), guilty)
    assert (relu.kind, relu.op, relu.aligned, relu.only_before) == ("op", "aten.relu.default", 2, 0)
    assert (addmm.kind, addmm.op, addmm.detail) == (
        "replaced",
        "aten.addmm.default",
        "aten.addmm.out in place of aten.addmm.default, and what they read agrees",
    )


GENERATED = (
    "a aten.addmm.out 1 = x",
    "m cpp_fused_0 7 = a/aten.addmm.out",
    "b aten.addmm.out 9 = m/cpp_fused_0",
    "b cpp_fused_1 9 = b/aten.addmm.out",
)
DISPATCHED = (
    "a aten.addmm.default 1 = x",
    "m aten.relu.default 2 = a/aten.addmm.default",
    "m aten.exp.default 3 = m/aten.relu.default",
    "b aten.addmm.default 4 = m/aten.exp.default",
    "b aten.gelu.default 5 = b/aten.addmm.default",
)


def test_generated_kernels_are_named_between_the_ops_that_both_run() -> None:
    found = first_difference(trace(*DISPATCHED), trace(*GENERATED))
    assert (found.kind, found.op) == ("between", "")
    assert found.unmatched_before == ("aten.relu.default in m", "aten.exp.default in m")
    assert found.unmatched_after == ("cpp_fused_0 in m",)
    assert found.detail.startswith(
        "not known at which op: between aten.addmm.default in a (forward), which agrees, "
        "and aten.addmm.default in b (forward, iteration 0)"
    )


def test_an_op_whose_result_the_other_has_in_another_place_is_not_blamed() -> None:
    first = trace(
        "a aten.mm.default 1 = x",
        "a aten.add.Tensor 2 = x",
        "c aten.mul.Tensor 4 = a/aten.mm.default w",
        leaves={"w": 1.0},
    )
    second = trace(
        "a aten.add.Tensor 2 = x", "b aten.mm.out 1 = x", "c aten.mul.Tensor 9 = b/aten.mm.out w", leaves={"w": 1.0}
    )
    found = first_difference(first, second)
    assert (found.kind, found.op, found.only_before, found.only_after) == ("op", "aten.mul.Tensor", 1, 1)
    other = trace(
        "a aten.add.Tensor 2 = x", "b aten.mm.out 8 = x", "c aten.mul.Tensor 9 = b/aten.mm.out w", leaves={"w": 1.0}
    )
    assert first_difference(first, other).op == "aten.mm.default"


def in_shape(made: Trace, *shape: int) -> Trace:
    """The trace whose records left tensors of this shape."""
    records = (replace(one, outputs=tuple(out._replace(shape=shape) for out in one.outputs)) for one in made.records)
    return replace(made, records=tuple(records))


def test_a_generated_kernel_that_agrees_is_not_blamed_for_the_op_behind_it() -> None:
    lines = (
        "a aten.addmm.out 1 = x",
        "m cpp_fused_0 3 = a/aten.addmm.out",
        "b aten.addmm.out 4 = m/cpp_fused_0",
        "b cpp_fused_1 9 = b/aten.addmm.out",
    )
    found = first_difference(trace(*DISPATCHED), trace(*lines))
    assert found.unmatched_after == ("cpp_fused_1 in b",)
    assert found.last_before is not None
    assert (found.last_before.module, found.first_after) == ("b", None)
    wrong = (*lines[:2], "b aten.addmm.out 5 = m/cpp_fused_0", lines[3], "x aten.sum.default 9 = b/cpp_fused_1")
    found = first_difference(trace(*DISPATCHED), trace(*wrong))
    assert (found.op, found.module) == ("aten.addmm.default", "b")


def test_a_buffer_that_is_filled_again_is_not_what_an_op_reads() -> None:
    def filling(made: Trace, buffer: str) -> Trace:
        first, second, third = made.records
        refs = (*third.inputs, Ref("out", buffer, 0, written=True))
        return replace(made, records=(first, second, replace(third, inputs=refs)))

    lines = ("a mul {} = x", "b neg 2 = x", "c add.out {} = b/neg")
    first, second = (trace(*(line.format(value) for line in lines)) for value in ("1", "9"))
    found = first_difference(filling(first, "a/mul"), filling(second, "a/mul"))
    assert (found.op, found.module) == ("add.out", "c")


def test_memory_that_an_op_only_fills_is_not_what_it_reads() -> None:
    def filling(value: str, old: str) -> Trace:
        made = trace(f"a linear {value} = x")
        record = replace(made.records[0], inputs=(*made.records[0].inputs, Ref("out", "other/#0", 0, written=True)))
        return replace(made, records=(record,), leaves=(*made.leaves, Leaf("other/#0", "other", digest(old), 0)))

    assert first_difference(filling("1", "5"), filling("9", "7")).kind == "op"


def test_the_two_levels_may_differ_first_at_two_places() -> None:
    first = trace("a conv 1 = x w", "d linear 4 = a/conv v", leaves=LEAVES)
    second = trace("a conv 1.1 = x w", "d linear 9 = a/conv v", leaves=LEAVES)
    assert first_difference(first, second, "tolerance").module == "d"
    assert first_difference(first, second, "bitwise").module == "a"


def test_what_differs_and_heals_is_counted() -> None:
    first, second, _ = CASES["a fold that heals before a wrong weight"]
    found = first_difference(first, second)
    assert (found.healed, found.aligned, found.only_before, found.only_after) == (1, 3, 1, 0)


def test_of_ops_without_a_counterpart_none_is_blamed_but_both_ends_are_named() -> None:
    first = trace("a conv 1 = x", "b one 2 = a/conv", "c two 3 = b/one", "d last 4 = c/two", leaves=LEAVES)
    second = trace("a conv 1 = x", "k fused 7 = a/conv", "d last 9 = k/fused", leaves=LEAVES)
    found = first_difference(first, second)
    assert (found.kind, found.op) == ("between", "")
    assert found.last_before == CommonRecord("conv", "a", "forward", 0, "a/conv", "a/conv")
    assert found.first_after == CommonRecord("last", "d", "forward", 0, "d/last", "d/last")
    assert (found.unmatched_before, found.unmatched_after) == (("one in b", "two in c"), ("fused in k",))
    assert found.detail == (
        "not known at which op: between conv in a (forward), which agrees, and last in d (forward, iteration 0), "
        "the first that differs of the ops taken for the same"
    )


UNKNOWN = "between  "
OTHER_MODELS = {
    "an op that only one execution runs, which another of the other replaces further on": case(
        ["a conv 1 = x", "b copy 1 = a/conv", "c mul 2 = b/copy", "d last 4 = c/mul"],
        ["a conv 1 = x", "e add 6 = a/conv", "f div 7 = e/add", "d last 9 = f/div"],
        UNKNOWN,
    ),
    "the first of several ops of one name, of which the other execution runs fewer": case(
        ["q mm 1 = x w", "k mm 2 = x v", "a dot 3 = q/mm k/mm"],
        ["qk mm 9 = x u", "a dot 9 = qk/mm qk/mm"],
        UNKNOWN,
        u=1.0,
    ),
    "an op that is given other tensors": case(
        ["a conv 1 = x", "b neg 2 = x", "c relu 1 = a/conv", "d add 3 = c/relu a/conv"],
        ["a conv 1 = x", "b neg 2 = x", "c relu 1 = a/conv", "d add 4 = c/relu b/neg"],
        UNKNOWN,
    ),
    "an op that is given the same tensors in another order": case(
        ["a conv 1 = x", "b neg 2 = x", "d add 3 = a/conv b/neg"],
        ["a conv 1 = x", "b neg 2 = x", "d add 9 = b/neg a/conv"],
        "op add d",
    ),
    "an op in place of another, in one place and given the same": case(
        ["a conv 1 = x", "a silu 2 = a/conv", "b last 3 = a/silu"],
        ["a conv 1 = x", "c gelu 8 = a/conv", "b last 9 = c/gelu"],
        "only before silu a",
    ),
    "an op after a copy that only one execution makes": case(
        ["a conv 1 = x", "b copy 1 = a/conv", "c mul(2) 2 = b/copy"],
        ["a conv 1 = x", "c mul(3) 3 = a/conv"],
        "op mul c",
    ),
    "an op that only one execution runs before an op of both": case(
        ["a conv 1 = x", "b scale 5 = a/conv", "c mul 5 = b/scale"],
        ["a conv 1 = x", "c mul 1 = a/conv"],
        "only before scale b",
    ),
}


@pytest.mark.parametrize(("first", "second", "expected"), OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_of_other_models_an_op_is_blamed_only_where_all_that_it_reads_agrees(
    first: Trace, second: Trace, expected: str
) -> None:
    found = first_difference(first, second)
    assert f"{found.kind} {found.op} {found.module}" == expected


def test_ops_that_leave_another_shape_are_not_the_same_op() -> None:
    lines = ("a outer {} = x", "b cos {} = a/outer", "c last {} = b/cos")
    first, second = (in_shape(trace(*(one.format(value) for one in lines)), 7, 8) for value in "12")
    turned = replace(second, records=tuple(reshaped(one, (14, 4)) for one in second.records))
    joined = replace(second, records=tuple(reshaped(one, (56,)) for one in second.records))
    assert first_difference(first, joined).op == "outer"
    assert first_difference(first, replace(turned, records=(*turned.records[:2], second.records[2]))).kind == "between"


def reshaped(record: OpRecord, shape: tuple[int, ...]) -> OpRecord:
    return replace(record, outputs=tuple(out._replace(shape=shape) for out in record.outputs))


@pytest.mark.parametrize(
    ("layout", "offset", "kind"), [("[4]", 0, "op"), ("[2]", 2, "between")], ids=["the same part", "another part"]
)
def test_an_op_that_is_given_another_part_of_the_same_tensor_is_not_blamed(layout: str, offset: int, kind: str) -> None:
    def reading(made: Trace, layout: str, offset: int) -> Trace:
        record = made.records[1]
        refs = (record.inputs[0]._replace(layout=layout, offset=offset),)
        return replace(made, records=(made.records[0], replace(record, inputs=refs)))

    first, second = (in_shape(trace("a mm 1 = x", f"b silu {value} = a/mm"), 4) for value in "29")
    whole = reading(first, "[4]" if kind == "op" else "[2]", 0)
    assert first_difference(whole, reading(second, layout, offset)).kind == kind


def test_the_last_op_of_a_module_replaces_the_last_of_the_other_if_the_shape_is_the_same() -> None:
    first = trace("m mm 1 = x", "m add 2 = m/mm", "n relu 3 = m/add").records
    second = trace("m quantize 1 = x", "m linear 2 = m/quantize", "n relu 3 = m/linear").records
    pairs, replaced = correspondence(first, second)
    assert pairs == [(0, None), (None, 0), (1, 1), (2, 2)]
    assert replaced == {(1, 1)}


def test_every_record_occurs_once_and_in_order() -> None:
    first = trace("m a 1 = x", "n b 1 = x", "m c 1 = x", "o d 1 = x").records
    second = trace("n e 1 = x", "m f 1 = x", "n g 1 = x", "o d 1 = x", "o h 1 = x").records
    pairs, replaced = correspondence(first, second)
    assert [a for a, _ in pairs if a is not None] == list(range(4))
    assert [b for _, b in pairs if b is not None] == list(range(5))
    assert replaced <= set(pairs)


def test_what_one_execution_alone_has_is_not_said_to_agree() -> None:
    first = trace("a mul 1 = x w", "b add 2 = a/mul", leaves={"w": 1.0})
    second = trace("a mul 1 = x w", "b sub 3 = a/mul v", leaves={"w": 1.0, "v": 4.0})
    found = first_difference(first, second)
    assert "agrees" not in found.detail, found
    assert "not all that it reads was compared: one execution alone has the parameter v" in found.detail


@pytest.mark.parametrize(
    ("shape", "differs"), [((11,), False), ((11, 1), False), ((1, 10), True)], ids=["flat", "turned", "fewer"]
)
def test_another_shape_of_the_same_values_is_no_difference(shape: tuple[int, ...], *, differs: bool) -> None:
    values = torch.arange(11.0).view(1, 11, 1)
    other = torch.arange(float(math.prod(shape))).view(shape)
    a, b = _in_one_shape(values, other)
    assert (compare_values("positions", a, b, rule=Rule()).kind == "shape") is differs
