"""Tell the samples of a batch apart: the batch's shape, and a short digest of each sample.

Two runs' batches are compared by them as sets (:mod:`hashbench.extensions.watch.batches`): what comes in another order,
or in batches of other sizes, has the same samples; what was changed by random transforms has others.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hashbench.extensions.watch.file import is_kept

_MOST_WORDS = 4096
"""Elements of a sample that its digest is made of, evenly spread over larger ones."""

_MOST_COPIED = 2**20
"""Elements of a batch whose samples are copied where they lie in no order of their own."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Size of an element -> what its bytes are read as."""

_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Samples:
    """A batch, by its largest tensor of which the first dimension counts the samples.

    Attributes:
        shape: of the tensor; empty: the batch has none.
        sums: one number for each sample, on the tensor's device; ``None``: not known.
    """

    shape: tuple[int, ...] = ()
    sums: torch.Tensor | None = None

    def digest(self) -> str:
        """Return the shape, and 8 hexadecimal digits for each sample; of many, for a share: ``2x4 0a1b2c3d4e5f6071``.

        Waits for the device.
        """
        try:
            numbers = [] if self.sums is None else self.sums.tolist()
        except Exception:  # a wrapper of a transform that is over
            numbers = []
        digests = [(number & _MASK) >> 32 for number in numbers]
        kept = "".join(f"{digest:08x}" for digest in digests if is_kept(digest, len(digests)))
        return " ".join(["x".join(map(str, self.shape)), *([kept] if kept else [])])


def samples_of(leaves: Iterable[object]) -> Samples:
    """Read the samples of a batch, by its leaves. What has no rows, or cannot be read, has none."""
    tensors = [
        leaf for leaf in leaves if type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_nested
    ]
    largest = max(
        (tensor for tensor in tensors if tensor.dim()),
        key=lambda tensor: tensor.numel() * tensor.element_size(),
        default=None,
    )
    if largest is None:
        return Samples()
    shape = tuple(largest.shape)
    try:
        return Samples(shape, _sums(largest.detach() if largest.requires_grad else largest))
    except Exception:  # of a wrapper without memory, or a type without such ops: the batch's digest is there
        return Samples(shape)


def _sums(tensor: torch.Tensor) -> torch.Tensor | None:
    rows = _rows(tensor)
    if rows is None or rows.is_meta or not rows.numel():
        return None
    if rows.is_complex():
        rows = torch.view_as_real(rows).flatten(1)
    words = rows if rows.dtype is torch.int64 else rows.view(_INTEGERS[rows.element_size()])
    if words.shape[1] > _MOST_WORDS:
        words = words[:, :: -(-words.shape[1] // _MOST_WORDS)]
    return (words * _weights(words.shape[1], words.device)).sum(1)


def _rows(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the samples as rows; those of a channels-last batch as they lie in memory, without a copy."""
    if tensor.is_contiguous():
        return tensor if tensor.dim() == 2 else tensor.reshape(tensor.shape[0], -1)
    strides = tensor.stride()
    inner = sorted(range(1, tensor.dim()), key=lambda at: -strides[at])
    ordered = tensor.permute(0, *inner)
    if ordered.is_contiguous():
        return ordered.flatten(1)
    return tensor.reshape(tensor.shape[0], -1).contiguous() if tensor.numel() <= _MOST_COPIED else None


@functools.lru_cache(64)
def _weights(number: int, device: torch.device) -> torch.Tensor:
    """Return the first of the numbers by which elements count in the sum of a sample."""
    return _all_weights(device)[:number]


@functools.cache
def _all_weights(device: torch.device) -> torch.Tensor:
    """Return odd numbers of 64 bits, the same in every process."""
    draw = random.Random(48)
    numbers = [draw.getrandbits(64) | 1 for _ in range(_MOST_WORDS)]
    return torch.tensor([number - 2**64 if number >= 2**63 else number for number in numbers], device=device)
