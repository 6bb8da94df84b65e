"""Inputs keep their meaning when sizes and values change."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hashbench.extensions.kernels.inputs import (
    KernelInputs,
    free_sizes,
    keep_meaning,
    meaning_of,
    prime_below,
    resized,
)


def test_leaves_are_named_by_place_and_put_back_there() -> None:
    x, y = torch.ones(2), torch.zeros(3)
    inputs = KernelInputs.of((x, (1, {"a": y})), {"scale": 2.0})
    assert inputs.names() == ["input 0", "input 1.0", "input 1.1.a", "input scale"]
    args, kwargs = inputs.having([x, 5, y, 3.0]).arguments()
    assert args[1][0] == 5
    assert args[1][1]["a"] is y
    assert kwargs == {"scale": 3.0}


def test_arrays_are_tensors_for_the_reference_and_arrays_for_the_kernel() -> None:
    inputs = KernelInputs.of((np.ones(3), torch.ones(2)), {}).copied()
    assert all(isinstance(leaf, torch.Tensor) for leaf in inputs.arguments()[0])
    array, tensor = inputs.arguments(arrays=True)[0]
    assert isinstance(array, np.ndarray)
    assert isinstance(tensor, torch.Tensor)


def test_copies_keep_strides_and_alignment() -> None:
    given = torch.arange(40.0)[1:25].view(4, 6).t()
    copy = KernelInputs.of((given,), {}).copied().leaves[0]
    assert copy.stride() == given.stride()
    assert copy.data_ptr() % 64 == given.data_ptr() % 64
    assert copy.data_ptr() != given.data_ptr()


def test_sizes_that_are_equal_change_together_and_integers_follow() -> None:
    inputs = KernelInputs.of((torch.ones(8, 32), torch.ones(32), 32, 256), {"n": 7})
    changed = resized(inputs, {32: 29}, integers=True)
    assert [tuple(tensor.shape) for _, tensor in changed.tensors()] == [(8, 29), (29,)]
    assert changed.leaves[2:] == (29, 8 * 29, 7)
    assert resized(inputs, {32: 29}, integers=False).leaves[2:] == (32, 256, 7)


def test_larger_tensors_repeat_the_given_one() -> None:
    changed = resized(KernelInputs.of((torch.tensor([1.0, 2, 3]),), {}), {3: 7}, integers=False)
    assert changed.leaves[0].tolist() == [1, 2, 3, 1, 2, 3, 1]


def test_offsets_hold_the_size_that_they_end_at() -> None:
    offsets = torch.tensor([0, 7, 9, 20], dtype=torch.int32)
    assert free_sizes(KernelInputs.of((torch.ones(20, 16), offsets), {})) == [16]


def test_counted_positions_hold_nothing() -> None:
    assert free_sizes(KernelInputs.of((torch.ones(20, 16), torch.arange(20)), {})) == [20, 16]


def test_indices_stay_inside_and_differ_where_they_did() -> None:
    table = torch.ones(16, 4)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    changed = resized(KernelInputs.of((table, order), {}), {16: 5}, integers=False).leaves[1]
    assert sorted(changed.tolist()) == [0, 1, 2, 3, 4]
    repeated = torch.tensor([15, 3, 3, 9, -1, 15])
    changed = resized(KernelInputs.of((table, repeated), {}), {16: 5}, integers=False).leaves[1]
    assert changed.tolist() == [0, 3, 3, 4, -1, 0]


@pytest.mark.parametrize(
    ("values", "fixed"),
    [
        ([0.0, 1.0, 0.0, 1.0, 1.0], True),
        ([0.0, float("-inf"), 2.0, 3.0, 4.0], True),
        ([1.0, 1.0, 1.0, 1.0, 1.0], False),
        ([0.5, 1.0, -3.0, 1.0, 7.0], False),
    ],
    ids=["a mask", "a mask of infinities", "ones as a weight", "numbers"],
)
def test_masks_are_not_varied(values: list[float], fixed: bool) -> None:
    assert meaning_of(torch.tensor(values)).fixed is fixed


def test_integers_and_bools_are_not_varied() -> None:
    assert meaning_of(torch.arange(3)).fixed
    assert meaning_of(torch.tensor([True])).fixed


@pytest.mark.parametrize(
    "given",
    [
        torch.tensor([1.0, 2.0, 5.0, 4.0]),
        torch.tensor([0.5, 2.0, 3.0, 7.0]),
        torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.1, 0.9]]),
        torch.tensor([[1.0, 2, 3], [0, -5, 6], [0, 0, 9]]),
    ],
    ids=["positive", "sorted", "shares of 1", "a triangle"],
)
def test_drawn_values_mean_what_the_given_ones_mean(given: torch.Tensor) -> None:
    meaning = meaning_of(given)
    drawn = torch.randn(given.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    made = keep_meaning(drawn, given, meaning)
    again = meaning_of(made)
    assert (again.positive, again.ascending, again.shares) == (meaning.positive, meaning.ascending, meaning.shares)
    assert torch.equal(made == 0, given == 0)
    assert not torch.equal(made, given)


def test_primes() -> None:
    assert [prime_below(number) for number in (1024, 64, 3, 2, 1)] == [1021, 61, 2, 1, 1]
