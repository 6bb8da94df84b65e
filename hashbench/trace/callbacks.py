"""Callback interface invoked before and after each traced op: to capture a call, or to replace what it computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hashbench.records import OpRecord
from hashbench.trace.build import Ids, Place, RawRecord, build_record
from hashbench.trace.op_schema import OpPlan


class TraceCallback:
    """Called around every op of a trace with the id that the op's record will have. The base class does nothing.

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
        """The record of a call is made, as the finished trace will have it. The caller of the op has not gone on yet:
        what is raised here reaches it."""


class CallbackRunner:
    """Invokes the callback of one trace, with the ids and records that the finished trace will have."""

    def __init__(self, callback: TraceCallback) -> None:
        self.callback = callback
        self.ids = Ids()
        self._place = Place("", "", None)
        self._records: list[OpRecord] = []

    def call(self, func: Any, plan: OpPlan, place: Place, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call an op whose record will be at ``place``; one that raises leaves no record."""
        try:
            self.callback.before(place.id, func, args, kwargs)
            output = plan.call(*args, **kwargs)
            self.callback.after(place.id, func, args, kwargs, output)
        except BaseException:
            self.ids.take_back_record()
            raise
        self._place = place
        return output

    def leaf(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        """Announce a leaf that is read for the first time."""
        self.callback.leaf(self.ids.add_leaf(kind, name), tensor)

    def recorded(self, raw: RawRecord, notes: Mapping[str, Any]) -> None:
        """Build the record of the last call and hand it over, where the callback wants records."""
        if self.callback.wants_records:
            forward = None if self._place.forward is None else self._records[self._place.forward]
            self._records.append(build_record(raw, self.ids, self._place, forward, notes))
            self.callback.recorded(self._records[-1])
