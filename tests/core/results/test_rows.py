"""Results: what a step leaves, and what exactly is said about two runs that differ."""

from __future__ import annotations

import math

import pytest
import torch

from hashbench.core.run.distance import Difference
from hashbench.core.run.leaves import NotComparableError, flatten
from hashbench.core.run.outputs import bitwise_equal, compare, state_results

ONE = torch.ones(1)


def difference(first, second) -> Difference:
    found = compare({"output": first}, {"output": second})
    assert found is not None
    assert found.names == ("output",)
    return found


def numbers(first, second) -> tuple[int | None, float | None, int | None]:
    found = difference(first, second)
    return found.elements, found.max_abs, found.max_ulp


def float_bits(bits: int) -> torch.Tensor:
    return torch.tensor([bits], dtype=torch.int32).view(torch.float32)


# ---------------------------------------------------------------------------------------- what a step leaves


def test_state_after_a_training_step_has_its_names() -> None:
    model = torch.nn.BatchNorm1d(2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    assert {name.split(".")[0] for name, _ in state_results(model, optimizer)} == {
        "grad",
        "parameter",
        "buffer",
        "optimizer",
    }
    names = {name for name, _ in state_results(model, optimizer)}
    assert {"grad.weight", "parameter.bias", "buffer.running_mean", "optimizer.bias.exp_avg_sq"} <= names


def test_optimizer_without_state_leaves_none() -> None:
    model = torch.nn.Linear(2, 2)
    names = [name for name, _ in state_results(model, torch.optim.SGD(model.parameters()))]
    assert names == ["parameter.weight", "parameter.bias"]


def test_parameter_without_data_is_left_out() -> None:
    found = dict(state_results(torch.nn.Linear(2, 2, bias=False, device="meta"), None))
    assert str(found["parameter.weight"]) == "parameter.weight: a tensor without data, float32[2,2]"


# -------------------------------------------------------------------------------------------------- equal or not

CSR = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
EQUAL = {
    "copies": (torch.arange(4.0), torch.arange(4.0)),
    "NaN of the same payload": (float_bits(0x7FC00001), float_bits(0x7FC00001)),
    "other strides": (torch.arange(6).reshape(2, 3).t().contiguous(), torch.arange(6).reshape(2, 3).t()),
    "channels-last and contiguous": (
        torch.arange(24.0).reshape(1, 2, 3, 4),
        torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    ),
    "an expanded view and its copy": (ONE.expand(3), torch.ones(3)),
    "a lazy conjugate and a real one": (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j])),
    "no elements": (torch.empty(0, 3), torch.empty(0, 3)),
    "Python values": (1.5, 1.5),
    "Python NaN": (math.nan, math.nan),
    "sparse": (CSR.to_sparse_csr(), CSR.to_sparse_csr()),
    "quantized": (
        torch.quantize_per_tensor(ONE, 0.1, 0, torch.quint8),
        torch.quantize_per_tensor(ONE, 0.1, 0, torch.quint8),
    ),
}
UNEQUAL = {
    "the sign of zero": (torch.tensor([0.0]), torch.tensor([-0.0])),
    "the payload of a NaN": (float_bits(0x7FC00001), float_bits(0x7FC00002)),
    "two elements swapped": (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
    "the dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "the dtype and the strides": (torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.int32).t()),
    "the shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "the shape of nothing": (torch.empty(0, 3), torch.empty(3, 0)),
    "the layout": (CSR, CSR.to_sparse_csr()),
    "the same memory, conjugated": (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj()),
    "values and strides": (torch.arange(6).reshape(2, 3).t().contiguous(), torch.arange(1, 7).reshape(2, 3).t()),
    "the type of a Python value": (1, 1.0),
    "the sign of a Python zero": (0.0, -0.0),
    "sparse values": (CSR.to_sparse(), (2 * CSR).to_sparse()),
    "sparse places": (CSR.to_sparse_csr(), CSR.t().to_sparse_csr()),
    "the scale of a quantized tensor": (
        torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8),
        torch.quantize_per_tensor(torch.zeros(2), 0.2, 0, torch.quint8),
    ),
}


@pytest.mark.parametrize(("first", "second"), EQUAL.values(), ids=EQUAL)
def test_equal(first, second) -> None:
    assert bitwise_equal(first, second)
    assert compare({"output": first}, {"output": second}) is None


@pytest.mark.parametrize(("first", "second"), UNEQUAL.values(), ids=UNEQUAL)
def test_unequal(first, second) -> None:
    assert not bitwise_equal(first, second)
    assert difference(first, second).names == ("output",)


# ---------------------------------------------------------------------------------------------------- by how much

FLOATS = {
    # The ULP of 2.0 is 2**-(mantissa bits - 1); from 2.0 to 4.0 there are 2**(mantissa bits) of them.
    torch.float64: 2**52,
    torch.float32: 2**23,
    torch.float16: 2**10,
    torch.bfloat16: 2**7,
    torch.float8_e4m3fn: 2**3,
    torch.float8_e5m2: 2**2,
    torch.float8_e4m3fnuz: 2**3,
    torch.float8_e5m2fnuz: 2**2,
    torch.float8_e8m0fnu: 1,
}


@pytest.mark.parametrize(("dtype", "ulp"), FLOATS.items(), ids=str)
def test_distance_of_floats_in_value_and_in_ulps(dtype: torch.dtype, ulp: int) -> None:
    first, second = (torch.tensor(values).to(dtype) for values in ([1.0, 2.0, 8.0], [1.0, 4.0, 8.0]))
    assert numbers(first, second) == (1, 2.0, ulp)


@pytest.mark.parametrize("dtype", [d for d in FLOATS if d is not torch.float8_e8m0fnu], ids=str)
def test_neighbours_are_one_ulp_apart(dtype: torch.dtype) -> None:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    first = torch.tensor([-1.0]).to(dtype)
    second = (first.view(bits) + 1).view(dtype)
    assert difference(first, second).max_ulp == 1


def test_neighbours_of_a_dtype_without_sign_are_one_ulp_apart() -> None:
    first, second = (torch.tensor([value]).to(torch.float8_e8m0fnu) for value in (1.0, 2.0))
    assert difference(first, second).max_ulp == 1  # bits 0x7f and 0x80


def test_ulps_between_numbers_of_other_signs_count_through_zero() -> None:
    tiny = float_bits(1)
    assert difference(tiny, -tiny).max_ulp == 2
    three = torch.tensor([3.0], dtype=torch.float64)
    assert difference(three, -three).max_ulp == 2 * 0x4008000000000000  # does not fit into 63 bits


INTEGERS = {
    "int8": (torch.tensor([-128, 1], dtype=torch.int8), torch.tensor([127, 1], dtype=torch.int8), 255.0),
    "uint8": (torch.tensor([200], dtype=torch.uint8), torch.tensor([10], dtype=torch.uint8), 190.0),
    "uint16": (torch.tensor([65535], dtype=torch.uint16), torch.tensor([0], dtype=torch.uint16), 65535.0),
    "int64 beyond the doubles": (torch.tensor([2**62]), torch.tensor([2**62 + 1]), 1.0),
    "int64 from end to end": (torch.tensor([-(2**63)]), torch.tensor([2**63 - 1]), float(2**64 - 1)),
    "uint64": (
        torch.tensor([2**63 - 1], dtype=torch.uint64),
        torch.tensor([2**63 + 2**20 - 1], dtype=torch.uint64),
        float(2**20),
    ),
    "bool": (torch.tensor([True, False]), torch.tensor([False, False]), 1.0),
}


@pytest.mark.parametrize(("first", "second", "gap"), INTEGERS.values(), ids=INTEGERS)
def test_distance_of_integers_is_exact_and_has_no_ulps(first, second, gap: float) -> None:
    assert numbers(first, second) == (1, gap, None)


def test_complex_element_counts_once() -> None:
    first, second = torch.tensor([1 + 1j, 2]), torch.tensor([2 + 3j, 2])
    assert numbers(first, second) == (1, 2.0, 2**23 + 2**22)


def test_complex_half() -> None:
    first, second = (torch.tensor([value]).to(torch.complex32) for value in (1 + 1j, 2 + 1j))
    assert numbers(first, second) == (1, 1.0, 2**10)


def test_infinity_and_nan_against_numbers_give_no_distance() -> None:
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([math.inf, math.nan])
    assert numbers(first, second) == (2, None, None)


def test_distance_is_over_the_finite_elements() -> None:
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([math.inf, 2.5])
    assert numbers(first, second)[:2] == (2, 0.5)


def test_quantized_tensors_are_measured_by_value() -> None:
    first = torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.5, 0, torch.quint8)
    second = torch.quantize_per_tensor(torch.tensor([1.0, 4.0]), 0.5, 0, torch.quint8)
    assert numbers(first, second)[:2] == (1, 2.0)


def test_rescaled_quantized_tensor_differs_in_value() -> None:
    first = torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.5, 0, torch.quint8)
    second = torch._make_per_tensor_quantized_tensor(first.int_repr(), 1.0, 0)
    assert numbers(first, second)[:2] == (2, 2.0)


NUMBERLESS = {
    "sparse tensors": (CSR.to_sparse(), (2 * CSR).to_sparse()),
    "different shape": (torch.zeros(2), torch.zeros(3)),
    "different dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    "Python values": (1, 2),
    "packed float4": tuple(torch.tensor([1, bits], dtype=torch.uint8).view(torch.float4_e2m1fn_x2) for bits in (2, 3)),
}


@pytest.mark.parametrize(("first", "second"), NUMBERLESS.values(), ids=NUMBERLESS)
def test_where_no_distance_can_be_given_there_is_none(first, second) -> None:
    found = difference(first, second)
    assert (found.max_abs, found.max_ulp, found.representation) == (None, None, "")


REPRESENTATIONS = {
    "sign of zero": ([(0.0, -0.0)], "sign of zero"),
    "in two results": ([(0.0, -0.0), (0.0, -0.0)], "sign of zero"),
    "NaN payload": ([(0x7FC00001, 0x7FC00002)], "NaN payload"),
    "both": ([(0.0, -0.0), (0x7FC00001, 0x7FC00002)], "NaN payload, sign of zero"),
    "a value beside it": ([(0.0, -0.0), (1.0, 2.0)], ""),
    "a NaN against a number": ([(0x7FC00001, 1.0)], ""),
}


@pytest.mark.parametrize(("pairs", "text"), REPRESENTATIONS.values(), ids=REPRESENTATIONS)
def test_difference_of_representation_only_is_said(pairs, text: str) -> None:
    def as_tensor(value) -> torch.Tensor:
        return float_bits(value) if isinstance(value, int) else torch.tensor([value])

    first, second = ({f"output.{n}": as_tensor(pair[side]) for n, pair in enumerate(pairs)} for side in (0, 1))
    found = compare(first, second)
    assert found is not None
    assert found.representation == text


def test_numbers_are_over_all_results() -> None:
    first = {"a": torch.zeros(4), "b": torch.zeros(2, dtype=torch.int64), "c": torch.ones(1)}
    second = {"a": torch.tensor([0, 0, 1.0, 1.0]), "b": torch.tensor([0, 7]), "c": torch.ones(1)}
    found = compare(first, second)
    assert found == Difference(("a", "b"), 3, 7.0, 0x3F800000, "", total=6, sum_relative=0.0)


def test_variability_is_over_all_elements_of_the_results_that_differ() -> None:
    first = {"a": torch.tensor([1.0, 2.0, 4.0, 0.0]), "b": torch.ones(100)}
    second = {"a": torch.tensor([1.0, 2.5, 3.0, 9.0]), "b": torch.ones(100)}
    found = compare(first, second)
    assert found is not None
    assert found.share == 3 / 4
    assert found.mean_relative == (0.25 + 0.25) / 4  # an element that was zero has no relative difference


def test_variability_of_differences_without_numbers_is_absent() -> None:
    found = compare({"a": 1.0, "b": torch.zeros(3)}, {"a": 2.0, "b": torch.zeros(4)})
    assert found is not None
    assert (found.share, found.mean_relative) == (None, None)


# -------------------------------------------------------------------------------------------------- structure


@pytest.mark.parametrize("name", ["grad.weight", "input_grad.0.x", "optimizer.weight.step"])
def test_what_a_step_may_leave_out_is_a_difference(name: str) -> None:
    both = {"output": ONE}
    for first, second in ((both, {**both, name: ONE}), ({**both, name: ONE}, both)):
        found = compare(first, second)
        assert found is not None
        assert found.names == (name,)


@pytest.mark.parametrize("name", ["output.1", "loss.1", "parameter.weight", "buffer.mean"])
def test_what_every_run_must_leave_is_another_structure(name: str) -> None:
    with pytest.raises(NotComparableError, match=f"only the second run has {name}"):
        compare({"output.0": ONE}, {"output.0": ONE, name: ONE})


def test_tensor_against_python_value_is_another_structure() -> None:
    with pytest.raises(NotComparableError, match="a Tensor in the first run, a float in the second"):
        compare({"output": ONE}, {"output": 1.0})


def test_empty_container_against_a_full_one_is_another_structure() -> None:
    with pytest.raises(NotComparableError):
        compare(dict(flatten({"boxes": []}, "output")), dict(flatten({"boxes": [ONE]}, "output")))
