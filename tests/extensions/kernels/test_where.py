"""Words for the wrong elements of a result: true both ways, and the simplest."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hashbench.core.text import spaced
from hashbench.extensions.kernels.conditions import roundest
from hashbench.extensions.kernels.where import places_of

SIZE = 128


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def _chance(share: float, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(6)) < share


def _slice(dim: int, places: Any, shape: tuple[int, ...] = (SIZE, SIZE)) -> torch.Tensor:
    found = torch.zeros(shape, dtype=torch.bool)
    found.transpose(0, dim)[places] = True
    return found


X = _drawn(SIZE, SIZE)
PLACES: dict[str, torch.Tensor] = {
    "": torch.ones(3, 4, dtype=torch.bool),
    "row 5": _slice(0, 5),
    "rows 96 to 126": _slice(0, slice(96, 127)),
    "the first row": _slice(0, 0),
    "the last 5 columns": _slice(1, slice(-5, None)),
    "the last 5 of dimension 1": _slice(1, slice(-5, None), (4, 37, 8)),
    "dimension 1 at 9 to 16": _slice(1, slice(9, 17), (4, 37, 8)),
    "the last 5 elements": _slice(0, slice(-5, None), (64,)),
    "element 5": _slice(0, 5, (64,)),
    "every 32nd column from 31 on": _slice(1, slice(31, None, 32)),
    "columns 28 to 31 of every 32": _slice(1, torch.arange(SIZE) % 32 >= 28),
    "all but the first 24 columns": _slice(1, slice(24, None)),
    "all but row 7": ~_slice(0, 7),
    "rows 3, 17 and 90": _slice(0, [3, 17, 90]),
    "rows 96 to 126 in the first 32 columns": _slice(0, slice(96, 127)) & _slice(1, slice(32)),
    "row 5, and column 7": _slice(0, 5) | _slice(1, 7),
    "all but rows 4 to 9 in the first 32 columns": ~(_slice(0, slice(4, 10)) & _slice(1, slice(32))),
    "the last 13 rows or the last 5 columns, not both": _slice(0, slice(-13, None)) ^ _slice(1, slice(-5, None)),
    "the last 300 elements in memory order": (torch.arange(SIZE * SIZE) >= SIZE * SIZE - 300).view(SIZE, SIZE),
    "the diagonal": torch.eye(SIZE, dtype=torch.bool),
    "above the diagonal": torch.ones(SIZE, SIZE, dtype=torch.bool).triu(1),
    "the diagonal and below": torch.ones(3, SIZE, SIZE, dtype=torch.bool).tril(),
    "diagonal 1 (column minus row)": torch.ones(SIZE, 90, dtype=torch.bool).triu(1).tril(1),
    "diagonals -3 to 2 (column minus row)": torch.ones(90, SIZE, dtype=torch.bool).triu(-3).tril(2),
    f"one element of {spaced(SIZE * SIZE)}, [3, 5]": _slice(0, 3) & _slice(1, 5),
    "1 element in 20 in rows 96 to 111": _slice(0, slice(96, 112), (256, 4096)) & _chance(0.05, 256, 4096),
    "most elements in the last 32 columns": _slice(1, slice(-32, None)) & _chance(0.7, SIZE, SIZE),
    "most elements": _chance(0.7, SIZE, SIZE),
    "nearly all elements": _chance(0.95, SIZE, SIZE),
    "all of 12 elements but [1, 2]": torch.arange(12).view(3, 4) != 6,
    "2 elements of 12: [0, 1], [2, 3]": (torch.arange(12).view(3, 4) % 10) == 1,
}
"""Masks by what is said of them."""


@pytest.mark.parametrize("words", PLACES, ids=lambda words: words or "all")
def test_places(words: str) -> None:
    wrong = PLACES[words]
    assert places_of(wrong, {"input 0": _drawn(*wrong.shape)}) == words


def _with(tensor: torch.Tensor, at: Any, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed[at] = value
    return changed


_SPOTS = (torch.tensor([3, 90, 91]), torch.tensor([7, 0, 3]))
_NAN = _with(X, _SPOTS, float("nan"))
_IDS = torch.randint(0, SIZE, (60,), generator=torch.Generator().manual_seed(7))
_LENGTHS = torch.randint(1, SIZE, (SIZE,), generator=torch.Generator().manual_seed(8))
_WIDE = torch.zeros(SIZE, SIZE, dtype=torch.bool)
CONDITIONS: dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {
    "where input 0 < 0": (X < 0, {"input 0": X}),
    "where input 1 > 0": (X > 0, {"input 0": _drawn(SIZE), "input 1": X}),
    "where input 0 == 0": (X.relu() == 0, {"input 0": X.relu()}),
    "where input 1 is 3": ((_IDS % 5)[:, None].expand(60, 8) == 3, {"input 0": _drawn(60, 8), "input 1": _IDS % 5}),
    "where input 0 is NaN": (_NAN.isnan(), {"input 0": _NAN}),
    "where input 0 is infinite": (_with(_WIDE, _SPOTS, True), {"input 0": _with(X, _SPOTS, float("inf"))}),
    "where input 0 has NaN or infinities in its last dimension": (
        _NAN.isnan().any(1, keepdim=True).expand(SIZE, SIZE),
        {"input 0": _NAN},
    ),
    "where |input 0| > 88": ((90 * X).abs() > 88, {"input 0": 90 * X}),
    "where 0.5 < input 0 < 1.5": ((X > 0.5) & (X < 1.5), {"input 0": X}),
    "where input 1 < 0": ((X[0] < 0).expand(SIZE, SIZE), {"input 0": X[1:], "input 1": X[0]}),
    "where input 0 == input 1": (X.round() == X.T.round(), {"input 0": X.round(), "input 1": X.T.round()}),
    "where the column >= input 1": (torch.arange(SIZE) >= _LENGTHS[:, None], {"input 0": X, "input 1": _LENGTHS}),
    "where input 1 names the row more than once": (
        (torch.bincount(_IDS, minlength=SIZE) > 1)[:, None].expand(SIZE, 8),
        {"input 0": _drawn(60, 8), "input 1": _IDS},
    ),
    "the last 50 columns where input 0 < 0": ((X < 0) & _slice(1, slice(-50, None)), {"input 0": X}),
    "1 element in 3 where input 0 < 0": ((X < 0) & _chance(0.33, SIZE, SIZE), {"input 0": X}),
}
"""Masks and inputs by what is said of them."""


@pytest.mark.parametrize("words", CONDITIONS)
def test_conditions_on_inputs(words: str) -> None:
    found = places_of(*CONDITIONS[words])
    numbers = r"-?\d+\.?\d*"
    assert re.sub(numbers, "#", found) == re.sub(numbers, "#", words)
    for told, meant in zip(re.findall(numbers, found), re.findall(numbers, words), strict=True):
        assert float(told) == pytest.approx(float(meant), abs=0.02 * max(1, abs(float(meant))))


def test_scattered_elements_are_told_by_share_and_the_first_one() -> None:
    wrong = _chance(0.01, SIZE, SIZE)
    first = wrong.nonzero()[0].tolist()
    words = places_of(wrong, {"input 0": X, "input 1": _drawn(SIZE), "input 2": _IDS})
    share = re.fullmatch(rf"1 element in (\d+), the first {re.escape(str(first))}", words)
    assert share is not None
    assert float(share[1]) == pytest.approx(SIZE * SIZE / int(wrong.sum()), rel=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_read_into_chance(seed: int) -> None:
    """Of few elements nearly any condition fits some."""
    made = torch.Generator().manual_seed(seed)
    wrong = torch.rand(6, 8, generator=made) < 0.2
    wrong[0, 0] = True
    inputs = {f"input {n}": torch.randn(6, 8, generator=made) for n in range(4)} | {"input 4": torch.arange(6)}
    assert re.match(r"(one element|\d+ elements?|\d+) (of|in) ", places_of(wrong, inputs))


def test_elements_that_may_be_either_count_for_nothing() -> None:
    wrong = _slice(0, slice(96, 127)) & _chance(0.9, SIZE, SIZE) & (X.abs() > 0.01)
    unsure = (_slice(0, slice(96, 127)) & ~wrong) | _chance(0.2, SIZE, SIZE)
    assert places_of(wrong, {"input 0": X}, unsure=unsure & ~wrong) == "rows 96 to 126"
    assert places_of(X.abs() > 0.1, {"input 0": X}, unsure=(X.abs() <= 0.1) & (X[0, 0] != X)) == ""


def test_a_condition_that_leaves_out_few_tells_nothing_where_small_errors_are_unsure() -> None:
    unsure = torch.zeros_like(X, dtype=torch.bool)
    unsure[0, 0] = True
    assert places_of(X.abs() > 0.01, {"input 0": X}, unsure=unsure) == ""
    assert places_of(X.abs() > 0.01, {"input 0": X}) == "where |input 0| > 0.01"


def test_a_power_of_ten() -> None:
    wrong = torch.zeros(5_000_000, dtype=torch.bool)
    wrong[torch.tensor([17, 40_000, 1_234_567, 2_000_001, 4_000_003])] = True
    assert places_of(wrong, {}) == "1 element in 10^6, the first [17]"


def test_of_nothing_there_is_no_place() -> None:
    with pytest.raises(ValueError, match="no element is wrong"):
        places_of(torch.zeros(3, dtype=torch.bool), {})


def test_a_result_without_dimensions_and_odd_inputs() -> None:
    inputs = {"a": torch.randn(3).to_sparse(), "b": torch.empty(0), "c": torch.ones(2, 3, 4, dtype=torch.complex64)}
    assert places_of(torch.tensor(True), inputs) == ""
    assert places_of(_slice(0, 2, (40, 3, 4)), inputs) == "dimension 0 at 2"


def test_a_million_elements_take_little_time() -> None:
    x = _drawn(1024, 1024)
    took = []
    for wrong in (x < 0, _chance(1e-3, 1024, 1024), _slice(1, slice(96, 128), (1024, 1024))) * 3:
        began = time.process_time()
        places_of(wrong, {"input 0": x})
        took.append(time.process_time() - began)
    assert sorted(took)[4] < 0.5  # 0.04 s on an idle core


@pytest.mark.parametrize(
    ("low", "high", "number"),
    [(87.93, 88.31, 88.0), (-0.2, 0.4, 0.0), (1.0, 2.0, 1.0), (-3.1, -2.9, -3.0), (0.123, 0.1234, 0.123)],
)
def test_the_shortest_number_of_a_range(low: float, high: float, number: float) -> None:
    assert roundest(low, high) == number


# ----------------------------------------------------------------------------- the description generates the mask


def _indices_of(words: str, size: int, noun: str) -> torch.Tensor:
    """Read a description of indices of one dimension."""
    found = torch.zeros(size, dtype=torch.bool)
    if words.startswith("all but "):
        return ~_indices_of(words.removeprefix("all but "), size, noun)
    if match := re.fullmatch(
        rf"the (first|last)(?: (\d+))? (?:of )?{noun}s?", words.replace("\N{NARROW NO-BREAK SPACE}", "")
    ):
        number = int(match[2] or 1)
        found[:number] = True
        return found if match[1] == "first" else found.flip(0)
    if match := re.fullmatch(rf"every (\d+)(?:st|nd|rd|th) (?:of )?{noun} from (\d+) (?:on|to (\d+))", words):
        found[int(match[2]) : int(match[3] or size) + 1 : int(match[1])] = True
        return found
    if match := re.fullmatch(rf"{noun}s?(?: at)? (\d+)(?: to (\d+))? of every (\d+)(?: up to (\d+))?", words):
        place = torch.arange(size)
        within = place % int(match[3])
        return (within >= int(match[1])) & (within <= int(match[2] or match[1])) & (place <= int(match[4] or size))
    match = re.fullmatch(rf"{noun}s?(?: at)? ([\d ,toand]+)", words)
    assert match, words
    for part in re.split(r", | and ", match[1]):
        low, _, high = part.partition(" to ")
        found[int(low) : int(high or low) + 1] = True
    return found


def _mask_of(words: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Read a description that :func:`places_of` gave of slices."""
    nouns = {1: ["element"], 2: ["row", "column"]}.get(len(shape), [f"dimension {dim}" for dim in range(len(shape))])
    if match := re.fullmatch(r"(?:one|all of|\d+)(?: \S+)? elements? .*?(\[.*\])", words):
        found = torch.zeros(shape, dtype=torch.bool)
        for place in re.findall(r"\[(.*?)\]", match[1]):
            found[tuple(int(part) for part in place.split(", "))] = True
        return ~found if words.startswith("all") else found
    if match := re.fullmatch(r"(.*) in memory order", words):
        return _indices_of(match[1], torch.Size(shape).numel(), "element").view(shape)
    found = torch.ones(shape, dtype=torch.bool)
    for part in filter(None, re.split(r" in |, (?=all|the|every|dimension)", words)):
        dim = next(dim for dim, noun in enumerate(nouns) if noun in part)
        inside = _indices_of(part, shape[dim], nouns[dim])
        found &= inside.view([-1 if other == dim else 1 for other in range(len(shape))])
    return found


@st.composite
def _sets(draw: st.DrawFn, size: int) -> torch.Tensor:
    """Draw indices of a dimension as mistakes have them, some and not all."""
    place = torch.arange(size)
    start = draw(st.integers(0, size - 1))
    kind = draw(st.sampled_from(["range", "first", "last", "every", "blocks", "rest"]))
    step = draw(st.integers(2, max(2, size // 4)))
    inside = {
        "range": (place >= start) & (place < start + step),
        "first": place < max(start, 1),
        "last": place >= max(start, 1),
        "every": place % step == start % step,
        "blocks": place % step >= step - max(step // 4, 1),
        "rest": (place < start) | (place >= start + step),
    }[kind]
    return inside if 0 < int(inside.sum()) < size else place == start


@given(st.data())
def test_slices_are_described_so_that_the_words_generate_the_mask(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(9, 40), min_size=1, max_size=3)))
    chosen = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1, max_size=2))
    wrong = torch.ones(shape, dtype=torch.bool)
    for dim in chosen:
        wrong &= data.draw(_sets(shape[dim])).view([-1 if other == dim else 1 for other in range(len(shape))])
    words = places_of(wrong, {})
    if "first [" in words:  # too few to say more
        assert wrong.numel() <= 100, words
    else:
        assert torch.equal(_mask_of(words, shape), wrong), words


@given(st.data())
def test_a_condition_holds_where_the_result_is_wrong(data: st.DataObject) -> None:
    bound = data.draw(st.sampled_from([-1.5, -0.5, 0.0, 0.25, 1.0]))
    sign = data.draw(st.sampled_from(["<", ">"]))
    x = _drawn(48, 48)
    wrong = x < bound if sign == "<" else x > bound
    words = places_of(wrong, {"input 0": x})
    match = re.fullmatch(r"where input 0 ([<>]) (\S+)", words)
    assert match, words
    told = x < float(match[2]) if match[1] == "<" else x > float(match[2])
    assert torch.equal(told, wrong)
