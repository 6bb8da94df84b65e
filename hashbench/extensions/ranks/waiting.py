"""Say where each rank is when the time of a run is over: the line of its script, and the collectives that it has begun.

At the deadline a thread of each rank writes a note beside its trace, from torch's flight recorder and the stack of the
main thread. That works while the main thread waits in a collective, and not where an extension holds the interpreter
lock: such a rank leaves no note, which is said.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from hashbench.core.divergence.collective_calls import group_word
from hashbench.core.io import from_json, read_json, replace_file, to_json

DEADLINE = "HASHBENCH_RANKS_DEADLINE"
"""Variable with the time at which ranks write their notes: that of ``time.monotonic``, the same for all processes."""

_NOT_REPORTED = "torch does not report its collectives"


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a rank was when time was over.

    Attributes:
        line: of the script, ``train.py:9 step``; empty if no code of the script runs.
        in_torch: that line has called torch, which has not returned.
        begun: collectives that were begun and have not ended, the earliest first; ``None`` if torch does not tell.
        last: the last one that has ended; empty if none has.
    """

    line: str
    in_torch: bool
    begun: tuple[str, ...] | None = None
    last: str = ""

    def words(self) -> str:
        """Format without the rank.

        >>> Whereabouts("train.py:9 step", True, ("all_reduce #3 of group 0-1",), "all_reduce #2 of group 0-1").words()
        'waits in all_reduce #3 of group 0-1 (train.py:9 step)'
        >>> Whereabouts("train.py:9 step", False, (), "all_reduce #2 of group 0-1").words()
        'waits in no collective (train.py:9 step); its last one is all_reduce #2 of group 0-1'
        """
        place = f" ({self.line})" if self.line else ""
        if self.begun is None:
            return f"is at {self.line or 'no line of the script'}; {_NOT_REPORTED}"
        if self.begun and self.in_torch:
            return f"waits in {self.begun[0]}{place}"
        if self.begun:
            return f"waits in no collective{place}; begun and not ended is {self.begun[0]}"
        return f"waits in no collective{place}; " + (f"its last one is {self.last}" if self.last else "it began none")


def waiting_words(folder: Path, ranks: int) -> list[str]:
    """Return a sentence for each rank of a run whose time was over."""
    return [f"rank {rank} {_words_of(waits_path(folder, rank))}" for rank in range(ranks)]


def waits_path(folder: Path, rank: int) -> Path:
    """Return where a rank writes its note."""
    return folder / f"rank{rank}.waits.json"


def all_reported(folder: Path, ranks: int) -> bool:
    """Return True once every rank has written its note."""
    return all(waits_path(folder, rank).exists() for rank in range(ranks))


def _words_of(path: Path) -> str:
    try:
        return from_json(Whereabouts, read_json(path)).words()
    except (OSError, ValueError):
        return "does not say where it is: it has ended, has not begun, or an extension holds the interpreter lock"


def begun_and_last(
    entries: Sequence[Mapping[str, Any]], groups: Mapping[str, tuple[Sequence[int], int]]
) -> tuple[tuple[str, ...], str]:
    """Return the collectives that have not ended, and the last one that has, of the flight recorder's entries.

    Args:
        entries: in order of calls.
        groups: global ranks and ordinal of each process group, by its name.
    """
    words = [(_word(entry, groups), bool(entry["retired"])) for entry in entries]
    ended = [word for word, is_over in words if is_over]
    return tuple(word for word, is_over in words if not is_over), ended[-1] if ended else ""


def _word(entry: Mapping[str, Any], groups: Mapping[str, tuple[Sequence[int], int]]) -> str:
    """Return ``all_reduce #3 of group 0-1``, or ``recv #2 in group 0-1``."""
    kind = str(entry["profiling_name"]).rpartition(":")[2]
    is_message = entry["is_p2p"]
    number = entry["p2p_seq_id" if is_message else "collective_seq_id"]
    ranks, ordinal = groups.get(str(entry["process_group"][0]), ((), 0))
    group = f" {'in' if is_message else 'of'} {group_word(ranks, ordinal)}" if ranks else ""
    return f"{kind} #{number}{group}"


# ------------------------------------------------------------------------------------------------- in the rank


@contextmanager
def telling_at_deadline(folder: Path) -> Iterator[None]:
    """Write the note of this rank when the time is over, if a launcher has set one."""
    deadline = os.environ.get(DEADLINE, "")
    if not deadline or threading.current_thread() is not threading.main_thread():
        yield
        return
    timer = threading.Timer(max(0.0, float(deadline) - monotonic()), _tell, (folder, threading.get_ident()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tell(folder: Path, main_thread: int) -> None:
    from hashbench.core.trace.groups import rank_of

    rank, _ = rank_of(os.environ) or (0, 1)
    with suppress(OSError):  # nobody waits for it any more
        replace_file(waits_path(folder, rank), json.dumps(to_json(whereabouts(main_thread))))


def whereabouts(thread: int) -> Whereabouts:
    """Return where a thread of this process is, and the collectives of the process."""
    from hashbench.core.trace.arguments import caller_line, in_torch

    frame = sys._current_frames().get(thread)
    line, waits = caller_line(frame), in_torch(frame)
    entries = flight_recorder()
    return Whereabouts(line, waits) if entries is None else Whereabouts(line, waits, *_named(entries))


def _named(entries: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], str]:
    from hashbench.core.trace.groups import RankGroups

    known = RankGroups()
    known.see()
    found = {name: known.of((name,)) for name in {str(entry["process_group"][0]) for entry in entries}}
    return begun_and_last(entries, {name: (group.ranks, group.ordinal) for name, group in found.items()})


def flight_recorder() -> list[dict[str, Any]] | None:
    """Return what torch's flight recorder holds of this process, in order of calls; ``None`` where this torch, or its
    backend, keeps nothing."""
    try:
        from torch._C import _distributed_c10d

        entries = json.loads(_distributed_c10d._dump_fr_trace_json())["entries"]
    except (AttributeError, ImportError, KeyError, RuntimeError, ValueError):
        return None
    named = {"retired", "profiling_name", "is_p2p", "p2p_seq_id", "collective_seq_id", "process_group"}
    whole = [entry for entry in entries if named <= entry.keys()]
    return sorted(whole, key=lambda entry: entry.get("record_id", 0)) or None
