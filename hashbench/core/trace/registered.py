"""Names given by the caller before an op reads a tensor: inputs, parameters and buffers, by storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hashbench.core.trace.digest import RawDigest
from hashbench.core.trace.storage_writers import storage_key

Registration = tuple[str, str, RawDigest]
"""``(kind, name, digest at that time)``"""


class Registered:
    """Registrations by storage address, with the time of their registration.

    A weak reference keeps the struct of a storage but not its memory, so the address of a registered storage is never
    reused, even after it died: the inputs of one step are gone when the next begins.
    """

    def __init__(self) -> None:
        self._now: dict[int, Registration] = {}
        self._unread: dict[int, Registration] = {}
        self._held: set[StorageWeakRef] = set()
        self._changes: list[tuple[int, int, Registration | None]] = []

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return storage_key(tensor) in self._now

    def add(self, tensor: torch.Tensor, registration: Registration, *, leaves: int) -> None:
        """Register a tensor that has a storage; ``leaves`` is the number of leaves so far."""
        held = StorageWeakRef(tensor.untyped_storage())
        storage = int(held.cdata)
        self._held.add(held)
        self._now[storage] = self._unread[storage] = registration
        self._changes.append((leaves, storage, registration))

    def read(self, storage: int) -> Registration | None:
        """Return the registration of a storage that an op is reading, or has just read."""
        self._unread.pop(storage, None)
        return self._now.get(storage)

    def read_by(self, storages: Sequence[int]) -> None:
        """Mark the storages of leaves, in the leaves' order, as read."""
        for storage, registration in zip(storages, self.along(storages), strict=True):
            if registration is self._now.get(storage):  # else another one replaced it
                self._unread.pop(storage, None)

    def unread(self) -> list[Registration]:
        """Return the registrations that no op has read so far."""
        return list(self._unread.values())

    def close(self, *, leaves: int) -> None:
        """End all registrations; ``leaves`` is the number of leaves so far."""
        self._changes += ((leaves, storage, None) for storage in self._now)
        self._now.clear()
        self._unread.clear()

    def along(self, storages: Iterable[int]) -> Iterator[Registration | None]:
        """Yield each leaf's registration at the time it was read, given the leaves' storages in order."""
        now: dict[int, Registration | None] = {}
        changes = iter(self._changes)
        change = next(changes, None)
        for number, storage in enumerate(storages):
            while change is not None and change[0] <= number:
                now[change[1]] = change[2]
                change = next(changes, None)
            yield now.get(storage)
