"""Pairs of calls of two logs: what is compared, and what a call overwrites."""

from __future__ import annotations

from typing import Any

import pytest

from hashbench.extensions.debugmode.pairing import PairedCall, Sameness, exchange, pair_calls
from tests.extensions.debugmode.debug_logs import Entry, empty, kernel, log, op

NAN = float("nan")
SAME, DIFFERENT, UNKNOWN = Sameness


def _pair(first: Entry, second: Entry) -> PairedCall:
    (pair,) = pair_calls(log(first).calls, log(second).calls)
    return pair


COMPARED: dict[str, tuple[Entry, Entry, Sameness, Sameness]] = {
    "equal": (op("mm", 1.0, 2.0), op("mm", 1.0, 2.0), SAME, SAME),
    "another input": (op("mm", 1.0, 2.0), op("mm", 1.0, 3.0), DIFFERENT, SAME),
    "another output": (op("mm", 1.0, left=1.0), op("mm", 1.0, left=2.0), SAME, DIFFERENT),
    "a number of hashes": (op("split", 1.0, left=[1.0]), op("split", 1.0, left=[1.0, 1.0]), SAME, DIFFERENT),
    "inputs of one run only": (op("mm", 1.0), op("mm", 1.0, unhashed=True), UNKNOWN, SAME),
    "NaN in both": (op("mm", NAN, left=NAN), op("mm", NAN, left=NAN), UNKNOWN, UNKNOWN),
    "NaN in one": (op("mm", 1.0, left=NAN), op("mm", 1.0, left=2.0), SAME, DIFFERENT),
    "an allocation": (empty(), empty(), UNKNOWN, UNKNOWN),
    "another shape": (op("nonzero", 1.0), op("nonzero", 1.0, output_str="  ->  t: f32[3]"), SAME, DIFFERENT),
    "a number in words": (
        op("item", 1.0, left=None, output_str="  ->  0.5"),
        op("item", 1.0, left=None, output_str="  ->  0.5"),
        SAME,
        SAME,
    ),
    "another number in words": (
        op("item", 1.0, left=None, output_str="  ->  0.5"),
        op("item", 1.0, left=None, output_str="  ->  0.6"),
        SAME,
        DIFFERENT,
    ),
    "an output that was not hashed": (op("mm", 1.0, left=None), op("mm", 1.0, left=None), SAME, UNKNOWN),
    "an overwritten target": (op("fill_.Scalar", 9.0, left=2.0), op("fill_.Scalar", 8.0, left=2.0), SAME, SAME),
    "a target that is read": (op("add_.Tensor", 9.0, left=2.0), op("add_.Tensor", 8.0, left=2.0), DIFFERENT, SAME),
    "a collective": (
        op("_c10d_functional::all_reduce", 1.0),
        op("_c10d_functional::all_reduce", 2.0, left=3.0),
        UNKNOWN,
        UNKNOWN,
    ),
    "the wait for one": (
        op("_c10d_functional::wait_tensor", 1.0),
        op("_c10d_functional::wait_tensor", 2.0, left=3.0),
        UNKNOWN,
        DIFFERENT,
    ),
    "a kernel": (kernel("k", {"in_ptr0": 1.0}, {"o": 1.0}), kernel("k", {"in_ptr0": 1.0}, {"o": 2.0}), SAME, DIFFERENT),
    "a kernel into fresh memory": (
        kernel("k", {"in_ptr0": 1.0, "y": 8.0}, {"in_ptr0": 1.0, "y": 2.0}),
        kernel("k", {"in_ptr0": 1.0, "y": 9.0}, {"in_ptr0": 1.0, "y": 2.0}),
        SAME,
        SAME,
    ),
    "a wrong kernel into fresh memory": (
        kernel("k", {"in_ptr0": 1.0, "out_ptr0": 8.0}, {"in_ptr0": 1.0, "out_ptr0": 2.0}),
        kernel("k", {"in_ptr0": 1.0, "out_ptr0": 9.0}, {"in_ptr0": 1.0, "out_ptr0": 3.0}),
        SAME,
        DIFFERENT,
    ),
    "a kernel that updates": (
        kernel("k", {"in_out_ptr0": 8.0}, {"in_out_ptr0": 2.0}),
        kernel("k", {"in_out_ptr0": 9.0}, {"in_out_ptr0": 3.0}),
        DIFFERENT,
        DIFFERENT,
    ),
}


@pytest.mark.parametrize(("first", "second", "inputs", "outputs"), COMPARED.values(), ids=COMPARED.keys())
def test_hashes_of(first: Entry, second: Entry, inputs: Sameness, outputs: Sameness) -> None:
    pair = _pair(first, second)
    assert (pair.inputs, pair.outputs) == (inputs, outputs)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("t: f32[2], alpha=0.1", "t: f32[2], alpha=0.2", False),
        ("t: f32[2], 1", "t: f32[3], 1", True),
        ("['dt: f32[2]{requires_grad=True}| S(0)'], 1", "['dt: f32[4]| R'], 1", True),
    ],
    ids=["a number", "a shape", "a placement"],
)
def test_arguments_are_those_that_are_no_tensors(first: str, second: str, same: bool) -> None:
    pair = _pair(op("add", 1.0, args_str=first), op("add", 1.0, args_str=second))
    assert pair.arguments is same
    assert pair.differs


def test_extra_calls_do_not_shift_the_others() -> None:
    def calls(*names: str) -> Any:
        return log(*(op(name, 1.0) for name in names)).calls

    pairs = list(pair_calls(calls("t", "mm", "t", "add"), calls("t", "clone", "mm", "clone", "t", "add")))
    assert [pair.node for pair in pairs if pair.alone] == ["/aten::clone#0", "/aten::clone#1"]
    assert sum(pair.first is not None and pair.second is not None for pair in pairs) == 4


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("c10d::allreduce_", "combine"),
        ("_c10d_functional::wait_tensor", "wait"),
        ("c10d::of_another_torch", "unknown"),
        ("fsdp::chunk_cat", "local"),
        ("aten::mm.out", ""),
        ("c10d_kernel", ""),
    ],
)
def test_what_an_op_exchanges_is_known_from_the_table(name: str, kind: str) -> None:
    assert exchange(log(op(name, 1.0)).calls[0] if "::" in name else log(kernel(name, {}, {})).calls[0]) == kind
