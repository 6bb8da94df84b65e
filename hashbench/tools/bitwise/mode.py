"""Dispatch mode that runs every op several times."""

from __future__ import annotations

import difflib
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from types import FrameType
from typing import Any, get_args

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass_type,
)

from hashbench.core.diagnose.calls.capture import CaptureError
from hashbench.core.diagnose.calls.ops import is_custom
from hashbench.core.errors import HashbenchError
from hashbench.core.native.library import is_recorded
from hashbench.core.run.leaves import NotComparableError
from hashbench.core.run.outcome import failure_of
from hashbench.core.trace.digest import unobserved
from hashbench.core.trace.op_schema import plan_of
from hashbench.tools.bitwise.findings import (
    BitwiseMismatchError,
    BitwiseMismatchWarning,
    Mismatch,
    Places,
    ProgramPlace,
    Unchecked,
    Unwritten,
    message,
)
from hashbench.tools.bitwise.repeating import Call, Equality, Repetitions, Treatment, treatment_of

Choice = str | torch._ops.OpOverloadPacket | torch._ops.OpOverload | Callable[[Any], bool]

_CANNOT_REPEAT = (CaptureError, NotComparableError, RuntimeError)


class BitwiseEquivalenceMode(TorchDispatchMode):
    """Runs every op several times from identical inputs and compares what it left bit by bit.

    The program goes on with what the first run gave; with and without the mode its results are the same bits. Arguments
    that an op writes are copied before it, as memory; of an op that is not torch's own all arguments are copied and
    compared. Generators are put back before each further run, and are left as after one.

    Not run again: allocations and views, since they compute nothing; collectives and whatever else ``unchecked`` names.
    An output that an op leaves unwritten in part is told from one that it computes in two ways by filling fresh memory
    with one value and another; such outputs are in ``unwritten``, not among the mismatches.

    It does not see kernels inside a fused or custom op (one call for the whole op), code that ``torch.compile`` made,
    Python threads of the program's own, state outside of tensors that an op of somebody else's keeps, and a difference
    that appears only between processes or with other memory addresses. ``docs/bitwise.md`` says what it costs.

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
        self._wanted = _filter(ops)
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
        """Return every tensor or number that differed, in the order of the calls."""
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
        """Format the findings as text: counts, then a line for each finding."""
        counted = f"{sum(self._checked.values())} calls of {len(self._checked)} ops run {self.runs} times"
        lines = [f"{counted}: {len(self._mismatches)} mismatches"]
        lines += [f"{each.op} {each.where.text(full=True)}: {each.text()}" for each in self._mismatches]
        for output in self._unwritten:
            what = f"{output.place} has {output.elements} unwritten elements that differ"
            lines.append(f"{output.op} {output.where.text(full=True)}: {what}")
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
        if not treatment.repeats:
            if treatment.value:
                self._unchecked[str(func), treatment.value] += 1
            return func(*args, **kwargs)
        with self._lock:
            return self._checked_call(func, args, kwargs, caller, copy_all=treatment is Treatment.COPY_ALL)

    def _treatment(self, func: Any) -> Treatment:
        treatment = treatment_of(
            plan_of(func),
            wanted=self._wanted(func),
            schema=hasattr(func, "_schema"),
            custom=is_custom(func),
            trusted=self.trust_schema,
        )
        return self._treatments.setdefault(func, treatment)

    def _checked_call(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], frame: FrameType | None, *, copy_all: bool
    ) -> Any:
        plan = plan_of(func)
        try:
            with _aside():
                call = Call(func, plan, args, kwargs, copy_all=copy_all)
        except _CANNOT_REPEAT as error:
            self._unchecked[plan.name, _reason(error)] += 1
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        try:
            with _aside():
                result = call.repeat(output, runs=self.runs, equal=self.equal, count_unwritten=self.count_unwritten)
        except _CANNOT_REPEAT as error:
            result = Repetitions(reason=_reason(error))
        if result.reason:
            self._unchecked[plan.name, result.reason] += 1
        if result.checked:
            self._checked[plan.name] += 1
        if result.differ or result.unwritten:
            self._tell(result, plan.name, self._places.now(frame))
        return output

    def _tell(self, result: Repetitions, op: str, where: ProgramPlace) -> None:
        call = sum(self._checked.values())
        self._unwritten += [Unwritten(op, call, name, count, where) for name, count in result.unwritten.items()]
        mismatches = [
            replace(each, call=call, where=where, runs=self.runs, runs_differing=len(result.others[name]))
            for name, each in result.differ.items()
        ]
        self._mismatches += mismatches
        if mismatches and self.raise_on_mismatch:
            raise BitwiseMismatchError(message(mismatches), mismatches)
        if mismatches:
            warnings.warn(message(mismatches), BitwiseMismatchWarning, stacklevel=4)


def _aside() -> AbstractContextManager[Any]:
    """Step out of sight of the modes around this one: they see the first run of every op, and nothing else."""
    return unobserved() if _get_current_dispatch_mode_stack() or is_recorded() else nullcontext()


def _reason(error: Exception) -> str:
    return failure_of(error).error if isinstance(error, RuntimeError) else str(error)


def _check_options(runs: int, equal: str) -> None:
    if isinstance(runs, bool) or not isinstance(runs, int) or runs < 2:
        what = f"runs must be {'>= 2' if type(runs) is int else 'an int >= 2'}, got {runs!r}"
        raise HashbenchError(what, consequence="nothing would be compared", tip="Pass runs=2 or more.")
    if equal not in get_args(Equality):
        what = f"equal must be 'bits' or 'values', got {equal!r}"
        raise HashbenchError(what, consequence="nothing would be compared", tip="Pass one of the two.")


# -------------------------------------------------------------------------------------------------- which ops


def _filter(ops: Choice | Iterable[Choice] | None) -> Callable[[Any], bool]:
    """Convert ``ops=`` to a predicate of overloads."""
    if ops is None:
        return lambda _: True
    # A packet of overloads is callable and iterable.
    choices = list(ops) if isinstance(ops, Iterable) and not isinstance(ops, str) and not callable(ops) else [ops]
    tests = [_test(_resolve(choice) if isinstance(choice, str) else choice) for choice in choices]
    if not tests:
        raise HashbenchError("ops= is empty", consequence="nothing would be checked", tip="Leave it out to check all.")
    return lambda func: any(test(func) for test in tests)


def _test(choice: Any) -> Callable[[Any], bool]:
    if isinstance(choice, torch._ops.OpOverload):
        return lambda func: func is choice
    if isinstance(choice, torch._ops.OpOverloadPacket):
        return lambda func: getattr(func, "overloadpacket", None) is choice
    if callable(choice):
        return lambda func: bool(choice(func))
    raise HashbenchError(
        f"ops= holds a {type(choice).__name__}",
        consequence="it does not name an op",
        tip='Give "aten.index_put_", torch.ops.aten.index_put_, one of its overloads, or a function of the overload.',
    )


def _resolve(name: str) -> Any:
    """Resolve the packet or overload called ``aten.add``, ``aten::add`` or ``aten.add.Tensor``."""
    parts = name.replace("::", ".").split(".")
    op: Any = None
    if len(parts) in (2, 3) and all(parts):
        try:
            packet = getattr(getattr(torch.ops, parts[0]), parts[1])
            op = packet if len(parts) == 2 else getattr(packet, parts[2])
        except (AttributeError, RuntimeError):
            op = None
    if isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return op
    known = {full.partition(".")[0].replace("::", ".") for full in torch._C._dispatch_get_all_op_names()}
    wanted = ".".join(parts) if len(parts) > 1 else f"aten.{name}"
    close = difflib.get_close_matches(wanted, sorted(known), n=3)
    tip = f"Names like it: {', '.join(close)}." if close else 'Names are like "aten.index_put_".'
    raise HashbenchError(f"the op {name!r} does not exist", consequence="nothing would be checked", tip=tip)
