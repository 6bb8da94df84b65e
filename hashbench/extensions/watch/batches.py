"""How the batches of two runs differ: in number, in shape, in the order of their samples, or in the samples. Pure.

Samples are compared as sets over steps. Doubt remains: that the first dimension counts samples is only usual; a sample
that is padded to its batch's length is another one in another batch; and of a large data set two short runs may read
samples that have nothing in common, though only their order differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hashbench.extensions.watch.file import Step, share_kept

SHOWN = 3


class SampleMatch(StrEnum):
    """How the samples of one run's step are related to those of the other run."""

    SAME = "same"
    """The step has the same samples in both runs."""
    MOVED = "moved"
    """They come in other steps of the other run."""
    OTHER = "other"
    """None of them comes in the other run."""
    UNKNOWN = "unknown"
    """Their digests are in no recording, or they are padded to different lengths."""


@dataclass(frozen=True, slots=True)
class BatchDifference:
    """How the batches of a step differ.

    Attributes:
        first, second: shapes of the step's batches in each run, as ``2x4``; empty where none is known.
        samples: how their samples are related.
    """

    first: tuple[str, ...]
    second: tuple[str, ...]
    samples: SampleMatch

    @property
    def in_number(self) -> bool:
        """True if one run had more batches in the step."""
        return len(self.first) != len(self.second)

    @property
    def in_shape(self) -> bool:
        """True if the batches have other shapes, or one run had more of them."""
        return self.first != self.second

    @property
    def one_more(self) -> bool:
        """True if one run went on with batches of the same shapes."""
        shared = min(len(self.first), len(self.second))
        return self.in_number and self.first[:shared] == self.second[:shared] and self.samples is not SampleMatch.SAME

    def words(self) -> tuple[str, str]:
        """Return the batches of each run, as ``2 batches a step (4x6, 4x6)``."""
        return _words(self.first), _words(self.second)


def _words(shapes: Sequence[str]) -> str:
    number = f"{len(shapes)} batch{'' if len(shapes) == 1 else 'es'} a step"
    known = [shape for shape in shapes if shape]
    more = ", …" if len(known) > SHOWN else ""
    return f"{number} ({', '.join(known[:SHOWN])}{more})" if known else number


def difference_of(number: int, first: Mapping[int, Step], second: Mapping[int, Step]) -> BatchDifference | None:
    """Return how the batches of step ``number`` differ, by all steps of each run; ``None`` where no shape is
    recorded."""
    old, new = first[number], second[number]
    if not (old.batches and new.batches):
        return None
    shapes = [tuple("x".join(map(str, batch.shape)) for batch in step.batches) for step in (old, new)]
    return BatchDifference(shapes[0], shapes[1], _related(number, first, second))


def _related(number: int, first: Mapping[int, Step], second: Mapping[int, Step]) -> SampleMatch:
    everything = [batch for run in (first, second) for step in run.values() for batch in step.batches]
    share = max(share_kept(samples.shape[0]) if samples.shape else 1 for samples in everything)
    here = [Counter(_samples([run[number]], share)) for run in (first, second)]
    if not (here[0] and here[1]):
        return SampleMatch.UNKNOWN
    if here[0] == here[1]:
        return SampleMatch.SAME
    both = first.keys() & second.keys()
    equal = {at for at in both if first[at].parts.get("batch") == second[at].parts.get("batch")}
    past = {*_samples((first[at] for at in equal), share)}
    later, own = (
        [
            {*_samples((run[at] for at in run if (at in both) == shared and at not in equal), share)}
            for run in (first, second)
        ]
        for shared in (True, False)
    )
    own = [each - past for each in own]
    if later[0] & (later[1] | own[1]) or later[1] & own[0]:
        return SampleMatch.MOVED
    again = [bool(past & divergence) for divergence in later]  # samples of an epoch that was equal
    if any(again):
        return SampleMatch.MOVED if all(again) else SampleMatch.UNKNOWN  # one run began anew, or transforms them
    return SampleMatch.OTHER if len({samples.shape[1:] for samples in everything}) == 1 else SampleMatch.UNKNOWN


def _samples(steps: Iterable[Step], share: int) -> list[int]:
    return [sample for step in steps for batch in step.batches for sample in batch.samples if sample % share == 0]
