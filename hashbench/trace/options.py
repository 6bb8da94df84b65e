"""What a trace is asked to record (``TraceOptions``), and what the facade asks of whatever records it (``Tracer``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hashbench.records import Trace
from hashbench.trace.callbacks import TraceCallback


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """What to record beside every op's outputs; :class:`~hashbench.trace.api.HashDebugTrace` explains each."""

    verbose: bool = False
    max_ops_logged: int | None = None
    include_timestamp: bool = False
    show_exec_time: bool = False
    hash_inputs: bool = False
    source_lines: bool = False
    callback: TraceCallback | None = None
    digests: str = "fast"

    @property
    def live_records(self) -> bool:
        """Whether the callback is to get each record as soon as it is made."""
        return self.callback is not None and self.callback.wants_records


class Tracer(Protocol):
    """Records every op between ``__enter__`` and ``__exit__`` and builds a :class:`~hashbench.records.Trace` of it.

    ``iteration`` is set by the caller and goes into every record, ``failed_op`` names the op that raised last.
    """

    iteration: int
    failed_op: str

    @property
    def active(self) -> bool:
        """Whether ops are being recorded now."""

    def __enter__(self) -> object: ...

    def __exit__(self, *exception: Any) -> None: ...

    def register_model(self, model: torch.nn.Module) -> None:
        """Name the modules, parameters and buffers of a model, and hash its state now."""

    def register_inputs(self, inputs: Any) -> None:
        """Name the tensors in ``inputs`` by their place and hash them now."""

    def mark(self, label: str, settings: Mapping[str, str]) -> None:
        """Note torch's global settings at this point of the run."""

    def add_result(self, name: str, value: Any) -> None:
        """Note something by which runs are compared: a tensor, at its final content, or a plain Python value."""

    def trace(self) -> Trace:
        """What was recorded so far."""

    def finish(self) -> tuple[Trace, Mapping[int, Mapping[str, Any]]]:
        """All that was recorded, and notes by record number; the raw records are released."""
