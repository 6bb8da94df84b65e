"""What runs leave: records, leaves, results, traces and failures. Pure; imports no torch."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

TRACE_SCHEMA = 1
"""Version of the text form of a trace; a file of another version is refused."""


PENDING = "pending"
"""Value of a digest of data from other ranks that had not arrived when the trace ended; it says nothing of the
content."""


BESIDE_DTENSORS = "beside DTensors"
"""Placement of a plain parameter of a module that has ``DTensor`` parameters as well: a replica by convention."""


SAME_BUILD = "equal"
"""Value of ``second_build`` where weights and inputs of two builds from one seed are equal."""


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
        launch: configuration of a Triton kernel, as autotuning chose it: ``XBLOCK 1024, 4 warps, 1 stage``.
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
    launch: str = ""


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
        source: line of the model's code that raised, or called what did; empty where none is known.
    """

    error: str
    out_of_memory: bool = False
    not_comparable: bool = False
    op: str = ""
    nondeterministic_op: str = ""
    stage: str = ""
    source: str = ""
