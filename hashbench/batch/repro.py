"""The repro of an item that depends on its company: a folder with the kernel alone, in both companies, for torch alone.

``repro.py`` makes the two calls and prints the rows that differ; ``tensors.pt`` holds the inputs of both.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import hashbench
from hashbench.batch.item_call import ItemCall, NotItemwiseError, in_force
from hashbench.diagnose.fresh_process import run_python
from hashbench.errors import HashbenchError, first_line
from hashbench.io import replace_file
from hashbench.records import Decision
from hashbench.replay.call import CapturedCall, CaptureError, capture
from hashbench.replay.ops import needs_definition
from hashbench.repro import script
from hashbench.repro.call_file import TENSORS_FILE, BadCallError
from hashbench.trace.op_schema import plan_of

SCRIPT_FILE = "repro.py"

MOST_BYTES = 2**28
"""Of the inputs of one of the two calls."""

_RUN = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
_WIDTH = 100


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
    if not isinstance(call.func, torch._ops.OpOverload) or needs_definition(call.func):
        raise _refused(call, "torch alone does not have it")
    try:
        with in_force(call):
            calls, places = _both(call, chosen, first)
            captured = [capture(one.func, one.args, one.kwargs, limit_bytes=MOST_BYTES) for one in calls]
            text = _script(calls, captured, places, heading=_heading(call, decision, seen_in))
    except (CaptureError, BadCallError, NotItemwiseError) as error:
        raise _refused(call, str(error)) from None
    folder.mkdir(parents=True, exist_ok=True)
    saved = {name: [tensor.detach().clone() for tensor in one.tensors] for name, one in zip(_NAMES, calls, strict=True)}
    torch.save(saved, folder / TENSORS_FILE)
    replace_file(folder / SCRIPT_FILE, text)


_NAMES = ("first", "second")


def _both(
    call: ItemCall, chosen: Sequence[int] | None, first: ItemCall | None
) -> tuple[tuple[ItemCall, ItemCall], dict[int, int]]:
    """The other call and the reference, and which item of the reference is at which place of the other."""
    if chosen is not None:
        other = call.select(chosen) if first is None else first
        if _row_sizes(other, call) == _row_sizes(call, call):
            return (other, call), {item: place for place, item in enumerate(chosen)}
        if call.watched is not None:
            raise NotItemwiseError("its rows have other sizes in other company")
    kept = call.items - 1
    return (call.select([kept] * call.items), call), {kept: kept}


def _row_sizes(one: ItemCall, call: ItemCall) -> tuple[tuple[int, ...], ...]:
    """The sizes of what ``one`` leaves of an item: those of its tensors in the other dimensions than the items' own."""
    left = zip(one.run()[0], call.outputs, strict=True)
    return tuple(
        (*tensor.shape[: axis.dim], *tensor.shape[axis.dim + 1 :]) for tensor, axis in left if axis is not None
    )


def _refused(call: ItemCall, why: str) -> HashbenchError:
    return HashbenchError(f"cannot write a repro of {call.name}", consequence=first_line(why))


def _script(
    calls: Sequence[ItemCall], captured: Sequence[CapturedCall], places: Mapping[int, int], *, heading: str
) -> str:
    reference = calls[1]
    tensors = reference.tensors
    changed = plan_of(reference.func).written_tensors(reference.args, reference.kwargs)
    return script.render(
        "items.py.jinja",
        heading=heading,
        threads=torch.get_num_threads(),
        settings=script.settings_statements(captured[1]),
        items=tuple(one.items for one in calls),
        compared=dict(sorted(places.items())),
        layout=[None if axis is None else (axis.dim, axis.outer, axis.inner) for axis in reference.outputs],
        written=[place for place, one in enumerate(tensors) if any(one is other for other in changed)],
        shapes=[one.shapes for one in calls],
        expressions=[script.expression(one) for one in captured],
    )


def _heading(call: ItemCall, decision: Decision, seen_in: str) -> str:
    lines = [
        f"{call.name} gives an item other rows in other company.",
        "",
        *textwrap.wrap(f"{seen_in[:1].upper()}{seen_in[1:]}.", _WIDTH)[: bool(seen_in)],
        *textwrap.wrap(f"Cause: {decision.cause}, {decision.confidence}. {decision.because.rstrip('.')}.", _WIDTH),
        f"Written by hashbench {hashbench.__version__} on torch {torch.__version__}. It needs torch alone.",
    ]
    return "\n".join(lines)


def run_item_repro(folder: Path, *, timeout: float) -> str:
    """Run the repro in a fresh process; what came of it: ``yes: 2 of 4 items
    differ between 4 items and 8``, ``no: …``, ``failed: …`` or ``timeout after 60 s``."""
    done = run_python(_RUN, str((folder / SCRIPT_FILE).resolve()), seconds=timeout)
    if done.status is None:
        return f"timeout after {timeout:g} s"
    if done.status not in (0, 1) or not done.stdout.strip():
        return f"failed: {done.last_line}"
    return f"{'yes' if done.status else 'no'}: {done.stdout.strip().splitlines()[-1]}"
