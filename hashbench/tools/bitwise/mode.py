"""Dispatch mode that runs every op several times; the other modules decide, repeat and compare."""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import FrameType
from typing import Any, get_args

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass_type,
)

from hashbench.errors import HashbenchError
from hashbench.replay.capture import CaptureError
from hashbench.replay.controls import POISONS, poisoned_memory
from hashbench.replay.op_owner import is_custom
from hashbench.run.outcome import failure_of
from hashbench.run.outputs import NotComparableError
from hashbench.tools.bitwise.choosing import Choice, Copies, OpFacts, Treatment, chooser, treatment_of
from hashbench.tools.bitwise.comparing import (
    Differing,
    Equality,
    Found,
    Left,
    fill_freed_memory,
    same,
    share_memory,
    unwritten_elements,
    written_by,
)
from hashbench.tools.bitwise.findings import (
    BitwiseMismatchError,
    BitwiseMismatchWarning,
    Mismatch,
    Place,
    Places,
    Unchecked,
    Unwritten,
    message,
)
from hashbench.tools.bitwise.repeating import Arguments, Generators, moved
from hashbench.trace.op_schema import OpPlan, Pattern, plan_of

_CANNOT_REPEAT = (CaptureError, NotComparableError, RuntimeError)


class BitwiseEquivalenceMode(TorchDispatchMode):
    """Runs every op several times from identical inputs and compares what it left bit by bit.

    The program goes on with what the first run gave; with and without the mode its results are the same bits. Arguments
    that an op writes are copied before it, as memory, so that strides, offsets, shared memory and alignment stay. An op
    of torch's is believed when its schema says that it writes nothing else (``trust_schema=False`` believes none of
    them); of an op of somebody else's all arguments are copied and compared. Generators (every device's, one given as
    an argument, and for ops of others Python's and NumPy's) are put back before each further run, and are left as after
    one.

    Not run again: allocations and views, since they compute nothing; collectives and whatever else ``unchecked`` names.
    An output that an op leaves unwritten in part is told from one that it computes in two ways by filling fresh memory
    with one value and another; such outputs are in ``unwritten``, not among the mismatches.

    Memory: for each op, while it runs, two copies of what it writes (of everything it reads, for ops of others) and one
    more set of its outputs; freed before the next op. The lines of forward calls are kept for the backward, as text.

    What it does not see: kernels inside a fused or custom op (one call for the whole op), code that ``torch.compile``
    made, Python threads of the program's own, state outside of tensors that an op of somebody else's keeps, and a
    difference that appears only between processes or with other memory addresses. A rare difference needs ``runs``.

    Args:
        raise_on_mismatch: raise :class:`BitwiseMismatchError` at the first op that differs, instead of warning.
        runs: how often each op runs, at least 2; every later run is compared with the first.
        equal: ``"bits"``, or ``"values"``: NaN payloads and signs of zero do not count.
        ops: check these only: names (``"aten.index_put_"``, ``"aten.add.Tensor"``), overloads, packets of overloads, or
            functions of an overload; one or several.
        trust_schema: whether torch's own schemas are believed about what an op writes.
        count_unwritten: whether outputs that differ in unwritten elements are mismatches like others.

    Raises:
        HashbenchError: ``runs``, ``equal`` or ``ops`` is not one of these, or names no op.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # one Python frame less for every op; under torch.compile the mode is hidden by the next method

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(
        self,
        raise_on_mismatch: bool = False,
        *,
        runs: int = 2,
        equal: Equality = "bits",
        ops: Choice | Iterable[Choice] | None = None,
        trust_schema: bool = True,
        count_unwritten: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        _check_options(runs, equal)
        self.raise_on_mismatch, self.runs, self.equal = raise_on_mismatch, runs, equal
        self.trust_schema, self.count_unwritten = trust_schema, count_unwritten
        self._wanted = chooser(ops)
        self._mismatches: list[Mismatch] = []
        self._unwritten: list[Unwritten] = []
        self._unchecked: Counter[tuple[str, str]] = Counter()
        self._checked: Counter[str] = Counter()
        self._treatments: dict[Any, Treatment] = {}
        self._places = Places()
        self._lock = threading.RLock()  # autograd has a thread for each device; generators are shared by all
        self._undo: list[ExitStack] = []

    def __enter__(self) -> BitwiseEquivalenceMode:
        with ExitStack() as undo:
            undo.enter_context(self._places.watched())
            super().__enter__()  # type: ignore[no-untyped-call]
            self._undo.append(undo.pop_all())
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._undo.pop().close()

    # ------------------------------------------------------------------------------------------------ what was found

    def get_mismatches(self) -> list[Mismatch]:
        """Every tensor or number that differed, in the order of the calls."""
        return list(self._mismatches)

    @property
    def mismatches(self) -> list[Mismatch]:
        """The same."""
        return self.get_mismatches()

    @property
    def checked(self) -> Counter[str]:
        """How many calls of each op were run again. Where that is empty, no mismatch means nothing."""
        return Counter(self._checked)

    @property
    def unchecked(self) -> tuple[Unchecked, ...]:
        """Ops that were run once only, with the reason and the number of calls."""
        return tuple(Unchecked(op, reason, calls) for (op, reason), calls in self._unchecked.items())

    @property
    def unwritten(self) -> tuple[Unwritten, ...]:
        """Outputs that differ only in elements that the op left unwritten. Harmless where nobody reads them."""
        return tuple(self._unwritten)

    def report(self) -> str:
        """All of it as text: counts, then a line for each finding."""
        counted = f"{sum(self._checked.values())} calls of {len(self._checked)} ops run {self.runs} times"
        lines = [f"{counted}: {len(self._mismatches)} mismatches"]
        lines += [f"{found.op} {found.where.full_text()}: {found.text()}" for found in self._mismatches]
        lines += [
            f"{found.op} {found.where.full_text()}: {found.place} has {found.elements} unwritten elements that differ"
            for found in self._unwritten
        ]
        lines += [f"not checked: {each.op} ({each.calls} calls): {each.reason}" for each in self.unchecked]
        return "\n".join(lines)

    # ------------------------------------------------------------------------------------------------- every call

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if types and any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # computes by ops on the tensors inside it: those come here
        kwargs = kwargs or {}
        caller = sys._getframe().f_back  # there is none in autograd's threads
        self._places.note(func, caller)
        treatment = self._treatments.get(func) or self._treatment(func)
        if treatment.copies is None:
            if treatment.reason:
                self._unchecked[str(func), treatment.reason] += 1
            return func(*args, **kwargs)
        with self._lock:
            return self._checked_call(func, treatment.copies, args, kwargs, caller)

    def _treatment(self, func: Any) -> Treatment:
        plan = plan_of(func)
        facts = OpFacts(
            wanted=self._wanted(func),
            schema=hasattr(func, "_schema"),
            tensors=plan.traced,
            allocates=plan.blank,
            metadata_only=plan.resizes or plan.pattern is Pattern.VIEW,
            collective=plan.collective,
            custom=is_custom(func),
            writes=plan.writes_arguments,
            trusted=self.trust_schema,
        )
        return self._treatments.setdefault(func, treatment_of(facts))

    def _checked_call(
        self, func: Any, copies: Copies, args: Sequence[Any], kwargs: Mapping[str, Any], frame: FrameType | None
    ) -> Any:
        plan = plan_of(func)
        try:
            with _aside():
                call = _Call(func, plan, copies, args, kwargs)
        except _CANNOT_REPEAT as error:
            self._unchecked[plan.name, _reason(error)] += 1
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        try:
            with _aside():
                found = self._repeat(call, output)
        except _CANNOT_REPEAT as error:
            self._unchecked[plan.name, _reason(error)] += 1
            return output
        self._count(found, plan.name)
        if found.differ or found.unwritten:
            self._tell(found, plan.name, self._places.now(frame))
        return output

    def _repeat(self, call: _Call, output: Any) -> Found:
        """Make the call again, so often as was asked; afterwards generators are as one run left them."""
        found = Found()
        first = call.left(call.arguments.args, call.arguments.kwargs, output)
        after = call.generators.now()
        call.moved = bool(moved(call.generators.before, after))
        if not first and not call.moved:
            return found  # a view, or a call that left nothing: to make it again would show nothing
        try:
            for run in range(2, self.runs + 1):
                self._compare_run(call, first, after, run, found)
            found.checked = True
            for name in [name for name in found.differ if found.differ[name].difference is not None]:
                self._look_for_unwritten(call, name, first, found)
        except _NoMemoryError as error:
            found.reason = str(error)
        finally:
            if call.moved:
                call.generators.restore(after)
        return found

    def _compare_run(self, call: _Call, first: Left, after: Mapping[str, torch.Tensor], run: int, found: Found) -> None:
        try:
            left = call.make()
        except Exception as error:
            failure = failure_of(error, op=call.plan.name)
            if failure.out_of_memory:
                raise _NoMemoryError(f"run {run} ran out of memory") from error
            found.add("", Differing(run, error=failure.error))
            return
        if share_memory(first, left):
            raise CaptureError("all runs write their results into the same memory")
        for name in [*first, *(name for name in left if name not in first)]:
            one, other = first.get(name, _ABSENT), left.get(name, _ABSENT)
            difference = same(one, other, equal=self.equal)
            if difference is not None:
                found.add(name, Differing(run, one, (other,), difference))
        now = call.generators.now()
        call.moved = bool(moved(call.generators.before, now))
        for name in moved(after, now):
            found.add(f"generator {name}", Differing(run))
            call.moved = True

    def _look_for_unwritten(self, call: _Call, name: str, first: Left, found: Found) -> None:
        """Whether what differs is memory that the op did not write."""
        differing = found.differ[name]
        if self.count_unwritten or name.startswith("argument"):
            return
        filled = []
        for poison in POISONS:
            try:
                with poisoned_memory(poison):
                    fill_freed_memory(first, poison)
                    filled.append(call.make().get(name))
            except Exception:
                return
        counts = [
            unwritten_elements(first[name], other, filled=filled, bytes_filled=POISONS) for other in differing.others
        ]
        if None not in counts:
            del found.differ[name]
            found.unwritten[name] = max(count or 0 for count in counts)

    def _count(self, found: Found, op: str) -> None:
        if found.reason:
            self._unchecked[op, found.reason] += 1
        if found.checked:
            self._checked[op] += 1

    def _tell(self, found: Found, op: str, where: Place) -> None:
        call = sum(self._checked.values())
        self._unwritten += [Unwritten(op, call, name, count, where) for name, count in found.unwritten.items()]
        mismatches = [
            each.mismatch(op, name, call=call, where=where, runs=self.runs) for name, each in found.differ.items()
        ]
        self._mismatches += mismatches
        if mismatches and self.raise_on_mismatch:
            raise BitwiseMismatchError(message(mismatches), mismatches)
        if mismatches:
            warnings.warn(message(mismatches), BitwiseMismatchWarning, stacklevel=4)


_ABSENT = "nothing of that name"


class _NoMemoryError(Exception):
    """There was not enough memory to run an op again."""


class _Call:
    """One call, ready to be made again. ``moved``: generators may not be as they were before it."""

    def __init__(self, func: Any, plan: OpPlan, copies: Copies, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.func, self.plan, self.copies = func, plan, copies
        self.arguments = Arguments(func, plan, args, kwargs, copies)
        self.generators = Generators(args, kwargs, outside_torch=is_custom(func))
        self.moved = False

    def make(self) -> Left:
        """One more run, from the same arguments and generator states; what it left."""
        if self.moved:
            self.generators.restore(self.generators.before)
        self.moved = True  # for all that is known until it is looked at again
        args, kwargs = self.arguments.again()
        return self.left(args, kwargs, self.func(*args, **kwargs))

    def left(self, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> Left:
        """What a run left that returned ``output``."""
        return written_by(self.plan, args, kwargs, output, all_arguments=self.copies is Copies.ALL)


def _aside() -> AbstractContextManager[Any]:
    """Out of sight of the modes around this one: they see the first run of every op, and nothing else."""
    return _disable_current_modes() if _get_current_dispatch_mode_stack() else nullcontext()


def _reason(error: Exception) -> str:
    return failure_of(error).error if isinstance(error, RuntimeError) else str(error)


def _check_options(runs: int, equal: str) -> None:
    if isinstance(runs, bool) or not isinstance(runs, int) or runs < 2:
        raise HashbenchError(f"runs={runs!r}", consequence="nothing would be compared", tip="Give a number from 2 on.")
    if equal not in get_args(Equality):
        raise HashbenchError(
            f"equal={equal!r}", consequence="it is neither way to compare", tip='Give "bits" or "values".'
        )
