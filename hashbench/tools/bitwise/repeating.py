"""One call made again from the same arguments and generator states, and what its runs left, compared bit by bit."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hashbench.core.diagnose.calls.capture import CaptureError, capture_arguments, is_plain, refuse_shadows
from hashbench.core.diagnose.calls.live import CallOutcome, LiveCall, generator_states
from hashbench.core.diagnose.calls.ops import is_custom
from hashbench.core.diagnose.replay.controls import POISONS, poisoned_memory
from hashbench.core.run.distance import Difference, integer_view, measure
from hashbench.core.run.leaves import flatten
from hashbench.core.run.outcome import failure_of
from hashbench.core.run.outputs import bitwise_equal
from hashbench.core.run.rng import restore_random_states
from hashbench.core.trace.arguments import named_arguments, tensors_in
from hashbench.core.trace.digest import dtype_name, raw_digest
from hashbench.core.trace.op_schema import OpPlan, Pattern
from hashbench.core.trace.storage_writers import storage_bytes, storage_key
from hashbench.tools.bitwise.findings import Mismatch, ProgramPlace

Equality = Literal["bits", "values"]
Left = dict[str, Any]
"""What a run left, by name."""


class Treatment(enum.Enum):
    """How calls of an op are treated. Those that are made once are named as unchecked where there is a text why."""

    NOTHING_TO_CHECK = ""
    HIGHER_ORDER = "a higher-order operator, which has no schema to say what it writes"
    COLLECTIVE = "exchanges data with other processes"
    COPY_WRITTEN = "repeated, with copies of the arguments that it writes and of whatever shares memory with them"
    COPY_ALL = "repeated, with copies of all arguments: what it writes is not known"

    @property
    def repeats(self) -> bool:
        """Whether calls are made again."""
        return self in (Treatment.COPY_WRITTEN, Treatment.COPY_ALL)


def treatment_of(plan: OpPlan, *, wanted: bool, schema: bool, custom: bool, trusted: bool) -> Treatment:
    """Decide how calls of an op with this plan are treated, as far as the op alone decides. ``wanted``: the user's
    filter lets it through; ``schema``: it has one; ``custom``: code other than torch's computes it; ``trusted``:
    torch's own schemas are believed."""
    if not wanted or not plan.traced or plan.blank or plan.resizes or plan.pattern is Pattern.VIEW:
        return Treatment.NOTHING_TO_CHECK
    if not schema:
        return Treatment.HIGHER_ORDER
    if plan.collective:
        return Treatment.COLLECTIVE
    return Treatment.COPY_ALL if custom or not trusted else Treatment.COPY_WRITTEN


# ----------------------------------------------------------------------------------------------- arguments, generators


def _refuse_opaque(tensor: torch.Tensor) -> None:
    """Raise :class:`CaptureError` for a tensor of a class that answers every op itself: nobody else knows what it
    holds."""
    answers = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if answers and not is_traceable_wrapper_subclass(tensor):
        refuse_shadows(tensor)
        raise CaptureError(f"a tensor is a {type(tensor).__name__}, which answers every op itself")


def _restore_defaults(states: Mapping[str, torch.Tensor]) -> None:
    restore_random_states({name: state for name, state in states.items() if not name.startswith("argument ")})


def moved(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of generators whose states differ."""
    return [name for name, state in after.items() if name not in before or not torch.equal(before[name], state)]


# ------------------------------------------------------------------------------------------------ comparing two runs


def same(first: Any, second: Any, *, equal: Equality) -> Difference | None:
    """Compare two results; ``None`` where they are the same: in every bit, or (``values``) but for NaN payloads
    and signs of zero."""
    if _same_bits(first, second):
        return None
    if equal == "bits":
        return measure(first, second)
    if _same_numbers(first, second):
        return None
    difference = measure(first, second)
    bits_alone = difference.elements is not None and difference.representation not in ("", "value")
    return None if bits_alone else difference


def _same_bits(first: Any, second: Any) -> bool:
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return bitwise_equal(first, second)
    if first.is_cpu and second.is_cpu:  # nearly always the digests agree, in their raw form too
        return raw_digest(first) == raw_digest(second) or bitwise_equal(first, second)
    plain = is_plain(first) and is_plain(second) and not (first.is_conj() or first.is_neg())
    if plain and (first.dtype, first.shape, first.device) == (second.dtype, second.shape, second.device):
        return same_on_device(first, second)
    return bitwise_equal(first, second)


def same_on_device(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Compare bit by bit without a copy to the host: two plain tensors of one dtype, shape and device. Waits for the
    device."""
    if first.is_complex():
        first, second = torch.view_as_real(first.detach()), torch.view_as_real(second.detach())
    return torch.equal(integer_view(first.detach()), integer_view(second.detach()))


def _same_numbers(first: Any, second: Any) -> bool:
    if type(first) is not type(second) or not isinstance(first, (float, complex)):
        return False
    a, b = complex(first), complex(second)
    pairs = ((a.real, b.real), (a.imag, b.imag))
    return all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in pairs)


def _share_memory(first: Left, second: Left) -> bool:
    """Return True if the second run wrote its results over those of the first, so that there is nothing to compare."""
    keys = [
        {storage_key(tensor) for tensor in tensors_in(list(left.values())) if tensor.numel()}
        for left in (first, second)
    ]
    return bool(keys[0] & keys[1] - {None})


def unwritten_elements(first: Any, second: Any, *, filled: Sequence[Any], bytes_filled: Sequence[int]) -> int | None:
    """Count the elements that differ, where all that do were left unwritten; ``None`` where one was written.

    ``filled`` are results of runs in which fresh memory held nothing but the byte of ``bytes_filled`` beside each. An
    element that holds just that in each of them was not written.
    """
    tensors = [first, second, *filled]
    if not all(isinstance(tensor, torch.Tensor) and is_plain(tensor) for tensor in tensors):
        return None
    if len({(tensor.shape, tensor.dtype) for tensor in tensors}) != 1:
        return None
    left, right, *runs = (_bytes(tensor) for tensor in tensors)
    differs = (left != right).any(dim=1)
    unwritten = all(bool((run[differs] == value).all()) for run, value in zip(runs, bytes_filled, strict=True))
    return int(differs.sum()) if unwritten else None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return flat.contiguous().view(torch.uint8).reshape(len(flat), -1)


# ---------------------------------------------------------------------------------------------------- one call's runs


@dataclass(slots=True)
class Repetitions:
    """What the further runs of one call showed. Not ``checked``: nothing was compared, for this ``reason`` if any.

    ``differ`` has the mismatch of the first run that differed, by place, yet without the call and where that stood;
    ``others`` has what each run left there that differed.
    """

    checked: bool = False
    reason: str = ""
    differ: dict[str, Mismatch] = field(default_factory=dict)
    others: dict[str, list[Any]] = field(default_factory=dict)
    unwritten: dict[str, int] = field(default_factory=dict)

    def add(self, mismatch: Mismatch, other: Any = None) -> None:
        """Record one more run that differed there."""
        self.differ.setdefault(mismatch.place, mismatch)
        self.others.setdefault(mismatch.place, []).append(other)


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) and not value.is_nested else None


def _dtype(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return dtype_name(value.dtype)
    return "" if value is None else type(value).__name__


_ABSENT = "nothing of that name"
_NOWHERE = ProgramPlace()


class Call:
    """One call about to be made, kept so that it can be made again.

    Copied are the arguments that it writes, or all (``copy_all``), as windows of memory: strides, offsets, shared and
    overlapping memory, and the address modulo 64 (kernels choose their code by it) stay. All else is passed on as it
    is. Two copies of a window exist while the call is repeated: the one kept and the one that a run works on.

    Raises:
        CaptureError: an argument has no content (fake, meta, of a transform), or must be copied and cannot be.
    """

    def __init__(
        self, func: Any, plan: OpPlan, args: Sequence[Any], kwargs: Mapping[str, Any], *, copy_all: bool
    ) -> None:
        values = [*args, *kwargs.values()]
        tensors = tensors_in(values)
        for tensor in tensors:
            _refuse_opaque(tensor)
        script = next((value for value in values if isinstance(value, torch.ScriptObject)), None)
        if copy_all and script is not None:
            raise CaptureError(f"an argument is a {type(script).__name__}, which it may change")
        written = tensors if copy_all else plan.written_tensors(args, kwargs)
        named = enumerate(named_arguments(args, kwargs)) if written else ()
        places = {id(tensor): (place, f"argument {path}") for place, (path, tensor) in named}
        self._written = [places[key] for key in {id(tensor): None for tensor in written}]
        self._plan, self._args, self._kwargs = plan, args, kwargs
        self._captured = capture_arguments(func, args, kwargs, targets=written)
        self._live: LiveCall | None = None  # of the runs after the first
        self._outside_torch = is_custom(func)
        self._before = generator_states(args, kwargs, outside_torch=self._outside_torch)
        self._moved = False  # whether default generators may not be as they were before the call

    def repeat(self, output: Any, *, runs: int, equal: Equality, count_unwritten: bool) -> Repetitions:
        """Make the call again, which gave ``output``, so that there are ``runs``; afterwards generators are as one run
        left them.

        Raises:
            NotComparableError: it returned something that is neither tensor nor plain value.
            CaptureError: a result has no content (meta, fake), or all runs write the same memory.
        """
        result = Repetitions()
        outcome = CallOutcome(self._plan, self._args, self._kwargs, output)
        first, after = self._left(outcome), self._states(outcome)
        self._moved = bool(moved(self._before, after))
        if not first and not self._moved:
            return result  # a view, or a call that left nothing: to make it again would show nothing
        try:
            for run in range(2, runs + 1):
                result.reason = self._compare(first, after, run, result, equal)
                if result.reason:
                    return result
            result.checked = True
            if not count_unwritten:
                for name in [name for name in result.differ if result.differ[name].difference is not None]:
                    self._look_for_unwritten(name, first, result)
        finally:
            if self._moved:
                _restore_defaults(after)
        return result

    def _make(self) -> CallOutcome:
        """Make one more run, from the same arguments and generator states, in the memory of the last."""
        if self._moved:
            _restore_defaults(self._before)
        self._moved = True  # for all that is known until it is looked at again
        if self._live is None:
            self._live = LiveCall(self._captured)
        else:
            self._live.reset()
        return self._live.run()

    def _states(self, outcome: CallOutcome) -> dict[str, torch.Tensor]:
        return generator_states(outcome.args, outcome.kwargs, outside_torch=self._outside_torch)

    def _left(self, outcome: CallOutcome) -> Left:
        """Return new outputs and numbers, and the arguments that the call wrote (or all of them). A view of an argument
        is nothing new."""
        arguments = tensors_in([*outcome.args, *outcome.kwargs.values()])
        known, given = {id(tensor) for tensor in arguments}, {storage_key(tensor) for tensor in arguments} - {None}
        known |= outcome.plan.unused_state(outcome.args, outcome.kwargs, outcome.output)
        left: Left = {name: arguments[place] for place, name in self._written}
        for name, value in flatten(outcome.output, "output") if outcome.output is not None else ():
            if not isinstance(value, torch.Tensor):
                left[name] = value
            elif id(value) not in known and storage_key(value) not in given:
                refuse_shadows(value)
                _refuse_opaque(value)
                left[name] = value
        return left

    def _compare(
        self, first: Left, after: Mapping[str, torch.Tensor], run: int, result: Repetitions, equal: Equality
    ) -> str:
        """Make one more run and note where it differs; returns why it could not be made."""
        mismatch = functools.partial(Mismatch, self._plan.name, 0, run=run, where=_NOWHERE)
        try:
            outcome = self._make()
            left = self._left(outcome)
        except Exception as error:
            failure = failure_of(error, op=self._plan.name)
            if failure.out_of_memory:
                return f"run {run} ran out of memory"
            result.add(mismatch("", error=failure.error))
            return ""
        if _share_memory(first, left):
            raise CaptureError("all runs write their results into the same memory")
        for name in first | left:
            old, new = first.get(name, _ABSENT), left.get(name, _ABSENT)
            difference = same(old, new, equal=equal)
            if difference is not None:
                representation = difference.representation.replace("value", "")
                numbers = replace(difference, names=(name,), representation=representation)
                sides: dict[str, Any] = {"shape": _shape(old), "dtype": _dtype(old)}
                sides |= {"other_shape": _shape(new), "other_dtype": _dtype(new)}
                result.add(mismatch(name, difference=numbers, **sides), new)
        now = self._states(outcome)
        self._moved = bool(moved(self._before, now))
        for name in moved(after, now):
            result.add(mismatch(f"generator {name}"))
            self._moved = True
        return ""

    def _look_for_unwritten(self, name: str, first: Left, result: Repetitions) -> None:
        """Move differences in memory that the op did not write from ``differ`` to ``unwritten``."""
        if name.startswith("argument") or name not in first:
            return
        filled = []
        for poison in POISONS:
            try:
                with poisoned_memory(poison):
                    _fill_freed_memory(first, poison)
                    filled.append(self._left(self._make()).get(name))
            except Exception:
                return
        counts = [
            unwritten_elements(first[name], other, filled=filled, bytes_filled=POISONS) for other in result.others[name]
        ]
        if None not in counts:
            del result.differ[name]
            result.unwritten[name] = max(count or 0 for count in counts)


def _fill_freed_memory(left: Left, value: int) -> None:
    """Fill blocks of the sizes of the results with the byte ``value`` and free them: on an accelerator torch hands
    those out next, also to kernels, which :func:`~hashbench.core.diagnose.replay.controls.poisoned_memory` does not
    reach there."""
    tensors = [tensor for tensor in tensors_in(list(left.values())) if is_plain(tensor)]
    blocks = [
        torch.full((storage_bytes(tensor),), value, dtype=torch.uint8, device=tensor.device) for tensor in tensors
    ]
    del blocks
