"""The vocabulary: one table each for statuses, invariances, origins, perturbations, causes, confidences and
experiments, read by everything that reports or sorts them. A new experiment also has its function in
``replay/methods``, an invariance in ``check/variants``, a perturbation in ``replay/controls/perturbations``. Imports no
other part of hashbench.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Self


class Word(StrEnum):
    """A coded word; further values of a member are the attributes that its class annotates, in their order."""

    def __new__(cls, word: str, *values: object) -> Self:
        member = str.__new__(cls, word)
        member._value_ = word
        for name, value in zip(cls.__annotations__, values, strict=True):
            setattr(member, name, value)
        return member


# ---------------------------------------------------------------------------------------------------------- statuses


class Kind(StrEnum):
    """Kinds of status; ``ABSENT`` is that of a model without a row."""

    ABSENT = "absent"
    PASS = "pass"
    SKIP = "skip"
    DIFFER = "differ"
    LATENT = "latent"
    FAIL = "fail"

    @property
    def is_fine(self) -> bool:
        """True for pass and skip."""
        return self in (Kind.PASS, Kind.SKIP)

    @property
    def is_trouble(self) -> bool:
        """True if the model was run and did not pass."""
        return self in (Kind.DIFFER, Kind.LATENT, Kind.FAIL)

    @property
    def has_cause(self) -> bool:
        """True if runs differ, so that there is a kernel and a cause to name."""
        return self in (Kind.DIFFER, Kind.LATENT)


_LACK = Kind.DIFFER, "I", "not invariant"
"""Of the statuses of models that lack an invariance."""


class Status(Word):
    """The status words of ``benchmarks/dynamo``, and some that it lacks: ``crashed`` (there a dead child leaves no
    row), ``results_not_comparable`` (there an unknown type is reported as ``eager_two_runs_differ``), two of
    ``--backend``, ``compiled_two_runs_differ`` and ``compilations_differ``, and ``replicas_differ`` of models with
    ranks. ``latent`` is for reports alone: in ``accuracy.csv`` such a model has ``pass``. Those that end in ``<n>`` end
    in a batch size there, as a sweep with ``--batch-invariant`` writes them (:func:`status_of`).

    Attributes:
        kind: by which statuses are compared and counted.
        letter, short: for where there is no room.
        meaning: a clause for a first-time reader.
    """

    kind: Kind
    letter: str
    short: str
    meaning: str

    PASS = "pass", Kind.PASS, "P", "passes", "all runs returned the same bits"
    TWO_RUNS_DIFFER = (
        "eager_two_runs_differ",
        Kind.DIFFER,
        "D",
        "two runs differ",
        "two runs returned different results",
    )
    LATENT = "latent", Kind.LATENT, "L", "flaky", "runs agree, but differ under stress"
    COMPILED_RUNS_DIFFER = (
        *("compiled_two_runs_differ", Kind.DIFFER, "R", "compiled runs differ"),
        "two runs of the compiled model returned different results",
    )
    FAIL_ACCURACY = (
        *("fail_accuracy", Kind.DIFFER, "A", "inaccurate"),
        "the compiled model's results are not those of eager mode within the tolerance",
    )
    COMPILATIONS_DIFFER = (
        *("compilations_differ", Kind.DIFFER, "N", "compilations differ"),
        "two compilations of the model returned different results",
    )
    REPLICAS_DIFFER = (
        *("replicas_differ", Kind.DIFFER, "X", "replicas differ"),
        "all runs returned the same bits, and parameters that must be replicas differ between ranks",
    )
    FIRST_RUN_FAIL = "eager_1st_run_fail", Kind.FAIL, "F", "fails", "the first run raised an error"
    FIRST_RUN_OOM = "eager_1st_run_OOM", Kind.FAIL, "M", "out of memory", "the first run ran out of memory"
    SECOND_RUN_FAIL = "eager_2nd_run_fail", Kind.FAIL, "F", "fails", "a later run raised an error"
    SECOND_RUN_OOM = "eager_2nd_run_OOM", Kind.FAIL, "M", "out of memory", "a later run ran out of memory"
    FAIL_TO_LOAD = "model_fail_to_load", Kind.FAIL, "F", "fails", "the model could not be built"
    FAIL_TO_RUN = "eager_fail_to_run", Kind.FAIL, "F", "fails", "the model could not be set up"
    NOT_COMPARABLE = "results_not_comparable", Kind.FAIL, "F", "fails", "the results cannot be compared"
    TIMEOUT = "timeout", Kind.FAIL, "T", "timeout", "exceeded the time limit"
    CRASHED = "crashed", Kind.FAIL, "C", "crashed", "its process died"
    SKIPPED = "pass_due_to_skip", Kind.SKIP, "S", "skipped", "it was not run"
    BATCH_DIFFERS = (
        *("fail_batch_invariance_at_<n>", Kind.DIFFER, "B", "differs by batch"),
        "results at batch size n differ from the full batch",
    )
    POSITION_DIFFERS = "fail_position_invariance", *_LACK, "results change with the position in the batch"
    RIGHT_PADDING_DIFFERS = "fail_right_padding_invariance", *_LACK, "right padding changes the results"
    LEFT_PADDING_DIFFERS = "fail_left_padding_invariance", *_LACK, "left padding changes the results"
    CACHED_DECODE_DIFFERS = "fail_cached_decode_invariance", *_LACK, "cached decoding differs from the full forward"
    CHUNKED_PREFILL_DIFFERS = (
        "fail_chunked_prefill_invariance",
        *_LACK,
        "chunked prefill differs from the full forward",
    )
    INVARIANCE_RUN_FAIL = "fail_to_run_variant", Kind.FAIL, "F", "fails", "the compared run raised an error"
    BATCH_RUN_FAIL = "fail_to_run_at_batch_<n>", Kind.FAIL, "F", "fails", "the run at batch size n raised an error"
    REFERENCE_FAIL = "fail_to_run", Kind.FAIL, "F", "fails", "a compiled run, or that at the full batch size, raised"
    OOM = "OOM", Kind.FAIL, "M", "out of memory", "a run at some batch size ran out of memory"

    def at(self, size: int) -> str:
        """Return the word with this batch size in it: ``fail_batch_invariance_at_4``."""
        return self.replace(_ANY_SIZE, str(size))

    @property
    def ran_out_of_memory(self) -> bool:
        """Out of memory: retried in isolation; peak memory not used for scheduling."""
        return self.letter == "M"

    @property
    def remedy(self) -> str:
        """The remedy for a model that failed; empty for other statuses (a difference has the advice of its cause)."""
        return _REMEDIES.get(self, "see its log" if self.kind is Kind.FAIL else "")


_ANY_SIZE = "<n>"
_IN_PLAIN_PYTHON = "run it in plain Python, where it should raise the same"
_MORE_MEMORY = "give it more memory: fewer --jobs, a smaller --batch-size, or a larger machine"
_REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        Status.FIRST_RUN_FAIL: _IN_PLAIN_PYTHON,
        Status.SECOND_RUN_FAIL: _IN_PLAIN_PYTHON,
        Status.FAIL_TO_LOAD: _IN_PLAIN_PYTHON,
        Status.FAIL_TO_RUN: _IN_PLAIN_PYTHON,
        Status.FIRST_RUN_OOM: _MORE_MEMORY,
        Status.SECOND_RUN_OOM: _MORE_MEMORY,
        Status.NOT_COMPARABLE: "let the model return tensors, numbers, strings, or containers of them",
        Status.TIMEOUT: "see its log for where it hangs, or raise --timeout",
        Status.CRASHED: "run it alone: its native code ended the process, or it was killed",
        Status.REFERENCE_FAIL: _IN_PLAIN_PYTHON,
        Status.INVARIANCE_RUN_FAIL: _IN_PLAIN_PYTHON,
        Status.BATCH_RUN_FAIL: "run it in plain Python at that batch size, or with another --batch-size: another "
        "dimension of its inputs that equals the batch size may be cut, too",
        Status.OOM: _MORE_MEMORY,
    }
)


STATUSES: Mapping[str, Status] = MappingProxyType({str(status): status for status in Status})
"""Word → status."""

WRITTEN = tuple(str(status) for status in Status if status is not Status.LATENT)
"""The words of the column ``accuracy``, without batch sizes."""

FORMER_STATUSES = MappingProxyType({"fail_to_run_in_company": str(Status.INVARIANCE_RUN_FAIL)})
"""Word in older files → status."""

OUT_OF_MEMORY = frozenset(status for status in Status if status.ran_out_of_memory)


_SIZE_AT_THE_END = re.compile(r"(?<=_)[1-9][0-9]{0,8}$")


def family_of(word: str) -> str:
    """Replace the batch size in a status word by ``<n>`` (``fail_batch_invariance_at_<n>``); return ``""`` for a word
    that already ends so."""
    return "" if word.endswith(_ANY_SIZE) else _SIZE_AT_THE_END.sub(_ANY_SIZE, word)


def status_of(word: str) -> Status | None:
    """Return the status of a word, with or without a batch size; ``None`` if it is unknown."""
    return STATUSES.get(family_of(word))


def kind_of(word: str) -> Kind:
    """Return the kind of a status word: ``ABSENT`` for ``""`` (no row), ``FAIL`` for an unknown word (dynamo has more
    than hashbench)."""
    if not word:
        return Kind.ABSENT
    status = status_of(word)
    return status.kind if status is not None else Kind.FAIL


def letter_of(word: str) -> str:
    """Return the letter of a status, for where there is no room: colour is never the only sign."""
    status = status_of(word)
    return status.letter if status is not None else "F" if word else ""


LETTERS: Mapping[str, str] = MappingProxyType({status.letter: status.short for status in Status})
"""Letter → its meaning in a word or two."""

# ------------------------------------------------------------------------------------------------------- invariances


@dataclass(frozen=True, slots=True)
class InvarianceKind:
    """What must not change the results of an item or a token. ``check/variants`` has its function.

    Attributes:
        name: as ``--invariance`` takes it.
        group: word of ``--invariance`` that stands for it.
        differs: status of a model that lacks it; :meth:`Status.at` adds the batch size, if it names one.
        fails: status of a model whose other run fails.
        unit: what is compared.
    """

    name: str
    group: str
    differs: Status
    fails: Status = Status.INVARIANCE_RUN_FAIL
    unit: str = "tokens"

    @property
    def mode(self) -> str:
        """The mode of a sweep that checks it."""
        return f"{self.name}-invariance"


_INVARIANCES = (
    InvarianceKind("batch", "batch", Status.BATCH_DIFFERS, Status.BATCH_RUN_FAIL, unit="items"),
    InvarianceKind("position", "position", Status.POSITION_DIFFERS, unit="items"),
    InvarianceKind("right-padding", "padding", Status.RIGHT_PADDING_DIFFERS),
    InvarianceKind("left-padding", "padding", Status.LEFT_PADDING_DIFFERS),
    InvarianceKind("cached-decode", "decode", Status.CACHED_DECODE_DIFFERS),
    InvarianceKind("chunked-prefill", "decode", Status.CHUNKED_PREFILL_DIFFERS),
)

INVARIANCES: Mapping[str, InvarianceKind] = MappingProxyType(
    {invariance.mode: invariance for invariance in _INVARIANCES}
)
"""Mode → the invariance that it checks."""

# ------------------------------------------------------------------------------------------- origins and confidences


class Origin(StrEnum):
    """Where a difference entered."""

    INPUT = "input"
    STATE = "state"
    SETTINGS = "settings"
    RNG = "rng"
    OUTSIDE = "outside"
    SEQUENCE = "sequence"
    KERNEL = "kernel"
    RANKS = "ranks"
    COLLECTIVE = "collective"
    UNWAITED = "unwaited"


class Perturbation(Word):
    """Runtime condition varied by ``--stress``, which must not change what a run computes, and two that may: a model
    may read the clock or draw from the system's entropy.

    Attributes:
        meaning: what differed between the runs, in words.
        matters: True if a model may depend on it.
    """

    meaning: str
    matters: bool

    THREADS = "threads", "more threads than cores in both runs", False
    LOAD = "load", "a busy machine", False
    MEMORY = "memory", "different content in fresh memory", False
    ADDRESS = "address", "other addresses of memory and objects", False
    PROCESS = "process", "another process, or one with other runs before", False
    COLLECTOR = "collector", "garbage collection at other moments", False
    TOGETHER = "together", "several perturbations together; none was seen to do it alone", False
    CLOCK = "clock", "another time", True
    ENTROPY = "entropy", "other random numbers from the system", True


LATENT = frozenset(str(perturbation) for perturbation in Perturbation if not perturbation.matters)
"""Perturbations under which a difference is latent: the model is flaky."""

OPAQUE: Mapping[str, str] = MappingProxyType(
    {"compiled code": 'To trace it, run it eagerly: torch.compiler.set_stance("force_eager").'}
)
"""Calls that a trace cannot look into → what to do, as a sentence. No kernel behind them is named."""


class Confidence(Word):
    """How firmly the evidence supports a cause."""

    meaning: str

    PROVEN = "proven", "a controlled experiment isolates the mechanism"
    LIKELY = (
        "likely",
        "the evidence fits it, but an experiment that would exclude another cause is missing or too small",
    )
    OPEN = "open", "no experiment decides it"


class Limit(Word):
    """What cuts a diagnosis short, as in the notes of experiments; ``meaning`` in words, ``remedy`` with ``{flag}`` for
    the flag or setting of the caller."""

    meaning: str
    remedy: str

    BUDGET = (
        *("budget", "the time for experiments ended"),
        "The time for experiments ended before the cause was certain: give them more ({flag})",
    )


# ------------------------------------------------------------------------------------------------------------ causes


@dataclass(frozen=True, slots=True)
class Remedy:
    """One remedy for a cause: a clause that begins with a verb.

    ``tests`` are the experiments that apply it temporarily: if those of them that were run still differ, the
    remedy was measured not to help. Empty: no experiment tests it.
    """

    clause: str
    tests: tuple[str, ...] = ()


_SOURCES = (
    Remedy("generator", ("generators",)),
    Remedy("clock", ("clocks",)),
    Remedy("file"),
    Remedy("entropy", ("entropy",)),
)
"""Possible sources of a value that differs."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A mechanism, as ``docs/causes.md`` explains it.

    Attributes:
        meaning: a sentence for a first-time reader.
        remedies: what to do, the best first; ``{named}`` is what an experiment singled out, or the ``sources`` that
            none has ruled out.
        sources: what ``{named}`` may be.
        pytest_advice: replaces the remedies in a failed test, where flags of ``sweep`` mean nothing.
        in_kernel: inside a kernel, where ``use_deterministic_algorithms`` may help.
        decided: False if it contradicts no other cause, since the deciding experiments were not made or decided
            nothing.
        batch: a difference of one item among other items, not of two equal runs
            (:mod:`hashbench.extensions.invariance.cause` decides it).
        of_data: in the code that makes batches; what was recorded of that code decides it, no experiment on a model.
        code: lines of Python to write instead, for the code around a model.
    """

    name: str
    meaning: str
    remedies: tuple[Remedy, ...]
    sources: tuple[Remedy, ...] = _SOURCES
    pytest_advice: str = ""
    in_kernel: bool = False
    decided: bool = True
    batch: bool = False
    of_data: bool = False
    code: str = ""

    @property
    def words(self) -> str:
        """The name as words: ``accumulation order``."""
        return self.name.replace("_", " ")

    @property
    def advice(self) -> str:
        """All remedies as a sentence without its full stop, with ``{named}`` in it."""
        return sentence_of(self.remedies)

    @property
    def unnamed(self) -> str:
        """All sources: the value of ``{named}`` if no experiment was made."""
        return named_by(self.sources)


def sentence_of(remedies: Sequence[Remedy]) -> str:
    """Join the clauses of ``remedies`` to one sentence, without its full stop."""
    text = ", or ".join(remedy.clause for remedy in remedies)
    return text[:1].upper() + text[1:]


def named_by(sources: Sequence[Remedy]) -> str:
    """Enumerate the clauses of ``sources``: ``generator, clock or file``."""
    *first, last = (source.clause for source in sources)
    return f"{', '.join(first)} or {last}" if first else last


_CAUSES = (
    Cause(
        "accumulation_order",
        "Parallel accumulation: the order of additions varies, so rounding does.",
        (
            Remedy("use a deterministic algorithm", ("deterministic",)),
            Remedy("sort by target and sum the segments", ("deterministic", "one_thread", "one_worker")),
            Remedy("expect results that differ in their last bits"),
        ),
        in_kernel=True,
    ),
    Cause(
        "write_race",
        "Several values are written to the same location, and the last writer varies.",
        (
            Remedy(
                "give every target one writer: drop duplicate indices, or combine their values before writing "
                "(index_add, scatter_reduce)"
            ),
        ),
        in_kernel=True,
    ),
    Cause(
        "overlapping_views",
        "An in-place op overwrites memory that it reads through another view.",
        (
            Remedy("clone what is read before the in-place op: x.add_(x.t().clone())", ("copied_sources",)),
            Remedy("write out of place", ("copied_sources",)),
        ),
        in_kernel=True,
    ),
    Cause(
        "unordered_output",
        "The output is a permutation whose order is unspecified.",
        (Remedy("sort what the op returns"), Remedy("let no later code depend on the order")),
        in_kernel=True,
    ),
    Cause(
        "uninitialized_memory",
        "Uninitialised memory is read: allocated and never written.",
        (Remedy("write all of the memory before it is read: zeros or full in place of empty, padding filled"),),
    ),
    Cause(
        "alignment",
        "The address of the inputs selects the kernel's code path.",
        (
            Remedy(
                "copy the op's inputs into memory that torch allocated, contiguous and from its start, so that every "
                "run takes the same path",
                ("fresh_memory",),
            ),
            Remedy("compute it with an op that takes one path at every address"),
        ),
        in_kernel=True,
    ),
    Cause(
        "algorithm_selection",
        "A library's choice of algorithm varies from run to run, and each algorithm rounds differently.",
        (
            Remedy("let no timing choose the algorithm", ("clocks",)),
            Remedy(
                "set torch.backends.cudnn.benchmark = False and torch.backends.cudnn.deterministic = True",
                ("cudnn_deterministic",),
            ),
            Remedy("keep to one algorithm and one version of the library"),
        ),
        in_kernel=True,
    ),
    Cause(
        "contention",
        "The result depends on the load of the machine.",
        (
            Remedy("remove time limits and dependence on free resources from the op"),
            Remedy("run it alone on the machine, and report it to its authors"),
        ),
        in_kernel=True,
    ),
    Cause(
        "rng",
        "A random generator was not reset to the same state.",
        (
            Remedy("reset {named} at the start of every run", ("generators",)),
            Remedy(
                "seed the generator with a fixed number, not from the system's entropy or a clock (torch.seed(), "
                "Generator.seed(), a generator made without a seed)",
                ("entropy", "clocks"),
            ),
            Remedy("draw from torch's default generator, which is reset", ("generators", "entropy", "clocks")),
        ),
        sources=(Remedy("the generator that is drawn from"),),
        code="torch.manual_seed(seed)  # before the first step",
    ),
    Cause(
        "outside_value",
        "A value from outside torch differs: a clock, entropy, a file.",
        (Remedy("pass {named} in as an argument that is the same in every run"),),
        sources=(Remedy("the value"),),
        code="# no clock, os.urandom, uuid or set where samples and their order are made: derive all from the seed",
    ),
    Cause(
        "surviving_state",
        "State left by an earlier run changed a later one.",
        (
            Remedy("keep caches and counters in the module, where a deep copy takes them along", ("fresh_process",)),
            Remedy("clear them at the start of a run", ("fresh_process",)),
        ),
    ),
    Cause(
        "call_order",
        "The same ops ran in another order, or with other data flow between them.",
        (
            Remedy("iterate over lists or sorted keys in place of sets", ("fixed_order",)),
            Remedy(
                "join the results of threads in the order they were started, each drawing from a generator of its own",
                ("one_worker",),
            ),
        ),
    ),
    Cause(
        "garbage_collection",
        "The garbage collector freed reference cycles at another moment.",
        (
            Remedy("break the cycles, or close what they hold explicitly", ("no_collector",)),
            Remedy(
                "let no result depend on when an object is removed (__del__, weak references, gc.get_objects)",
                ("no_collector",),
            ),
        ),
    ),
    Cause(
        "control_flow",
        "An earlier value differed, and the program took another branch.",
        (
            Remedy("make the branch condition the same in every run ({named})"),
            Remedy("compute both branches and select with torch.where"),
        ),
    ),
    Cause(
        "input_pipeline",
        "The model's inputs differ before the first op.",
        (
            Remedy("seed the source of the inputs ({named})", ("generators", "entropy", "clocks")),
            Remedy("save the inputs once and load them for every run"),
        ),
    ),
    Cause(
        "initial_state",
        "Parameters or buffers differ before the first op.",
        (
            Remedy("seed the initialisation of parameters and buffers ({named})", ("generators", "entropy", "clocks")),
            Remedy("load parameters and buffers from one state_dict for every run"),
        ),
        code="torch.manual_seed(seed)  # before the model is made, which import does too early\n"
        'model.load_state_dict(torch.load("initial.pt", weights_only=True))  # or load the weights',
    ),
    Cause(
        "external_mutation",
        "Memory was written without torch's knowledge.",
        (
            Remedy("stop writing into a tensor's memory from outside torch ({named}): copy it before sharing it"),
            Remedy("wait for threads that fill the tensor", ("one_worker",)),
        ),
    ),
    Cause(
        "global_settings",
        "A run changed a global torch setting.",
        (Remedy("set torch's global settings once before the model runs, and restore what the model changes"),),
        code="torch.backends.cudnn.benchmark = False\ntorch.use_deterministic_algorithms(True)",
    ),
    Cause(
        "other_ranks",
        "The runs diverge in or after data received from other ranks; one rank's trace does not show where it began.",
        (
            Remedy(
                "compare the two traces of each rank, and look first at a rank whose detail names no collective (if "
                "all do, at the input of each rank to it)"
            ),
            Remedy("run the model in a group of one rank"),
        ),
        decided=False,
    ),
    Cause(
        "arrival_order",
        "A collective gives what depends on the order in which the data of the ranks arrive.",
        (
            Remedy("name the source of each receive (src=), or sort what was received", ("fixed_source",)),
            Remedy("exclude NVLink SHARP (NCCL_ALGO=^NVLS)", ("nvls_off",)),
            Remedy(
                "fix NCCL's algorithm and protocol (NCCL_ALGO=Ring, NCCL_PROTO=Simple)", ("nccl_ring", "nccl_simple")
            ),
            Remedy("use another backend (gloo) for this collective", ("gloo",)),
        ),
    ),
    Cause(
        "unwaited_read",
        "The program reads what a collective receives before its data have arrived.",
        (Remedy("wait for the Work (work.wait()) before its output is used"),),
    ),
    Cause(
        "unreduced_replica",
        "A gradient that every rank computes from its own data reaches a replicated parameter without being reduced.",
        (
            Remedy(
                "reduce the gradient of {named} over the ranks before the optimizer's step (dist.all_reduce, or "
                "DistributedDataParallel outside no_sync)"
            ),
        ),
        sources=(Remedy("the parameter"),),
    ),
    Cause(
        "rank_seed",
        "A generator has another state on each rank, and what it draws must be the same on all of them.",
        (
            Remedy("seed the generator with the same number on every rank, or draw on one rank and broadcast"),
            Remedy("draw before the parameters are made replicas (DistributedDataParallel, broadcast)"),
        ),
    ),
    Cause(
        "opaque_kernel",
        "A custom op gives different outputs for equal inputs, and no experiment explains it.",
        (
            Remedy(
                "test the operator by itself with the repro: look for native threads and direct system reads, which no "
                "experiment controls"
            ),
        ),
        in_kernel=True,
    ),
    Cause(
        "opaque_producer",
        "The op's input was produced by code that torch does not see.",
        (
            Remedy(
                "find the code that fills this memory without torch (NumPy, a C extension, another thread) and make it "
                "write the same values"
            ),
        ),
    ),
    Cause(
        "representation",
        "The values are equal; only their bits differ (the sign of a zero, the payload of a NaN).",
        (
            Remedy(
                "compare with torch.equal, for which 0.0 equals -0.0, or add 0.0 to the result; for equal bits, find "
                "the mechanism"
            ),
        ),
        in_kernel=True,
    ),
    Cause(
        "masked_by_tracing",
        "The runs differ only untraced: with the tracer they agree.",
        (Remedy("compare results of untraced runs, and bisect the model"),),
    ),
    Cause(
        "batch_coupling",
        "An item's result depends on the content of the other items in its batch.",
        (
            Remedy(
                "let nothing be computed over the items of a batch (statistics, a scale, a capacity, a mask that "
                "leaks): {named}"
            ),
        ),
        sources=(Remedy("torch.nn.Module.eval() for batch norm; compute all else per item"),),
        in_kernel=True,
        batch=True,
    ),
    Cause(
        "shape_dependent_kernel",
        "The number of items selects how the kernel computes each of them, and each way rounds differently.",
        (
            Remedy("give the kernel the same number of items each time"),
            Remedy("expect results that differ in their last bits: {named}"),
        ),
        sources=(Remedy("no other remedy was measured to work"),),
        in_kernel=True,
        batch=True,
    ),
    Cause(
        "unreproduced",
        "It differed in the sweep and never again.",
        (
            Remedy(
                "run it more often (--runs 20 --replays 200), also under the load of the sweep, before accepting or "
                "dismissing it"
            ),
        ),
        # A function cannot be built again in a fresh process, by which a sweep proves that a state outlived a run:
        # there that is a difference that never comes again.
        pytest_advice="Look for what the first run left behind (a cache, a counter, a module in a closure); else run "
        "it more often (runs=20, hashbench_replays = 200)",
        decided=False,
    ),
    Cause(
        "unknown",
        "No experiment decides it; all are listed as evidence.",
        (Remedy("look at the evidence and the repro, and repeat the experiments more often (--replays)"),),
        pytest_advice="Look at the evidence, and repeat the experiments more often (hashbench_replays)",
        in_kernel=True,
        decided=False,
        code="torch.use_deterministic_algorithms(True)\n"
        "torch.backends.cudnn.benchmark = False  # the cause: hashbench sweep --suite FILE.py --training",
    ),
)


def _of_data(name: str, meaning: str, *code: str) -> Cause:
    return Cause(name, meaning, (), of_data=True, code="\n".join(code))


_CAUSES_OF_DATA = (
    _of_data(
        *("unseeded_shuffle", "The order of samples is drawn from a generator that was not seeded."),
        "DataLoader(dataset, shuffle=True, generator=torch.Generator().manual_seed(seed))",
        "random.Random(seed).shuffle(files)  # where the dataset shuffles by itself",
    ),
    _of_data(
        *("unsorted_listing", "Files are taken in the order in which the system lists them."),
        "files = sorted(os.listdir(folder))  # likewise glob, Path.glob, os.walk, os.scandir",
    ),
    _of_data(
        *("set_order", "An order or a numbering follows that of a set, and so Python's hash seed."),
        "for name in sorted(names):  # not: for name in set(names)",
    ),
    _of_data(
        *("string_hash", "A value follows hash() of a string, which differs in each process."),
        "seed = zlib.crc32(name.encode())  # not hash(name), which differs in each process;",
        '# or int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")',
    ),
    _of_data(
        *("reseeded", "A generator was seeded again from entropy, after it had been seeded."),
        "# seed once, at the start: later no torch.seed(), random.seed() or manual_seed(time.time())",
    ),
    _of_data(
        *("import_order", "Modules are imported in a different order."),
        "for name in sorted(plugins):",
        "    importlib.import_module(name)",
    ),
    _of_data(
        *("random_dataset", "The dataset draws from a generator that was not seeded."),
        "def __getitem__(self, index):",
        "    generator = np.random.default_rng((seed, index))  # or draw from torch, which is seeded in every worker",
    ),
    _of_data(
        *("random_transform", "A transform or collate_fn draws from a generator that was not seeded."),
        "torch.manual_seed(seed)  # before the loader is iterated; or, for the loader alone:",
        "DataLoader(dataset, generator=torch.Generator().manual_seed(seed))  # workers derive their seeds from it",
    ),
    _of_data(
        *("worker_seeds", "worker_init_fn seeds the generators of a worker differently in each run."),
        "def worker_init_fn(worker):",
        "    worker_seed = torch.initial_seed() % 2**32  # derived from the loader's generator",
        "    numpy.random.seed(worker_seed)",
        "    random.seed(worker_seed)",
    ),
    _of_data(
        *("unseeded_construction", "The dataset or a transform was made with numbers drawn before the seeding."),
        "torch.manual_seed(seed)  # likewise random and numpy: before the dataset is made;",
        "# import is too early for draws",
    ),
    _of_data(
        *("unseeded_loader", "A loader that is no DataLoader draws from a generator that was not seeded."),
        "rng = random.Random(seed)  # draw from it all that batches and their order are made of",
    ),
    _of_data(
        *("modified_later", "Batches or weights were modified in place after they were made."),
        "batch = [tensor.clone() for tensor in batch]  # do not change weights or batches in place",
    ),
)

CAUSES: Mapping[str, Cause] = MappingProxyType({cause.name: cause for cause in (*_CAUSES, *_CAUSES_OF_DATA)})
"""Name → cause."""

CANDIDATES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        Origin.INPUT: ("input_pipeline",),
        Origin.STATE: ("initial_state",),
        Origin.SETTINGS: ("global_settings",),
        Origin.RNG: ("rng",),
        Origin.OUTSIDE: ("outside_value", "external_mutation"),
        Origin.SEQUENCE: ("control_flow", "call_order"),
        Origin.KERNEL: tuple(
            cause.name
            for cause in _CAUSES
            if cause.in_kernel and cause.decided and not cause.batch and cause.name != "representation"
        ),
        Origin.RANKS: ("other_ranks",),
        Origin.COLLECTIVE: ("arrival_order",),
        Origin.UNWAITED: ("unwaited_read",),
    }
)
"""Origin → causes that it suggests before any experiment was made, the most frequent first: a heuristic. Others are
possible, as a race that shows as another order of calls."""

# ------------------------------------------------------------------------------------------------------- experiments

Place = tuple[str, str]
"""The name of an experiment and what it repeats, one of :data:`REPEATED`."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """What an experiment repeats: one trial in words (``unit``), in a table (``short``), and as a heading."""

    unit: str
    short: str
    heading: str


REPEATED: Mapping[str, Repeated] = MappingProxyType(
    {
        "call": Repeated("replays", "call", "The captured call of this kernel, repeated"),
        "pair": Repeated("pairs of runs", "whole model", "Two runs of the whole model, repeated"),
        "process": Repeated("process", "fresh processes", "Runs in fresh processes"),
        "collective": Repeated("repetitions", "collective", "The collective, repeated with the saved contributions"),
        "items": Repeated("comparisons", "batch", "The call with an item in another batch"),
        "compilation": Repeated("compilations", "compilation", "The model compiled anew, with one change each"),
    }
)


class Role(Enum):
    """The role of an experiment. ``STEADY`` ones hold one thing constant, which can remove a difference but not cause
    one. ``FLAG`` and ``LIBRARY`` ones run another kernel than the sweep did; ``PROCESS`` ones compare runs of different
    processes, whose hash seeds differ."""

    BASE = "repeats the same with nothing changed: what the others are compared with"
    STEADY = "holds one thing still"
    CONTENT = "changes the inputs so that one mechanism has no effect"
    DISTURB = "changes what should not matter: it may bring a difference about"
    FLAG = "sets deterministic algorithms"
    LIBRARY = "makes another library, algorithm or precision compute"
    PROCESS = "starts anew in fresh processes"
    COMPILER = "compiles another program"


@dataclass(frozen=True, slots=True)
class Experiment:
    """One controlled experiment: the same thing repeated with one change.

    Attributes:
        on: what it may repeat (``items``: the call, with other items of a batch; ``compilation``: the compilation of
            the model, under one of ``inductor.fallbacks.CHANGES``).
        phrase: the change, after a count (``0 of 20 with one thread``); that of a ``BASE`` or ``PROCESS`` experiment
            includes its unit (``20 of 20 unmodified replays``).
        cause: follows if this one alone removes the difference, or a disturbance causes it.
        holds_value: holds a value constant, which may choose a path, rather than an order.
        rate_of: the word for the trials of a baseline that a rate may be taken from.
        proof: the count is itself the proof: these words where it differs, and where not.
        devices: types of device that have it (empty: all; ROCm's are called ``cuda``, too).
        weight: its share of the time.
        demo: what a repro script that repeats it does.
    """

    name: str
    on: tuple[str, ...]
    phrase: str
    role: Role
    cause: str = ""
    holds_value: bool = False
    rate_of: str = ""
    proof: tuple[str, str] | None = None
    devices: tuple[str, ...] = ()
    weight: int = 1
    demo: str = ""

    def runs_on(self, kind: str) -> bool:
        """Return True if devices of this type (``cuda``) have it."""
        return not self.devices or kind in self.devices

    @property
    def has_unit(self) -> bool:
        """True if the phrase names the trials."""
        return self.role in (Role.BASE, Role.PROCESS)

    @property
    def holds(self) -> bool:
        """True if it holds one thing outside torch constant, which is the cause if the difference is then gone."""
        return self.role in (Role.STEADY, Role.PROCESS) and bool(self.cause)


_CALL, _PAIR, _BOTH, _PROCESS = ("call",), ("pair",), ("call", "pair"), ("process",)
_ITEMS, _CALL_AND_ITEMS, _EVERYWHERE = ("items",), ("call", "items"), ("call", "pair", "items")
_COMPILATION, _CUDA, _WITH_STREAMS = ("compilation",), ("cuda",), ("cuda", "xpu")
_COLLECTIVE = ("collective",)

_EXPERIMENTS = (
    Experiment(
        *("repeat", _CALL, "unmodified replays", Role.BASE),
        rate_of="replays",
        demo="Makes the call again and again, from inputs that are restored in place.",
    ),
    Experiment("one_thread", (*_EVERYWHERE, "compilation"), "with one thread", Role.STEADY, devices=("cpu",)),
    Experiment(
        "exact_values", _CALL_AND_ITEMS, "with integer-valued inputs (sums are exact in any order)", Role.CONTENT
    ),
    Experiment("copied_sources", _CALL, "with aliased inputs copied first", Role.CONTENT),
    Experiment(
        *("poison", _BOTH, "with different content in uninitialised memory", Role.DISTURB),
        proof=("depends on uninitialised memory", "does not depend on it"),
        weight=3,  # few replays show nothing
        demo="Makes the call with memory full of one byte handed out to it, then full of another.",
    ),
    Experiment("generators", _BOTH, "with all RNG states restored", Role.STEADY, "rng", holds_value=True),
    Experiment("entropy", _BOTH, "with constant entropy", Role.STEADY, "outside_value", holds_value=True),
    Experiment("clocks", _BOTH, "with a deterministic clock", Role.STEADY, "outside_value", holds_value=True),
    Experiment("one_worker", _BOTH, "with the model's threads one at a time", Role.STEADY, "call_order"),
    Experiment("fixed_source", _PAIR, "with each receive from a fixed source", Role.STEADY, "arrival_order"),
    Experiment("no_collector", _PAIR, "without the garbage collector", Role.STEADY, "garbage_collection"),
    Experiment(
        *("moved", _CALL, "with inputs moved by a few bytes", Role.DISTURB, "alignment"),
        proof=("another outcome", "agrees too"),
        demo="Makes the call with its inputs moved in memory by a few bytes, strides kept.",
    ),
    Experiment(
        *("busy", _CALL, "while other threads keep the processor busy", Role.DISTURB, "contention"),
        demo="Makes the call again and again while other threads keep all cores busy.",
    ),
    Experiment(
        *("busy_stream", _CALL, "while another stream keeps the device busy", Role.DISTURB, "contention"),
        devices=_WITH_STREAMS,
        demo="Makes the call again and again while a second stream keeps the device busy.",
    ),
    Experiment(
        *("fresh_memory", _CALL, "with inputs in new memory", Role.DISTURB),
        demo="Makes the call again and again, with its inputs in other memory each time.",
    ),
    Experiment("deterministic", _CALL_AND_ITEMS, "with deterministic algorithms", Role.FLAG),
    Experiment("deterministic_fill", _CALL, "with deterministic algorithms and filled memory", Role.FLAG),
    Experiment("nondeterministic", _CALL, "without deterministic algorithms", Role.FLAG),
    # Smallest change first.
    Experiment("cudnn_deterministic", _CALL, "with cuDNN's deterministic algorithms", Role.LIBRARY, devices=_CUDA),
    Experiment("onednn_deterministic", _CALL, "with oneDNN's deterministic algorithms", Role.LIBRARY, devices=("xpu",)),
    Experiment("onednn_off", _CALL_AND_ITEMS, "without oneDNN", Role.LIBRARY, devices=("cpu",)),
    Experiment("cudnn_off", _CALL, "without cuDNN", Role.LIBRARY, devices=_CUDA),
    Experiment("cudnn_benchmark", _CALL, "while cuDNN tries algorithms out", Role.LIBRARY, devices=_CUDA),
    Experiment(
        *("sdpa_math", _CALL_AND_ITEMS, "with the math implementation of attention", Role.LIBRARY),
        devices=_WITH_STREAMS,
    ),
    Experiment("sdpa_flash", _CALL, "with flash attention", Role.LIBRARY, devices=_WITH_STREAMS),
    Experiment("sdpa_efficient", _CALL, "with memory-efficient attention", Role.LIBRARY, devices=_CUDA),
    Experiment("sdpa_cudnn", _CALL, "with cuDNN's attention", Role.LIBRARY, devices=_CUDA),
    Experiment("tf32_off", _CALL, "without TF32", Role.LIBRARY, devices=_CUDA),
    Experiment("tf32_on", _CALL, "with TF32", Role.LIBRARY, devices=_CUDA),
    Experiment("pair", _PAIR, "pairs of runs", Role.BASE, rate_of="pairs"),
    Experiment("untraced", _PAIR, "pairs of untraced runs", Role.BASE),
    Experiment("within_process", _PROCESS, "pairs of runs in a fresh process each", Role.BASE, rate_of="processes"),
    # Last, as the least specific: a fresh process also resets every generator, and in its first run threads may finish
    # in the same order because they all start cold.
    Experiment(
        *("fresh_process", _PROCESS, "first runs of fresh processes", Role.PROCESS, "surviving_state"),
        holds_value=True,
    ),
    Experiment(
        *("fixed_order", _PROCESS, "first runs of fresh processes with hash seed and addresses fixed", Role.PROCESS),
        cause="call_order",
    ),
    Experiment(
        *("contributions", _COLLECTIVE, "repetitions with the saved contributions", Role.BASE), rate_of="collectives"
    ),
    Experiment("gloo", _COLLECTIVE, "with the gloo backend", Role.LIBRARY),
    Experiment("nvls_off", _COLLECTIVE, "without NVLink SHARP (NCCL_ALGO=^NVLS)", Role.LIBRARY, devices=_CUDA),
    Experiment("nccl_ring", _COLLECTIVE, "with NCCL_ALGO=Ring", Role.LIBRARY, devices=_CUDA),
    Experiment("nccl_simple", _COLLECTIVE, "with NCCL_PROTO=Simple", Role.LIBRARY, devices=_CUDA),
    Experiment("same_items", _ITEMS, "repetitions with the same items", Role.BASE),
    Experiment("other_number", _ITEMS, "other numbers of items", Role.BASE),
    Experiment("as_in_runs", _ITEMS, "repetitions of the call as both runs made it", Role.BASE),
    Experiment("same_strides", _ITEMS, "with contiguous inputs", Role.CONTENT),
    Experiment("other_content", _ITEMS, "with different content in the other items", Role.CONTENT),
    Experiment("other_places", _ITEMS, "with the items at other places of the batch", Role.CONTENT),
    # Smallest change first.
    Experiment("eager_op", _COMPILATION, "with the op run eagerly", Role.COMPILER),
    Experiment("no_decomposition", _COMPILATION, "without the op's decomposition", Role.COMPILER),
    Experiment("no_pass", _COMPILATION, "without the pass", Role.COMPILER),
    Experiment("scalar_code", _COMPILATION, "without vectorization (cpp.simdlen=1)", Role.COMPILER),
    Experiment("no_fusion", _COMPILATION, "without fusion", Role.COMPILER),
    Experiment("no_buffer_reuse", _COMPILATION, "without reuse of buffers", Role.COMPILER),
    Experiment("no_inplace_buffers", _COMPILATION, "without kernels that write in place", Role.COMPILER),
    Experiment(
        *("precision_casts", _COMPILATION, "with casts to low precision kept (emulate_precision_casts)", Role.COMPILER)
    ),
)

EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType({experiment.name: experiment for experiment in _EXPERIMENTS})
"""Name → experiment. On a call that differs when it is repeated they are run in this order; on one that does not,
disturbances go first."""


def places(experiments: Iterable[Experiment], *on: str) -> tuple[Place, ...]:
    """Return the places of these experiments, grouped by what is repeated."""
    known = tuple(experiments)
    return tuple((experiment.name, kind) for kind in on or REPEATED for experiment in known if kind in experiment.on)
