"""Which calls of a run are captured, and what each rank says of it: a note beside its trace. Never imports torch.

A call is named by the id of its record and its rank, ``forward.1/net/aten.index_put_.default#0@1``; without a rank it
is captured on every rank that makes it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hashbench.core.catalog import Origin
from hashbench.core.commands import replay_with
from hashbench.core.divergence.collective_calls import nodes_of_call
from hashbench.core.io import from_json, read_json, replace_file, to_json
from hashbench.core.records import Trace
from hashbench.extensions.ranks.verdict import RankDivergence, RanksVerdict

REPRO = "repro"
"""Folder of the repro, in that of a recording and in that of ``ranks run``."""


@dataclass(frozen=True, slots=True)
class NamedCall:
    """A call to capture: the id of its record, and its rank; ``None``: every rank."""

    node: str
    rank: int | None = None

    @classmethod
    def of(cls, word: str) -> NamedCall:
        """Return the call of a word, ``ID`` or ``ID@RANK``."""
        node, _, rank = word.rpartition("@")
        return cls(node, int(rank)) if node and rank.isdecimal() else cls(word)

    def word(self) -> str:
        """Format it for :meth:`of`."""
        return self.node if self.rank is None else f"{self.node}@{self.rank}"


@dataclass(frozen=True, slots=True)
class CaptureNote:
    """How a rank captured a call.

    Attributes:
        words: what its repetition shows, or why there is none.
        written: the rank wrote its part of the repro.
        members: number of ranks of the collective; 0: it is a kernel.
        definition: file or module that defines a custom op; empty for any other.
    """

    words: str
    written: bool = False
    members: int = 0
    definition: str = ""

    def command(self, folder: Path) -> str:
        """Return the command that repeats the call of the repro in ``folder``."""
        if self.members:
            return shlex.join(["torchrun", "--nproc-per-node", str(self.members), str(folder / "repro.py")])
        defined, here = Path(self.definition), Path.cwd()
        shown = str(defined.relative_to(here) if defined.is_relative_to(here) else self.definition)
        return replay_with(folder, shown if self.definition else "")


@dataclass(frozen=True, slots=True)
class Repro:
    """The repro of the first kernel or collective.

    Attributes:
        repro: its folder; empty: there is none.
        reproduced: what its repetition shows, or why there is none.
        command: repeats it.
    """

    repro: str = ""
    reproduced: str = ""
    command: str = ""


def note_path(folder: Path, rank: int) -> Path:
    """Return where a rank writes its note."""
    return folder / f"rank{rank}.capture.json"


def write_note(folder: Path, rank: int, note: CaptureNote) -> None:
    """Write the note of a rank."""
    replace_file(note_path(folder, rank), json.dumps(to_json(note)))


def read_notes(folder: Path, calls: Sequence[NamedCall]) -> list[CaptureNote]:
    """Return the notes of the ranks of some calls; ranks that left none are left out."""
    paths = [note_path(folder, call.rank) for call in calls if call.rank is not None]
    return [from_json(CaptureNote, read_json(path)) for path in paths if path.exists()]


def guilty_of(verdict: RanksVerdict) -> RankDivergence | None:
    """Return the kernel or collective that is first; ``None`` if only other origins are."""
    return next(
        (divergence for divergence in verdict.first if divergence.origin in (Origin.KERNEL, Origin.COLLECTIVE)), None
    )


def calls_to_capture(found: RankDivergence, traces: Mapping[int, Trace]) -> tuple[NamedCall, ...]:
    """Return the call of a kernel, or those of all ranks of a collective, in the order of its group.

    Args:
        found: a divergence.
        traces: of one run, by rank.

    Returns:
        Empty for a message, and for a collective if the call of a rank is missing: these are not repeated.
    """
    if found.origin == Origin.KERNEL:
        return (NamedCall(found.node, found.rank),)
    return tuple(NamedCall(node, rank) for rank, node in nodes_of_call(traces, found.rank, found.node).items())
