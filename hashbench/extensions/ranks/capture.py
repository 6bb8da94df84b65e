"""Capture one call on this rank while it is recorded, and write its repro when the program has ended.

A kernel is local to its rank: its call is captured and replayed as that of any program. Of a collective each rank saves
its contribution, and a script repeats it under torchrun.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hashbench.core.diagnose.calls.call import CapturedCall
from hashbench.core.diagnose.calls.capture import CaptureError
from hashbench.core.diagnose.named_call import kernel_of, write_kernel
from hashbench.core.diagnose.rank_processes import backend_for
from hashbench.core.errors import bounded
from hashbench.core.records import OpRecord
from hashbench.core.run.recorder import CallCapture
from hashbench.core.text import one_line
from hashbench.core.trace.arguments import tensors_in
from hashbench.core.trace.collective_ops import KINDS, RECEIVE, UNKNOWN, CollectivePlan, collective_op
from hashbench.core.trace.groups import RankGroups
from hashbench.extensions.ranks.contributions import ContributionWatcher, save, write_script
from hashbench.extensions.ranks.notes import REPRO, CaptureNote, NamedCall, write_note

_NOT_REPEATED = frozenset({"send", RECEIVE, UNKNOWN})
"""Kinds of exchange that ranks with their contributions alone do not repeat."""


@dataclass(frozen=True, slots=True)
class _Contribution:
    """The call of a collective on this rank.

    Attributes:
        call: op and arguments.
        member: rank within its group.
        members: ranks of the group.
        backend: of the repro.
    """

    call: Mapping[str, Any]
    member: int
    members: int
    backend: str


class RankCapture(CallCapture):
    """Keeps the first call of this rank that is named, and writes its repro into ``repro`` of the recording.

    Args:
        calls: the named calls.
        folder: of the recording.
        rank: returns the rank of this process.
    """

    def __init__(self, calls: Sequence[NamedCall], folder: Path, rank: Callable[[], int]) -> None:
        self._calls, self._folder, self._rank, self._process = calls, folder, rank, os.getpid()
        self._nodes = frozenset(call.node for call in calls)
        self._why = "the call was not made"
        self._call: NamedCall | None = None
        self._kept: CapturedCall | _Contribution | None = None
        self._record: OpRecord | None = None

    def before(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if node not in self._nodes or self._call is not None:
            return
        self._call = next((call for call in self._named() if call.node == node), None)
        if self._call is None:
            return
        at = self._rank()
        self._rank = lambda: at  # which nobody may know when the program has left its group
        try:
            schema = getattr(func, "_schema", None)
            exchanges = schema is not None and (line := collective_op(schema)) is not None and line.exchanges
            self._kept = _contribution(node, func, args, kwargs) if exchanges else kernel_of(func, args, kwargs)
        except Exception as error:  # of whatever kind: the program goes on without
            self._why = bounded(one_line(str(error)))

    def describe(self, records: Iterable[OpRecord]) -> None:
        """Look for the record of the call among those of a step."""
        if self._call is not None and self._record is None:
            self._record = next((record for record in records if record.id == self._call.node), None)

    def write(self) -> None:
        """Write the repro, a note on it, and one line to standard error; nothing if no call of this rank is named."""
        named, rank = self._named(), self._rank()
        if not named or os.getpid() != self._process:
            return
        try:
            note = self._written()
        except Exception as error:  # the program has done its work
            note = CaptureNote(f"not captured: {bounded(one_line(str(error)))}")
        call = self._call or named[0]
        again = f"; {note.command(self._repro(call))}" if note.written else ""
        with suppress(OSError, ValueError):  # standard error may lie on the same disk, or be closed
            write_note(self._folder, rank, note)
            print(f"hashbench: rank {rank}, {call.node}: {note.words}{again}", file=sys.stderr)

    def _named(self) -> list[NamedCall]:
        """Return the calls that are named for this rank."""
        return [call for call in self._calls if call.rank in (None, self._rank())]

    def _repro(self, call: NamedCall) -> Path:
        """Return the folder of the repro: one for the kernel of a rank, and one for all ranks of a collective."""
        alone = call.rank is None and isinstance(self._kept, CapturedCall)
        return self._folder / REPRO / f"rank{self._rank()}" if alone else self._folder / REPRO

    def _written(self) -> CaptureNote:
        if self._kept is None or self._call is None:
            return CaptureNote(f"not captured: {self._why}")
        folder = self._repro(self._call)
        if isinstance(self._kept, CapturedCall):
            call = self._described(replace(self._kept, node=self._call.node))
            return _write_kernel(folder, call, self._record, self._rank())
        return _write_contribution(folder, self._call.node, self._kept)

    def _described(self, call: CapturedCall) -> CapturedCall:
        if (record := self._record) is None:
            return call
        known = {name: getattr(record, name) for name in ("phase", "module", "forward_op", "source")}
        return replace(call, **known)


def _contribution(node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Contribution:
    """Keep what this rank contributes to a collective."""
    line = collective_op(func._schema)
    assert line is not None
    if line.kind in _NOT_REPEATED:
        raise CaptureError(f"{KINDS[line.kind]}, and that is not repeated")
    group = RankGroups().of(CollectivePlan(line, func._schema).group(args, kwargs))
    watcher = ContributionWatcher(node)
    watcher.before(node, func, args, kwargs)
    if watcher.call is None or group.own is None or not group.ranks:
        raise CaptureError("its arguments or its process group cannot be saved")
    devices = [str(tensor.device) for tensor in tensors_in([*args]) if not tensor.is_cpu]
    members = len(group.ranks)
    return _Contribution(watcher.call, group.own, members, backend_for(devices[0] if devices else "cpu", members))


def _write_kernel(folder: Path, call: CapturedCall, record: OpRecord | None, rank: int) -> CaptureNote:
    """Replay the call here, where also a custom op is defined, and write it with what that shows."""
    written = write_kernel(folder, call, record, seen_in=f"on rank {rank}")
    return CaptureNote(written.words, written=True, definition=written.definition)


def _write_contribution(folder: Path, node: str, contribution: _Contribution) -> CaptureNote:
    """Write this rank's contribution, and the script, which is the same on every rank."""
    folder.mkdir(parents=True, exist_ok=True)
    save(contribution.call, folder, member=contribution.member)
    write_script(folder, members=contribution.members, backend=contribution.backend, claim=f"A collective: {node}")
    return CaptureNote("saved its contribution", written=True, members=contribution.members)
