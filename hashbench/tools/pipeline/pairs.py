"""Two records of a pipeline side by side: the samples that both have, and the code that both ran. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, zip_longest
from operator import attrgetter
from typing import TypeVar

from hashbench.core.divergence import find
from hashbench.core.records import Divergence, Verdict
from hashbench.tools.pipeline.observed import (
    MOMENTS,
    SPANS,
    BatchRecord,
    Digests,
    Observed,
    Sample,
    TransformStep,
    moved,
)

_Value = TypeVar("_Value")
States = tuple[Digests, Digests]
"""The states of generators in the first check and in the second."""


@dataclass(frozen=True, slots=True)
class Span:
    """Code that ran in both checks, and the states of the generators around it.

    Attributes:
        code: one of :data:`~hashbench.tools.pipeline.observed.SPANS`, or what made a sample or a batch.
        before, after: the states in each check; those that were not recorded are left out.
        drew: generators that it drew from, in either check.
        where: for which sample, or in which batch.
    """

    code: str
    before: States
    after: States
    drew: tuple[str, ...] = ()
    where: str = ""

    def __str__(self) -> str:
        return f"{self.code}, {self.where}," if self.where else self.code

    @property
    def drawn(self) -> tuple[str, ...]:
        """The generators that it drew from and that it found in different states."""
        return tuple(name for name in moved(*self.before) if name in self.drew)

    @property
    def seeded(self) -> tuple[str, ...]:
        """Those of :attr:`drawn` that it left in equal states: draws before the seeding look the same as none."""
        first, second = self.after
        return tuple(name for name in self.drawn if name in first and first[name] == second.get(name))

    @property
    def diverged(self) -> tuple[str, ...]:
        """The generators that it found in equal states and left in different ones."""
        first, second = self.before
        return tuple(name for name in moved(*self.after) if name in first and first[name] == second.get(name))


@dataclass(frozen=True, slots=True)
class SamplePair:
    """The same sample in two checks, and its batch in each."""

    name: str
    first: Sample
    second: Sample
    batch: BatchRecord
    other_batch: BatchRecord

    def __str__(self) -> str:
        worker = "" if self.batch.worker is None else f", worker {self.batch.worker}"
        return f"{self.name} (batch {self.batch.number}{worker})"

    def differs(self, *, before: bool) -> bool:
        """Return True if the input of the first transform differs (``before``), else if the collated sample does."""
        if before:
            return self.first.content != self.second.content
        return self.first.after != self.second.after

    def is_moved(self) -> bool:
        """Return True if the dataset was asked for the same file by another index."""
        elsewhere = bool(self.first.files) and self.first.index != self.second.index
        return elsewhere and not self.differs(before=True) and self.differing_steps() == (None, None)

    def differing_steps(self) -> tuple[TransformStep | None, TransformStep | None]:
        """Return the first pair of transforms that differ by name or output; ``None`` in place of a missing one."""
        steps = zip_longest(self.first.steps or (), self.second.steps or ())
        form = attrgetter("transform", "after")
        return next((pair for pair in steps if None in pair or form(pair[0]) != form(pair[1])), (None, None))

    def drew(self) -> tuple[str, ...]:
        """Return the generators drawn from in the first transform that differs, else outside the transforms."""
        drew = [step.drew for step in self.differing_steps() if step is not None]
        return united(*(drew or [self.first.drew_outside, self.second.drew_outside]))

    def span(self, *, before: bool) -> Span:
        """Return the code that made the sample differ: its first transform that does, else the dataset."""
        step = None if before else self.differing_steps()[0]
        return Span(
            "the dataset" if step is None else step.transform,
            (self.first.generators or {}, self.second.generators or {}),
            (_after_sample(self.batch, self.first), _after_sample(self.other_batch, self.second)),
            self.first.drew_outside if before else self.drew(),
            f"for {self.name}",
        )


def _after_sample(batch: BatchRecord, sample: Sample) -> Digests:
    """Return the states of the generators behind a sample: before the next one, or before the batch was collated."""
    samples = batch.samples or ()
    later = [following for item, following in pairwise(samples) if item is sample]
    return (later[0] if later else batch).generators or {}


@dataclass(frozen=True)
class CheckPair:
    """Two records side by side, and what is derived from both."""

    first: Observed
    second: Observed

    def of(self, get: Callable[[Observed], _Value]) -> tuple[_Value, _Value]:
        """Return ``get`` of each."""
        return get(self.first), get(self.second)

    @cached_property
    def samples(self) -> tuple[SamplePair, ...] | None:
        """Each sample that both recorded, in the order of the first, matched by its files, else by its index; ``None``
        where samples cannot be identified."""
        by_file = all(self.of(lambda seen: bool(seen.batches.samples) and all(s.files for s in seen.batches.samples)))
        named, twins = self.of(lambda seen: _by_name(seen, by_file=by_file))
        if not twins:
            return None
        return tuple(
            SamplePair(name, sample, twins[name][0], batch, twins[name][1])
            for name, (sample, batch) in named.items()
            if name in twins
        )

    @cached_property
    def verdict(self) -> Verdict | None:
        """The comparison of the traces; ``None`` where there are no two of the same tracer, or one is empty."""
        first, second = self.of(lambda seen: seen.trace)
        if first is None or second is None or first.tracer != second.tracer:
            return None
        is_empty = any(not trace.records and not trace.results for trace in (first, second))
        return None if is_empty else find(first, second)

    @property
    def divergence(self) -> Divergence | None:
        """The first divergence of the traces."""
        return None if self.verdict is None else self.verdict.divergence

    def states(self, moment: str) -> States:
        """Return the states of the global generators at one of :data:`~hashbench.tools.pipeline.observed.MOMENTS`."""
        return self.of(lambda seen: seen.random_state.moments.get(moment, {}))

    def between(self, begin: str, end: str, code: str = "") -> Span:
        """Return the code between two moments."""
        before, after = self.states(begin), self.states(end)
        return Span(code, before, after, united(*map(moved, before, after)))

    def spans(self, *codes: str) -> Iterator[Span]:
        """Yield these of :data:`~hashbench.tools.pipeline.observed.SPANS`."""
        return (self.between(*SPANS[code], code) for code in codes)

    def batch_spans(self, code: str, last: int | None = None) -> Iterator[Span]:
        """Yield the making of each batch by ``code``; with ``last`` up to that number, by the process that made it."""
        pairs = list(zip(*self.of(lambda seen: seen.batches.batches), strict=False))
        if last is not None and pairs:
            worker = pairs[min(last, len(pairs) - 1)][0].worker
            pairs = [pair for pair in pairs[: last + 1] if pair[0].worker == worker]
        for a, b in pairs:
            before = a.generators or {}, b.generators or {}
            after = _after_batch(self.first, a), _after_batch(self.second, b)
            yield Span(code, before, after, united(a.drew, b.drew), f"in batch {a.number}")


def _by_name(seen: Observed, *, by_file: bool) -> dict[str, tuple[Sample, BatchRecord]]:
    """Map a unique name to each sample and its batch; a sample that was drawn twice has a count in its name."""
    named: dict[str, tuple[Sample, BatchRecord]] = {}
    counts: Counter[str] = Counter()
    for batch in seen.batches.batches:
        for sample in batch.samples or ():
            if by_file or sample.index is not None:
                name = " ".join(sample.files or ()) if by_file else f"sample {sample.index}"
                counts[name] += 1
                named[f"{name} ({counts[name]})" if counts[name] > 1 else name] = sample, batch
    return named


def _after_batch(seen: Observed, batch: BatchRecord) -> Mapping[str, str]:
    """Return the states of the generators behind a batch: before the next one of its process, else, of the first batch
    that the main process makes, at the moment behind it."""
    later = [item for item in seen.batches.batches[batch.number + 1 :] if item.worker == batch.worker]
    if later:
        return later[0].generators or {}
    is_first = batch.number == 0 and batch.worker is None
    return seen.random_state.moments.get(MOMENTS[-1], {}) if is_first else {}


def united(*names: tuple[str, ...]) -> tuple[str, ...]:
    """Return all names, each once, in order."""
    return tuple(dict.fromkeys(name for some in names for name in some))
