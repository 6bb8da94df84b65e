"""Digests of the samples of a batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hashbench.extensions.watch import samples
from hashbench.extensions.watch.file import is_kept
from hashbench.extensions.watch.samples import samples_of

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


def digests(*leaves: torch.Tensor) -> list[str]:
    digits = samples_of(leaves).digest().partition(" ")[2]
    return [digits[at : at + 8] for at in range(0, len(digits), 8)]


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 200
    return (drawn > 100) if dtype is torch.bool else drawn.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_have_digests_of_their_own_wherever_they_are(dtype: torch.dtype) -> None:
    batch = numbers(dtype, 6, 40)
    found = digests(batch)
    assert len(set(found)) == 6
    assert digests(batch.flip(0)) == found[::-1]
    assert [*digests(batch[:2]), *digests(batch[2:])] == found, "in batches of other sizes as well"


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch.t().contiguous().t(),
        lambda batch: torch.cat([batch, batch], 1)[:, :40],
        lambda batch: batch.clone().requires_grad_(),
    ],
)
def test_the_layout_in_memory_is_no_content(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    batch = numbers(torch.float32, 6, 40)
    assert digests(change(batch)) == digests(batch)


def test_images_lie_in_memory_as_they_like() -> None:
    images = numbers(torch.float32, 4, 3, 8, 8).to(memory_format=torch.channels_last)
    assert len(set(digests(images))) == 4
    assert digests(images.flip(0).contiguous(memory_format=torch.channels_last)) == digests(images)[::-1]


def test_the_largest_tensor_of_a_batch_is_read() -> None:
    batch, labels = numbers(torch.float32, 6, 40), torch.zeros(6)
    assert samples_of([labels, torch.tensor(3.0), batch]).digest() == samples_of([batch]).digest()
    assert samples_of([batch]).digest().startswith("6x40 ")


def test_a_change_of_a_large_sample_is_seen_in_many_places() -> None:
    batch = numbers(torch.float32, 2, samples._MOST_WORDS * 3)
    changed = batch.clone()
    changed[1, 100:200] += 1
    assert [one == other for one, other in zip(digests(batch), digests(changed), strict=True)] == [True, False]


def test_of_many_samples_a_share_is_kept() -> None:
    batch = numbers(torch.float32, 512, 4)
    all_of_them = {one for at in range(0, 512, 8) for one in digests(batch[at : at + 8])}
    kept = digests(batch)
    assert set(kept) == {one for one in all_of_them if is_kept(int(one, 16), 512)}
    assert 8 < len(kept) < 128


@pytest.mark.parametrize(
    ("leaves", "said"),
    [
        ([], ""),
        ([torch.tensor(1.0)], ""),
        ([torch.zeros(0, 3)], "0x3"),
        ([torch.zeros(2, 3, device="meta")], "2x3"),
        ([torch.zeros(2, 3).to_sparse()], ""),
        ([3, "text"], ""),
    ],
)
def test_what_has_no_samples_has_no_digests(leaves: list[object], said: str) -> None:
    assert samples_of(leaves).digest() == said
