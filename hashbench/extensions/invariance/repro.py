"""Write the repro of an item that depends on its batch: a folder with the kernel alone, in both batches, for torch
alone.

``repro.py`` makes the two calls and prints the rows that differ; ``tensors.pt`` holds the inputs of both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hashbench.core.diagnose.calls.call import CapturedCall
from hashbench.core.diagnose.calls.capture import CaptureError, capture
from hashbench.core.diagnose.calls.live import captured_environment
from hashbench.core.diagnose.calls.ops import needs_definition
from hashbench.core.diagnose.fresh_process import run_python
from hashbench.core.diagnose.repro import script, writer
from hashbench.core.diagnose.repro.call_arguments import BadCallError
from hashbench.core.errors import HashbenchError, first_line
from hashbench.core.records import Decision
from hashbench.core.trace.op_schema import plan_of
from hashbench.extensions.invariance.call_pair import CallPair
from hashbench.extensions.invariance.item_call import SEED, ItemCall
from hashbench.extensions.invariance.layout import Cut, ItemAxis, NotItemwiseError
from hashbench.extensions.invariance.match import Agreement, Match

MOST_BYTES = 2**28
"""Of the inputs of one of the two calls."""

_LAST_LINE = re.compile(r"^(.+)\s*\Z", re.MULTILINE)
"""In what a script prints."""

Part = tuple[tuple[int, int, int, int], ...]
"""What of a tensor is compared with all of the other call's: of each of these dimensions, in each of so many blocks,
from which index on and how many: ``(dimension, blocks, start, length)``."""


def write_item_repro(
    folder: Path,
    call: ItemCall,
    decision: Decision,
    *,
    chosen: Sequence[int] | None = None,
    first: ItemCall | None = None,
    seen_in: str = "",
) -> None:
    """Write the repro of a call into ``folder``.

    Args:
        call: on as many items as the reference has.
        decision: what the experiments on it showed.
        chosen: the items in the other call, in their order there: some of them, or all at other places; ``None``: as
            many, all of them copies of the one that is compared, as for a coupling to their content. So it is, too,
            where the rows of fewer items are shorter, as those of each item against all others are.
        first: the other call itself, where it is not just that of the ``chosen`` items.
        seen_in: in which model or sample, in words.

    Raises:
        HashbenchError: the call is of no op that torch alone has, or cannot be written.
        OSError: the folder cannot be written.
    """
    _require_torch_op(call)
    try:
        with captured_environment(call):
            calls, places = _both(call, chosen, first)
            captured = [capture(call.func, call.args, call.kwargs, limit_bytes=MOST_BYTES) for call in calls]
            layout = [None if axis is None else (axis.dim, axis.outer, axis.inner) for axis in call.outputs]
            items, heading = (calls[0].items, calls[1].items), _heading(call, decision, seen_in)
            text = _script(calls, captured, heading=heading, items=items, layout=layout, compared=places)
    except (CaptureError, BadCallError, NotItemwiseError) as error:
        raise _refused(call, str(error)) from None
    _save(folder, calls, captured[1], text)


def write_part_repro(
    folder: Path,
    made: ItemCall | CallPair,
    decision: Decision,
    *,
    sizes: tuple[int, int],
    unit: str = "tokens",
    seen_in: str = "",
) -> None:
    """Write the repro of a call whose common part is compared as one: tokens that depend on each other, or the calls as
    both runs made them. ``folder``, ``decision`` and ``seen_in`` are those of :func:`write_item_repro`.

    Args:
        made: a call with a watched item, which is compared with the same alone; or both calls.
        sizes: how many tokens (or items: ``unit``) the smaller run and the reference had.

    Raises:
        HashbenchError: the call is of no op that torch alone has, or cannot be written; or the rows of the other run
            cannot be identified.
        OSError: the folder cannot be written.
    """
    call = made.reference if isinstance(made, CallPair) else made
    _require_torch_op(call)
    try:
        with captured_environment(call):
            if isinstance(made, CallPair):
                calls, parts = (made.other, made.reference), _parts_of_pair(made)
            else:
                calls, parts = (made.select([made.watched or 0]), made), _parts_of_watched(made)
            _require_shapes(calls, parts)
            captured = [capture(call.func, call.args, call.kwargs, limit_bytes=MOST_BYTES) for call in calls]
            heading = _heading(call, decision, seen_in)
            text = _script(calls, captured, heading=heading, items=sizes, unit=unit, parts=parts)
    except (CaptureError, BadCallError, NotItemwiseError) as error:
        raise _refused(call, str(error)) from None
    _save(folder, calls, captured[1], text)


def _parts_of_watched(call: ItemCall) -> list[Part | None]:
    """Return, for each tensor that a call leaves, the part of its watched item; ``None``: it is not compared."""

    def part(axis: ItemAxis, shape: Sequence[int]) -> Part:
        place = call.watched or 0
        further = ((dim, 1, place * (shape[dim] // call.items), shape[dim] // call.items) for dim in axis.also)
        return (axis.dim, axis.outer, place * axis.inner, axis.inner), *further

    left = [*zip(call.outputs, (tensor.shape for tensor in call.run()[0]), strict=True)]
    if not any(axis is not None for axis, _ in left):
        return [() for _ in left]
    return [None if axis is None else part(axis, shape) for axis, shape in left]


def _parts_of_pair(pair: CallPair) -> list[Part | None]:
    """Return, for each tensor that differs, the part of the reference that the other run has."""
    inherited = tuple(pair.judged.read.values())
    parts: list[Part | None] = []
    for at in pair.written:
        part, cut = (None, None) if at is None else (pair.judged.written[at], pair.rows[0].written[at].cut)
        parts.append(None if part is None or part.equal or cut is None else _part(pair, part, cut, inherited))
    return parts


def _part(pair: CallPair, match: Match, cut: Cut, inherited: Sequence[Match]) -> Part:
    if match.agreement is not Agreement.DIFFERENT or any(
        other.agreement is Agreement.FOUND and other.sizes == match.sizes for other in inherited
    ):
        raise NotItemwiseError("which of its rows are the other run's is not known")
    further = tuple((dim, 1, start, length) for dim, start, length in cut.narrowed)
    if match.sizes is None or cut.dim is None:
        return further
    outer = match.outer(inherited)
    return (cut.dim, outer, pair.subset.start(match.sizes[0], outer), match.sizes[1] // outer), *further


def _require_shapes(calls: tuple[ItemCall, ItemCall], parts: Sequence[Part | None]) -> None:
    """Raise unless the compared parts have the same shape in both calls."""
    if not any(part is not None for part in parts):
        raise NotItemwiseError("nothing that it leaves can be compared")
    for first, other, part in zip(*(call.run()[0] for call in calls), parts, strict=True):
        shape = [*other.shape]
        for dim, outer, _, length in part or ():
            shape[dim] = outer * length
        if part is not None and shape != [*first.shape]:
            raise NotItemwiseError("its rows have other sizes in the other batch")


def _save(folder: Path, calls: Sequence[ItemCall], captured: CapturedCall, text: str) -> None:
    saved = {
        name: [tensor.detach().clone() for tensor in call.tensors] for name, call in zip(_NAMES, calls, strict=True)
    }
    generators = {"generators": [*captured.generators]} if captured.generators else {}
    with writer.new_folder(folder) as new:
        writer.write(new, text, saved | generators)


_NAMES = ("first", "second")


def _both(
    call: ItemCall, chosen: Sequence[int] | None, first: ItemCall | None
) -> tuple[tuple[ItemCall, ItemCall], dict[int, int]]:
    """Return the other call and the reference, and which item of the reference is at which place of the other."""
    if chosen is not None:
        other = call.select(chosen) if first is None else first
        if _row_sizes(other, call) == _row_sizes(call, call):
            return (other, call), {item: place for place, item in enumerate(chosen)}
    kept = call.items - 1
    return (call.select([kept] * call.items), call), {kept: kept}


def _row_sizes(smaller: ItemCall, call: ItemCall) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of the tensors that ``one`` leaves in all dimensions but the item axes."""
    left = zip(smaller.run()[0], call.outputs, strict=True)
    return tuple(
        (*tensor.shape[: axis.dim], *tensor.shape[axis.dim + 1 :]) for tensor, axis in left if axis is not None
    )


def _require_torch_op(call: ItemCall) -> None:
    if not isinstance(call.func, torch._ops.OpOverload) or needs_definition(call.func):
        raise _refused(call, "torch alone does not have it")


def _refused(call: ItemCall, why: str) -> HashbenchError:
    return HashbenchError(f"cannot write a repro of {call.name}", consequence=first_line(why))


def _script(
    calls: Sequence[ItemCall],
    captured: Sequence[CapturedCall],
    *,
    heading: str,
    items: tuple[int, ...],
    compared: Mapping[int, int] | None = None,
    layout: Sequence[object] = (),
    parts: Sequence[Part | None] = (),
    unit: str = "items",
) -> str:
    reference = calls[1]
    tensors = reference.tensors
    changed = plan_of(reference.func).written_tensors(reference.args, reference.kwargs)
    return writer.render(
        "items.py.jinja",
        package=__package__,
        metadata=writer.metadata(),
        heading=heading,
        threads=torch.get_num_threads(),
        settings=script.settings_statements(captured[1]),
        items=items,
        unit=unit,
        compared=dict(sorted((compared or {}).items())),
        layout=[*layout],
        parts=[*parts],
        written=[place for place, tensor in enumerate(tensors) if any(tensor is other for other in changed)],
        shapes=[call.shapes for call in calls],
        expressions=[script.expression(call) for call in captured],
        generators=script.generators(captured[1]),
        seed=SEED if plan_of(reference.func).seeded else None,
    )


def _heading(call: ItemCall, decision: Decision, seen_in: str) -> str:
    claim = f"{call.name} gives an item other rows in the other batch."
    return writer.heading(claim, writer.place_words(None, seen_in=seen_in), writer.cause_words(decision))


def run_item_repro(folder: Path, *, timeout: float) -> str:
    """Run the repro in a fresh process and return the outcome: ``in a fresh process 2 of 4 items differ between 4 items
    and 8``, ``failed: …`` or ``timeout after 300 s``."""
    ran = writer.run(folder, _LAST_LINE, timeout=timeout, by=run_python)
    return ran.problem or "in a fresh process {}".format(*ran.shows)
