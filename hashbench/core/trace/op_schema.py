"""Facts about an op: its schema, read once, and whether an active dispatch mode changes how torch computes it."""

from __future__ import annotations

import csv
import enum
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hashbench.core.records import OpRecord, Trace
from hashbench.core.trace.arguments import tensors_in
from hashbench.core.trace.collective_ops import RECEIVE, WAIT, CollectivePlan, collective_op
from hashbench.core.trace.storage_writers import storage_key

_ALLOCATIONS = frozenset(
    {
        # Their output is uninitialized. torch has no tag for them; the list is from the documentation of
        # torch.utils.deterministic.fill_uninitialized_memory, plus their variants in native_functions.yaml.
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::empty_permuted",
        "aten::empty_quantized",
        "aten::_empty_affine_quantized",
        "aten::_empty_per_channel_affine_quantized",
        "aten::new_empty",
        "aten::new_empty_strided",
    }
)

_GENERATOR_STATE = frozenset({"philox_seed", "philox_offset", "rng_state", "unused"})
"""Arguments and outputs of attention that hold the generator's state for dropout (``dropout_p``); without dropout they
are allocated and neither written nor read (aten/src/ATen/native/transformers/cuda/attention.cu)."""

GROUP = "<group>"
"""Placeholder for the name of a process group in a record's arguments: a recreated group has another name."""


class Pattern(enum.Enum):
    """Common write patterns of ops; any other is ``GENERAL``."""

    FRESH = "returns one new tensor and writes nothing else"
    SEVERAL = "returns several new tensors and writes nothing else"
    INPLACE = "writes its first argument, a tensor, and returns it"
    VIEW = "returns one tensor that shares memory with an argument"
    GENERAL = "anything else"


@dataclass(frozen=True, slots=True)
class OpPlan:
    """Schema of one op overload, in the form that the hot path needs.

    Attributes: written, written_names: the arguments that the op writes, by position and by name.
        running_statistics: positions that batch and instance norm write if their argument at ``training`` is true: the
            schema of ``native_batch_norm`` and its relatives omits that mutation.
        fresh: no output shares memory with an argument, according to the schema.
        traced: false for ops without any tensor, such as the profiler's marks.
        collective: what it exchanges with other ranks; its outputs may arrive later. ``None``: nothing.
        group: the arguments that name a process group, by position or name.
        receives_once: its Work must be waited for only once.
        waits: returns a collective's output once it has arrived.
        shown: index of the output that aliases a written argument, undeclared in the schema.
        drawn_inside: the generator's state is recorded although the op is not tagged as seeded; it belongs to the
            record of an inner op if one draws.
        leading: the positions of the tensor arguments, if those are plain tensors before all other arguments; ``None``
            if each argument must be checked.
        dropout: position of ``dropout_p``, where arguments or outputs hold the generator's state for it.
        state_outputs, state_arguments: positions of these outputs and arguments.
        opaque: description of a call that does more than a trace sees (:class:`OpRecord`).
        module: path of the module that it belongs to, if that is not the current one.
        source: source line of the program that it was compiled from.
        filled: of the positions that a generated kernel writes, those of memory that nothing wrote before it.
        launch: returns the configuration of a Triton kernel; ``None`` for anything else.
    """

    name: str
    call: Callable[..., Any]
    pattern: Pattern = Pattern.GENERAL
    written: tuple[int, ...] = ()
    written_names: tuple[str, ...] = ()
    running_statistics: tuple[int, ...] = ()
    training: int = -1
    fresh: bool = True
    blank: bool = False
    resizes: bool = False
    seeded: bool = False
    drawn_inside: bool = False
    traced: bool = True
    collective: CollectivePlan | None = None
    group: tuple[int | str, ...] = ()
    receives_once: bool = False
    waits: bool = False
    shown: int | None = None
    leading: tuple[int, ...] | None = None
    writes_arguments: bool = False
    dropout: int = -1
    state_outputs: tuple[int, ...] = ()
    state_arguments: tuple[int, ...] = ()
    opaque: str = ""
    module: str = ""
    source: str = ""
    filled: tuple[int, ...] = ()
    launch: Callable[[], str] | None = None

    def unused_state(self, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any = None) -> set[int]:
        """Return the ``id`` of each tensor among arguments and output that a call without dropout leaves undefined."""
        if self.dropout < 0 or (args[self.dropout] if len(args) > self.dropout else kwargs.get("dropout_p", 0.0)):
            return set()
        found = [args[position] for position in self.state_arguments if position < len(args)]
        if isinstance(output, tuple):
            found += [output[position] for position in self.state_outputs]
        return {id(tensor) for tensor in found}

    def writes(self, argument: int | str) -> bool:
        """Return True if ``argument`` (position, name, or ``position.index`` in a list) is written."""
        if isinstance(argument, str):
            head, _, _ = argument.partition(".")
            return head in self.written_names or (head.isdigit() and int(head) in self.written)
        return argument in self.written

    def written_values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the arguments that one call writes, in the schema's order."""
        values = [args[position] for position in self.written if position < len(args)]
        values += [kwargs[name] for name in self.written_names if name in kwargs]
        if self.running_statistics and (self.training < 0 or (self.training < len(args) and args[self.training])):
            values += [args[position] for position in self.running_statistics if position < len(args)]
        return values

    def written_tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors among the written arguments."""
        return tensors_in(self.written_values(args, kwargs)) if self.writes_arguments else []

    def written_by(self, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> list[torch.Tensor]:
        """Return all tensors that one call wrote: outputs that are no views of an argument, then arguments in the
        schema's order."""
        targets = self.written_tensors(args, kwargs)
        known = {id(tensor) for tensor in targets}
        given = set() if self.fresh else {storage_key(tensor) for tensor in tensors_in([*args, *kwargs.values()])}
        new = [tensor for tensor in tensors_in(output) if id(tensor) not in known]
        return [tensor for tensor in new if storage_key(tensor) not in given - {None}] + targets


@functools.cache
def plan_of(func: Any) -> OpPlan:
    """Return the plan of an op overload, from ``func._schema`` and ``func.tags``. For anything else (a higher-order
    operator), every output is treated as freshly written."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return OpPlan(name=str(func), call=func)
    line = collective_op(schema)
    undeclared, shown = ((), None) if line is None else (line.written, line.shown)
    metadata_only = torch.Tag.inplace_view in func.tags
    arguments = list(schema.arguments)
    names = [argument.name for argument in arguments]
    written = [
        (position, argument)
        for position, argument in enumerate(arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write and not metadata_only)
        or argument.name in undeclared
    ]
    kinds = [str(item.type) for item in [*arguments, *schema.returns]]
    returns_scalar = not {"number", "int", "float", "bool"}.isdisjoint(kinds[len(arguments) :])
    statistics: tuple[int, ...] = ()
    # Only the forward of a norm has a momentum for its running statistics; its backward merely reads them.
    if not written and not {"momentum", "exponential_average_factor"}.isdisjoint(names):
        statistics = tuple(names.index(name) for name in ("running_mean", "running_var") if name in names)
    waits = line is not None and line.kind == WAIT
    collective = CollectivePlan(line, schema) if line is not None and line.exchanges else None
    pattern = _pattern(schema, metadata_only=metadata_only, undeclared=bool(statistics))
    dropout = names.index("dropout_p") if "dropout_p" in names else -1
    state_outputs, state_arguments = (
        tuple(position for position, item in enumerate(items) if dropout >= 0 and item.name in _GENERATOR_STATE)
        for items in (schema.returns, arguments)
    )
    if state_outputs:
        pattern = Pattern.GENERAL
    if collective is not None or waits or shown is not None:
        pattern = Pattern.VIEW if waits and pattern is Pattern.FRESH else Pattern.GENERAL
    return OpPlan(
        name=str(func),
        call=func._op,  # OpOverload.__call__ without its Python frame
        pattern=pattern,
        writes_arguments=bool(written or statistics),
        written=tuple(position for position, argument in written if not argument.kwarg_only),
        written_names=tuple(argument.name for _, argument in written),
        running_statistics=statistics,
        training=next((names.index(name) for name in ("training", "train", "use_input_stats") if name in names), -1),
        fresh=all(item.alias_info is None for item in schema.returns)
        and not (metadata_only or (line is not None and line.returned)),
        blank=schema.name in _ALLOCATIONS or (metadata_only and "Storage" in kinds),
        resizes=metadata_only,
        seeded=torch.Tag.nondeterministic_seeded in func.tags or any("Generator" in kind for kind in kinds),
        traced=returns_scalar or any("Tensor" in kind for kind in kinds),
        collective=collective,
        group=tuple(
            key
            for at, (label, kind) in enumerate(zip(names, kinds, strict=False))
            if label == "group_name" or (label, kind) == ("tag", "str")
            for key in (at, label)
        ),
        receives_once=line is not None and line.kind == RECEIVE and any("c10d.Work" in kind for kind in kinds),
        waits=waits,
        shown=shown,
        leading=None if collective is not None else _leading_tensors(arguments),
        dropout=dropout if state_outputs or state_arguments else -1,
        state_outputs=state_outputs,
        state_arguments=state_arguments,
    )


def _leading_tensors(arguments: Sequence[Any]) -> tuple[int, ...] | None:
    kinds = [str(argument.type) for argument in arguments if not argument.kwarg_only]
    count = next((index for index, kind in enumerate(kinds) if kind != "Tensor"), len(kinds))
    return None if any("Tensor" in kind for kind in kinds[count:]) else tuple(range(count))


def _pattern(schema: Any, *, metadata_only: bool, undeclared: bool) -> Pattern:
    if metadata_only or undeclared or any(str(item.type) != "Tensor" for item in schema.returns):
        return Pattern.GENERAL
    if len(schema.returns) != 1:
        alone = all(item.alias_info is None for item in [*schema.arguments, *schema.returns])
        return Pattern.SEVERAL if alone and schema.returns else Pattern.GENERAL
    aliases = [(index, item.alias_info) for index, item in enumerate(schema.arguments) if item.alias_info is not None]
    written = [index for index, alias in aliases if alias.is_write]
    returned = schema.returns[0].alias_info
    if returned is None:
        return Pattern.GENERAL if written else Pattern.FRESH
    if not returned.is_write:
        return Pattern.GENERAL if written else Pattern.VIEW
    first = schema.arguments[0]
    in_place = written == [0] and str(first.type) == "Tensor" and not first.kwarg_only
    return Pattern.INPLACE if in_place else Pattern.GENERAL


# ------------------------------------------------------------------------------------------------- mode-dependent ops

TABLE = Path(__file__).with_name("mode_dependent_ops.csv")


@dataclass(frozen=True, slots=True)
class ModeDependentOp:
    """Op that torch may compute by another formula under a dispatch mode, such as the Python tracer: a line of
    ``data/mode_dependent_ops.csv``, measured by ``benchmarks/mode_dependent.py`` on torch's own op database.

    Such an op gives the same bits in every traced run, and perhaps others in an untraced run, depending on its inputs.

    Attributes:
        phase: where the formula differs: ``backward`` in the derivative of the op, ``any`` in the op itself, ``no
            gradient`` in the op itself if no derivative of it is computed.
        complex_only: only for complex dtypes.
        signature: sequence of records that identifies the formula, one of them the op; empty if the op alone does.
    """

    op: str
    phase: str
    complex_only: bool
    signature: tuple[str, ...] = ()

    @property
    def recorded_as(self) -> tuple[str, ...]:
        """Names of the op in a trace. The derivative of an in-place variant is that of the op."""
        packet, _, overload = self.op.rpartition(".")
        return (self.op, f"{packet}_.{overload}") if self.phase == "backward" else (self.op,)

    def has_signature(self, records: Sequence[OpRecord], position: int) -> bool:
        """Return True if the record at ``position`` is part of the signature."""
        if not self.signature:
            return True
        begin = position - self.signature.index(self.op)
        run = records[max(0, begin) : begin + len(self.signature)]
        return begin >= 0 and tuple(record.op for record in run) == self.signature


@functools.cache
def mode_dependent_ops() -> tuple[ModeDependentOp, ...]:
    """Load all ops known to depend on a mode."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return tuple(
            ModeDependentOp(line["op"], line["phase"], line["dtypes"] == "complex", tuple(line["signature"].split()))
            for line in csv.DictReader(file)
        )


def mode_dependent(trace: Trace) -> tuple[str, ...]:
    """Return the ops of a trace that torch may have computed by another formula because of the tracer, in table order
    without duplicates; none under the native tracer, which is no mode."""
    if trace.tracer == "native":
        return ()
    positions: dict[str, list[int]] = defaultdict(list)
    derivatives: dict[str, bool] = {}  # by forward record id: is its derivative complex
    for position, record in enumerate(trace.records):
        positions[record.op].append(position)
        if record.forward_op:
            derivatives[record.forward_op] = derivatives.get(record.forward_op, False) or _is_complex(record)

    def depends(entry: ModeDependentOp, position: int) -> bool:
        record = trace.records[position]
        differentiated = record.id in derivatives
        if entry.complex_only and not (_is_complex(record) or derivatives.get(record.id)):
            return False
        applies = {"any": True, "backward": differentiated, "no gradient": not differentiated}[entry.phase]
        return applies and entry.has_signature(trace.records, position)

    names = (
        entry.op
        for entry in mode_dependent_ops()
        if any(depends(entry, position) for op in entry.recorded_as for position in positions.get(op, ()))
    )
    return tuple(dict.fromkeys(names))


def _is_complex(record: OpRecord) -> bool:
    return any("complex" in output.dtype for output in record.outputs)
