"""Capture one call of a program while it is traced, and replay it when the program has ended."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hashbench.core.diagnose.calls.call import CapturedCall
from hashbench.core.diagnose.named_call import kernel_of, write_kernel
from hashbench.core.errors import bounded
from hashbench.core.io import replace_file, to_json
from hashbench.core.records import OpRecord
from hashbench.core.run.recorder import CallCapture
from hashbench.core.text import one_line
from hashbench.extensions.watch.program.task import NOTE, REPRO, CallNote


class ProgramCapture(CallCapture):
    """Keeps the call of one record, and writes its repro and a note into the folder of the run."""

    def __init__(self, node: str, folder: Path) -> None:
        self._node, self._folder = node, folder
        self._why = "the call was not made"
        self._call: CapturedCall | None = None
        self._record: OpRecord | None = None
        self._seen = False

    def before(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if node != self._node or self._seen:
            return
        self._seen = True
        try:
            self._call = kernel_of(func, args, kwargs)
        except Exception as error:  # of whatever kind: the program goes on without
            self._why = bounded(one_line(str(error)))

    def describe(self, records: Iterable[OpRecord]) -> None:
        """Look for the record of the call among those of a step."""
        if self._seen and self._record is None:
            self._record = next((record for record in records if record.id == self._node), None)

    def write(self) -> None:
        """Write the repro, and a note on it."""
        try:
            note = self._written()
        except Exception as error:  # the program has done its work
            note = CallNote(f"not captured: {bounded(one_line(str(error)))}")
        replace_file(self._folder / NOTE, json.dumps(to_json(note)))

    def _written(self) -> CallNote:
        if self._call is None:
            return CallNote(f"not captured: {self._why}")
        call, record = replace(self._call, node=self._node), self._record
        if record is not None:
            known = {name: getattr(record, name) for name in ("phase", "module", "forward_op", "source")}
            call = replace(call, **known)
        written = write_kernel(self._folder / REPRO, call, record, seen_in="in a run of the program")
        decided = written.diagnosis.decision
        return CallNote(
            written.words,
            True,
            str(decided.cause),
            str(decided.confidence),
            decided.because,
            decided.advice,
            written.definition,
        )
