"""Match calls that two runs make a different number of times, as a loop over the items does. Pure: no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hashbench.batch.judged import RowRun
from hashbench.batch.match import CallRows
from hashbench.records import OpRecord


@dataclass(frozen=True)
class Twins:
    """Finds calls of ``reference`` for those of ``other``."""

    reference: RowRun
    other: RowRun

    def shifted(self, record: OpRecord) -> bool:
        """Return True if the runs called this op in this module a different number of times."""
        return record.id.rpartition("#")[0] in self.uneven

    def of_content(self, record: OpRecord, rows: CallRows) -> Sequence[str]:
        """Return the calls of the reference with the same inputs, if whole tensors are passed."""
        return self._by_content.get(_key(record, rows), ())

    def of_state(self, record: OpRecord, rows: CallRows) -> Sequence[str]:
        """Return the calls of the reference that drew from the same state of a generator."""
        return self._by_state.get(_state_key(record, rows), ()) if self.shifted(record) else ()

    @cached_property
    def uneven(self) -> Mapping[str, tuple[int, int]]:
        """Op in a module → its numbers of calls, if these differ."""
        counts = [
            Counter(record.id.rpartition("#")[0] for record in run.trace.records if not record.inside)
            for run in (self.reference, self.other)
        ]
        both = {name: (counts[0][name], counts[1][name]) for name in counts[0] | counts[1]}
        return {name: (there, here) for name, (there, here) in both.items() if there != here}

    @cached_property
    def _by_content(self) -> Mapping[Any, Sequence[str]]:
        found: dict[Any, list[str]] = {}
        for record in self.reference.trace.records:
            if record.id in self.reference.calls and self.shifted(record):
                found.setdefault(_key(record, self.reference.calls[record.id]), []).append(record.id)
        return found

    @cached_property
    def _by_state(self) -> Mapping[Any, Sequence[str]]:
        found: dict[Any, list[str]] = {}
        for record in self.reference.trace.records:
            key = _state_key(record, self.reference.calls.get(record.id))
            if key is not None and self.shifted(record):
                found.setdefault(key, []).append(record.id)
        return found


def _key(record: OpRecord, rows: CallRows) -> Any:
    return record.op, record.module, record.arguments, record.rng, tuple(one._replace(cut=None) for _, one in rows.read)


def _state_key(record: OpRecord, rows: CallRows | None) -> Any:
    return None if rows is None or rows.drew is None else (record.op, record.module, rows.drew.before)
