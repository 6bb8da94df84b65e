"""Frozen values that travel between the parts of hashbench, in the order in which a sweep makes them:
:class:`ModelSpec` and :class:`RunOptions` are asked for, :class:`Trace` (or :class:`Failure`) is seen,
:class:`Divergence` is concluded, :class:`Row` is shown."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

TRACE_SCHEMA = 1
"""Version of the text form of a trace; a file of another version is refused."""

ROW_SCHEMA = 1
"""Version of the meaning of the CSV's columns and of the row files; written to ``environment.json`` as ``schema``.
Another one is refused. A new column does not raise it: a row that lacks a column has its default."""

SWEEP_SCHEMA = 1
"""Version of ``sweep.json``. A sweep of another version, or with rows of another, is neither resumed nor merged."""

PHASES = ("forward", "backward", "optimizer")
MODES = ("training", "inference")
"""How a model is run: in ``train()`` mode with backward and optimizer, or in ``eval()`` mode, forward only."""

BATCH_INVARIANCE = "batch-invariance"
INVARIANCE_GROUPS: Mapping[str, tuple[str, ...]] = {
    "batch": ("batch",),
    "position": ("position",),
    "padding": ("right-padding", "left-padding"),
    "decode": ("cached-decode", "chunked-prefill"),
}
"""What ``--invariance`` takes, and the invariances that each word stands for; these are taken, too."""

INVARIANCES = {f"{name}-invariance": name for names in INVARIANCE_GROUPS.values() for name in names}
"""Mode → the invariance that it checks; ``batch``: the items of smaller and smaller batches."""


def invariances_of(words: Sequence[str]) -> tuple[str, ...]:
    """The invariances that words of ``--invariance`` stand for, each once.

    Raises:
        ValueError: a word stands for none.
    """
    known = {**INVARIANCE_GROUPS, **{name: (name,) for name in INVARIANCES.values()}}
    for word in words:
        if word not in known:
            raise ValueError(f"{word!r} is none of {', '.join(known)}")
    return tuple(dict.fromkeys(name for word in words for name in known[word]))


SWEEP_MODES = (*MODES, *INVARIANCES)
"""What a sweep does with a model; the invariances run it in inference."""

SMALLEST_BATCH = 8
"""What a sweep of batch invariance takes of each model at least, as dynamo does."""

DETERMINISTIC = ("on", "warn", "off")
DTYPES = ("float32", "bfloat16", "float16", "amp")
TRACERS = ("auto", "native", "python")


# ---------------------------------------------------------------------------------------------- asked for


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model of a suite, as data: a line of ``models/<suite>.csv`` or one entry of a user's ``MODELS``.

    ``suite`` is a suite's name; that of a zoo file is the file's name without ``.py``, and ``source`` then is its
    absolute path. ``input_shape`` has no batch dimension. ``arguments`` go to the constructor. ``skip_training`` and
    ``skip_inference`` say why that mode cannot run. ``devices`` are the types of device that the model is for
    (``cuda``, ``xpu``); empty means any. An empty ``deterministic`` or ``optimizer`` and ``None`` for ``iterations`` or
    ``runs`` leave the choice to the command line and then to the harness. ``parameters`` counts the elements of the
    module's parameters, where the data say.
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
    parameters: int | None = None
    note: str = ""
    source: str = ""

    def skip_reason(self, mode: str, *, device: str = "cpu") -> str:
        """Why this model cannot run in ``mode`` on ``device`` (``cpu``, ``cuda:1``); empty when it can."""
        if self.devices and device.partition(":")[0] not in self.devices:
            return f"needs {' or '.join(self.devices)}"
        return self.skip_training if mode == "training" else self.skip_inference


def flags_of_mode(mode: str) -> tuple[str, ...]:
    """What a command line asks for a sweep in this mode with."""
    if mode not in INVARIANCES:
        return (f"--{mode}",)
    return ("--inference", "--batch-invariant", *(("--invariance", INVARIANCES[mode]) * (mode != BATCH_INVARIANCE)))


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How every model of one sweep is run; what the flags of ``hashbench sweep`` ask for.

    An empty ``dtype`` means: as the model was built; an empty ``deterministic``: as the model's data say, else ``on``;
    ``runs`` of ``None``: as the model's data say, else 2. ``output`` is the results folder. ``replays`` is how often an
    experiment is repeated at least, ``diagnose_budget`` the seconds that all experiments on one model may take (0: none
    are made), ``capture_mib`` the largest call that is captured for them. ``tracer`` is one of :data:`TRACERS`:
    ``auto`` is the native one where it can be used. ``stress``: what passes is run again under perturbations that must
    not matter. ``mode`` is one of :data:`SWEEP_MODES`.
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
    output: str = ""

    @property
    def dtype_column(self) -> str:
        """The ``dtype`` of every row of the sweep, also of models that never answered."""
        return self.dtype or "float32"

    @property
    def batch_invariant(self) -> bool:
        """Whether an invariance is checked, as ``--batch-invariant`` and ``--invariance`` ask for."""
        return self.mode in INVARIANCES

    @property
    def invariance(self) -> str:
        """The invariance that is checked, a value of ``INVARIANCES``; empty in other modes."""
        return INVARIANCES.get(self.mode, "")

    @property
    def model_mode(self) -> str:
        """The mode in which a model is built and run, one of :data:`MODES`."""
        return "inference" if self.batch_invariant else self.mode

    def batch_size_of(self, spec: ModelSpec) -> int | None:
        """The examples of one step of a model; ``None`` where its own function makes the inputs."""
        if self.batch_size is not None or spec.batch_size is None or self.invariance not in ("batch", "position"):
            return self.batch_size or spec.batch_size
        return max(SMALLEST_BATCH, spec.batch_size)


# ---------------------------------------------------------------------------------------------------- seen


class TensorDigest(NamedTuple):
    """The fingerprint of one tensor. ``value`` is hexadecimal, over the bytes in memory order (logical order
    where the layout has holes), or empty for memory that was allocated and not written (*blank*)."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    value: str

    def word(self) -> str:
        """The digest as one word, without its stride: ``float32[8,64,56,56]:0123456789abcdef``."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]:{self.value or 'blank'}"


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The stride, in elements, that torch gives a new contiguous tensor of this shape."""
    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * max(1, shape[dim + 1])
    return tuple(stride)


class Ref(NamedTuple):
    """One tensor that a record read: which argument (``"0"``, ``"1.2"`` for a list element, ``"src"`` for a
    keyword), the id of the record or leaf that wrote its storage last, the storage offset in elements, whether
    the op also writes it, and (with ``hash_inputs``) its digest just before the call."""

    argument: str
    source: str
    offset: int = 0
    written: bool = False
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that no recorded op wrote, hashed when first read. ``kind`` is ``parameter``, ``buffer``,
    ``input`` or ``other``. ``position`` is the index of the record that read it first. ``initial`` is its digest
    at the start of the run where it was registered (parameters, buffers, inputs); empty where it was not."""

    id: str
    kind: str
    digest: TensorDigest
    position: int
    initial: str = ""


@dataclass(frozen=True, slots=True)
class OpRecord:
    """What one dispatched op left in a trace.

    ``id`` is unique in the trace and survives insertions elsewhere: phase, iteration, module path, op and a count
    within these. ``iteration`` is ``None`` where nothing had counted yet. ``arguments`` is the text of all non-tensor
    arguments. ``outputs`` are the digests of what the op wrote (outputs first, then written arguments in schema order);
    empty for a view. ``scalar`` is the text of a returned Python scalar, ``rng`` the digest of the generator's state
    before a seeded op, ``forward_op`` the id of the forward record of a backward one, ``source`` a source line.
    ``blank`` marks allocations, ``collective`` ops that exchange data with other processes.
    ``opaque``: what the record stands for where it is no op, and the trace sees neither all that it read nor all
    that it wrote (``compiled code``): no kernel behind it can be named. ``inside`` is the id of the record of the op
    that called this one, where that is no op of ``aten``'s: its record follows, and has this one among its ``inputs``.
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
    collective: bool = False
    inside: str = ""


def op_of(node: str) -> str:
    """The name of the op in the id of a record, ``aten.mm.default`` of ``forward/0/net.fc/aten.mm.default#2``."""
    return node.rpartition("/")[2].partition("#")[0]


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor (or Python value) by which runs are compared: ``name`` such as ``output.0``, ``loss``,
    ``grad.fc.weight``; ``source`` the id of the record or leaf that wrote it last, empty for a Python value."""

    name: str
    digest: TensorDigest
    source: str = ""


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
    """Everything one run left behind. Equal runs give equal traces.

    ``tracer`` is what made it, ``native`` or ``python`` (the dispatch mode, which changes which ops run), and
    ``tracer_reason`` why it is not the native one where any was welcome. ``early_reads`` are the reads of a
    collective's output that the program has not waited for.
    """

    records: tuple[OpRecord, ...]
    leaves: tuple[Leaf, ...] = ()
    results: tuple[Result, ...] = ()
    marks: tuple[SettingsMark, ...] = ()
    hashed_inputs: bool = False
    tracer: str = "python"
    tracer_reason: str = ""
    early_reads: tuple[EarlyRead, ...] = ()

    def __repr__(self) -> str:
        """How much there is of what; all of it would be megabytes."""
        phases = ", ".join(f"{number} {phase}" for phase, number in Counter(op.phase for op in self.records).items())
        ops = f"{len(self.records)}{f' ({phases})' if phases else ''}"
        return f"<Trace: ops={ops}, leaves={len(self.leaves)}, results={len(self.results)}>"


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that ended with an exception. ``out_of_memory`` and ``not_comparable`` (its results are of no kind that can
    be compared) tell it from other failures; ``op`` is the dispatched op during which it was raised (empty outside any
    op); ``nondeterministic_op`` is that op where torch refused it for having no deterministic implementation."""

    error: str
    out_of_memory: bool = False
    not_comparable: bool = False
    op: str = ""
    nondeterministic_op: str = ""


# ----------------------------------------------------------------------------------------------- concluded


@dataclass(frozen=True, slots=True)
class Steering:
    """An earlier recorded scalar that differed and may have chosen another path: the record that returned it, the
    two values, and where that difference entered."""

    record: str
    first: str
    second: str
    kernel: str = ""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where the difference between two runs entered: the first record of the pair that differs *and reaches the
    results*.

    ``origin`` is one of :class:`~hashbench.catalog.Origin`. ``node`` is the id of the record or leaf
    (``setting:<name>`` for settings). ``kernel`` is the op's name (for a leaf: the first op that read it). ``op_index``
    counts records of the first run from 0. ``first`` and ``second`` say in words what the two runs had there.
    ``inside`` is the name of the op that called the kernel; empty where the program did. ``opaque_producer``: who wrote
    the content is not among the records, or a thread that nobody waits for.
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
    """The judgement on a pair: ``differing`` names the results that differ, ``divergence`` says where that entered
    (``None`` when no result differs, and none may untraced: :class:`EarlyRead`), ``benign`` lists the ids of records
    that differ without reaching a result, ``unseen`` says in sentences what the traces did not see (empty where they
    saw all)."""

    differing: tuple[str, ...]
    divergence: Divergence | None
    benign: tuple[str, ...]
    unseen: str = ""

    def __repr__(self) -> str:
        """Where the difference entered, and how much differs, on one line."""
        found, where = self.divergence, "no divergence"
        if found is not None:
            inside = f" inside {found.inside}" if found.inside else ""
            module = f" in {found.module}" if found.module else ""
            where = f"{found.origin} at {found.kernel or found.node}{inside}{module}"
        unseen = "; not all was seen" if self.unseen else ""
        return f"<Verdict: {where}; results that differ: {len(self.differing)}{unseen}>"


NO_TIME = "budget"
"""The note of an experiment for which no time was left, or that ended before it was complete."""

OTHER_WEIGHTS = "its model has other weights"
"""The note of an experiment whose fresh processes built a model, or inputs, of other content than the runs had."""


@dataclass(frozen=True, slots=True)
class ExperimentResult:
    """One controlled experiment: what was changed, and how often the outcome still differed.

    ``name`` and ``on`` are those of :class:`~hashbench.catalog.Experiment`. ``trials`` counts comparisons with the
    first outcome and ``differing`` those that differed; ``distinct`` counts outcomes, the first among them. ``seconds``
    is the median time of one repetition. ``found`` names what the experiment singled out (a generator, a clock, the
    shifts that differ), ``moves`` are those shifts: a memory (``None``: all together) and by how many bytes it was
    moved. An experiment that could not be run has no trials, and ``note`` says why; ``raised``: the op refused it.
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
        """Whether it was not run because the time was up."""
        return not self.ran and self.is_cut_short

    @property
    def is_cut_short(self) -> bool:
        """Whether the time was up before it was complete, or begun."""
        return self.note == NO_TIME

    @property
    def ran(self) -> bool:
        """Whether there is anything to conclude from."""
        return self.trials > 0

    def word(self) -> str:
        """As one word for a table: ``call/one_thread 0/20``, ``pair/clocks not run (budget)``."""
        outcome = f"{self.differing}/{self.trials}" if self.ran else f"not run ({self.note})"
        return f"{self.place} {outcome}" + (f" [{self.found}]" if self.found else "")


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What is known of the captured call beside the results of experiments.

    ``custom``: torch itself does not define the op. ``allocation``: it hands out memory without writing it.
    ``overlap``: it writes memory that it also reads through another view. Of outcomes that differ (``None``: none were
    seen): ``same_values``: they hold the same values in other places; ``chosen_values``: each holds a value of one of
    the call's inputs; ``tied_places``: they are places of equal elements of an input. ``matches_record``: the replay
    gave what the trace recorded in one of the runs. ``limits``: why the call could not be captured, or not wholly.
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


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything from which a cause is decided. ``origin``, ``opaque_producer`` and ``steered`` are those of the
    divergence; ``reordered``: both runs have the same ops, in another order or wired otherwise. ``first_pair`` tells
    how often runs of the sweep differed from the first: ``(differing, compared)``."""

    origin: str
    opaque_producer: bool = False
    steered: bool = False
    reordered: bool = False
    representation: str = ""
    first_pair: tuple[int, int] = (1, 1)
    untraced: str = ""
    call: CallFacts | None = None
    arms: tuple[ExperimentResult, ...] = ()

    @property
    def between_processes(self) -> bool:
        """Whether runs of one process agree, those of the sweep as well as any made since."""
        within = self.arm("within_process", "process")
        return within.ran and not within.differing and not self.first_pair[0]

    def arm(self, name: str, on: str) -> ExperimentResult:
        """The arm of that name; one without trials where it was not run."""
        return _result_in(self.arms, name, on)


@dataclass(frozen=True, slots=True)
class Decision:
    """What the evidence says: ``because`` is a sentence with the numbers, ``advice`` a sentence on what to do."""

    cause: str
    confidence: str
    because: str
    advice: str


@dataclass(frozen=True, slots=True)
class Rate:
    """How often outcomes differ from the first one: ``differing`` of ``trials``. ``of`` says of what: ``runs`` of the
    sweep, ``replays`` of a call, ``pairs`` here or in ``processes``; ``low`` and ``high`` are the 95 % bounds of the
    share, ``distinct`` counts outcomes."""

    differing: int
    trials: int
    of: str
    low: float
    high: float
    distinct: int

    @property
    def share(self) -> float:
        """The observed share, 0 to 1."""
        return self.differing / self.trials


@dataclass(frozen=True, slots=True)
class RunCounts:
    """The runs of a sweep: how many were ``compared`` with the first, how many of these differ, and how many different
    results there were."""

    compared: int
    differing: int
    distinct: int


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a model's runs differ. ``deterministic_*`` are the columns of those names, ``repro`` is a folder in the
    results folder, ``reproduced`` what the repro did in a fresh process, and ``other_sources`` describes each further
    independent difference (with ``all_sources``)."""

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
    """The column ``evidence``: the results of all experiments, in their order, and their text. A row that was read from
    a CSV has the text alone. Two with the same text are equal."""

    text: str = ""
    results: tuple[ExperimentResult, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, results: Iterable[ExperimentResult]) -> RowEvidence:
        """What these results say."""
        kept = tuple(results)
        return cls(_text_of(kept), kept)

    def result(self, name: str, on: str) -> ExperimentResult:
        """The result of that name; one without trials where it was not run."""
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


def labelled(label: str) -> Any:
    """A column with a text, which reports show under this label."""
    return field(default="", metadata={"label": label})


@dataclass(frozen=True, slots=True)
class Row:
    """One line of ``accuracy.csv``; ``docs/csv.md`` explains every column. ``None`` and ``""`` are written as an
    empty cell: absent, never zero."""

    dev: str
    name: str
    batch_size: int | None
    accuracy: str
    suite: str = ""
    mode: str = ""
    dtype: str = ""
    iterations: int | None = None
    runs: int | None = None
    threads: int | None = None
    deterministic: str = ""
    nondeterministic_op: str = ""
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
    steered_by: str = ""
    cause: str = ""
    confidence: str = ""
    because: str = ""
    evidence: RowEvidence = RowEvidence()
    other_sources: str = ""
    capture: str = ""
    distinct: int | None = None
    trials: int | None = None
    rate_of: str = ""
    rate: float | None = None
    rate_low: float | None = None
    rate_high: float | None = None
    differing_results: str = ""
    differing_elements: int | None = None
    max_abs_diff: float | None = None
    max_ulp: int | None = None
    mean_relative_variability: float | None = None
    count_variability: float | None = None
    representation: str = ""
    benign: int | None = None
    benign_ops: str = ""
    confirmed: str = labelled("Confirmed by another pair")
    untraced: str = labelled("Untraced runs")
    tracer: str = labelled("Tracer")
    perturbed_ops: str = ""
    settings_changed: str = labelled("Settings changed")
    not_compared: str = labelled("Not compared")
    compiled: str = labelled("Compiled code")
    deterministic_doc: str = labelled("torch documents")
    deterministic_here: str = ""
    deterministic_price: float | None = None
    advice: str = ""
    stressed: str = labelled("Stressed pairs that differ")
    latent: str = ""
    latent_kernel: str = ""
    latent_module: str = ""
    latent_phase: str = ""
    latent_cause: str = ""
    latent_confidence: str = ""
    latent_rate: float | None = None
    company: str = labelled("Compared")
    batch_sizes: str = labelled("Batch sizes compared")
    smallest_batch: int | None = None
    shapes: str = ""
    reference_shapes: str = ""
    not_attributable: int | None = None
    repro: str = ""
    reproduced: str = ""
    traces: str = ""
    retried: str = ""
    seconds: float | None = None
    overhead_seconds: float | None = None
    peak_memory_mib: float | None = None
    device_memory_mib: float | None = None
    env: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class ExpectedRow(Row):
    """A row of a CSV of expected rows: since when it is expected and when it was seen last (dates as ISO 8601), and the
    address of the issue that tells more. Empty where nothing is known."""

    since: str = ""
    link: str = ""
    seen: str = ""


@dataclass(frozen=True, slots=True)
class HarnessRow(Row):
    """A row of ours with the word of PyTorch's own harness for the model; empty where the harness has no row."""

    harness_accuracy: str = ""


_Row = TypeVar("_Row", bound=Row)


def extended(kind: type[_Row], row: Row, **more: str) -> _Row:
    """``row`` as one of a ``kind`` that has ``more`` columns."""
    return kind(**{column: getattr(row, column) for column in ROW_COLUMNS} | more)


ROW_COLUMNS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(Row))
LABELS: Mapping[str, str] = {f.name: f.metadata["label"] for f in dataclasses.fields(Row) if f.metadata}
"""Column → the label under which the page of a model shows it; the others are said in sentences or in tables."""
ROW_KEY: tuple[str, ...] = ("suite", "mode", "dtype", "dev", "name")
"""What identifies a row: two sweeps are compared by it, and a sweep holds each at most once."""
