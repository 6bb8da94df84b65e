"""Derive facts about a captured call and its outcomes from memory and bits, without further experiments.

The content of an outcome is a *snapshot*: copies of the tensors that the call wrote, in a fixed order. Functions that
take several snapshots need at least two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hashbench.core.diagnose.calls.call import CapturedCall, Slot, TensorForm, plan_for
from hashbench.core.diagnose.calls.live import LiveCall
from hashbench.core.run import outputs
from hashbench.core.run.distance import Difference, integer_view
from hashbench.core.trace.arguments import leaves
from hashbench.core.trace.digest import components

Snapshot = tuple[torch.Tensor, ...]


# -------------------------------------------------------------------------------------------------- the arguments


def written_slots(call: CapturedCall) -> frozenset[int]:
    """Return the indices (into the call's tensors) of arguments that the schema declares as written."""
    written = leaves(plan_for(call.func).written_values(call.args, call.kwargs))
    return frozenset(leaf.index for leaf in written if isinstance(leaf, Slot))


def has_overlap(call: CapturedCall) -> bool:
    """Return whether the call writes elements that it also reads through another view, or that alias within a written
    argument (an expanded tensor). Reading and writing through the same view is ordinary for in-place ops."""
    written = written_slots(call)
    forms = {index: form for index, form in enumerate(call.tensors) if isinstance(form, TensorForm)}
    for target in [forms[index] for index in sorted(written & forms.keys())]:
        view, (start, end) = _view_key(target), target.span()
        others = [form for form in forms.values() if form.storage == target.storage and _view_key(form) != view]
        meeting = [form for form in others if form.span()[0] < end and start < form.span()[1]]
        if not meeting and target.is_injective():
            continue
        marks = torch.zeros(call.memories[target.storage].content.nbytes, dtype=torch.uint8)
        _bytes_of(target, marks).fill_(1)
        held_twice = int(marks.sum()) < math.prod(target.shape) * target.dtype.itemsize
        if held_twice or any(bool(_bytes_of(form, marks).any()) for form in meeting):
            return True
    return False


def _view_key(form: TensorForm) -> tuple[object, ...]:
    return form.offset, form.shape, form.stride, form.dtype


def _bytes_of(form: TensorForm, memory: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements as a view of flat memory."""
    width = form.dtype.itemsize
    return memory.as_strided((*form.shape, width), (*(step * width for step in form.stride), 1), form.offset * width)


# --------------------------------------------------------------------------------------------------- the outcomes


def element_bits(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the content of a tensor of any layout as integers of its element width, one row per element.

    Elements of 16 bytes are pairs of ``int64``.
    """
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.is_nested and tensor.layout is torch.strided:
        tensor = tensor.values()
    parts = components(tensor)
    if len(parts) != 1 or parts[0] is not tensor:
        return [bits for part in parts for bits in element_bits(part)]
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if plain.itemsize == 16:
        return [torch.view_as_real(plain).contiguous().view(torch.int64)]
    return [integer_view(plain).reshape(-1, 1)]


def snapshot_bits(snapshot: Snapshot) -> list[torch.Tensor]:
    """Return the bits of a snapshot: one tensor of shape (elements, words) per component."""
    return [bits for tensor in snapshot for bits in element_bits(tensor)]


def have_same_form(first: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Return whether two snapshots can be compared element by element."""
    return [(bits.shape, bits.dtype) for bits in first] == [(bits.shape, bits.dtype) for bits in other]


def have_same_values(snapshots: Sequence[Snapshot]) -> bool:
    """Return whether the differing snapshots are permutations of each other, tensor by tensor."""
    contents = [snapshot_bits(snapshot) for snapshot in snapshots]
    sums = [[int(bits.sum(dtype=torch.int64)) for bits in content] for content in contents]
    if any(other != sums[0] for other in sums[1:]):
        return False  # which settles nearly all cases without sorting millions of elements
    first, *others = ([np.sort(_scalars(bits)) for bits in content] for content in contents)
    return all(np.array_equal(*pair) for other in others for pair in zip(first, other, strict=True))


def have_chosen_values(call: CapturedCall, snapshots: Sequence[Snapshot]) -> bool:
    """Return whether, wherever two snapshots differ, both hold an element of some input of the same dtype."""
    inputs = _typed_bits(LiveCall(call).tensors)
    contents = [_typed_bits(snapshot) for snapshot in snapshots]
    return all(_are_chosen(first, other, inputs) for first, other in pairwise(contents))


def have_tied_places(call: CapturedCall, snapshots: Sequence[Snapshot]) -> bool:
    """Return whether the snapshots differ only in indices along one dimension of an input that select bitwise equal
    elements.

    This is how ops differ that return the index of a median, of a maximum, of a free slot.
    """
    tensors = [tensor for tensor in LiveCall(call).tensors if tensor.layout is torch.strided]
    inputs = [tensor for tensor in tensors if not (tensor.is_nested or tensor.is_quantized)]
    return all(_are_tied(first, other, inputs) for first, other in pairwise(snapshots))


def _are_tied(snapshot: Snapshot, other: Snapshot, inputs: Sequence[torch.Tensor]) -> bool:
    if len(snapshot) != len(other):
        return False
    differing = [(a, b) for a, b in zip(snapshot, other, strict=True) if not outputs.bitwise_equal(a, b)]
    return bool(differing) and all(
        any(_select_equal_elements(a, b, source, dim) for source in inputs for dim in range(source.dim()))
        for a, b in differing
    )


def _select_equal_elements(tensor: torch.Tensor, other: torch.Tensor, source: torch.Tensor, dim: int) -> bool:
    """Return whether two index tensors along ``dim`` of ``source``, which may lack that dimension, select equal
    elements."""
    if any(index.dtype is not torch.int64 or index.device != source.device for index in (tensor, other)):
        return False
    if tensor.shape != other.shape or tensor.layout is not torch.strided:
        return False
    if tensor.dim() == source.dim() - 1:
        tensor, other = tensor.unsqueeze(dim), other.unsqueeze(dim)
    beside = [(a, b) for place, (a, b) in enumerate(zip(tensor.shape, source.shape, strict=False)) if place != dim]
    if tensor.dim() != source.dim() or any(a != b for a, b in beside):
        return False
    if not all(bool(((places >= 0) & (places < source.shape[dim])).all()) for places in (tensor, other)):
        return False
    return outputs.bitwise_equal(source.gather(dim, tensor), source.gather(dim, other))


Elements = list[tuple[torch.dtype, torch.Tensor]]


def _typed_bits(tensors: Sequence[torch.Tensor]) -> Elements:
    return [(tensor.dtype, bits) for tensor in tensors for bits in element_bits(tensor)]


def _are_chosen(elements: Elements, other: Elements, inputs: Elements) -> bool:
    if not have_same_form([bits for _, bits in elements], [bits for _, bits in other]):
        return False
    for (dtype, a), (_, b) in zip(elements, other, strict=True):
        differs = (a != b).any(dim=1)
        differing = torch.cat([a[differs], b[differs]])
        known = [bits for kind, bits in inputs if kind is dtype and bits.shape[1] == a.shape[1]]
        if not (_are_among(differing[:FEW], known) and _are_among(differing, known)):
            return False
    return True


FEW = 100
"""Elements looked up first: if values are computed rather than chosen, they decide without all others."""


def _are_among(elements: torch.Tensor, known: Sequence[torch.Tensor]) -> bool:
    if not len(elements) or not known:
        return not len(elements)
    every, wanted = np.concatenate([_scalars(bits) for bits in known]), _distinct(_scalars(elements))
    if len(wanted) <= FEW:
        places = np.searchsorted(wanted, every).clip(max=len(wanted) - 1)
        return len(_distinct(places[wanted[places] == every])) == len(wanted)
    every.sort()
    places = np.searchsorted(every, wanted).clip(max=len(every) - 1)
    return bool((every[places] == wanted).all())  # np.isin takes 20 s for 18 million elements, this takes 2


def _distinct(words: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the sorted distinct values. ``np.unique`` uses a hash table, 40 times slower for six million elements."""
    ordered = np.sort(words)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if len(ordered) else ordered


def _scalars(bits: torch.Tensor) -> np.ndarray[Any, Any]:
    """View the bits as one scalar per element."""
    values = np.ascontiguousarray(bits.cpu().numpy())
    if values.shape[1] == 1:
        return values[:, 0]
    return values.view([("low", "<i8"), ("high", "<i8")])[:, 0]


def representation_of(snapshots: Sequence[Snapshot]) -> str:
    """Return ``sign of zero``, ``NaN payload`` or both if no two snapshots differ in more than that; else an empty
    string."""
    differences = [difference_of(snapshots[0], other) for other in snapshots[1:]]
    kinds = {"" if difference is None else difference.representation for difference in differences}
    return "" if "" in kinds else ", ".join(sorted({word for kind in kinds for word in kind.split(", ")}))


def difference_of(first: Snapshot, other: Snapshot) -> Difference | None:
    """Measure the difference of two snapshots; ``None`` if they are equal or have different numbers of tensors."""
    if len(first) != len(other):
        return None
    named = [{f"output.{place}": tensor for place, tensor in enumerate(snapshot)} for snapshot in (first, other)]
    return outputs.compare(*named)
