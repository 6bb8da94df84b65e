"""One call becomes one raw record.

The hot path records the reads and writes of a call in a few microseconds and decides nothing; everything that can wait
is left to ``build``. A record is made in four steps, which other kinds of records take one by one:

1. ``reads``: the writers of the arguments (:class:`~hashbench.core.trace.reads.Reads`).
2. ``begin``: the id of the pending record, which the caller's callback is told. A call that raises takes it back.
3. The call. Then ``nodes.next_record()``: the record's number.
4. ``writes``: digests of everything that it wrote, whose storages are marked with the number; the record is added.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hashbench.core.trace import arguments, op_schema
from hashbench.core.trace.build import EXCHANGED, RecordIdentity
from hashbench.core.trace.digest import RawDigest, undefined
from hashbench.core.trace.op_schema import OpPlan, Pattern
from hashbench.core.trace.raw import PLAIN_TENSORS, RawTrace, WithoutContentError
from hashbench.core.trace.reads import PLAIN_TYPES, Reads
from hashbench.core.trace.storage_writers import Mark

_current_autograd_node = torch._C._current_autograd_node
_get_sequence_nr = torch._C._autograd._get_sequence_nr
_FRESH, _INPLACE, _VIEW, _SEVERAL = Pattern.FRESH, Pattern.INPLACE, Pattern.VIEW, Pattern.SEVERAL
_GENERAL = Pattern.GENERAL


class CallRecorder:
    """Recorder of calls in Python, held by both tracers.

    Args:
        trace: the trace that records are added to.
        plan_of: return an op's plan, whose ``call`` makes the call.

    Attributes:
        plans: plans by the ids of ops; see :meth:`plan`.
    """

    def __init__(self, trace: RawTrace, plan_of: Callable[[Any], OpPlan] = op_schema.plan_of) -> None:
        self.plans: dict[int, OpPlan] = {}
        self.reads = Reads(trace)
        self._trace, self._plan_of = trace, plan_of
        self._token, self._records, self._next_record = trace.nodes.token, trace.nodes.records, trace.nodes.next_record
        self._modules, self._observer, self._write = trace.modules, trace.observer, trace.write
        self._records_nothing = trace.records_nothing

    def plan(self, func: Any, known: OpPlan | None = None) -> OpPlan:
        """Return the plan of an op that ``plans`` does not have yet, or of something else whose plan is ``known``."""
        plan = self._plan_of(func) if known is None else known
        if self._observer.callback is not None and plan.traced:
            plan = replace(plan, call=functools.partial(_call_with_callback, weakref.ref(self), func, plan))
        self.plans[id(func)] = plan
        return plan

    def begin(self, plan: OpPlan) -> RecordIdentity:
        """Return the identity of the pending call's record."""
        node, place = _current_autograd_node(), self._trace.nodes.place()
        sequence = _get_sequence_nr() - 1 if node is None else node._sequence_nr()
        return self._observer.ids.add_record(
            plan.name,
            phase="backward" if node is not None else "optimizer" if place.optimizing else "forward",
            iteration=place.iteration,
            module=plan.module or place.module,
            sequence=sequence | place.thread_mark,
            thread=place.thread,
        )

    def record(self, plan: OpPlan, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        """Make a call, add its record, and return its output."""
        if self._records_nothing:
            return self.call_unrecorded(plan, args, kwargs or {})
        token = self._token
        reads: tuple[Any, ...] = ()  # no list: cold memory is most of a record's cost
        others: Sequence[Any]
        storage: Any = None
        if plan.leading is None:
            reads, others = self.reads.positional(plan, args)
        else:  # fast path: leading tensors, each marked with its writer
            others = args[len(plan.leading) :]
            for argument in plan.leading:
                value = args[argument]
                try:
                    storage = value.untyped_storage()
                    owner, node, views = storage._hashbench_writer
                    if owner is token and views is None and type(value) in PLAIN_TENSORS:
                        reads += (argument, node, value.storage_offset())
                        continue
                except (AttributeError, NotImplementedError, RuntimeError):
                    pass  # not a tensor, or without a storage: sparse, nested, opaque
                reads, others = self.reads.positional(plan, args)
                break
        if kwargs:
            named_reads, named_others = self.reads.named(plan, kwargs)
            reads, others = reads + named_reads, (*others, *named_others)
        elif kwargs is None:
            kwargs = {}
        node = _current_autograd_node()
        if node is not None:
            phase, sequence = "backward", node._sequence_nr()
        else:
            phase = "optimizer" if self._modules.optimizing else "forward"
            sequence = _get_sequence_nr() - 1
        rng = arguments.generator_digest(args, kwargs) if plan.seeded else None
        noted = self._observer.before(plan, args, kwargs) if self._observer.wanted or plan.resizes else None
        exchanged = None
        if plan.collective is not None:
            known = (noted or {}).get("inputs", {})
            exchanged = self._trace.collectives.exchanged(plan, args, kwargs, known)
        try:
            if exchanged is None:
                output = plan.call(*args, **kwargs)
            else:
                with self._trace.collectives.within(exchanged):
                    output = plan.call(*args, **kwargs)
        except BaseException:
            self._trace.failed_op = plan.name
            raise
        number = self._next_record()
        if exchanged is not None:
            self._observer.kept[number] = {EXCHANGED: exchanged}
        scalar = None
        written: tuple[RawDigest, ...] = ()
        pattern = plan.pattern if output is not None else _GENERAL  # None may replace any tensor
        try:
            if pattern is _VIEW and self._is_view_of_known(output, storage):
                pass  # half of all calls: a pure view
            elif pattern is _FRESH:
                written = (self._write(output, (token, number, None), plan.blank),)
            elif pattern is _INPLACE:
                written = (self._write(args[0], (token, number, None), False),)
            elif pattern is _SEVERAL and type(output) is tuple:
                mark = (token, number, None)
                # A backward returns None for a gradient that was not requested.
                written = tuple([self._write(tensor, mark, plan.blank) for tensor in output if tensor is not None])
            else:
                if type(output) in PLAIN_TYPES:
                    scalar = output
                written = self.writes(plan, args, kwargs, output, (token, number, None))
        except WithoutContentError:
            if self._observer.callback is not None:
                self._observer.take_back()
            return output
        iteration, module = self._trace.iteration, plan.module or self._modules.current
        self._records.append((plan, phase, iteration, module, sequence, reads, others, written, scalar, rng, number))
        if noted is not None:
            self._observer.after(number, plan, args, kwargs, noted)
        return output

    def call_unrecorded(self, plan: OpPlan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make a call with the callback around it, without a record."""
        try:
            return plan.call(*args, **kwargs)
        except BaseException:
            self._trace.failed_op = plan.name
            raise

    def writes(
        self, plan: OpPlan, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any, mark: Mark
    ) -> tuple[RawDigest, ...]:
        """Hash everything that a call wrote: fresh outputs first, then written arguments in the schema's order."""
        targets = plan.written_tensors(args, kwargs) if plan.shown is None else [output[plan.shown]]
        seen = {id(tensor) for tensor in targets}
        fresh = [
            tensor
            for tensor in arguments.tensors_in(output)
            if id(tensor) not in seen and (plan.fresh or not self._trace.nodes.is_known(tensor))
        ]
        if plan.collective is not None:
            once = plan.receives_once
            return self._trace.collectives.begin(mark[1], [*fresh, *targets], output, receives_once=once)
        written = tuple([self._write(tensor, mark, plan.blank) for tensor in fresh + targets])
        if unused := plan.unused_state(args, kwargs, output):
            return tuple(
                undefined(tensor) if id(tensor) in unused else digest
                for tensor, digest in zip(fresh + targets, written, strict=True)
            )
        return written

    def _is_view_of_known(self, tensor: torch.Tensor, storage: Any) -> bool:
        """Return True if a view shares ``storage`` (the last-read argument's), or any other storage known to this
        trace."""
        try:
            return tensor.untyped_storage() is storage or self._trace.nodes.is_known(tensor)
        except (NotImplementedError, RuntimeError):
            return self._trace.nodes.is_known(tensor)

    def add_opaque(
        self, plan: OpPlan, reads: tuple[Any, ...], others: Sequence[Any], output: Any, noted: Mapping[str, Any] | None
    ) -> None:
        """Add one record for ops that were not seen, as if an op of this plan had returned ``output``."""
        number, sequence, place = self._next_record(), _get_sequence_nr() - 1, self._trace.nodes.place()
        phase, mark = "optimizer" if place.optimizing else "forward", (self._token, number, None)
        written = tuple([self._write(tensor, mark, False) for tensor in arguments.tensors_in(output)])
        self._records.append(
            (plan, phase, place.iteration, place.module, sequence, reads, others, written, None, None, number)
        )
        if self._observer.callback is not None:
            identity = self._observer.ids.add_record(
                plan.name, phase=phase, iteration=place.iteration, module=place.module, sequence=sequence
            )
            self._observer.opaque(identity, output)
        if noted is not None:
            self._observer.after(number, plan, (), {}, noted)


def _call_with_callback(
    recorder: Callable[[], CallRecorder | None], func: Any, plan: OpPlan, /, *args: Any, **kwargs: Any
) -> Any:
    """Make a call with the caller's callback around it. ``recorder`` is a weak reference: this function is part of the
    plans that records keep, which must not keep the trace alive."""
    held = recorder()
    assert held is not None
    return held._observer.call(func, plan, held.begin(plan), args, kwargs)
