"""Hold the sources of messages still: receives from any source take theirs from where they came before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class FixedSources:
    """Contexts in which ``recv`` without a source receives from the ranks that it received from in the first of them.

    Only of this process; the others send as they did. The first context notes where each message came from.
    """

    def __init__(self) -> None:
        self._sources: list[int] | None = None

    @property
    def count(self) -> int | None:
        """Number of receives from any source that were noted; ``None`` before the first context has ended."""
        return None if self._sources is None else len(self._sources)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Note the sources, or receive from those that are known."""
        group_type = torch.distributed.ProcessGroup
        original = group_type.recv_anysource
        works: list[Any] = []
        known, position = self._sources, 0

        def receive(group: Any, tensors: Any, tag: int) -> Any:
            nonlocal position
            if known is not None and position < len(known):
                position += 1
                return group.recv(tensors, known[position - 1], tag)
            works.append(original(group, tensors, tag))
            return works[-1]

        group_type.recv_anysource = receive  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            group_type.recv_anysource = original  # type: ignore[method-assign]
        if known is None:
            self._sources = [work._source_rank() for work in works]
