"""Last-writer tag of a storage, kept as an attribute of its Python object so that it shares the storage's lifetime."""

from __future__ import annotations

from typing import Any

import torch

from hashbench.native.library import unrecorded
from hashbench.trace.digest import components, is_dense

LeafViews = dict[tuple[Any, ...], int]
"""The parts of a storage that were recorded as leaves: ``(offset, shape, stride)`` to leaf number."""


class InFlight:
    """Stands in a mark for data that may not have come from other processes yet."""


IN_FLIGHT = InFlight()

Mark = tuple[object, int, LeafViews | InFlight | None]
"""``(trace, node, views)``: the object that stands for the trace that set it, the number of the record (0 and up) or
leaf (-1 and down) that wrote it, and, for a leaf of which only a part was seen, the parts known so far; for the output
of a collective that nobody has read yet, :data:`IN_FLIGHT`."""

# Storages without a mark show this one, of no trace: looking an attribute up in vain costs 1 to 4 µs, more than a hash.
torch.UntypedStorage._hashbench_writer = (None, 0, None)  # type: ignore[attr-defined]


def get_mark(tensor: torch.Tensor) -> Mark | None:
    """The mark of the tensor's storage, or of the tensor itself where it has no storage of its own."""
    storage = _storage(tensor)
    mark: Mark | None = getattr(tensor if storage is None else storage, "_hashbench_writer", None)
    return None if mark is None or mark[0] is None else mark


def is_in_flight(tensor: torch.Tensor) -> bool:
    """Whether a collective writes to the tensor's storage, and the trace does not know yet whether it is done."""
    mark = get_mark(tensor)
    return mark is not None and mark[2] is IN_FLIGHT


def set_mark(tensor: torch.Tensor, mark: Mark) -> None:
    """Mark everything that holds data of ``tensor``: its storage, or those of its components."""
    parts = components(tensor)
    for part in parts:
        part.untyped_storage()._hashbench_writer = mark  # type: ignore[attr-defined]
    if not parts or parts[0] is not tensor:
        tensor._hashbench_writer = mark  # type: ignore[attr-defined]


def storage_key(tensor: torch.Tensor) -> int | None:
    """An identity of the tensor's storage that holds while the tensor lives; ``None`` without a storage."""
    storage = _storage(tensor)
    return None if storage is None else int(storage._cdata)


def share_memory(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    """Whether two models hold the same parameters or buffers. A deep copy does where its class copies itself by hand:
    what is done to the copy is then done to the model."""
    keys = [{storage_key(tensor) for tensor in (*model.parameters(), *model.buffers())} for model in (first, second)]
    return bool(keys[0] & keys[1] - {None})


def storage_bytes(tensor: torch.Tensor) -> int:
    """Size of the tensor's storage in bytes; 0 without a storage."""
    storage = _storage(tensor)
    return 0 if storage is None else storage.nbytes()


def view_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Which part of its storage a tensor shows; the empty tuple without a storage."""
    if _storage(tensor) is None:
        return ()
    return tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride())


def offset(tensor: torch.Tensor) -> int:
    """The storage offset in elements; 0 without a storage."""
    return 0 if _storage(tensor) is None else int(tensor.storage_offset())


def covers_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor shows every byte of its storage (or has none). An expanded one may be larger and show less."""
    storage = _storage(tensor)
    return storage is None or (tensor.nbytes >= storage.nbytes() and is_dense(tensor))


@unrecorded()
def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the tensor's storage, as a flat tensor that shares it."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
