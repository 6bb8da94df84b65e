"""Read the traces of a run's ranks, ``rank0.log.gz`` and so on in one folder, and those of two runs at once.

A file that cannot be read leaves its rank without a trace, which is said; ranks of two runs in one folder are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hashbench.core.errors import HashbenchError
from hashbench.core.io import read_file
from hashbench.core.processes import uncollected
from hashbench.core.records import Trace, TracedRank
from hashbench.core.text import format_ranks, one_line
from hashbench.core.trace import file
from hashbench.core.trace.file import ParsedRecords, refuse_different
from hashbench.core.trace.step_file import run_of, without_run

_NAME = re.compile(r"rank(0|[1-9][0-9]{0,6})\.log(\.gz)?")

_TIP = "Record a run into a new folder: torchrun … -m hashbench ranks record --output FOLDER -- train.py"


@dataclass(frozen=True, slots=True)
class RankFolder:
    """The traces of one run of a distributed program.

    Attributes:
        path: of the folder.
        traces: by global rank.
        world_size: number of ranks of the run.
        missing: ranks of the run without a readable trace.
        notes: sentences on files that are cut or cannot be read, and on missing ranks.
    """

    path: Path
    traces: Mapping[int, Trace]
    world_size: int
    missing: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def read_ranks(folder: Path) -> RankFolder:
    """Read the traces of one run.

    Raises:
        HashbenchError: there is no such folder, no readable trace of a rank in it, or it holds ranks of two runs.
    """
    files = _files(folder)
    with uncollected():
        return _folder(folder, files, {rank: _read(path, ParsedRecords()) for rank, path in files.items()})


def read_both(first: Path, second: Path) -> tuple[RankFolder, RankFolder]:
    """Read the traces of two runs. A rank whose files are equal has one trace, the same object in both; of other ranks
    the records of equal lines are the same objects.

    Raises:
        HashbenchError: as for :func:`read_ranks`, or the runs have other world sizes or tracers.
    """
    files = _files(first), _files(second)
    found: tuple[dict[int, Trace | str], dict[int, Trace | str]] = ({}, {})
    with uncollected():
        for rank in sorted({*files[0], *files[1]}):
            parsed = ParsedRecords()
            here = [(side, file[rank]) for side, file in zip(found, files, strict=True) if rank in file]
            for side, path in here:
                same = side is not here[0][0] and _same_bytes(path, here[0][1])
                side[rank] = found[0][rank] if same else _read(path, parsed)
    runs = _folder(first, files[0], found[0]), _folder(second, files[1], found[1])
    _refuse_incomparable(*runs)
    return runs


def _files(folder: Path) -> dict[int, Path]:
    """Return the files that are named as traces of ranks, by rank."""
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise HashbenchError(
            f"cannot read the folder {folder}", consequence=error.strerror or str(error), tip=_TIP
        ) from error
    found: dict[int, Path] = {}
    for path in paths:
        if name := _NAME.fullmatch(path.name):
            rank = int(name[1])
            if rank in found:
                _refuse(folder, f"it has two traces of rank {rank}, {found[rank].name} and {path.name}")
            found[rank] = path
    if not found:
        raise HashbenchError(
            f"no traces of ranks in {folder}", consequence="it has no file like rank0.log.gz", tip=_TIP
        )
    return dict(sorted(found.items()))


def _read(path: Path, parsed: ParsedRecords) -> Trace | str:
    """Return the trace in a file, or why it cannot be read."""
    try:
        return file.read(path, cut=True, parsed=parsed)
    except HashbenchError as error:
        return error.consequence.removesuffix(", so nothing was compared")


def _same_bytes(first: Path, second: Path) -> bool:
    try:
        same_size = first.stat().st_size == second.stat().st_size
        return same_size and without_run(read_file(first)) == without_run(read_file(second))
    except OSError:
        return False


def _folder(path: Path, files: Mapping[int, Path], found: Mapping[int, Trace | str]) -> RankFolder:
    """Check what was read of a folder: one run's ranks, each in the file of its number."""
    traces = {rank: trace for rank, trace in found.items() if isinstance(trace, Trace)}
    unreadable = {rank: why for rank, why in found.items() if isinstance(why, str)}
    if not traces:
        rank, why = next(iter(unreadable.items()))
        raise HashbenchError(f"no readable trace of a rank in {path}", consequence=f"rank {rank}: {why}", tip=_TIP)
    known = {rank: _rank_of(path, rank, trace) for rank, trace in traces.items()}
    first, place = next(iter(known.items()))
    launched = {rank: run_of(files[rank]) for rank in known}
    for rank, other in known.items():
        if launched[rank] != launched[first] and launched[rank] and launched[first]:
            _refuse(path, f"it holds ranks of two runs: ranks {first} and {rank} were not launched together")
        if other.world_size != place.world_size:
            sizes = f"rank {first} is one of {place.world_size}, rank {rank} one of {other.world_size}"
            _refuse(path, f"it holds ranks of two runs: {sizes}")
        for name, what in (("tracer", "tracer"), ("hashed_inputs", "kind of trace")):
            if getattr(traces[rank], name) != getattr(traces[first], name):
                _refuse(path, f"it holds ranks of two runs: ranks {first} and {rank} have another {what}")
    if beyond := [rank for rank in found if rank >= place.world_size]:
        _refuse(path, f"it holds ranks of two runs: there is a rank {beyond[0]}, and the run has {place.world_size}")
    missing = tuple(rank for rank in range(place.world_size) if rank not in traces)
    return RankFolder(path, traces, place.world_size, missing, tuple(_notes(path, known, unreadable, missing)))


def _rank_of(path: Path, rank: int, trace: Trace) -> TracedRank:
    if trace.rank is None:
        _refuse(path, f"the trace in the file of rank {rank} is that of a program of one process")
    if trace.rank.rank != rank:
        _refuse(path, f"the file of rank {rank} holds the trace of rank {trace.rank.rank}")
    return trace.rank


def _notes(
    path: Path, known: Mapping[int, TracedRank], unreadable: Mapping[int, str], missing: Iterable[int]
) -> Iterable[str]:
    for rank, why in unreadable.items():
        yield f"{path}: the trace of rank {rank} cannot be read: {one_line(why)}"
    if absent := [rank for rank in missing if rank not in unreadable]:
        yield f"{path}: no trace of {format_ranks(absent)}"
    for rank, place in known.items():
        if place.ended == file.CUT:
            yield f"{path}: the trace of rank {rank} is cut; its whole steps were read"
        elif place.ended:
            yield f"{path}: rank {rank} did not end by itself: {one_line(place.ended)}"


def _refuse_incomparable(first: RankFolder, second: RankFolder) -> None:
    if first.world_size != second.world_size:
        raise HashbenchError(
            f"the runs have {first.world_size} and {second.world_size} ranks",
            consequence="a rank of one does other work in the other, so nothing was compared",
            tip="Record both runs with the same number of ranks.",
        )
    tracer, other = (next(iter(run.traces.values())).tracer for run in (first, second))
    refuse_different(tracer, other, names=(str(first.path), str(second.path)))


def _refuse(path: Path, why: str) -> NoReturn:
    raise HashbenchError(f"cannot use the traces in {path}", consequence=f"{why}, so nothing was compared", tip=_TIP)
