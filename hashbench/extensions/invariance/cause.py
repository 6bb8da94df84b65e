"""Decide why an item's result changes with its batch: the cause, and the remedies that were measured to work.

Pure: imports no torch. Rows of one item are compared among other items, so counts are of deterministic comparisons, not
of chances: a call whose rows differ in equal batches is sorted out before all else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hashbench.core.catalog import CAUSES, EXPERIMENTS, Confidence
from hashbench.core.diagnose.causes.evidence import count, in_words
from hashbench.core.records import Decision, ExperimentResult

ON = "items"


@dataclass(frozen=True, slots=True)
class MeasuredRemedy:
    """One measured change that may make the rows agree at every number of items.

    Attributes:
        words: what to do.
        differing: comparisons that still differ.
        trials: comparisons made.
        price: time over the time without it; ``None``: not measured.
        of: what is timed.
    """

    words: str
    trials: int
    differing: int
    price: float | None = None
    of: str = ""

    @property
    def works(self) -> bool:
        """Whether it was measured, without a difference."""
        return self.trials > 0 and not self.differing

    def said(self) -> str:
        """Format ``pad the batch to a multiple of 4 (2.1x the time of one item)``."""
        if self.price is None:
            return self.words
        return f"{self.words} ({self.price:.2g}x the time{f' of {self.of}' if self.of else ''})"


@dataclass(frozen=True, slots=True)
class ItemEvidence:
    """Results of the experiments on one call of ``items`` items.

    Attributes:
        items: items of the call.
        arms: experiments on ``items`` of :data:`~hashbench.core.catalog.EXPERIMENTS`; they count comparisons of the
            rows of items with those in the call on all items.
        sizes: numbers of items at which rows differ from these.
        smallest_batch: the smallest number at which an item's rows differ from those alone; ``None`` without one.
        skipped: whether numbers below it were left out.
        reduced: no output has rows of items.
        random: it draws random numbers.
        follows_seed: rows change with the seed.
        placed: rows follow from their place and the random numbers alone, whatever the items are.
        counted: rows depend on the number of items only by a plain number among the arguments that counts them.
        moved: the runs had the items at other places of the batch.
    """

    items: int
    arms: tuple[ExperimentResult, ...] = ()
    sizes: tuple[int, ...] = ()
    smallest_batch: int | None = None
    skipped: bool = False
    reduced: bool = False
    random: bool = False
    follows_seed: bool = False
    placed: bool = False
    counted: bool = False
    moved: bool = False
    remedies: tuple[MeasuredRemedy, ...] = ()

    def arm(self, name: str) -> ExperimentResult:
        """Return the experiment of that name; without trials if it was not made."""
        return next(
            (result for result in self.arms if result.name == name), ExperimentResult(name, ON, note="not tried")
        )

    @property
    def explained(self) -> bool:
        """Whether rows differ in any batch, or by themselves."""
        names = ("same_items", "other_content", "other_number", "other_places")
        return self.random or any(self.arm(name).differing for name in names)

    def removes(self, name: str) -> bool:
        """Return True if rows differ with the number of items, and not under this experiment."""
        arm = self.arm(name)
        differs = self.arm("other_number").differing or self.arm("as_in_runs").differing
        return differs > 0 and arm.ran and not arm.differing


CONTROLS = ("one_thread", "deterministic", "onednn_off", "sdpa_math")
"""Settings that may remove a dependence on the number of items: each is a remedy where it does."""


DRAW_APART = "Draw for each item from a torch.Generator of its own, or switch the drawing off (model.eval())."
"""What to do about random numbers that follow the batch."""

DRAW_IN_EVAL = (
    "Draw for each item from a torch.Generator of its own, or draw nothing in eval(): a functional dropout takes "
    "training=self.training, attention dropout_p=0."
)
"""The same for a model that is in eval() already."""


def decide(evidence: ItemEvidence) -> Decision:
    """Decide the cause by the experiments.

    Content before number: if other content at the same shape changes an item's rows, so does any other number.
    """
    same, content = evidence.arm("same_items"), evidence.arm("other_content")
    number, places = evidence.arm("other_number"), evidence.arm("other_places")
    if same.differing:
        because = f"{in_words(same)}: the call differs by itself, whatever the other items are"
        advice = (
            "Find out why it differs from itself first: hashbench sweep without --batch-invariant names that cause."
        )
        return Decision("unknown", Confidence.OPEN, because, advice)
    steady = same.trials >= 2
    if evidence.follows_seed and not content.differing:
        return _decide_draws(evidence)
    if content.differing:
        confidence = Confidence.PROVEN if steady else Confidence.LIKELY
        return _decision("batch_coupling", confidence, in_words(content, base=same), ())
    if evidence.counted:
        because = f"{in_words(number)}, and none where the argument that counts the items stays as it is"
        return _decision("batch_coupling", Confidence.PROVEN if steady else Confidence.LIKELY, because, ())
    alone = evidence.arm("as_in_runs")
    decided_alone = content.ran or evidence.removes("exact_values") or evidence.removes("same_strides")
    if number.differing or places.differing or (alone.differing and decided_alone):
        confidence = Confidence.PROVEN if steady and content.ran and not evidence.random else Confidence.LIKELY
        return _decision("shape_dependent_kernel", confidence, "; ".join(_shown(evidence)), evidence.remedies)
    because = in_words(number, places, alone, base=same) or "no experiment could be made"
    advice = "Look at the call in its model: alone, the kernel gives each item the same in any batch."
    return Decision("unknown", Confidence.OPEN, because, advice)


def _decide_draws(evidence: ItemEvidence) -> Decision:
    """Decide the cause for rows that follow from random numbers of one generator state."""
    same, number, places = (evidence.arm(name) for name in ("same_items", "other_number", "other_places"))
    other = places if evidence.moved else number
    if not other.differing:
        because = "; ".join(filter(None, (in_words(other, base=same), "it draws random numbers")))
        return Decision("unknown", Confidence.OPEN, because, DRAW_APART)
    where = "at another place" if evidence.moved else "among another number of items"
    because = f"{in_words(other, base=same)}: from one state of the generator an item gets other numbers {where}"
    confidence = Confidence.PROVEN if same.trials >= 2 and evidence.placed else Confidence.LIKELY
    return Decision("batch_coupling", confidence, because, DRAW_APART)


def _decision(cause: str, confidence: Confidence, because: str, remedies: Iterable[MeasuredRemedy]) -> Decision:
    working = sorted((remedy for remedy in remedies if remedy.works), key=lambda remedy: remedy.price or 0.0)
    return Decision(cause, confidence, because, advice_for(cause, " or ".join(remedy.said() for remedy in working)))


def advice_for(cause: str, named: str = "") -> str:
    """Return the advice for a cause, with the remedies that work."""
    known = CAUSES[cause]
    return known.advice.format(named=named or known.unnamed) + "."


def _shown(evidence: ItemEvidence) -> Iterator[str]:
    """Yield what was seen, and what each experiment shows of the mechanism."""
    alone, strides = evidence.arm("as_in_runs"), evidence.arm("same_strides")
    if alone.differing:
        yield in_words(alone)
        if strides.ran:
            meaning = ": it chooses by the order in memory" if not strides.differing else ""
            yield f"{count(strides)} {EXPERIMENTS['same_strides'].phrase}{meaning}"
    yield in_words(evidence.arm("other_number")) or in_words(evidence.arm("same_items"))
    content, places = evidence.arm("other_content"), evidence.arm("other_places")
    if content.ran:
        yield f"{count(content)} {EXPERIMENTS['other_content'].phrase}"
    if evidence.smallest_batch is not None:
        yield f"from {evidence.smallest_batch} items on"
    if places.ran:
        meaning = ": where an item lies in the batch decides too" if places.differing else ""
        yield f"{count(places)} {EXPERIMENTS['other_places'].phrase}{meaning}"
    exact = evidence.arm("exact_values")
    if exact.ran:
        meaning = ": it is the order of addition" if evidence.removes("exact_values") else ""
        yield f"{count(exact)} {EXPERIMENTS['exact_values'].phrase}{meaning}"
    for name in CONTROLS:
        if evidence.arm(name).ran:
            yield f"{count(evidence.arm(name))} {EXPERIMENTS[name].phrase}"
