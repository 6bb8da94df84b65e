"""The numeric check's comparisons of values, beside those of torch's own that it replaces."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import warnings
from types import ModuleType

import pytest
import torch

from hashbench.core.errors import HashbenchError
from hashbench.tools import numeric
from hashbench.tools.numeric.compare import compare_values, renamed
from hashbench.tools.numeric.report import Rule, finding_of

NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module")
def ancestor() -> ModuleType:
    """Torch's own check; importing it sets an environment variable for good."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
        from torch._inductor.fx_passes import numeric_utils

    return numeric_utils


def compared(before, after, *, precision=None, ignore=()):
    return compare_values("x", before, after, rule=Rule(precision, ignore=frozenset(ignore)))


# ------------------------------------------------------------------------------------ the same as the ancestor's


NUMBERS = [0.0, -0.0, 1.0, 1.0 + 5e-5, 1.0 + 2e-4, 1e-5, -1e-5, 1e6, 1e6 + 50, 1e6 + 500, INF, -INF, NAN]
INTEGERS = [0, 1, 200, 201, 2**7]
DTYPES = {
    **dict.fromkeys((torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64), NUMBERS),
    **dict.fromkeys((torch.int64, torch.int32, torch.uint8), INTEGERS),
}


@pytest.mark.slow
@pytest.mark.parametrize("precision", [1e-4, 0.0, 1e-3, 0.1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verdict_on_tensors_is_the_ancestors(ancestor: ModuleType, dtype: torch.dtype, precision: float) -> None:
    tensors = [torch.tensor([number, 1], dtype=dtype) for number in DTYPES[dtype]]
    for before, after in itertools.product(tensors, tensors):
        verdict = ancestor.compare_dict_tensors({"x": before}, {"x": after}, precision)
        assert bool(numeric.compare_dict_tensors({"x": before}, {"x": after}, precision)) == verdict, (before, after)
        for name in ("compare_tuple_tensors", "compare_forward_output"):
            verdict = bool(getattr(ancestor, name)((before,), (after,), precision))
            assert bool(getattr(numeric, name)((before,), (after,), precision)) == verdict, (name, before, after)


def test_verdict_on_models_is_the_ancestors(ancestor: ModuleType) -> None:
    torch.manual_seed(0)
    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    for shift in (0.0, 1e-5, 1e-2):
        with torch.no_grad():
            for parameter, other in zip(models[1].parameters(), models[0].parameters(), strict=True):
                parameter.copy_(other + shift)
                parameter.grad, other.grad = other.detach() + shift, other.detach().clone()
        for name in ("compare_parameters", "compare_gradients"):
            assert bool(getattr(numeric, name)(*models, 1e-4)) == getattr(ancestor, name)(*models, 1e-4)


def test_every_function_of_the_ancestor_is_there_and_takes_its_arguments_in_that_order(ancestor: ModuleType) -> None:
    own = [name for name, item in vars(ancestor).items() if getattr(item, "__module__", "") == ancestor.__name__]
    names = [name for name in own if not name.startswith("__")]  # Python 3.14 adds __annotate__
    assert len(names) >= 9
    for name in names:
        theirs = list(inspect.signature(getattr(ancestor, name)).parameters.values())
        ours = list(inspect.signature(getattr(numeric, name)).parameters.values())
        assert [p.name for p in theirs] == [p.name for p in ours[: len(theirs)]], name
        assert all(
            p.default is not inspect.Parameter.empty or p.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD
            for p in ours[len(theirs) :]
        ), name
        for one, other in zip(theirs, ours, strict=False):
            assert one.default is inspect.Parameter.empty or one.default == other.default, name
    assert numeric.MAIN_RANDOM_SEED == ancestor.MAIN_RANDOM_SEED


# ------------------------------------------------------------------------------------ better than the ancestor's


def test_missing_key_is_a_difference_with_its_name_and_no_key_error(ancestor: ModuleType) -> None:
    a, b = {"x": torch.ones(1), "y": torch.ones(1)}, {"x": torch.ones(1), "z": torch.ones(1)}
    with pytest.raises(KeyError):
        ancestor.compare_dict_tensors(a, b, 1e-4)
    result = numeric.compare_dict_tensors(a, b, 1e-4)
    assert not result
    assert [(item.name, item.kind) for item in result.tensors if not item] == [
        ("y", "only before"),
        ("z", "only after"),
    ]


def test_gradient_that_only_one_model_has_is_a_difference_and_none_on_both_sides_is_not(ancestor: ModuleType) -> None:
    gradient = {"x": torch.ones(1), "y": None}
    assert ancestor.compare_dict_tensors(gradient, {"x": None, "y": None}, 1e-4)  # silence
    result = numeric.compare_dict_tensors(gradient, {"x": None, "y": None}, 1e-4)
    assert [(item.name, item.within, item.kind, item.detail) for item in result.tensors] == [
        ("x", False, "only before", "None after"),
        ("y", True, "", ""),
    ]
    assert [item.kind for item in numeric.compare_dict_tensors({"x": None}, gradient, 1e-4).tensors] == [
        "only after",
        "only after",
    ]


def test_outputs_of_another_length_name_what_is_missing() -> None:
    one, two = (torch.ones(1),), (torch.ones(1), torch.zeros(2))
    assert [(item.name, item.kind) for item in numeric.compare_tuple_tensors(one, two, 1e-4).differing] == [
        ("output.1", "only after")
    ]


def test_outputs_may_be_nested() -> None:
    @dataclasses.dataclass
    class Output:
        loss: torch.Tensor
        states: dict

    def output(value: float) -> Output:
        return Output(torch.tensor(1.0), {"a": [torch.ones(2), (torch.tensor([value]), "text", 3, None)]})

    result = numeric.compare_forward_output(output(1.0), output(1.5), 1e-4)
    assert [item.name for item in result.differing] == ["output.states.a.1.0"]
    assert len(result.tensors) == 6


FORMS = {
    "shape": (torch.ones(2, 3), torch.ones(3, 2), "shape", "float32[2,3] and float32[3,2]"),
    "shape that would broadcast": (torch.ones(3), torch.ones(1), "shape", "float32[3] and float32[1]"),
    "dtype": (torch.ones(2), torch.ones(2).double(), "dtype", "float32 and float64"),
    "layout": (torch.ones(2, 2), torch.ones(2, 2).to_sparse(), "layout", "strided and sparse_coo"),
    "tensor against a number": (torch.ones(()), 1.0, "type", "Tensor and float"),
    "text against a number": ("1", 1, "type", "str and int"),
    "other text": ("a", "b", "value", "'a' and 'b'"),
    "no data on both sides": (
        torch.ones(2, device="meta"),
        torch.ones(2, device="meta"),
        "no data",
        "float32[2] and float32[2]",
    ),
}


@pytest.mark.parametrize(("before", "after", "kind", "detail"), FORMS.values(), ids=FORMS)
def test_difference_of_form_is_a_difference_and_says_which(before, after, kind: str, detail: str) -> None:
    result = compared(before, after)
    assert (result.within, result.bitwise, result.kind, result.detail) == (False, False, kind, detail)


def test_form_can_be_looked_past_and_values_still_count() -> None:
    half = torch.tensor([1.0, 2.0]).half()
    assert compared(half, half.float(), ignore=["dtype"]).within
    assert not compared(half, half.float(), ignore=["dtype"]).bitwise
    assert compared(half, half.float(), ignore=["dtype"]).kind == "dtype"
    assert not compared(half, half.float() + 1, ignore=["dtype"]).within
    assert compared(torch.eye(2), torch.eye(2).to_sparse(), ignore=["layout"]).within
    with pytest.raises(HashbenchError, match="'stride' cannot be ignored"):
        compared(half, half, ignore=["stride"])


def test_unknown_type_is_never_equal() -> None:
    result = numeric.compare_forward_output(object(), object())
    assert not result
    assert result.tensors[0].kind == "not comparable"
    assert "builtins.object" in result.tensors[0].detail


# --------------------------------------------------------------------------------------------------- numbers


def test_numbers_of_a_difference() -> None:
    result = compared(torch.tensor([1.0, 2.0, 0.0, 4.0]), torch.tensor([1.0, 2.5, 0.5, 4.0 + 2**-21]))
    assert (result.elements, result.total, result.beyond) == (3, 4, 2)
    assert (result.max_abs, result.max_relative) == (0.5, 0.25)
    assert result.max_ulp == 0x3F000000  # from 0 to 0.5
    assert (result.rtol, result.atol) == (1.3e-6, 1e-5)
    assert result.excess == pytest.approx(0.5 / (1e-5 + 1.3e-6 * 0.5))


def test_both_verdicts_are_given() -> None:
    result = compared(torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]))
    assert (result.within, result.bitwise, result.max_ulp, result.beyond) == (True, False, 1, 0)
    assert 0 < result.excess < 1


LIMITS = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.int64: (0.0, 0.0),
    torch.bool: (0.0, 0.0),
}


@pytest.mark.parametrize(("dtype", "limits"), LIMITS.items(), ids=str)
def test_default_tolerance_is_that_of_assert_close(dtype: torch.dtype, limits: tuple[float, float]) -> None:
    result = compared(torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype))
    assert (result.rtol, result.atol) == limits
    assert not result.within


IMAGE = torch.rand(2, 3, 4, 4)
PAYLOADS = [torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001)]
EQUALITY = {
    "NaN at the same place": (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0]), True, True, ""),
    "NaN against a number": (torch.tensor([NAN]), torch.tensor([1.0]), False, False, ""),
    "infinity against itself": (torch.tensor([INF]), torch.tensor([INF]), True, True, ""),
    "infinity against the other": (torch.tensor([INF]), torch.tensor([-INF]), False, False, ""),
    "infinity against a number": (torch.tensor([INF]), torch.tensor([3e38]), False, False, ""),
    "sign of zero": (torch.tensor([0.0]), torch.tensor([-0.0]), True, False, "sign of zero"),
    "payload of NaN": (*PAYLOADS, True, False, "NaN payload"),
    "other strides": (IMAGE, IMAGE.to(memory_format=torch.channels_last), True, True, ""),
}


@pytest.mark.parametrize(("before", "after", "within", "bitwise", "detail"), EQUALITY.values(), ids=EQUALITY)
def test_equality_of(before: torch.Tensor, after: torch.Tensor, within: bool, bitwise: bool, detail: str) -> None:
    result = compared(before, after)
    assert (result.within, result.bitwise, result.detail) == (within, bitwise, detail)
    assert result.within or result.excess == INF
    assert (result.kind == "representation") == bool(detail)
    assert result.nan_in_both == int((before.isnan() & after.isnan()).sum())


def quantized(*values: float) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it deprecated
        return torch.quantize_per_tensor(torch.tensor(values), 0.5, 0, torch.qint8)


ODD = {
    "bool": (torch.tensor([True, False]), torch.tensor([True, True])),
    "uint16": tuple(torch.tensor([1, value], dtype=torch.uint16) for value in (2, 9)),
    "float8": tuple(torch.tensor([1.0, value]).to(torch.float8_e4m3fn) for value in (2.0, 8.0)),
    "sparse": (torch.eye(2).to_sparse(), torch.eye(2).mul(3).to_sparse()),
    "quantized": (quantized(1.0, 2.0), quantized(1.0, 9.0)),
    "complex": (torch.tensor([1 + 2j, 3j]), torch.tensor([1 + 2j, 9j])),
    "scalar": (torch.tensor(2.0), torch.tensor(9.0)),
    "empty": (torch.empty(0, 3), None),
}


@pytest.mark.parametrize(("before", "after"), ODD.values(), ids=ODD)
def test_every_kind_of_tensor_equals_itself_and_differs_from_another(before, after) -> None:
    same = compared(before, before.clone())
    assert (same.within, same.bitwise, same.kind) == (True, True, "")
    if after is not None:
        other = compared(before, after)
        assert (other.within, other.bitwise, other.kind) == (False, False, "value")
        assert other.excess is not None
        assert other.excess > 1


FLOAT8 = torch.tensor([1.0, 2.0])
CLOSE = {
    "Python floats": (1.0, 1.25, ()),
    "complex numbers": (1j, 1.25j, ()),
    "a float and an integer": (2.5, 3, ()),
    "float8, which has no arithmetic": (FLOAT8.to(torch.float8_e4m3fn), (FLOAT8 * 1.25).to(torch.float8_e4m3fn), ()),
    "two kinds of float8": (FLOAT8.to(torch.float8_e4m3fn), (FLOAT8 * 1.25).to(torch.float8_e5m2), ("dtype",)),
}


@pytest.mark.parametrize(("before", "after", "ignore"), CLOSE.values(), ids=CLOSE)
def test_values_that_are_close_are_within_tolerance_and_not_equal_bit_by_bit(before, after, ignore) -> None:
    result = compared(before, after, precision=0.5, ignore=ignore)
    assert (result.within, result.bitwise) == (True, False)
    assert not compared(before, after, ignore=ignore).within


def test_nested_tensors_are_compared_part_by_part() -> None:
    def nested(value: float) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.ones(2), torch.full((3,), value)], layout=torch.jagged)

    result = numeric.compare_forward_output((nested(1.0),), (nested(2.0),))
    assert [item.name for item in result.differing] == ["output.0.1"]


@pytest.mark.parametrize("value", [-1.0, NAN, INF])
def test_tolerance_that_means_nothing_is_refused(value: float) -> None:
    with pytest.raises(HashbenchError, match="is not a tolerance"):
        numeric.compare_dict_tensors({}, {}, value)


def test_table_shows_the_first_iteration_that_is_beyond_tolerance_and_the_worst_tensor_first() -> None:
    def tensor(name: str, within: bool, excess: float) -> numeric.TensorComparison:
        return numeric.TensorComparison(name, within, bitwise=False, kind="value", excess=excess)

    iterations = [((True, 0.1), (True, 0.2)), ((True, 0.3), (False, 8.0)), ((True, 0.5), (False, 9.0))]
    stages = [
        numeric.Comparison("outputs", (tensor("mild", *mild), tensor("bad", *bad)), number)
        for number, (mild, bad) in enumerate(iterations)
    ]
    found = finding_of(numeric.Report(tuple(stages)))
    assert found.table is not None
    assert [[cell for cell in row if cell] for row in found.table.rows] == [
        ["outputs", "bad", "1", "8"],
        ["outputs", "mild", "0", "0.1"],
    ]
    assert found.facts == (("outputs", "differ from iteration 1 on (1 of 2: bad)"),)


# ----------------------------------------------------------------------------------------------------- names


RENAMES = {
    "a whole name": ({"a.weight": "b.weight"}, {"a.weight": "b.weight", "a.bias": "a.bias"}),
    "what names begin with": ({"a": "s.0"}, {"a.weight": "s.0.weight", "a.bias": "s.0.bias"}),
    "the longest that fits": ({"a": "b", "a.bias": "c"}, {"a.weight": "b.weight", "a.bias": "c"}),
    "no part of a word": ({"a.b": "c"}, {"a.weight": "a.weight", "a.bias": "a.bias"}),
    "a function": (str.upper, {"a.weight": "A.WEIGHT", "a.bias": "A.BIAS"}),
    "nothing": (None, {"a.weight": "a.weight", "a.bias": "a.bias"}),
}


@pytest.mark.parametrize(("rename", "expected"), RENAMES.values(), ids=RENAMES)
def test_rename_takes(rename, expected: dict[str, str]) -> None:
    assert renamed(["a.weight", "a.bias"], rename) == expected


def test_renamed_tensors_are_compared_and_two_names_that_become_one_are_refused() -> None:
    before, after = {"a.w": torch.ones(1), "b": torch.zeros(1)}, {"s.w": torch.ones(1), "b": torch.zeros(1)}
    assert numeric.compare_dict_tensors(before, after, rename={"a": "s"}).bitwise
    assert not numeric.compare_dict_tensors(before, after)
    with pytest.raises(HashbenchError, match="takes both 'a' and 'b' to 'c'"):
        renamed(["a", "b"], {"a": "c", "b": "c"})
