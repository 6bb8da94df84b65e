"""Two recordings' folders as one verdict: every rank, the traces of steps, and further runs. Pure but for reading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hashbench.core.divergence import find
from hashbench.core.divergence.text import PairVerdict
from hashbench.core.errors import HashbenchError
from hashbench.core.trace import file as trace_file
from hashbench.extensions.watch import file
from hashbench.extensions.watch.compare import TIMES, RankVerdict, compare, range_words
from hashbench.extensions.watch.file import Recording


@dataclass(frozen=True, slots=True)
class TracedSteps:
    """The traces of some steps of a rank, in two runs.

    Attributes:
        rank: of both.
        first, last: steps.
        verdict: on the pair; ``None`` where it could not be judged.
        problem: why not.
    """

    rank: int
    first: int
    last: int
    verdict: PairVerdict | None
    problem: str = ""

    @property
    def names_a_kernel(self) -> bool:
        """True if the traces show where the difference was made, and not only that it was there when they began."""
        divergence = None if self.verdict is None else self.verdict.divergence
        if self.verdict is None or divergence is None:
            return False
        return divergence.opaque_producer or divergence.node not in {leaf.id for leaf in self.verdict.first.leaves}


@dataclass(frozen=True, slots=True)
class FurtherRun:
    """Another run, compared with the first.

    Attributes:
        folder: of its recording.
        step: first step that differs on any rank; ``None``: none.
        differs: a step or a trace differs.
        equal: nothing differs, and all was compared.
    """

    folder: Path
    step: int | None
    differs: bool
    equal: bool


@dataclass(frozen=True, slots=True)
class LoopVerdict:
    """The verdict on two recordings of a training loop.

    Attributes:
        folders: of the two.
        ranks: one verdict for each rank of both.
        traced: the pairs of traces, in the order of ranks and steps.
        further: other runs.
        notes: ranks that only one of the runs has.
        recordings: of the first rank of both runs.
    """

    folders: tuple[Path, Path]
    ranks: tuple[RankVerdict, ...]
    traced: tuple[TracedSteps, ...] = ()
    further: tuple[FurtherRun, ...] = ()
    notes: tuple[str, ...] = ()
    recordings: tuple[Recording, ...] = ()

    @property
    def equal(self) -> bool:
        """True if all was compared, on all ranks and to the last step, and nothing differs, traces included."""
        traces_equal = all(traced.verdict is not None and traced.verdict.equal for traced in self.traced)
        return traces_equal and not self.notes and all(rank.equal for rank in self.ranks)

    @property
    def differs(self) -> bool:
        """True if a step or a trace differs. Neither this nor ``equal``: what was compared agrees, not all was."""
        return self.first is not None or any(
            traced.verdict is not None and not traced.verdict.equal for traced in self.traced
        )

    @property
    def first(self) -> RankVerdict | None:
        """The rank that differs first: in the earliest step, and in it in the earliest part; ``None``: none does."""
        differing = [rank for rank in self.ranks if rank.step is not None]
        return min(differing, key=_moment, default=None)

    @property
    def kernels(self) -> tuple[TracedSteps, ...]:
        """The pairs of traces that name a divergence, by rank."""
        return tuple(
            traced for traced in self.traced if traced.verdict is not None and traced.verdict.divergence is not None
        )


def _moment(rank: RankVerdict) -> tuple[int, int, int]:
    assert rank.step is not None
    return rank.step, TIMES[rank.differing[0].part], rank.rank


def compare_folders(first: Path, second: Path, *, further: Sequence[Path] = (), shift: int = 0) -> LoopVerdict:
    """Compare the recordings in two folders, rank by rank, and their traces; and further runs with the first.

    Raises:
        HashbenchError: nothing can be compared.
    """
    paths = [file.ranks(folder) for folder in (first, second)]
    both = sorted(paths[0].keys() & paths[1].keys())
    if not both:
        raise HashbenchError(f"{first} and {second} have no rank in common", consequence="nothing was compared")
    alone = [
        f"Only {folder} has a recording of rank {rank}."
        for folder, own, other in ((first, paths[0], paths[1]), (second, paths[1], paths[0]))
        for rank in sorted(own.keys() - other.keys())
    ]
    recordings = {rank: (file.read(paths[0][rank]), file.read(paths[1][rank])) for rank in both}
    alone += [note for pair in recordings.values() for recording in pair for note in _untraced(recording)]
    return LoopVerdict(
        (first, second),
        tuple(compare(*recordings[rank], shift=shift) for rank in both),
        tuple(_compare_traces(first, second)),
        tuple(_further(first, other) for other in further),
        tuple(alone),
        recordings[both[0]],
    )


def _untraced(recording: Recording) -> Iterator[str]:
    """Say that a run which was to trace steps did not."""
    folder, rank = recording.path.parent, recording.header.rank
    if recording.header.traced and not any(key[0] == rank for key in file.traces(folder)):
        steps = range_words(range(*recording.header.traced))
        yield f"{folder} has no trace of {steps}: it would begin with a call of the model in one of them."


def _compare_traces(first: Path, second: Path) -> list[TracedSteps]:
    found = [file.traces(folder) for folder in (first, second)]
    return [_judged(*key, found[0][key], found[1][key]) for key in found[0] if key in found[1]]


def _judged(rank: int, first: int, last: int, old: Path, new: Path) -> TracedSteps:
    try:
        return TracedSteps(rank, first, last, find(trace_file.read(old), trace_file.read(new)))
    except HashbenchError as error:
        return TracedSteps(rank, first, last, None, str(error))


def _further(first: Path, other: Path) -> FurtherRun:
    verdict = compare_folders(first, other)
    rank = verdict.first
    return FurtherRun(other, None if rank is None else rank.step, differs=verdict.differs, equal=verdict.equal)
