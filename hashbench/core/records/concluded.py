"""What follows from runs: divergences, verdicts, evidence and diagnoses. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Steering:
    """An earlier recorded scalar that differed and may have changed the control flow.

    Attributes:
        record: id of the record that returned it.
        first: value in the first run.
        second: value in the second run.
        kernel: where that difference entered.
    """

    record: str
    first: str
    second: str
    kernel: str = ""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first record of a pair of runs that differs *and reaches the results*.

    Attributes:
        origin: one of :class:`~hashbench.core.catalog.Origin`.
        node: id of the record or leaf; ``setting:<name>`` for settings.
        kernel: name of the op; for a leaf, the first op that read it.
        op_index: position among the records of the first run, from 0.
        phase: one of :data:`PHASES`.
        iteration: step, from 0.
        module: path of the module.
        forward_op: forward op of a backward op.
        detail: one sentence on the difference.
        first: what the first run had there, in words.
        second: what the second run had there, in words.
        source: source line.
        opaque_producer: the content was written by something that the trace does not record, or by an unjoined thread.
        steered_by: earlier scalar that may have changed the control flow.
        inside: name of the op that called the kernel; empty if the program did.
    """

    origin: str
    node: str
    kernel: str
    op_index: int | None
    phase: str
    iteration: int | None
    module: str
    forward_op: str
    detail: str
    first: str = ""
    second: str = ""
    source: str = ""
    opaque_producer: bool = False
    steered_by: Steering | None = None
    inside: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Verdict:
    """The comparison of a pair of runs.

    Attributes:
        differing: names of results that differ.
        divergence: where the difference entered; ``None`` if no result differs, and none may untraced
            (:class:`EarlyRead`).
        benign: ids of records that differ without reaching a result.
        unseen: sentences on what the traces did not see; empty if complete.
    """

    differing: tuple[str, ...]
    divergence: Divergence | None
    benign: tuple[str, ...]
    unseen: str = ""

    def __repr__(self) -> str:
        """Return origin and extent of the difference on one line."""
        found, where = self.divergence, "no divergence"
        if found is not None:
            inside = f" inside {found.inside}" if found.inside else ""
            module = f" in {found.module}" if found.module else ""
            where = f"{found.origin} at {found.kernel or found.node}{inside}{module}"
        unseen = "; not all was seen" if self.unseen else ""
        return f"<Verdict: {where}; results that differ: {len(self.differing)}{unseen}>"


NO_TIME = "budget"
"""Note of an experiment that was not started or not completed for lack of time."""


OTHER_WEIGHTS = "its model has other weights"
"""Note of an experiment whose fresh processes built a model, or inputs, of different content than the runs had."""


@dataclass(frozen=True, slots=True)
class ExperimentResult:
    """One controlled experiment: what was changed, and how often the outcome still differed.

    Attributes:
        name: as in :class:`~hashbench.core.catalog.Experiment`.
        on: what was repeated, as in :class:`~hashbench.core.catalog.Experiment`.
        trials: number of comparisons with the first outcome; 0 if it could not be run.
        differing: number of those that differed.
        distinct: number of distinct outcomes, the first included.
        seconds: median time of one repetition.
        found: what the experiment singled out (a generator, a clock, the shifts that differ).
        note: why it could not be run.
        raised: the op raised.
        moves: shifts that differ: a memory (``None``: all together) and the bytes.
    """

    name: str
    on: str
    trials: int = 0
    differing: int = 0
    distinct: int = 0
    seconds: float | None = None
    found: str = ""
    note: str = ""
    raised: bool = False
    moves: tuple[tuple[int | None, int], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.differing <= self.trials:
            raise ValueError(f"{self.differing} of {self.trials} is not a count of outcomes that differ")
        if not self.trials and not self.note:
            object.__setattr__(self, "note", "nothing to compare")

    @property
    def place(self) -> str:
        """What was repeated and what was changed, as one word: ``call/one_thread``."""
        return f"{self.on}/{self.name}"

    @property
    def lacked_time(self) -> bool:
        """Whether it was not run for lack of time."""
        return not self.ran and self.is_cut_short

    @property
    def is_cut_short(self) -> bool:
        """Whether time was up before it started or completed."""
        return self.note == NO_TIME

    @property
    def ran(self) -> bool:
        """Whether it has any trials."""
        return self.trials > 0

    def word(self) -> str:
        """Format for a table: ``call/one_thread 0/20``, ``pair/clocks not run (budget)``."""
        outcome = f"{self.differing}/{self.trials}" if self.ran else f"not run ({self.note})"
        return f"{self.place} {outcome}" + (f" [{self.found}]" if self.found else "")


@dataclass(frozen=True, slots=True)
class CallFacts:
    """Facts about the captured call beside the results of experiments.

    Attributes:
        op: name of the op.
        custom: torch does not define the op.
        allocation: the op returns memory without writing it.
        overlap: the op writes memory that it also reads through another view.
        same_values: differing outcomes hold the same values in different places; ``None``: none differed.
        chosen_values: differing outcomes hold values of one of the inputs; ``None``: none differed.
        tied_places: differing outcomes are indices of equal elements of an input; ``None``: none differed.
        matches_record: the replay gave what the trace of one of the runs recorded.
        representation: ``sign of zero``, ``NaN payload`` if outcomes differ in nothing else.
        limits: why the call could not be captured, or not completely.
    """

    op: str
    custom: bool = False
    allocation: bool = False
    overlap: bool = False
    same_values: bool | None = None
    chosen_values: bool | None = None
    tied_places: bool | None = None
    matches_record: bool | None = None
    representation: str = ""
    limits: str = ""


UNREDUCED, SEEDED, COMPUTED = "unreduced", "seed", "op"


REPLICAS_BY: Mapping[str, str] = MappingProxyType(
    {
        UNREDUCED: "the gradient was never reduced over these ranks",
        SEEDED: "RNG state differs between ranks",
        COMPUTED: "an op returns different outputs, or only some ranks run it",
    }
)
"""Why replicas differ between the ranks of one run."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything from which a cause is decided.

    Attributes:
        origin: of the divergence.
        opaque_producer: of the divergence.
        steered: the divergence has an earlier differing scalar.
        reordered: both runs have the same ops, in another order or with other inputs.
        representation: ``sign of zero``, ``NaN payload`` if results differ in nothing else.
        first_pair: runs of the sweep that differed from the first: ``(differing, compared)``.
        untraced: result of the untraced pair.
        call: facts about the captured call.
        arms: results of all experiments.
        replicas: why replicas of one run differ between its ranks, a word of :data:`REPLICAS_BY`; empty if runs differ.
        parameter: name of the first replica that differs.
    """

    origin: str
    opaque_producer: bool = False
    steered: bool = False
    reordered: bool = False
    representation: str = ""
    first_pair: tuple[int, int] = (1, 1)
    untraced: str = ""
    call: CallFacts | None = None
    arms: tuple[ExperimentResult, ...] = ()
    replicas: str = ""
    parameter: str = ""

    @property
    def between_processes(self) -> bool:
        """Whether runs within a process agree, both those of the sweep and later ones."""
        within = self.arm("within_process", "process")
        return within.ran and not within.differing and not self.first_pair[0]

    def arm(self, name: str, on: str) -> ExperimentResult:
        """Return the result of the named experiment, or one without trials if it was not run."""
        return result_in(self.arms, name, on)


@dataclass(frozen=True, slots=True)
class Decision:
    """The conclusion from the evidence.

    Attributes:
        cause: coded cause.
        confidence: ``proven``, ``likely`` or ``open``.
        because: sentence with the numbers.
        advice: sentence on what to do.
    """

    cause: str
    confidence: str
    because: str
    advice: str


@dataclass(frozen=True, slots=True)
class Rate:
    """How often outcomes differ from the first one.

    Attributes:
        differing: number that differ.
        trials: number compared.
        of: ``runs`` of the sweep, ``replays`` of a call, ``pairs`` here or in ``processes``.
        low: lower 95 % bound of the share.
        high: upper 95 % bound of the share.
        distinct: number of distinct outcomes.
    """

    differing: int
    trials: int
    of: str
    low: float
    high: float
    distinct: int

    @property
    def share(self) -> float:
        """Observed share, 0 to 1."""
        return self.differing / self.trials


@dataclass(frozen=True, slots=True)
class RunCounts:
    """The runs of a sweep.

    Attributes:
        compared: number compared with the first.
        differing: number of those that differ.
        distinct: number of distinct results.
    """

    compared: int
    differing: int
    distinct: int


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a model's runs differ.

    Attributes:
        decision: the conclusion.
        evidence: what it is based on.
        rate: how often outcomes differ.
        deterministic_doc: the column of that name.
        deterministic_here: the column of that name.
        deterministic_price: the column of that name.
        repro: folder in the results folder.
        reproduced: result of the repro in a fresh process.
        other_sources: descriptions of further independent differences (with ``all_sources``).
    """

    decision: Decision
    evidence: Evidence
    rate: Rate | None = None
    deterministic_doc: str = ""
    deterministic_here: str = ""
    deterministic_price: float | None = None
    repro: str = ""
    reproduced: str = ""
    other_sources: tuple[str, ...] = ()


def result_in(results: Iterable[ExperimentResult], name: str, on: str) -> ExperimentResult:
    missing = ExperimentResult(name, on, note="not tried")
    return next((result for result in results if (result.name, result.on) == (name, on)), missing)
