"""Facts read off memory and bits: overlap, permuted, chosen and tied values, representation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hashbench.core.diagnose.calls.call import CapturedCall
from hashbench.core.diagnose.calls.live import captured_environment
from hashbench.core.diagnose.replay import experiments
from hashbench.core.diagnose.replay.facts import (
    have_chosen_values,
    have_same_values,
    have_tied_places,
    representation_of,
)
from hashbench.core.processes import Budget
from tests.core.diagnose.replay.replay_helpers import aten, captured, numbers

pytestmark = pytest.mark.usefixtures("eight_threads")


BASE = torch.arange(64, dtype=torch.float32)


OVERLAPS: dict[str, tuple[Callable[[], CapturedCall], bool]] = {
    "the same view twice": (lambda: captured(aten.add_.Tensor, BASE[:8], BASE[:8]), False),
    "neighbours": (lambda: captured(aten.add_.Tensor, BASE[:8], BASE[8:16]), False),
    "interleaved": (lambda: captured(aten.add_.Tensor, BASE[0:16:2], BASE[1:17:2]), False),
    "shifted by one": (lambda: captured(aten.add_.Tensor, BASE[1:9], BASE[:8]), True),
    "transposed": (lambda: captured(aten.add_.Tensor, BASE.view(8, 8), BASE.view(8, 8).t()), True),
    "its first row": (lambda: captured(aten.sub_.Tensor, BASE.view(8, 8), BASE.view(8, 8)[:1]), True),
    "an expanded target": (lambda: captured(aten.add_.Tensor, BASE[:1].expand(4), BASE[8:12]), True),
    "windows that meet": (lambda: captured(aten.fill_.Scalar, BASE.as_strided((4, 4), (2, 1)), 1.0), True),
    "windows side by side": (lambda: captured(aten.fill_.Scalar, BASE.as_strided((4, 2), (4, 2)), 1.0), False),
    "read only": (lambda: captured(aten.add.Tensor, BASE[1:9], BASE[:8]), False),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_has_overlap(name: str) -> None:
    make, expected = OVERLAPS[name]
    assert experiments(make(), replays=1, budget=Budget(5), arms=()).facts.overlap is expected


ONE, SWAPPED = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 1.0, 3.0])


SNAPSHOTS = {
    "swapped": ([(ONE,), (SWAPPED,)], True),
    "changed": ([(ONE,), (ONE + 1,)], False),
    "a third": ([(ONE,), (SWAPPED,), (ONE * 2,)], False),
    "two outputs": ([(ONE, ONE), (SWAPPED, ONE)], True),
    "fewer": ([(ONE,), (SWAPPED[:2],)], False),
    "same sum": ([(torch.tensor([0.0, 5.0, 4.0]),), (torch.tensor([2.0, 4.0, 3.0]),)], False),
    "complex": ([(ONE * (1j + 1),), (SWAPPED * (1j + 1),)], True),
    "wide": ([(ONE.to(torch.complex128),), (SWAPPED.to(torch.complex128),)], True),
    "turned": ([(ONE.to(torch.complex128),), (ONE.to(torch.complex128) * 1j,)], False),
}


@pytest.mark.parametrize(("snapshots", "expected"), SNAPSHOTS.values(), ids=SNAPSHOTS)
def test_have_same_values(snapshots: list[tuple[torch.Tensor, ...]], expected: bool) -> None:
    assert have_same_values(snapshots) is expected


MANY = numbers(5000)


CHOSEN = {
    "both from the input": (ONE, [1.0, 2.0], [1.0, 3.0], True),
    "one computed": (ONE, [1.0, 2.0], [1.0, 5.0], False),
    "computed where they agree": (ONE, [9.0, 2.0], [9.0, 3.0], True),
    "another zero": (torch.tensor([0.0]), [0.0], [-0.0], False),
    "the bits of another type": (ONE.view(torch.int32), [1.0], [2.0], False),
    "thousands": (MANY, MANY.tolist(), MANY.flip(0).tolist(), True),
    "one computed of thousands": (MANY, MANY.tolist(), [*MANY[1:].tolist(), 7.5], False),
}


@pytest.mark.parametrize(("source", "one", "other", "expected"), CHOSEN.values(), ids=CHOSEN)
def test_have_chosen_values(source: torch.Tensor, one: list[float], other: list[float], expected: bool) -> None:
    call = captured(aten.clone.default, source)
    with captured_environment(call):
        assert have_chosen_values(call, [(torch.tensor(one),), (torch.tensor(other),)]) is expected


SCORES = torch.tensor([[2.0, 1.0, 2.0, 3.0], [5.0, 5.0, 4.0, 5.0]])


def places(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        pytest.param((SCORES[:, 0], places(0, 0)), (SCORES[:, 0], places(2, 3)), True, id="along the last dimension"),
        pytest.param((places(0, 0)[:, None],), (places(2, 1)[:, None],), True, id="a dimension of one is kept"),
        pytest.param((places(0, 0),), (places(1, 0),), False, id="another value"),
        pytest.param((places(0, 1),), (places(0, 9),), False, id="no place at all"),
        pytest.param((places(0, 0).int(),), (places(2, 0).int(),), False, id="no indices"),
        pytest.param((SCORES[:, 0], places(0, 0)), (SCORES[:, 1], places(2, 3)), False, id="values differ, too"),
        pytest.param((places(0, 0),), (places(2, 3, 1),), False, id="another number of places"),
        pytest.param(
            (places(1, 1, 0, 0),), (places(1, 1, 0, 1),), False, id="along the first dimension, another value"
        ),
    ],
)
def test_have_tied_places(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...], expected: bool) -> None:
    call = captured(aten.median.dim, SCORES, 1)
    with captured_environment(call):
        assert have_tied_places(call, [one, other]) is expected


@pytest.mark.parametrize(
    ("others", "expected"),
    [([[-0.0, 1.0]], "sign of zero"), ([[0.0, 2.0]], ""), ([[-0.0, 1.0], [0.0, 2.0]], "")],
    ids=["another zero", "another number", "both"],
)
def test_representation_of(others: list[list[float]], expected: str) -> None:
    assert representation_of([(torch.tensor([0.0, 1.0]),), *((torch.tensor(other),) for other in others)]) == expected
