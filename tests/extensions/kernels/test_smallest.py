"""The smallest inputs that still show a fault, and the words for them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from hashbench.extensions.kernels.smallest import smallest, words_of

Arguments = tuple[Any, ...]


def _drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)


def _sums_without_the_tail(args: Arguments) -> bool:
    """Whether a sum over blocks of 32 differs that forgets what is behind the last whole block."""
    (x,) = args
    whole = x.shape[1] // 32 * 32
    return not torch.allclose(x[:, :whole].double().sum(1), x.double().sum(1))


def test_a_lost_tail_needs_one_row_and_one_element_behind_a_block() -> None:
    found = smallest((_drawn(50, 1021),), _sums_without_the_tail, seconds=20)
    assert _sums_without_the_tail(found)
    assert words_of(found) == ("float32[1, 1]: [[1]]",)


def test_a_fault_of_sizes_above_a_block_shrinks_to_one_more() -> None:
    def wrong(args: Arguments) -> bool:
        return bool(args[0].shape[1] > 32 and args[0].sum() != 0)

    (x,) = smallest((_drawn(50, 1021),), wrong, seconds=20)
    assert x.shape == (1, 33)
    assert int((x != 0).sum()) == 1


def test_dimensions_of_one_size_shrink_together() -> None:
    def wrong(args: Arguments) -> bool:
        a, b = args
        return bool((a @ b).abs().sum() > 0)  # raises if sizes do not fit

    a, b = smallest((_drawn(48, 64), _drawn(64, 40)), wrong, seconds=20)
    assert (a.shape, b.shape) == ((1, 1), (1, 1))
    assert words_of((a, b)) == ("float32[1, 1]: [[1]]", "float32[1, 1]: [[1]]")


@pytest.mark.parametrize("at", [(0, 0), (25, 13), (49, 63)])
def test_the_element_that_matters_is_kept(at: tuple[int, int]) -> None:
    x = _drawn(50, 64)
    x[at] = torch.nan
    found = smallest((x,), lambda args: bool(args[0].isnan().any()), seconds=20)
    assert int(found[0].isnan().sum()) == 1
    assert found[0].numel() <= 32 * 32
    assert int((found[0] == 0).sum()) == found[0].numel() - 1


def test_indices_stay_below_the_size_that_shrinks() -> None:
    def wrong(args: Arguments) -> bool:
        table, index = args
        return bool(table[index].numel() and index.unique().numel() < index.numel())

    index = torch.arange(40) * 7 % 33 + 5
    table, index = smallest((_drawn(50, 8), index), wrong, seconds=20)
    assert table.shape[0] <= 2
    assert index.shape == (2,)


def test_sizes_that_are_arguments_shrink_with_the_tensors() -> None:
    def wrong(args: Arguments) -> bool:
        x, size, other = args
        assert x.shape[0] == size
        return bool(other == 7)

    x, size, other = smallest((_drawn(50), 50, 7), wrong, seconds=20)
    assert (x.shape[0], size, other) == (1, 1, 7)


def test_strides_and_offset_are_kept_where_they_matter() -> None:
    x = _drawn(65, 32).flatten()[3:].as_strided((30, 32), (32, 1)).T

    def wrong(args: Arguments) -> bool:
        return not args[0].is_contiguous() and args[0].storage_offset() % 4 == 3

    (found,) = smallest((x,), wrong, seconds=20)
    assert wrong((found,))
    assert "strides" in words_of((found,))[0]
    assert bool((found == 0).all())


def test_expanded_tensors_are_not_written() -> None:
    x = _drawn(1, 8).expand(6, 8)
    kept = x.clone()
    (found,) = smallest((x,), lambda args: bool(args[0].shape[0] == 6 and args[0][0, 3] != 0), seconds=20)
    assert torch.equal(x, kept)
    assert found.shape[0] == 6
    (found,) = smallest((x,), lambda args: args[0].stride(0) == 0, seconds=20)
    assert found.stride(0) == 0


def test_tensors_without_comparisons_stay() -> None:
    small = torch.ones(4).to(torch.float8_e4m3fn)
    found = smallest((small, torch.eye(4).to_sparse()), lambda args: args[0].shape[0] == 4, seconds=20)
    assert found[0].float().tolist() == [1, 1, 1, 1]


def test_what_does_not_show_the_fault_is_never_returned() -> None:
    assert smallest((_drawn(4),), lambda _: False, seconds=1) == ()
    assert smallest((_drawn(4),), lambda _: 1 / 0, seconds=1) == ()
    seen: list[tuple[int, ...]] = []

    def wrong(args: Arguments) -> bool:
        seen.append(tuple(args[0].shape))
        if args[0].shape != (37, 5):
            raise RuntimeError("no other shape")
        args[0].zero_()  # a kernel may write its inputs
        return len(seen) > 0

    x = _drawn(37, 5)
    (found,) = smallest((x,), wrong, seconds=5)
    assert found.shape == (37, 5)
    assert bool((x != 0).any()), "the caller's tensor stays"


def test_what_is_known_to_show_the_fault_is_not_asked_for_again() -> None:
    x = _drawn(37, 5)
    asked: list[tuple[int, ...]] = []

    def wrong(args: Arguments) -> bool:
        asked.append(tuple(args[0].shape))
        return False

    assert smallest((x,), wrong, seconds=0, shown=True)[0] is x
    assert not asked


def test_it_ends_in_time() -> None:
    calls = []

    def wrong(args: Arguments) -> bool:
        calls.append(args)
        time.sleep(0.05)
        return bool(args[0].abs().sum() > 0)

    (found,) = smallest((_drawn(64, 64),), wrong, seconds=0.12)
    assert len(calls) <= 4
    assert wrong((found,))


def test_gradients_are_asked_for_as_before() -> None:
    x = _drawn(8, 8).requires_grad_()
    (found,) = smallest((x,), lambda args: args[0].requires_grad and args[0].is_leaf, seconds=5)
    assert found.requires_grad
    assert found.shape == (1, 1)


def test_without_tensors_or_elements() -> None:
    assert smallest((3, "a", torch.empty(0, 4)), lambda _: True, seconds=5)[:2] == (3, "a")


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(4, 7), "float32[4, 7], zeros"),
        (torch.ones(4, 7, dtype=torch.bfloat16), "bfloat16[4, 7], ones"),
        (torch.full((4, 7), 0.25), "float32[4, 7], all 0.25"),
        (torch.eye(10)[6:7], "float32[1, 10], zeros but 1 at [0, 6]"),
        (
            torch.tensor([[0.5, torch.nan], [-torch.inf, 2.0]], dtype=torch.bfloat16),
            "bfloat16[2, 2]: [[0.5, nan], [-inf, 2]]",
        ),
        (torch.arange(100), "int64[100], from 0 to 99"),
        (torch.tensor([True, False]), "bool[2]: [1, 0]"),
        (torch.tensor(3.0), "float32[]: 3"),
        (torch.ones(4, 8).T, "float32[8, 4] with strides [1, 8], ones"),
        (torch.ones(3, dtype=torch.complex64), "complex64[3]: [1+0j, 1+0j, 1+0j]"),
        (0.5, "0.5"),
        (None, "None"),
    ],
    ids=str,
)
def test_words(tensor: Any, words: str) -> None:
    assert words_of((tensor,)) == (words,)
