"""Bitwise comparison of two runs of one call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from hashbench.replay.capture import is_plain
from hashbench.run.outputs import Difference, bitwise_equal, flatten, integer_view, measure
from hashbench.tools.bitwise.findings import Mismatch, Place
from hashbench.tools.bitwise.repeating import argument_names, refuse_without_content
from hashbench.trace.arguments import tensors_in
from hashbench.trace.digest import dtype_name, raw_digest
from hashbench.trace.op_schema import OpPlan
from hashbench.trace.storage_writers import storage_bytes, storage_key

Equality = Literal["bits", "values"]
Left = dict[str, Any]


def written_by(
    plan: OpPlan, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any, *, all_arguments: bool
) -> Left:
    """What a call wrote, by name: new outputs and numbers, and the arguments that it wrote (or all of them). A view of
    an argument is nothing new.

    Raises:
        NotComparableError: it returned something that is neither tensor nor plain value.
        CaptureError: a result has no content (meta, fake).
    """
    arguments = tensors_in([*args, *kwargs.values()])
    known, given = {id(tensor) for tensor in arguments}, {storage_key(tensor) for tensor in arguments} - {None}
    written = arguments if all_arguments else plan.written_tensors(args, kwargs)
    names = argument_names(args, kwargs) if written else {}
    left: Left = {names[id(tensor)]: tensor for tensor in written}
    for name, value in flatten(output, "output") if output is not None else ():
        if not isinstance(value, torch.Tensor):
            left[name] = value
        elif id(value) not in known and storage_key(value) not in given:
            refuse_without_content(value)
            left[name] = value
    return left


def same(first: Any, second: Any, *, equal: Equality) -> Difference | None:
    """``None`` where two results are the same: in every bit, or (``values``) but for NaN payloads and signs of zero."""
    if _same_bits(first, second):
        return None
    if equal == "values" and _same_numbers(first, second):
        return None
    found = measure(first, second)
    return None if equal == "values" and _only_representation(found) else found


def _same_bits(first: Any, second: Any) -> bool:
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return bitwise_equal(first, second)
    if first.is_cpu and second.is_cpu:  # nearly always the digests agree, in their raw form too
        return raw_digest(first) == raw_digest(second) or bitwise_equal(first, second)
    return same_on_device(first, second) if _comparable_there(first, second) else bitwise_equal(first, second)


def _comparable_there(first: torch.Tensor, second: torch.Tensor) -> bool:
    plain = is_plain(first) and is_plain(second) and not (first.is_conj() or first.is_neg())
    return plain and (first.dtype, first.shape, first.device) == (second.dtype, second.shape, second.device)


def same_on_device(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Bit by bit without a copy to the host: two plain tensors of one dtype, shape and device. Waits for the device."""
    if first.is_complex():
        first, second = torch.view_as_real(first.detach()), torch.view_as_real(second.detach())
    return torch.equal(integer_view(first.detach()), integer_view(second.detach()))


def _same_numbers(first: Any, second: Any) -> bool:
    if type(first) is not type(second) or not isinstance(first, (float, complex)):
        return False
    pairs = [(complex(first).real, complex(second).real), (complex(first).imag, complex(second).imag)]
    return all(one == other or (math.isnan(one) and math.isnan(other)) for one, other in pairs)


def _only_representation(found: Difference) -> bool:
    return found.elements is not None and found.representation not in ("", "value")


def share_memory(first: Left, second: Left) -> bool:
    """Whether the second run wrote its results over those of the first, so that there is nothing to compare."""
    one, other = (
        {storage_key(tensor) for tensor in tensors_in(list(left.values())) if tensor.numel()}
        for left in (first, second)
    )
    return bool(one & other - {None})


# ------------------------------------------------------------------------------------------------ unwritten memory


def fill_freed_memory(left: Left, value: int) -> None:
    """Blocks of the sizes of the results, filled with the byte ``value`` and freed: on an accelerator torch hands those
    out next, also to kernels, which :func:`~hashbench.replay.controls.poisoned_memory` does not reach there."""
    tensors = [tensor for tensor in tensors_in(list(left.values())) if is_plain(tensor)]
    blocks = [
        torch.full((storage_bytes(tensor),), value, dtype=torch.uint8, device=tensor.device) for tensor in tensors
    ]
    del blocks


def unwritten_elements(first: Any, second: Any, *, filled: Sequence[Any], bytes_filled: Sequence[int]) -> int | None:
    """How many elements differ, where all that do were left unwritten; ``None`` where one was written.

    ``filled`` are results of runs in which fresh memory held nothing but the byte of ``bytes_filled`` beside each. An
    element that holds just that in each of them was not written.
    """
    tensors = [first, second, *filled]
    if not all(isinstance(tensor, torch.Tensor) and is_plain(tensor) for tensor in tensors):
        return None
    if len({(tensor.shape, tensor.dtype) for tensor in tensors}) != 1:
        return None
    one, other, *runs = (_bytes(tensor) for tensor in tensors)
    differs = (one != other).any(dim=1)
    unwritten = [bool((run[differs] == value).all()) for run, value in zip(runs, bytes_filled, strict=True)]
    return int(differs.sum()) if all(unwritten) else None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return flat.contiguous().view(torch.uint8).reshape(len(flat), -1)


# ---------------------------------------------------------------------------------------------------- one call's runs


@dataclass(slots=True)
class Differing:
    """How one result differed from that of the first run: the number of the first run that did, and in ``others`` what
    each run left that did."""

    run: int
    one: Any = None
    others: tuple[Any, ...] = (None,)
    difference: Difference | None = None
    error: str = ""

    def mismatch(self, op: str, name: str, *, call: int, where: Place, runs: int) -> Mismatch:
        found = self.difference
        if found is not None:
            found = replace(found, names=(name,), representation=found.representation.replace("value", ""))
        return Mismatch(
            op=op,
            call=call,
            place=name,
            run=self.run,
            where=where,
            shape=_shape(self.one),
            other_shape=_shape(self.others[0]),
            dtype=_dtype(self.one),
            other_dtype=_dtype(self.others[0]),
            difference=found,
            runs_differing=len(self.others),
            runs=runs,
            error=self.error,
        )


@dataclass(slots=True)
class Found:
    """What the runs of one call showed."""

    checked: bool = False
    reason: str = ""
    differ: dict[str, Differing] = field(default_factory=dict)
    unwritten: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, differing: Differing) -> None:
        if name in self.differ:
            self.differ[name].others += differing.others
        else:
            self.differ[name] = differing


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) and not value.is_nested else None


def _dtype(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return dtype_name(value.dtype)
    return "" if value is None else type(value).__name__
