"""How the batches of two runs differ: number, shape, order of samples, samples."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hashbench.extensions.watch.batches import BatchDifference, SampleMatch, difference_of
from hashbench.extensions.watch.file import Batch, Step, is_kept


def run(steps: Sequence[Sequence[Sequence[int]]], length: int = 6) -> list[Step]:
    """Steps of batches of samples, as numbers."""
    return [
        Step(
            number,
            {"batch": {str(at): repr(samples) for at, samples in enumerate(batches)}},
            batches=tuple(Batch((len(samples), length), tuple(samples)) for samples in batches),
        )
        for number, batches in enumerate(steps)
    ]


def difference(first: list[Step], second: list[Step], at: int) -> BatchDifference:
    found = difference_of(at, *({step.number: step for step in steps} for steps in (first, second)))
    assert found is not None
    return found


WHOLE = [[[1, 2, 3, 4]], [[5, 6, 7, 8]], [[9, 10, 11, 12]]]


@pytest.mark.parametrize(
    ("second", "samples"),
    [
        ([WHOLE[0], [[6, 5, 7, 8]], WHOLE[2]], SampleMatch.SAME),
        ([WHOLE[0], WHOLE[2], WHOLE[1]], SampleMatch.MOVED),
        ([WHOLE[0], [[5, 6, 7, 9]], [[8, 10, 11, 12]]], SampleMatch.MOVED),
        ([WHOLE[0], WHOLE[0], WHOLE[1]], SampleMatch.MOVED),
        ([WHOLE[0], [[21, 22, 23, 24]], [[25, 26, 27, 28]]], SampleMatch.OTHER),
        ([WHOLE[0], [[]], WHOLE[2]], SampleMatch.UNKNOWN),
    ],
)
def test_samples_are_compared_as_sets_over_steps(
    second: Sequence[Sequence[Sequence[int]]], samples: SampleMatch
) -> None:
    found = difference(run(WHOLE), run(second), 1)
    assert found.samples is samples
    assert found.in_shape == (samples is SampleMatch.UNKNOWN)


def test_what_agrees_before_the_difference_is_no_evidence() -> None:
    """The second epoch has the samples of the first, transformed anew in one run; the first epoch agreed."""
    first, second = run([*WHOLE, *WHOLE]), run([*WHOLE, [[31, 32, 33, 34]], [[35, 36, 37, 38]], [[39, 40, 41, 42]]])
    assert difference(first, second, 3).samples is SampleMatch.UNKNOWN, "one began anew, or the other transforms them"
    fresh = run([*WHOLE, [[51, 52, 53, 54]], [[55, 56, 57, 58]], [[59, 60, 61, 62]]])
    assert difference(fresh, second, 3).samples is SampleMatch.OTHER
    again = run([*WHOLE, WHOLE[0], [[31, 32, 33, 34]], [[35, 36, 37, 38]]])
    assert difference(run([*WHOLE, WHOLE[2], WHOLE[0], WHOLE[1]]), again, 3).samples is SampleMatch.MOVED


def test_what_the_other_run_read_before_is_found() -> None:
    """The resumed run begins with the data anew; its steps are the last ones of the whole run."""
    whole, resumed = run([*WHOLE, [[13, 14]]]), run([[], [], [[1, 2]], [[3, 4]]])
    found = difference_of(2, {one.number: one for one in whole}, {one.number: one for one in resumed[2:]})
    assert found is not None
    assert found.samples is SampleMatch.MOVED


def test_the_same_samples_in_batches_of_other_sizes_are_told() -> None:
    found = difference(run([[[1, 2, 3, 4]]]), run([[[1, 2], [3, 4]]]), 0)
    assert (found.in_number, found.in_shape, found.one_more, found.samples) == (True, True, False, SampleMatch.SAME)
    assert found.words() == ("1 batch a step (4x6)", "2 batches a step (2x6, 2x6)")
    more = difference(run([[[1, 2]]]), run([[[1, 2], [3, 4]]]), 0)
    assert more.one_more, "the optimizer of one run did not step"


def test_padding_to_other_lengths_is_not_taken_for_other_content() -> None:
    padded = [run([[[1, 2]]])[0], *run([[[1, 2]], [[3, 4]]], length=9)[1:]]
    other = [padded[0], *run([[[1, 2]], [[5, 6]]], length=7)[1:]]
    assert difference(padded, other, 1).samples is SampleMatch.UNKNOWN


def test_large_batches_are_compared_by_the_samples_that_both_kept() -> None:
    numbers = [hash_of(number) for number in range(256)]
    large = [[number for number in numbers if is_kept(number, 256)]]
    small = [numbers[at : at + 8] for at in range(0, 256, 8)]
    first = Step(0, {"batch": {"0": "a"}}, batches=(Batch((256, 4), tuple(large[0])),))
    second = Step(0, {"batch": {"0": "b"}}, batches=tuple(Batch((8, 4), tuple(one)) for one in small))
    assert 8 <= len(large[0]) <= 64
    assert difference([first], [second], 0).samples is SampleMatch.SAME


def hash_of(number: int) -> int:
    return (number + 1) * 2654435761 % 2**32 >> 3


def test_without_shapes_nothing_is_said() -> None:
    assert difference_of(0, {0: Step(0, {})}, {0: Step(0, {})}) is None
