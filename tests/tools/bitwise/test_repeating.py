"""The parts of the bitwise mode that decide something, each alone."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest
import torch

from hashbench.core.run.distance import Difference, measure
from hashbench.core.trace.op_schema import OpPlan, Pattern, plan_of
from hashbench.tools.bitwise.findings import Mismatch, Places, ProgramPlace, message
from hashbench.tools.bitwise.repeating import (
    Treatment,
    same,
    same_on_device,
    treatment_of,
    unwritten_elements,
)

NOTHING_TO_CHECK, HIGHER_ORDER, COLLECTIVE, WRITTEN, ALL = Treatment

READS, WRITES = OpPlan("op", call=print), OpPlan("op", call=print, writes_arguments=True)
COMMUNICATES = replace(READS, collective=True)
VIEW = replace(READS, pattern=Pattern.VIEW)


@pytest.mark.parametrize(
    ("plan", "facts", "expected"),
    [
        pytest.param(READS, {}, WRITTEN, id="reads only"),
        pytest.param(WRITES, {}, WRITTEN, id="writes an argument"),
        pytest.param(READS, {"custom": True}, ALL, id="somebody else's"),
        pytest.param(WRITES, {"custom": True}, ALL, id="somebody else's that writes"),
        pytest.param(READS, {"trusted": False}, ALL, id="no schema is believed"),
        pytest.param(WRITES, {"trusted": False}, ALL, id="no schema is believed, and it writes"),
        pytest.param(READS, {"wanted": False}, NOTHING_TO_CHECK, id="not asked for"),
        pytest.param(COMMUNICATES, {"wanted": False}, NOTHING_TO_CHECK, id="a collective not asked for"),
        pytest.param(
            READS, {"wanted": False, "schema": False, "custom": True}, NOTHING_TO_CHECK, id="no schema, not asked for"
        ),
        pytest.param(replace(READS, traced=False), {}, NOTHING_TO_CHECK, id="a profiler's mark"),
        pytest.param(replace(READS, blank=True), {}, NOTHING_TO_CHECK, id="an allocation"),
        pytest.param(replace(READS, resizes=True), {}, NOTHING_TO_CHECK, id="a resize"),
        pytest.param(VIEW, {}, NOTHING_TO_CHECK, id="a view"),
        pytest.param(VIEW, {"trusted": False}, NOTHING_TO_CHECK, id="a view, no schema believed"),
        pytest.param(COMMUNICATES, {}, COLLECTIVE, id="a collective"),
        pytest.param(replace(WRITES, collective=True), {"trusted": False}, COLLECTIVE, id="a collective that writes"),
        pytest.param(READS, {"schema": False, "custom": True}, HIGHER_ORDER, id="no schema"),
    ],
)
def test_treatment(plan: OpPlan, facts: dict[str, bool], expected: Treatment) -> None:
    usual = {"wanted": True, "schema": True, "custom": False, "trusted": True}
    assert treatment_of(plan, **usual | facts) == expected
    assert expected.repeats == (expected in (WRITTEN, ALL))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("c10d.allreduce_", True),
        ("c10d.barrier", True),
        ("_c10d_functional.all_reduce", True),
        ("_c10d_functional.all_gather_into_tensor_coalesced", True),
        ("_dtensor.shard_dim_alltoall", True),
        ("symm_mem.nvshmem_put", True),
        ("_c10d_functional.wait_tensor", False),  # returns its argument: there is nothing to compare
        ("aten.add", False),
        ("aten.empty", False),
        ("aten.convolution", False),
    ],
)
def test_collectives_are_known_by_their_schemas(op: str, expected: bool) -> None:
    import torch.distributed
    import torch.distributed._symmetric_memory

    namespace, name = op.split(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    plans = [plan_of(getattr(packet, overload)) for overload in packet.overloads()]
    assert {plan.collective is not None for plan in plans} == {expected}


# ------------------------------------------------------------------------------------------------------ comparing


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.bool, torch.complex128],
)
def test_comparing_on_a_device_sees_every_bit(dtype: torch.dtype) -> None:
    one = torch.zeros(5, 3).to(dtype).t()
    other = one.clone()
    assert same_on_device(one, other)
    other.t().view(torch.uint8)[1, 0] ^= 1
    assert not same_on_device(one, other)
    if dtype.is_floating_point:
        assert not same_on_device(torch.tensor([0.0]).to(dtype), torch.tensor([-0.0]).to(dtype))
        assert same_on_device(torch.tensor([float("nan")]).to(dtype), torch.tensor([float("nan")]).to(dtype))


OTHER_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]


@pytest.mark.parametrize(
    ("one", "other", "by_bits", "by_value"),
    [
        (1.0, 1.0, True, True),
        (0.0, -0.0, False, True),
        (float("nan"), float("nan"), True, True),
        (1.0, 1, False, False),
        (1j, 1j, True, True),
        (complex(0, -0.0), 0j, False, True),
        (1, 2, False, False),
        (None, None, True, True),
        (None, torch.ones(1), False, False),
        (torch.ones(1), torch.ones(1, 1), False, False),
        (torch.ones(1), torch.ones(1, dtype=torch.float64), False, False),
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 2.0]), False, False),
        (torch.tensor([OTHER_NAN]).double(), torch.tensor([OTHER_NAN], dtype=torch.float64), False, True),
        (torch.tensor([math.nan]), torch.tensor([math.nan]), True, True),
        (torch.tensor([math.nan]), torch.tensor([1.0]), False, False),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False, True),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), False, False),
        (torch.tensor([1.0]), torch.tensor([1.0000001]), False, False),
    ],
)
def test_same(one: object, other: object, by_bits: bool, by_value: bool) -> None:
    assert (same(one, other, equal="bits") is None) == by_bits
    assert (same(one, other, equal="values") is None) == by_value


A, B = 0x3F, 0x40


def filled(byte: int, *written: float) -> torch.Tensor:
    """Four numbers, of which those written come first."""
    found = torch.full((16,), byte, dtype=torch.uint8).view(torch.float32)
    found[: len(written)] = torch.tensor(written)
    return found


@pytest.mark.parametrize(
    ("first", "second", "runs", "expected"),
    [
        pytest.param(filled(1, 5.0), filled(2, 5.0), [filled(A, 5.0), filled(B, 5.0)], 3, id="three unwritten"),
        pytest.param(
            filled(1, 5.0), filled(2, 6.0), [filled(A, 5.0), filled(B, 6.0)], None, id="a written one differs"
        ),
        pytest.param(filled(1, 5.0), filled(2, 5.0), [filled(A, 5.0), filled(A, 5.0)], None, id="does not follow"),
        pytest.param(filled(1), filled(2), [filled(A) * 2, filled(B) * 2], None, id="computed from such memory"),
        pytest.param(filled(1), filled(2)[:3], [filled(A), filled(B)], None, id="another size"),
        pytest.param(filled(1), filled(2), [filled(A), None], None, id="a run left nothing"),
        pytest.param(1.0, 2.0, [1.0, 2.0], None, id="numbers"),
    ],
)
def test_unwritten_elements(first: object, second: object, runs: list[object], expected: int | None) -> None:
    assert unwritten_elements(first, second, filled=runs, bytes_filled=(A, B)) == expected


# ------------------------------------------------------------------------------------------------------ what is said


def mismatch(**facts: object) -> Mismatch:
    defaults = {"op": "aten.x.default", "call": 1, "place": "output", "run": 2, "where": ProgramPlace(), "shape": (2,)}
    return Mismatch(**defaults | {"other_shape": (2,), "dtype": "float32", "other_dtype": "float32"} | facts)  # type: ignore[arg-type]


TEXTS = {
    "its content": mismatch(),
    "shapes [2] and [3]": mismatch(other_shape=(3,)),
    "shapes none and [3]": mismatch(shape=None, other_shape=(3,)),
    "dtypes float32 and int64": mismatch(other_dtype="int64"),
    "1 of 2 elements, by at most 0.5 (3 ULP)": mismatch(difference=Difference((), 1, 0.5, 3, total=2)),
    "1 of 1 elements, sign of zero only": mismatch(difference=measure(torch.tensor([0.0]), torch.tensor([-0.0]))),
}


@pytest.mark.parametrize(("text", "found"), TEXTS.items(), ids=TEXTS)
def test_text_of_a_mismatch(found: Mismatch, text: str) -> None:
    assert found.text() == f"output differs in 1 of 1 repetitions: {text}"


def test_message_has_every_mismatch_of_the_call_and_its_forward_line() -> None:
    where = ProgramPlace("backward", "", "train.py:9 main", "aten.y.default", "Net.head", "net.py:3 forward")
    text = message([mismatch(where=where), mismatch(where=where, place="output.1")])

    assert text.splitlines() == [
        "Bitwise mismatch detected in aten.x.default (backward, at train.py:9 main)",
        "  output differs in 1 of 1 repetitions: its content",
        "  output.1 differs in 1 of 1 repetitions: its content",
        "  forward call: aten.y.default in Net.head, at net.py:3 forward",
    ]


def test_lines_of_forward_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Places, "MOST", 10)
    places, x = Places(), torch.ones(1, requires_grad=True)
    with places.watched():
        for _ in range(50):
            x = x * 2
            places.note("aten.mul.Tensor", None)
            assert 1 <= len(places._forward) <= 10
    assert len(places._known) == 1
