"""The memory of a dense tensor, seen as bytes or words without a copy."""

from __future__ import annotations

import torch


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A ``uint8`` view, of one dimension, of the memory that a dense tensor fills, in memory order.

    ``tensor`` may have any dtype and any order of dimensions, but no holes and no overlaps.
    """
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * tensor.element_size()
    return view.set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,))


def alignment(data: torch.Tensor) -> int:
    """The largest of 8, 4, 2 and 1 that divides the address of ``data``, in bytes."""
    address = (
        data.data_ptr()
    )  # of a dense tensor in any order of dimensions: its first byte, strides are never negative
    return next(size for size in (8, 4, 2, 1) if address % size == 0)
