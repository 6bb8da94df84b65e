"""Align the calls of two logs of DebugMode, and compare the hashes of each pair.

What a call overwrites, it does not read: the target of ``fill_``, an ``out=``, a kernel's argument that differs before
the call and agrees after it. It may be fresh memory, whose content is another in every run. The hash of a collective is
taken when its call returns, maybe before its data have come, and is not compared; that of ``wait_tensor`` is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from hashbench.core.divergence.align import OVERWRITING_ALL, align
from hashbench.core.records import OpRecord
from hashbench.core.trace.collective_ops import COLLECTIVE_OPS, LOCAL, NAMESPACES, UNKNOWN, WAIT
from hashbench.extensions.debugmode.log import (
    ANNOTATION,
    PLACEMENT,
    TENSOR,
    TRITON,
    Hashes,
    LoggedCall,
    kind_of_hash,
    says_nothing,
)

_WRITTEN_BY_KERNELS = "out_ptr"
"""Prefix of the arguments that Inductor's kernels write and do not read (``torch/_inductor/codegen/common.py``)."""


class Sameness(StrEnum):
    """Whether two runs agree, as far as hashes say."""

    SAME = "same"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


HashPair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class PairedCall:
    """A call of both runs, or of one alone.

    Attributes:
        node: id, as a record's: ``module/op#count``.
        first, second: the call in each run; ``None`` if that run did not make it.
        inputs: whether what it read agrees.
        outputs: whether what it left agrees.
        arguments: whether all arguments that are no tensors agree.
        read: differing hashes of inputs, by argument.
        left: differing hashes of outputs, by path.
    """

    node: str
    first: LoggedCall | None
    second: LoggedCall | None
    inputs: Sameness = Sameness.UNKNOWN
    outputs: Sameness = Sameness.UNKNOWN
    arguments: bool = True
    read: Mapping[str, HashPair] = field(default_factory=dict)
    left: Mapping[str, HashPair] = field(default_factory=dict)

    @property
    def call(self) -> LoggedCall:
        """The call in the first run that made it."""
        call = self.first or self.second
        if call is None:
            raise ValueError("a pair of no calls")
        return call

    @property
    def alone(self) -> bool:
        """True if one run alone made it, and it computes something."""
        return (self.first is None or self.second is None) and not self.is_remark

    @property
    def is_remark(self) -> bool:
        """True for an annotation or a placement, which compute nothing."""
        return self.call.kind in (ANNOTATION, PLACEMENT)

    @property
    def is_exchange(self) -> bool:
        """True for an op that exchanges data with other ranks, or waits for them."""
        return exchange(self.call) not in ("", LOCAL)

    @property
    def shows(self) -> bool:
        """True if it left something else, or was given another argument and what it left is not known."""
        if self.first is None or self.second is None or self.is_remark:
            return False
        if self.is_exchange:
            return self.outputs is Sameness.DIFFERENT
        return self.outputs is Sameness.DIFFERENT or (not self.arguments and self.outputs is Sameness.UNKNOWN)

    @property
    def clear(self) -> bool:
        """True if all that it was given agrees."""
        return self.inputs is Sameness.SAME and self.arguments

    @property
    def differs(self) -> bool:
        """True if anything in it differs between the logs."""
        if self.first is None or self.second is None:
            return True
        return not self.arguments or Sameness.DIFFERENT in (self.inputs, self.outputs) or self.moved

    @property
    def moved(self) -> bool:
        """True if it stands at another depth, has a tensor argument of another shape, or less was recorded of it."""
        if self.first is None or self.second is None:
            return False
        return _recorded(self.first) != _recorded(self.second)


def _recorded(call: LoggedCall) -> tuple[object, ...]:
    hashed = [None if hashes is None else frozenset(hashes) for hashes in (call.inputs, call.outputs)]
    return call.depth, call.arguments, bool(call.output), *hashed


def pair_calls(first: Sequence[LoggedCall], second: Sequence[LoggedCall]) -> Iterator[PairedCall]:
    """Yield the calls of two runs in order, aligned as the records of traces are: by kind, module and name."""
    records = [_records(first), _records(second)]
    for at_first, at_second in align(*records):
        a = None if at_first is None else first[at_first]
        b = None if at_second is None else second[at_second]
        node = records[0][at_first].id if at_first is not None else records[1][at_second or 0].id
        yield PairedCall(node, a, b) if a is None or b is None else _judged(node, a, b)


def _records(calls: Iterable[LoggedCall]) -> list[OpRecord]:
    """Return what the alignment of traces reads: calls match if kind, module and name agree."""
    seen: Counter[str] = Counter()
    records = []
    for call in calls:
        name = f"{call.module}/{call.name}"
        records.append(OpRecord(f"{name}#{seen[name]}", call.kind, None, call.module, call.name))
        seen[name] += 1
    return records


def _judged(node: str, a: LoggedCall, b: LoggedCall) -> PairedCall:
    inputs, read = _compared(_read_by(a, b), _read_by(b, a))
    outputs, left = _compared(a.outputs, b.outputs)
    if a.output and b.output and a.output != b.output:
        outputs, left = Sameness.DIFFERENT, left or {"": (a.output, b.output)}
    elif outputs is Sameness.SAME and not a.outputs and (not a.output or TENSOR.search(a.output)):
        outputs = Sameness.UNKNOWN  # nothing hashed, and no number in words either
    arguments = TENSOR.sub("t", a.arguments) == TENSOR.sub("t", b.arguments)
    if (kind := exchange(a)) not in ("", LOCAL):
        outputs = outputs if kind == WAIT else Sameness.UNKNOWN
        return PairedCall(node, a, b, Sameness.UNKNOWN, outputs, arguments, {}, left)
    return PairedCall(node, a, b, inputs, outputs, arguments, read, left)


def exchange(call: LoggedCall) -> str:
    """Return what an op of ``torch.distributed`` exchanges, a word of
    :data:`~hashbench.core.trace.collective_ops.KINDS`; empty for any other call."""
    op = call.name.partition(".")[0]
    line = COLLECTIVE_OPS.get(op)
    if line is not None:
        return line.kind
    return UNKNOWN if op.partition("::")[0] in NAMESPACES else ""


def _short(call: LoggedCall) -> str:
    """Return the name of an op without namespace and overload."""
    return call.name.partition("::")[2].partition(".")[0]


def _read_by(call: LoggedCall, other: LoggedCall) -> Hashes | None:
    """Return the hashes of what a call reads, without what it overwrites."""
    if call.inputs is None:
        return None
    return {name: value for name, value in call.inputs.items() if not _overwrites(call, other, name)}


def _overwrites(call: LoggedCall, other: LoggedCall, name: str) -> bool:
    """Return True if what an argument held before the call does not matter."""
    if call.kind != TRITON:
        return name.startswith("out") or (name.partition(".")[0] == "0" and _short(call) in OVERWRITING_ALL)
    before = [(first.inputs or {}).get(name) for first in (call, other)]
    after = [(first.outputs or {}).get(name) for first in (call, other)]
    return name.startswith(_WRITTEN_BY_KERNELS) or (
        None not in before and before[0] != before[1] and after[0] == after[1] is not None
    )


def _compared(a: Hashes | None, b: Hashes | None) -> tuple[Sameness, Mapping[str, HashPair]]:
    """Compare the hashes of one call; return those that differ."""
    if a is None or b is None:
        return Sameness.UNKNOWN, {}
    names = dict.fromkeys([*a, *b])
    differing = {n: (a.get(n, "absent"), b.get(n, "absent")) for n in names if a.get(n) != b.get(n)}
    if differing:
        return Sameness.DIFFERENT, differing
    kinds = {kind_of_hash(value) for value in a.values()}
    mute = {kind_of_hash(value) for value in a.values() if says_nothing(value)}
    return (Sameness.UNKNOWN if mute and mute == kinds else Sameness.SAME), {}  # of two functions, one may say enough
