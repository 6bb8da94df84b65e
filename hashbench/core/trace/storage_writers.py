"""Last-writer tag of a storage, kept as an attribute of its Python object so that it shares the storage's lifetime."""

from __future__ import annotations

from typing import Any

import torch

from hashbench.core.native.library import unrecorded
from hashbench.core.trace.digest import components, is_dense

LeafViews = dict[tuple[Any, ...], int]
"""Parts of a storage recorded as leaves: ``(offset, shape, stride)`` to leaf number."""


class InFlight:
    """Marker in a mark: data from other processes may not have arrived."""


IN_FLIGHT = InFlight()

Mark = tuple[object, int, LeafViews | InFlight | None]
"""``(trace, node, views)``: a token of the trace that set it; the number of the record (>= 0) or leaf (< 0) that wrote
it; and for a partly seen leaf its known parts, or :data:`IN_FLIGHT` for an unread output of a collective."""

# Default mark of no trace, as class attribute: a failed attribute lookup takes 1 to 4 µs, more than a hash.
torch.UntypedStorage._hashbench_writer = (None, 0, None)  # type: ignore[attr-defined]


def get_mark(tensor: torch.Tensor) -> Mark | None:
    """Return the mark of the tensor's storage, or of the tensor itself if it has no storage."""
    storage = _storage(tensor)
    mark: Mark | None = getattr(tensor if storage is None else storage, "_hashbench_writer", None)
    return None if mark is None or mark[0] is None else mark


def is_in_flight(tensor: torch.Tensor) -> bool:
    """Return True if a collective writes to the tensor's storage and is not known to be done."""
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
    """Return an identity of the tensor's storage, valid while the tensor lives; ``None`` without a storage."""
    storage = _storage(tensor)
    return None if storage is None else int(storage._cdata)


def share_memory(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    """Return True if two models share parameters or buffers. A deep copy may, if its class defines its own
    ``__deepcopy__``: mutating the copy then mutates the model."""
    keys = [{storage_key(tensor) for tensor in (*model.parameters(), *model.buffers())} for model in (first, second)]
    return bool(keys[0] & keys[1] - {None})


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return the size of the tensor's storage in bytes; 0 without a storage."""
    storage = _storage(tensor)
    return 0 if storage is None else storage.nbytes()


def view_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return offset, shape and stride of the view; ``()`` without a storage."""
    if _storage(tensor) is None:
        return ()
    return tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride())


def offset(tensor: torch.Tensor) -> int:
    """Return the storage offset in elements; 0 without a storage."""
    return 0 if _storage(tensor) is None else int(tensor.storage_offset())


def covers_storage(tensor: torch.Tensor) -> bool:
    """Return True if the tensor covers every byte of its storage (or has none). An expanded tensor may be larger and
    cover less."""
    storage = _storage(tensor)
    return storage is None or (tensor.nbytes >= storage.nbytes() and is_dense(tensor))


@unrecorded()
def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of the tensor's storage, as a flat tensor that shares it."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
