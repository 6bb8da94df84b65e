"""What may look at single calls while a trace is made: to capture one, or to put recorded content in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hashbench.records import OpRecord


class Watcher:
    """Told of every call of a watched trace by the id that its record will have. Does nothing itself.

    All methods run with dispatch modes disabled, so what they compute is not traced.
    """

    wants_records = False
    """Whether :meth:`recorded` is to be called. Making every record at once costs some 10 µs a call."""

    def before(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The op ``func`` is about to be called."""

    def after(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """The call has been made; what it wrote is hashed after this."""

    def leaf(self, node: str, tensor: torch.Tensor) -> None:
        """A parameter, buffer or input at the start of the run, or any tensor that no recorded op wrote and that is
        read for the first time; it is hashed after this."""

    def recorded(self, record: OpRecord) -> None:
        """The record of a call is made, as the finished trace will have it; whoever called the op has not gone on yet.
        What is raised here reaches that caller."""
