"""What a kernel does beside its results: memory that it did not write, state that it keeps, inputs that it writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hashbench.core.diagnose.replay.controls.memory import POISONS
from hashbench.core.errors import named_line
from hashbench.core.run.distance import resolved
from hashbench.extensions.kernels.calls import Called, Caller, equal_bits
from hashbench.extensions.kernels.inputs import KernelInputs
from hashbench.extensions.kernels.verdict import Fault, FaultKind
from hashbench.extensions.kernels.where import places_of


@dataclass(frozen=True, slots=True)
class Habits:
    """What calls of a kernel showed beside their results.

    Attributes:
        faults: what is wrong.
        remarks: what is worth knowing, as sentences.
    """

    faults: tuple[Fault, ...] = ()
    remarks: tuple[str, ...] = ()

    def __add__(self, other: Habits) -> Habits:
        return Habits(self.faults + other.faults, self.remarks + other.remarks)


# ------------------------------------------------------------------------------------------------- unwritten memory


def unwritten(caller: Caller, inputs: KernelInputs, variation: str) -> Habits:
    """Call a function with each of two poisons in fresh memory: what follows the poison was not written.

    Where results differ, it is called in the other order as well: those of every other call may differ without poison.
    """
    one, other = (caller(inputs, poison=poison) for poison in POISONS)
    if one.same_bits(other):
        return Habits()
    other_again, one_again = (caller(inputs, poison=poison) for poison in reversed(POISONS))
    if any(called.error for called in (one, other, other_again, one_again)):
        return Habits()
    if not (one.same_bits(one_again) and other.same_bits(other_again)):
        return Habits()
    faults = []
    for name, left, right in zip(one.names, one.results, other.results, strict=True):
        if left.shape != right.shape or left.dtype is not right.dtype or equal_bits(left, right):
            continue
        follows = _bits_differ(left, right)
        held = _holds(left, POISONS[0]) & _holds(right, POISONS[1])
        share = float(follows.double().mean())
        whole = bool((held | ~follows).all())
        detail = (
            "elements hold what fresh memory held before the call"
            if whole
            else "elements follow what fresh memory held before the call"
        )
        faults.append(
            Fault(
                FaultKind.UNWRITTEN,
                variation,
                name,
                where=places_of(follows, inputs.named()),
                share=share,
                detail=detail,
            )
        )
    return Habits(tuple(faults))


def _bits_differ(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return where two tensors of one shape and dtype have other bits."""
    return (_bytes(left) != _bytes(right)).any(-1)


def _holds(tensor: torch.Tensor, byte: int) -> torch.Tensor:
    """Return which elements consist of one byte."""
    return (_bytes(tensor) == byte).all(-1)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = resolved(tensor).contiguous().reshape(-1).view(torch.uint8)
    return flat.reshape(*tensor.shape, tensor.itemsize)


# ------------------------------------------------------------------------------------------------ from call to call


def repeated(
    caller: Caller,
    first: Called,
    inputs: KernelInputs,
    other: KernelInputs | None,
    right: Callable[[Called, KernelInputs], bool],
) -> Habits:
    """Call a kernel again with the same inputs, with others, and with the first ones.

    Args:
        caller: of the kernel.
        first: its first call.
        inputs: of the first call.
        other: of the same shapes, with other values; ``None``: they cannot be varied.
        right: returns whether the results of a call for inputs are within rounding.
    """
    second = caller(inputs)

    def compared(later: Called, words: str) -> Habits:
        return _compared(first, later, words, lambda called: right(called, inputs))

    found = compared(second, "the second call with the same inputs")
    if found.faults or other is None:
        return found
    between = caller(other)
    if between.error is not None:
        return found
    if between.same_bits(first) and not right(between, other) and right(first, inputs):
        detail = "a call with other inputs returns the result of the call before"
        return Habits((Fault(FaultKind.STALE, output=first.names[0], detail=detail),), found.remarks)
    overwritten = first.overwritten()
    if overwritten:
        detail = "the next call writes over the result of the one before"
        return Habits(tuple(Fault(FaultKind.STALE, output=name, detail=detail) for name in overwritten), found.remarks)
    third = compared(caller(inputs), "a call after one with other inputs")
    return found if found.remarks and not third.faults else found + third


def _compared(first: Called, later: Called, words: str, right: Callable[[Called], bool]) -> Habits:
    if later.error is not None:
        detail = f"{words} raises {named_line(later.error, limit=200)}"
        return Habits((Fault(FaultKind.CALLS_DIFFER, detail=detail),))
    if later.same_bits(first):
        return Habits()
    if right(later) or not right(first):
        remark = f"{words} differs in bits from the first; both are {'within' if right(later) else 'beyond'} rounding"
        return Habits(remarks=(remark,))
    names = [
        name
        for name, one, other in zip(first.names, first.results, later.results, strict=False)
        if not equal_bits(one, other)
    ]
    detail = f"the first call is within rounding, {words} is not"
    return Habits(tuple(Fault(FaultKind.CALLS_DIFFER, output=name, detail=detail) for name in names[:1] or ["output"]))


# ------------------------------------------------------------------------------------------------------------- inputs


def written_inputs(
    called: Called, reference: Called, reference_ignores: Callable[[int], bool], variation: str = "given"
) -> Habits:
    """Return what is to be said of inputs that a call wrote.

    Args:
        called: of the kernel.
        reference: the same call of the reference.
        reference_ignores: returns whether the results of the reference do not depend on an input; it is then no input
            but a place for the result.
        variation: name of the one that showed it.
    """
    names = called.given.names()
    faults, remarks = [], []
    for number in sorted(called.written):
        name = names[number]
        if number in reference.written:
            remarks.append(f"the kernel and the reference both write {name}: what they leave there was judged")
        elif reference_ignores(number):
            remarks.append(f"the kernel writes {name}, which the reference does not read")
        else:
            detail = f"writes {name}, the reference does not"
            faults.append(Fault(FaultKind.WRITES_INPUT, variation, name, detail=detail))
    remarks += [
        f"a result lies in the memory of {names[number]}: who writes one of them changes the other"
        for number in sorted(called.aliased - called.written - reference.aliased)
    ]
    return Habits(tuple(faults), tuple(remarks))
