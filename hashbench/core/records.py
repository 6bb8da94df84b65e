"""Frozen records passed between the parts of hashbench, in the order in which a sweep produces them.

:class:`ModelSpec` and :class:`RunOptions` are the request, :class:`Trace` (or :class:`Failure`) is observed,
:class:`Divergence` is derived, :class:`Row` is reported.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from hashbench.core.catalog import FORMER_STATUSES, INVARIANCES, WRITTEN

TRACE_SCHEMA = 1
"""Version of the text form of a trace; a file of another version is refused."""

ROW_SCHEMA = 1
"""Version of the CSV columns' meaning and of the row files, written to ``environment.json`` as ``schema``; another
version is refused. A new column does not raise it: a row that lacks a column has its default."""

SWEEP_SCHEMA = 1
"""Version of ``sweep.json``. A sweep of another version, or with rows of another, is neither resumed nor merged."""

PENDING = "pending"
"""Value of a digest of data from other ranks that had not arrived when the trace ended; it says nothing of the
content."""

BESIDE_DTENSORS = "beside DTensors"
"""Placement of a plain parameter of a module that has ``DTensor`` parameters as well: a replica by convention."""

PHASES = ("forward", "backward", "optimizer")
MODES = ("training", "inference")
"""Modes of a model: ``train()`` with backward and optimizer, or ``eval()``, forward only."""

SAME_BUILD = "equal"
"""Value of ``second_build`` where weights and inputs of two builds from one seed are equal."""

BATCH_INVARIANCE = "batch-invariance"
INVARIANCE_GROUPS: Mapping[str, tuple[str, ...]] = {
    group: tuple(invariance.name for invariance in INVARIANCES.values() if invariance.group == group)
    for group in dict.fromkeys(invariance.group for invariance in INVARIANCES.values())
}
"""What ``--invariance`` takes, and the invariances that each word stands for; these are taken, too."""


def invariances_of(words: Sequence[str]) -> tuple[str, ...]:
    """The invariances that words of ``--invariance`` stand for, each once.

    Raises:
        ValueError: a word stands for none.
    """
    known = {**INVARIANCE_GROUPS, **{invariance.name: (invariance.name,) for invariance in INVARIANCES.values()}}
    for word in words:
        if word not in known:
            raise ValueError(f"{word!r} is none of {', '.join(known)}")
    return tuple(dict.fromkeys(name for word in words for name in known[word]))


SWEEP_MODES = (*MODES, *INVARIANCES)
"""Modes of a sweep; the invariances run models in inference."""

SMALLEST_BATCH = 8
"""Minimum batch size for batch invariance, as in dynamo."""

DETERMINISTIC = ("on", "warn", "off")
DTYPES = ("float32", "bfloat16", "float16", "amp")
TRACERS = ("auto", "native", "python")


# ---------------------------------------------------------------------------------------------- asked for


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model of a suite: a line of ``models/<suite>.csv`` or an entry of a user's ``MODELS``.

    Attributes:
        suite: name of the suite; for a zoo file, the file's name without ``.py``.
        name: of the model in its suite.
        task: kind of task.
        family: architecture family.
        batch_size: examples per step; ``None`` if the model's function makes the inputs.
        input_shape: without batch dimension.
        arguments: passed to the constructor.
        default: part of the default selection.
        skip_training: why training cannot run; empty if it can.
        skip_inference: why inference cannot run; empty if it can.
        devices: supported device types (``cuda``, ``xpu``); empty: any.
        deterministic: level; empty: the command line's, else the harness default.
        optimizer: as for ``deterministic``.
        iterations: steps per run; ``None``: as for ``deterministic``.
        runs: number of runs; ``None``: as for ``deterministic``.
        world_size: number of ranks that run the model together; ``None``: as for ``deterministic``, else 1.
        parameters: number of elements of the module's parameters, if known.
        note: remark.
        source: absolute path of the zoo file.
    """

    suite: str
    name: str
    task: str = ""
    family: str = ""
    batch_size: int | None = None
    input_shape: tuple[int, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    default: bool = False
    skip_training: str = ""
    skip_inference: str = ""
    devices: tuple[str, ...] = ()
    deterministic: str = ""
    optimizer: str = ""
    iterations: int | None = None
    runs: int | None = None
    world_size: int | None = None
    parameters: int | None = None
    note: str = ""
    source: str = ""

    def skip_reason(self, mode: str, *, device: str = "cpu") -> str:
        """Return why this model cannot run in ``mode`` on ``device`` (``cpu``, ``cuda:1``); empty if it can."""
        if self.devices and device.partition(":")[0] not in self.devices:
            return f"needs {' or '.join(self.devices)}"
        return self.skip_training if mode == "training" else self.skip_inference


def flags_of_mode(mode: str) -> tuple[str, ...]:
    """Return the command line flags that select this mode of a sweep."""
    if mode not in INVARIANCES:
        return (f"--{mode}",)
    named = ("--invariance", INVARIANCES[mode].name) if mode != BATCH_INVARIANCE else ()
    return ("--inference", "--batch-invariant", *named)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run every model of a sweep: the flags of ``hashbench sweep``.

    Attributes:
        mode: one of :data:`SWEEP_MODES`.
        device: torch device.
        dtype: empty: as the model was built.
        iterations: steps per run; ``None``: the model's, else 2.
        runs: number of runs; ``None``: the model's, else 2.
        batch_size: ``None``: the model's.
        threads: torch threads; ``None``: torch's default.
        seed: of all random generators.
        cotangent: ``ones`` or ``random``: default loss in training.
        deterministic: empty: the model's, else ``on``.
        hash_inputs: hash every input before each call.
        untraced_pair: also compare two untraced runs.
        keep_traces: keep traces of runs that agree.
        all_sources: look for every independent source of differences.
        replays: minimum repetitions per experiment.
        diagnose_budget: seconds for all experiments on one model; 0: none.
        capture_mib: largest call captured for experiments, in MiB.
        tracer: one of :data:`TRACERS`; ``auto``: native if available.
        stress: rerun passing models under perturbations.
        backend: of ``torch.compile``, whose program is compared with eager mode; empty: no compiled run.
        compilations: number of compilations that are compared; 1: no further one.
        extensions: names of further extensions that are asked for.
        output: results folder.
    """

    mode: str = "inference"
    device: str = "cpu"
    dtype: str = ""
    iterations: int | None = None
    runs: int | None = None
    batch_size: int | None = None
    threads: int | None = None
    seed: int = 1337
    cotangent: str = "ones"
    deterministic: str = ""
    hash_inputs: bool = False
    untraced_pair: bool = False
    keep_traces: bool = False
    all_sources: bool = False
    replays: int = 20
    diagnose_budget: float = 120.0
    capture_mib: float = 2048.0
    tracer: str = "auto"
    stress: bool = False
    backend: str = ""
    compilations: int = 1
    extensions: tuple[str, ...] = ()
    output: str = ""

    @property
    def dtype_column(self) -> str:
        """The ``dtype`` of every row of the sweep, also for models without a result."""
        return self.dtype or "float32"

    @property
    def batch_invariant(self) -> bool:
        """Whether an invariance is checked, as ``--batch-invariant`` and ``--invariance`` ask for."""
        return self.mode in INVARIANCES

    @property
    def invariance(self) -> str:
        """Name of the invariance that is checked; empty in other modes."""
        return INVARIANCES[self.mode].name if self.batch_invariant else ""

    @property
    def model_mode(self) -> str:
        """The mode in which a model is built and run, one of :data:`MODES`."""
        return "inference" if self.batch_invariant else self.mode

    def batch_size_of(self, spec: ModelSpec) -> int | None:
        """Return the examples per step of a model; ``None`` if its function makes the inputs."""
        of_items = self.batch_invariant and INVARIANCES[self.mode].unit == "items"
        if self.batch_size is not None or spec.batch_size is None or not of_items:
            return self.batch_size or spec.batch_size
        return max(SMALLEST_BATCH, spec.batch_size)


# ---------------------------------------------------------------------------------------------------- seen


class TensorDigest(NamedTuple):
    """The digest of one tensor.

    Attributes:
        dtype: name of the dtype.
        shape: elements per dimension.
        stride: in elements.
        value: hexadecimal, over the bytes in memory order (logical order if the layout has holes); empty for memory
            that was allocated and not written (*blank*).
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    value: str

    def word(self) -> str:
        """Format as one word, without stride: ``float32[8,64,56,56]:0123456789abcdef``."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]:{self.value or 'blank'}"


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the stride, in elements, of a new contiguous tensor of this shape."""
    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * max(1, shape[dim + 1])
    return tuple(stride)


@functools.lru_cache(maxsize=4096)
def layout_text(shape: tuple[int, ...], stride: tuple[int, ...]) -> str:
    """Format ``[shape]{stride}``; the stride is omitted if contiguous."""
    strided = "" if stride == contiguous_stride(shape) else f"{{{','.join(map(str, stride))}}}"
    return f"[{','.join(map(str, shape))}]{strided}"


class Ref(NamedTuple):
    """One tensor that a record read.

    Attributes:
        argument: ``"0"``, ``"1.2"`` for a list element, ``"src"`` for a keyword.
        source: id of the record or leaf that wrote its storage last.
        offset: storage offset in elements.
        written: the op also writes it.
        digest: digest just before the call (with ``hash_inputs``).
        layout: shape and stride that belong to it, ``[2,3]{1,2}``; without the stride if contiguous.
    """

    argument: str
    source: str
    offset: int = 0
    written: bool = False
    digest: str = ""
    layout: str = ""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that no recorded op wrote, hashed when first read.

    Attributes:
        id: unique in the trace.
        kind: ``parameter``, ``buffer``, ``input`` or ``other``.
        digest: when first read.
        position: index of the record that read it first.
        initial: digest at the start of the run if registered (parameters, buffers, inputs); else empty.
    """

    id: str
    kind: str
    digest: TensorDigest
    position: int
    initial: str = ""


@dataclass(frozen=True, slots=True)
class Collective:
    """The exchange of data with other ranks that a record made, in the words of torch's flight recorder.

    Attributes:
        kind: how contributions become outputs, a word of ``data/collectives.csv``.
        process_group: global ranks of its process group, in the group's order; empty if the group is unknown.
        ordinal: number of that group among the groups of the same ranks, in order of creation.
        contributed: arguments (as :attr:`Ref.argument`) whose content goes to other ranks; :attr:`Ref.digest` is their
            content just before the call.
        root: global rank of the root, if the op has one.
        peer: global rank at the other end of a message; ``None``: no message, or from any source.
        tag: tag of a message.
    """

    kind: str
    process_group: tuple[int, ...] = ()
    ordinal: int = 0
    contributed: tuple[str, ...] = ()
    root: int | None = None
    peer: int | None = None
    tag: int = 0


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One dispatched op in a trace.

    Attributes:
        id: unique in the trace and stable under insertions elsewhere: phase, iteration, module path, op and a count.
        phase: one of :data:`PHASES`.
        iteration: ``None`` before the first counted step.
        module: path of the module.
        op: name of the op.
        inputs: tensors read.
        arguments: text of all non-tensor arguments.
        outputs: digests of what the op wrote (outputs, then written arguments in schema order); empty for a view.
        scalar: text of a returned Python scalar.
        rng: digest of the generator's state before a seeded op.
        forward_op: id of the forward record of a backward op.
        blank: the op allocates memory without writing it.
        source: source line.
        opaque: set if the record stands for something other than an op, whose reads and writes the trace does not see
            completely (``compiled code``): no kernel behind it can be named.
        collective: what it exchanged with other ranks; ``None`` if the op exchanges nothing.
        inside: id of the record of the non-``aten`` op that called this one; that record follows and has this one among
            its ``inputs``.
    """

    id: str
    phase: str
    iteration: int | None
    module: str
    op: str
    inputs: tuple[Ref, ...] = ()
    arguments: str = ""
    outputs: tuple[TensorDigest, ...] = ()
    scalar: str = ""
    rng: str = ""
    forward_op: str = ""
    blank: bool = False
    source: str = ""
    opaque: str = ""
    collective: Collective | None = None
    inside: str = ""


def op_of(node: str) -> str:
    """Return the op in a record id: ``aten.mm.default`` of ``forward/0/net.fc/aten.mm.default#2``."""
    return node.rpartition("/")[2].partition("#")[0]


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor or Python value by which runs are compared.

    Attributes:
        name: ``output.0``, ``loss``, ``grad.fc.weight``.
        digest: of its value.
        source: id of the record or leaf that wrote it last; empty for a Python value.
        placement: how a distributed tensor lies on its mesh (``(Replicate(), Shard(dim=0))``), ``DDP``, or
            :data:`BESIDE_DTENSORS`.
        replicas: global ranks that must hold the same content, this one included; empty if none is known.
    """

    name: str
    digest: TensorDigest
    source: str = ""
    placement: str = ""
    replicas: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A whole step of a traced program: its records end at ``position``.

    Attributes:
        number: of the step, from 0.
        position: number of records up to its end.
        results: parameters after the step, and what the program added.
    """

    number: int
    position: int
    results: tuple[Result, ...] = ()


@dataclass(frozen=True, slots=True)
class TracedRank:
    """The rank of a distributed program that a trace belongs to.

    Attributes:
        rank: global rank.
        world_size: number of ranks.
        ended: how the program ended on this rank, in words (``SIGTERM``, ``ValueError: …``, ``trace is cut``); empty if
            it ended by itself.
    """

    rank: int
    world_size: int
    ended: str = ""


@dataclass(frozen=True, slots=True)
class EarlyRead:
    """A read of a collective's output while its Work was not done, which changed that output afterwards.

    The program has not waited for the collective. The trace has, in its place, so that the traced program goes on with
    other data than an untraced one may.

    Attributes:
        collective: id of the record of the collective.
        reader: id of the record that read its output, or the name of the result where ``is_result``.
        source: ``file:line function`` of the code that read it, also without ``source_lines``; may be empty.
    """

    collective: str
    reader: str
    source: str = ""
    is_result: bool = False


@dataclass(frozen=True, slots=True)
class SettingsMark:
    """Torch's global settings after ``position`` records, as sorted ``(name, value)`` texts."""

    position: int
    label: str
    settings: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, repr=False)
class Trace:
    """The trace of one run. Equal runs give equal traces.

    Attributes:
        records: dispatched ops in order.
        leaves: tensors that no recorded op wrote.
        results: tensors and values by which runs are compared.
        marks: snapshots of torch's settings.
        hashed_inputs: inputs were hashed before each call.
        tracer: ``native`` or ``python`` (the dispatch mode, which changes which ops run).
        tracer_reason: why ``auto`` did not select the native tracer.
        early_reads: reads of a collective's output before the program waited for it.
        rank: the rank that was traced; ``None`` for a program of one process.
        steps: the whole steps, if it was recorded step by step; ``results`` are then those at the end, or of the last
            whole step.
    """

    records: tuple[OpRecord, ...]
    leaves: tuple[Leaf, ...] = ()
    results: tuple[Result, ...] = ()
    marks: tuple[SettingsMark, ...] = ()
    hashed_inputs: bool = False
    tracer: str = "python"
    tracer_reason: str = ""
    early_reads: tuple[EarlyRead, ...] = ()
    rank: TracedRank | None = None
    steps: tuple[TracedStep, ...] = ()

    def __repr__(self) -> str:
        """Return a summary; the full content would be megabytes."""
        phases = ", ".join(f"{number} {phase}" for phase, number in Counter(op.phase for op in self.records).items())
        ops = f"{len(self.records)}{f' ({phases})' if phases else ''}"
        return f"<Trace: ops={ops}, leaves={len(self.leaves)}, results={len(self.results)}>"


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that ended with an exception.

    Attributes:
        error: type and message.
        out_of_memory: memory of host or device ran out.
        not_comparable: its results are of no comparable kind.
        op: dispatched op that raised; empty outside any op.
        nondeterministic_op: that op if torch refused it for lack of a deterministic implementation.
        stage: of the compiler that raised; ``runtime`` if compiled code did, empty for an eager run.
    """

    error: str
    out_of_memory: bool = False
    not_comparable: bool = False
    op: str = ""
    nondeterministic_op: str = ""
    stage: str = ""


# ----------------------------------------------------------------------------------------------- concluded


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
        return _result_in(self.arms, name, on)


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


# ---------------------------------------------------------------------------------------------------- shown


@dataclass(frozen=True, slots=True)
class RowEvidence:
    """The column ``evidence``: all experiment results in order, and their text. Compared by text.

    A row read from a CSV has the text only.
    """

    text: str = ""
    results: tuple[ExperimentResult, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, results: Iterable[ExperimentResult]) -> RowEvidence:
        """Build the column from results."""
        kept = tuple(results)
        return cls(_text_of(kept), kept)

    def result(self, name: str, on: str) -> ExperimentResult:
        """Return the named result, or one without trials if it was not run."""
        return _result_in(self.results, name, on)

    def __str__(self) -> str:
        return self.text

    def __bool__(self) -> bool:
        return bool(self.text)

    def __post_init__(self) -> None:
        if self.results and self.text != _text_of(self.results):
            raise ValueError("the text of this evidence is not that of its results")


def _text_of(results: Iterable[ExperimentResult]) -> str:
    return "; ".join(result.word() for result in results)


def _result_in(results: Iterable[ExperimentResult], name: str, on: str) -> ExperimentResult:
    missing = ExperimentResult(name, on, note="not tried")
    return next((result for result in results if (result.name, result.on) == (name, on)), missing)


SHARE, AMOUNT = (0.0, 1.0), (0.0, 1e12)
"""Between which values a share lies, and seconds or MiB."""


class Column(NamedTuple):
    """What is declared of a column beside its name, type and default.

    Attributes:
        label: on the page of a model; empty: it appears in sentences or tables.
        formerly: the name that it has in older files; empty: the same.
        noun: what its words are called.
        words: that it may hold; empty: any.
        former_words: what some of them are today, by their names in older files.
        check: tells a valid text; with what that is, and a tip.
        between: lowest and highest number.
        rare: a CSV has it only where a row does.
        after: the column of a sweep's table that it follows; empty: the table lacks it.
        yields_to: the column that a narrow table keeps rather; empty: none.
        place: comparisons as CSV show it of both sides.
    """

    label: str = ""
    formerly: str = ""
    noun: str = ""
    words: Sequence[str] = ()
    former_words: Mapping[str, str] = MappingProxyType({})
    check: tuple[Callable[[str], bool], str, str] | None = None
    between: tuple[float, float] | None = None
    rare: bool = False
    after: str = ""
    yields_to: str = ""
    place: bool = False


def declared(**attributes: Any) -> Mapping[str, Column]:
    """Return the metadata of a field that is a column, with attributes of a :class:`Column`."""
    return {"column": Column(**attributes)}


def column(default: object = "", **attributes: Any) -> Any:
    """Declare a column with a default, and with attributes of a :class:`Column`."""
    return field(default=default, metadata=declared(**attributes))


@dataclass(frozen=True, slots=True)
class Facts:
    """What an extension knows of a model: the fields of its dataclass are its columns, in their order.

    A default means absent; of facts that are all absent, a row has none.
    """


_Facts = TypeVar("_Facts", bound=Facts)


class HasFacts:
    """What has facts of extensions, one of each kind at most."""

    __slots__ = ()
    facts: tuple[Facts, ...]

    def of(self, kind: type[_Facts]) -> _Facts:
        """Return the facts of a kind; where there are none, those that are all absent."""
        return next((each for each in self.facts if isinstance(each, kind)), kind())


def holding(facts: Iterable[Facts], item: Facts) -> tuple[Facts, ...]:
    """Return ``facts`` with ``one`` in the place of those of its kind."""
    return (*(each for each in facts if type(each) is not type(item)), item)


def value_of(row: object, name: str) -> Any:
    """Return what a row has in a column, its own or one of its facts; ``None`` where these are absent."""
    for holder in (row, *getattr(row, "facts", ())):
        if hasattr(holder, name):
            return getattr(holder, name)
    return None


@dataclass(frozen=True, slots=True)
class Row(HasFacts):
    """One line of ``accuracy.csv``; ``docs/csv.md`` explains every column. ``None`` and ``""`` are written as an empty
    cell: absent, never zero. ``facts`` is no column: those of extensions are its fields, after the core's."""

    dev: str
    name: str
    batch_size: int | None
    accuracy: str = field(metadata=declared(noun="status", words=WRITTEN, former_words=FORMER_STATUSES))
    suite: str = ""
    mode: str = ""
    dtype: str = ""
    iterations: int | None = None
    runs: int | None = None
    threads: int | None = None
    deterministic: str = ""
    nondeterministic_op: str = column(rare=True)
    ops: int | None = None
    origin: str = ""
    kernel: str = ""
    op_index: int | None = None
    phase: str = ""
    iteration: int | None = None
    module: str = ""
    forward_op: str = ""
    source: str = ""
    detail: str = ""
    steered_by: str = column(rare=True)
    cause: str = ""
    confidence: str = ""
    because: str = ""
    evidence: RowEvidence = RowEvidence()
    other_sources: str = column(rare=True)
    capture: str = column(rare=True)
    distinct: int | None = None
    trials: int | None = None
    rate_of: str = ""
    rate: float | None = column(None, between=SHARE)
    rate_low: float | None = column(None, between=SHARE)
    rate_high: float | None = column(None, between=SHARE)
    differing_results: str = column(rare=True)
    differing_elements: int | None = column(None, rare=True)
    max_abs_diff: float | None = column(None, rare=True)
    max_ulp: int | None = column(None, rare=True)
    mean_relative_variability: float | None = column(None, rare=True)
    count_variability: float | None = column(None, rare=True)
    representation: str = column(rare=True)
    benign: int | None = column(None, rare=True)
    benign_ops: str = column(rare=True)
    confirmed: str = column(label="Confirmed by another pair")
    untraced: str = column(label="Untraced runs", rare=True)
    tracer: str = column(label="Tracer")
    perturbed_ops: str = column(rare=True)
    settings_changed: str = column(label="Settings changed", rare=True)
    not_compared: str = column(label="Not compared", rare=True)
    second_build: str = column(label="Second build")
    deterministic_ops: str = column(label="Deterministic by the flag alone")
    compiled: str = column(label="Compiled code", rare=True)
    backend: str = column(label="Backend", rare=True)
    deterministic_doc: str = column(label="torch documents", rare=True)
    deterministic_here: str = column(rare=True)
    deterministic_price: float | None = column(None, rare=True)
    advice: str = ""
    repro: str = ""
    reproduced: str = ""
    traces: str = ""
    retried: str = column(rare=True)
    seconds: float | None = column(None, between=AMOUNT)
    overhead_seconds: float | None = column(None, between=AMOUNT)
    peak_memory_mib: float | None = column(None, between=AMOUNT)
    device_memory_mib: float | None = column(None, between=AMOUNT, rare=True)
    env: str = ""
    error: str = ""
    facts: tuple[Facts, ...] = ()


def is_date(text: str) -> bool:
    """Return True if ``text`` is a date such as ``2026-11-20``, or empty."""
    try:
        return not text or date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


_LINK = re.compile(r"https?://[^\s<>()\[\]\"'`\\|]+")
"""Only what needs no escaping in HTML attributes and Markdown, and never ``javascript:``."""


def is_link(text: str) -> bool:
    """Return True if ``text`` is a URL that may become a link, or empty."""
    return not text or _LINK.fullmatch(text) is not None


_DATE = (is_date, "a date", "Write it as 2026-11-20, or leave it empty.")


@dataclass(frozen=True, slots=True)
class ExpectedRow(Row):
    """A row of a baseline CSV. Fields are empty if unknown.

    Attributes:
        since: date (ISO 8601) since which it is expected.
        link: URL of the issue.
        seen: date on which the failure or difference was last seen.
    """

    since: str = column(check=_DATE)
    link: str = column(check=(is_link, "an address", "It begins with https:// and holds no spaces or quotes."))
    seen: str = column(check=_DATE)


@dataclass(frozen=True, slots=True)
class HarnessRow(Row):
    """A row with the status of PyTorch's own harness for the model; empty if the harness has no row."""

    harness_accuracy: str = ""


_Row = TypeVar("_Row", bound=Row)


def extended(kind: type[_Row], row: Row, **more: str) -> _Row:
    """Convert ``row`` to a ``kind`` of row with ``more`` columns."""
    return kind(**{column: getattr(row, column) for column in (*ROW_COLUMNS, "facts")} | more)


ROW_COLUMNS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(Row) if f.name != "facts")
"""The core's columns."""
ROW_KEY: tuple[str, ...] = ("suite", "mode", "dtype", "dev", "name")
"""Key of a row: two sweeps are compared by it, and a sweep holds each key at most once."""
