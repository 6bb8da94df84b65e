"""Signatures are collected from calls, and rebuilt calls have the recorded arguments."""

from __future__ import annotations

import math

import torch

from hashbench.core.trace.api import HashDebugTrace
from hashbench.extensions.fingerprint import values
from hashbench.extensions.fingerprint.calls import KernelCollector
from hashbench.extensions.fingerprint.document import tensor_word
from hashbench.extensions.fingerprint.measure import record
from tests.extensions.fingerprint.fingerprint_helpers import verified


def test_indices_and_masks_are_recorded() -> None:
    index = torch.tensor([3, 1, 3, 0])
    made = record(lambda: torch.zeros(5, 2).index_select(0, index), name="picked")
    (kernel,) = [kernel for kernel in made.models[0].kernels if kernel.op == "aten.index_select.default"]

    word = tensor_word(kernel.tensors[1])
    content = made.models[0].contents[int(word.values[1:])]
    assert values.content_from(content, torch.int64, (4,)).tolist() == [3, 1, 3, 0]


def test_aliasing_arguments_alias_again() -> None:
    def shared() -> None:
        memory = torch.ones(10)
        memory[1:5].add_(memory[5:9])

    made = record(shared, name="shared")

    (kernel,) = [kernel for kernel in made.models[0].kernels if kernel.op == "aten.add_.Tensor"]
    assert [tensor_word(word).memory for word in kernel.tensors] == [None, 0]
    assert verified(made).changed == ()


def test_equal_arguments_have_one_signature() -> None:
    x = torch.ones(3)
    collector = KernelCollector()
    with HashDebugTrace(watcher=collector):
        for minimum in (1, 1, 1.0, 1.0, True, 0.0, -0.0, math.nan, math.nan):
            torch.clamp(x, minimum)
        for place in (0, 0, 1):
            torch.softmax(x.expand(3, 3), dim=place)
    calls = [(kernel.op, kernel.args[1], kernel.calls) for kernel in collector.kernels]
    clamped = [(repr(minimum), count) for op, minimum, count in calls if op == "aten.clamp.default"]
    assert [count for _, count in clamped] == [2, 2, 1, 1, 1, 2]
    assert [(place, count) for op, place, count in calls if op == "aten._softmax.default"] == [(0, 2), (1, 1)]


def test_custom_op_gets_numbers_from_0_to_1() -> None:
    """It may take some as places, and write there unchecked."""
    library = torch.library.Library("fingerprint_places", "DEF")
    library.define("row(Tensor x, Tensor boxes, Tensor columns) -> Tensor")
    places: list[int] = []

    def row(x: torch.Tensor, boxes: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        places.extend(int(box[0]) for box in boxes)
        return x[[0] * len(boxes)][:, at]

    library.impl("row", row, "CPU")

    boxes = torch.tensor([[0.0, 9.0], [0.5, -7.0], [0.25, 3.0], [0.0, 0.0]])
    columns = torch.tensor([2, 0])
    made = record(lambda: torch.ops.fingerprint_places.row(torch.ones(2, 3), boxes, columns), name="places")
    (kernel,) = [kernel for kernel in made.models[0].kernels if kernel.op == "fingerprint_places.row.default"]
    assert [tensor_word(word).values for word in kernel.tensors] == [values.UNIT, values.UNIT, "#0"]
    assert verified(made).changed == ()
    assert set(places) == {0}
    library._destroy()
