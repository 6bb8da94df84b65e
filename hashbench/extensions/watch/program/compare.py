"""Compare two runs of a program: how they ended, the digests of their steps, their traces, prints and files. Pure but
for reading."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from hashbench.core.divergence import find
from hashbench.core.divergence.text import PairVerdict
from hashbench.core.errors import HashbenchError
from hashbench.core.io import read_file
from hashbench.core.processes import uncollected
from hashbench.core.records import Divergence, Trace
from hashbench.core.trace import file as trace_file
from hashbench.core.trace.step_file import rank_path
from hashbench.extensions.watch.program.launch import ProgramRun
from hashbench.extensions.watch.program.task import STDOUT
from hashbench.extensions.watch.traced import LoopVerdict, compare_folders

MOST_PRINTED = 1 << 26
"""Bytes of printed output that are compared."""


@dataclass(frozen=True, slots=True)
class LineDifference:
    """A line of a text that differs.

    Attributes:
        number: of the line, from 1.
        first, second: the lines; ``None``: the text has ended.
        at: number of bytes before it in the first text.
    """

    number: int
    first: str | None
    second: str | None
    at: int


@dataclass(frozen=True, slots=True)
class TextDifference:
    """A text that two runs wrote differently.

    Attributes:
        name: of the file; empty: printed output.
        lines: the first lines that differ; none: the content is not text, or one run has no such file.
        total: number of lines that differ.
        words: what differs where there are no lines.
    """

    name: str
    lines: tuple[LineDifference, ...] = ()
    total: int = 0
    words: str = ""


@dataclass(frozen=True, slots=True)
class RunsVerdict:
    """Two runs, compared.

    Attributes:
        first, second: the runs.
        loop: on the digests of their steps; ``None``: a run has none.
        traced: on their traces; ``None``: a run has none.
        texts: printed output and files that differ.
        gaps: what could not be compared, each a sentence.
    """

    first: ProgramRun
    second: ProgramRun
    loop: LoopVerdict | None
    traced: PairVerdict | None
    texts: tuple[TextDifference, ...]
    gaps: tuple[str, ...] = ()

    @property
    def ends_differ(self) -> bool:
        """Whether one run ended differently than the other."""
        return kind_of_end(self.first) != kind_of_end(self.second)

    @property
    def divergence(self) -> Divergence | None:
        """The kernel, or the like, that the traces name."""
        return None if self.traced is None else self.traced.divergence

    @property
    def differs(self) -> bool:
        """Whether anything differs that reaches a result."""
        return bool(self.ends_differ or self.texts or self.differs_inside)

    @property
    def differs_inside(self) -> bool:
        """Whether tensors differ that reach a result."""
        return self.divergence is not None or self.lengths_differ or self.step_differs

    @property
    def step_differs(self) -> bool:
        """Whether the digests of a step differ."""
        return self.loop is not None and self.loop.first is not None

    @property
    def lengths_differ(self) -> bool:
        """Whether one run has more steps, although both came to an end."""
        ends = self.first.end, self.second.end
        return None not in ends and len({end.steps for end in ends if end is not None}) > 1

    @property
    def kernels(self) -> int:
        """Number of kernels that were compared."""
        return 0 if self.traced is None else len(self.traced.first.records)


def kind_of_end(run: ProgramRun) -> str:
    """Return how a run ended without what an exception says."""
    return run.ended().partition(":")[0]


def compare_runs(first: ProgramRun, second: ProgramRun, *, most: int) -> RunsVerdict:
    """Compare two runs; of traces that reached their maximum, the first ``most`` records."""
    gaps = [f"No run wrote {name}: it was not compared." for name in _unwritten(first, second)]
    return RunsVerdict(
        first,
        second,
        _loop(first, second, gaps),
        _traced(first, second, gaps, most=most),
        tuple(texts_of(first, second)),
        tuple(gaps),
    )


def _loop(first: ProgramRun, second: ProgramRun, gaps: list[str]) -> LoopVerdict | None:
    runs = first, second
    if any(run.end is not None and not run.end.steps for run in runs) or not all(_is_watched(run) for run in runs):
        return None
    try:
        return compare_folders(first.folder, second.folder)
    except HashbenchError as error:
        why = error.consequence.removesuffix("; nothing was compared") or error.what
        gaps.append(f"Digests of steps were not compared: {why}.")
        return None


def _is_watched(run: ProgramRun) -> bool:
    return (run.folder / "rank0.jsonl").exists()


def _traced(first: ProgramRun, second: ProgramRun, gaps: list[str], *, most: int) -> PairVerdict | None:
    paths = [rank_path(run.folder, 0) for run in (first, second)]
    if not all(path.exists() for path in paths):
        return None
    try:
        with uncollected():
            traces = [trace_file.read(path, cut=True) for path in paths]
            if any(run.end is not None and run.end.bounded for run in (first, second)):
                traces = _bounded(traces, most)
            if not any(trace.records for trace in traces):
                return None  # no kernel ran
            return find(*traces)
    except HashbenchError as error:
        gaps.append(f"Traces were not compared: {error.what}.")
        return None


def _bounded(traces: Sequence[Trace], most: int) -> list[Trace]:
    """Return the first records of both traces: they ended by the clock."""
    length = min(most, *(len(trace.records) for trace in traces))
    shared = set.intersection(*({result.name for result in trace.results} for trace in traces))
    return [
        replace(
            trace,
            records=trace.records[:length],
            results=tuple(result for result in trace.results if result.name in shared),
        )
        for trace in traces
    ]


def first_divergence(verdict: PairVerdict) -> Divergence | None:
    """Return the first record that differs, whether or not it reaches a result that is recorded.

    A value that enters in the forward pass may reach a parameter by the backward of its op alone: a loss is no recorded
    result. Where that forward op differs as well, the first record that differs is named, if it is of the same line.
    """
    named = verdict.divergence
    if named is not None and named.forward_op not in verdict.benign:
        return named
    if named is None and not (verdict.benign or verdict.leaves):
        return None
    try:
        first = find(replace(verdict.first, results=()), replace(verdict.second, results=())).divergence
    except HashbenchError:
        return named
    return first if named is None or (first is not None and first.source == named.source) else named


# ------------------------------------------------------------------------------------------------------- texts


_ADDRESS = re.compile(rb"(?<= at )0x[0-9a-f]+(?=>)")
"""An address, as Python writes it of an object without words of its own: ``<Net object at 0x7f3a80>``."""


def texts_of(first: ProgramRun, second: ProgramRun) -> Iterator[TextDifference]:
    """Yield printed output and files that differ."""
    for (name, old), (_, new) in zip(_texts(first), _texts(second), strict=True):
        if old != new:
            yield _text(name, old, new)


def _texts(run: ProgramRun) -> Iterator[tuple[str, bytes | None]]:
    yield "", read_file(run.folder / STDOUT, most=MOST_PRINTED)
    yield from run.files


def _unwritten(first: ProgramRun, second: ProgramRun) -> Iterator[str]:
    """Yield the names of files that neither run has written."""
    for (name, old), (_, new) in zip(first.files, second.files, strict=True):
        if old is None and new is None:
            yield name


def differ_beside_addresses(first: ProgramRun, second: ProgramRun) -> frozenset[str]:
    """Return the names of texts that differ in more than addresses of objects."""
    return frozenset(
        name
        for (name, old), (_, new) in zip(_texts(first), _texts(second), strict=True)
        if without_addresses(old) != without_addresses(new)
    )


def without_addresses(text: bytes | None) -> bytes | None:
    """Return a text without the addresses of objects in it."""
    return None if text is None else _ADDRESS.sub(b"", text)


_SHOWN = 8


def _text(name: str, old: bytes | None, new: bytes | None) -> TextDifference:
    if old is None or new is None:
        return TextDifference(name, words=f"only the {'second' if old is None else 'first'} run wrote it")
    if b"\0" in old or b"\0" in new:
        at = next(
            (place for place, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new))
        )
        return TextDifference(name, words=f"byte {at} is the first that differs ({len(old)} and {len(new)} bytes)")
    found: list[LineDifference] = []
    total = at = 0
    for number, (a, b) in enumerate(zip_longest(old.split(b"\n"), new.split(b"\n")), 1):
        if a != b:
            total += 1
            if len(found) < _SHOWN:
                found.append(LineDifference(number, _line(a), _line(b), at))
        at += len(a or b"") + 1
    return TextDifference(name, tuple(found), total)


def _line(content: bytes | None) -> str | None:
    return None if content is None else content.decode(errors="replace").rpartition("\r")[2]


def lines_of(folder: Path) -> int:
    """Return the number of lines that a run printed."""
    content = read_file(folder / STDOUT, most=MOST_PRINTED)
    return content.count(b"\n") + (not content.endswith(b"\n") and bool(content))
