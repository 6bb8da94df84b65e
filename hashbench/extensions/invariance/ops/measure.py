"""Rows of an audit of batch invariance: what a worker process measures of one op.

Of each sample the axis of its items is found by experiment, then the op is run, forward, on other numbers of them and
in another order. What differs from the run on all of them is explained by the experiments of
:mod:`hashbench.extensions.invariance`.

1. The batch axis: the first dimension of the inputs, and one of the outputs, such that one more item in is one more
   out, and items in another order come out in that order. Weights have none, nor has an input as large as the batch by
   chance that the op takes beside fewer items.
2. The reference has 8 items, 32 of a widened sample, 13 if an item is widened to more than 16,384 elements; missing
   ones are copies, each multiplied by a factor of its own. The rows of the first 1, 2, 3, 5, 7 and 31 items alone are
   compared with theirs, bit by bit, and if one number differs those of 4, 6, 8, 12 and 16 too; then those of all items
   backwards, and with the first one last.
3. What differs is traced: the kernel is the first whose inputs' rows are equal and whose outputs' are not, as in a
   sweep. Experiments on it say why (``shape_dependent_kernel``, from how many items on, whether it is the order of
   addition); ``repro/`` gets it at both sizes or in both orders.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import thread_time

import torch

from hashbench.core.check.function import FunctionCall
from hashbench.core.diagnose.calls.live import captured_environment
from hashbench.core.diagnose.repro import REPRO_SECONDS
from hashbench.core.errors import HashbenchError, named_line
from hashbench.core.records import Decision
from hashbench.core.report.audits import Op, OpSample, Samples
from hashbench.core.run.settings import settings
from hashbench.core.trace.arguments import tensors_in
from hashbench.extensions.invariance.cause import decide
from hashbench.extensions.invariance.experiments import diagnose_item_call
from hashbench.extensions.invariance.item_call import ItemCall, digests_of
from hashbench.extensions.invariance.layout import NotItemwiseError
from hashbench.extensions.invariance.ops.axis import Itemwise, draws, find_axis, widened, with_items
from hashbench.extensions.invariance.ops.kernel import another_order, kernel_of
from hashbench.extensions.invariance.ops.table import INVARIANCE, Invariance, InvarianceRow
from hashbench.extensions.invariance.repro import run_item_repro, write_item_repro

ITEMS, MANY_ITEMS, LARGE_ITEMS, LARGE = 8, 32, 13, 2**14
"""Items of the reference: of a sample as it is, of a widened one, and of one whose items are widened to more than so
many elements each."""

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 31)
"""Numbers of items that are compared with the reference, those below it."""

FIRST_SIZES = (1, 2, 3, 5, 7, 31)
"""Those of them that are always tried: at one at least, every op differed that differed at any on the CPU of the
baseline."""


LONGEST_REASON = 300


def rows_of(op: Op, samples: Samples, *, device: str, budget: float, folder: Path | None) -> Iterator[InvarianceRow]:
    """Yield every row of one op; a :class:`~hashbench.core.report.audits.MeasureOp`."""
    search, threads = _OpSamples(budget, folder), torch.get_num_threads()
    for dtype, made in samples:
        row = INVARIANCE.row(device, op, Invariance.FAILS, dtype=dtype, threads=threads)
        if isinstance(made, str):
            yield replace(row, error=made)
            continue
        for sample in made:
            yield from search.rows_of_sample(sample, replace(row, sample=sample.sample, inputs=sample.inputs))


class _OpSamples:
    """The samples of one op: what they show, and of those that differ why, within the op's budget."""

    def __init__(self, budget: float, folder: Path | None) -> None:
        self.left, self.folder = budget, folder
        self.shown: set[str] = set()

    def rows_of_sample(self, sample: OpSample, row: InvarianceRow) -> Iterator[InvarianceRow]:
        """Yield ``row`` for the sample as it is, and for each widened one."""
        try:
            call = _whole(sample.call)
            with warnings.catch_warnings(), captured_environment(call):
                warnings.simplefilter("ignore")
                if (drawing := draws(call)) is not False:
                    yield replace(row, verdict=Invariance.RANDOM if drawing else Invariance.UNSTEADY)
                    return
                found = find_axis(call.func, call.args, dict(call.kwargs))
                if found is None:
                    yield replace(row, verdict=Invariance.NO_AXIS)
                    return
                for each in [found, *widened(found)]:
                    yield self._row(each, replace(row, widened=each.widened))
        except Exception as error:
            yield replace(row, error=named_line(error, limit=300))

    def _row(self, sample: Itemwise, row: InvarianceRow) -> InvarianceRow:
        items = ITEMS if not sample.widened else MANY_ITEMS if sample.elements <= LARGE else LARGE_ITEMS
        call = with_items(sample.call, items)
        row = replace(row, items=items, shapes=call.shapes)
        if sample.coupled:
            because = "different content in the other items changes an item by more than rounding"
            return replace(row, verdict=Invariance.COUPLED, cause="batch_coupling", because=because)
        verdict, sizes = measured(call)
        row = replace(row, verdict=verdict, sizes=" ".join(map(str, sizes)))
        if verdict not in (Invariance.DEPENDS, Invariance.PLACE):
            return row
        if self.left <= 0:
            return replace(row, because="the cause was not looked for: no time left for this op")
        return self._explained(call, row, sizes)

    def _explained(self, call: ItemCall, row: InvarianceRow, sizes: tuple[int, ...]) -> InvarianceRow:
        """Return the row with the cause, which is that of the kernel where one is named; for an op's first such a
        repro."""
        started = thread_time()
        found = kernel_of(call, sizes)
        kernel = found.call if found is not None else None
        evidence = diagnose_item_call(kernel or call, budget=self.left)
        if kernel is not None and not (evidence.sizes or evidence.arm("other_places").differing):
            found, kernel = None, None  # alone it does not depend on them
            evidence = diagnose_item_call(call, budget=self.left)
        decided = decide(evidence)
        why = found.detail if found is not None and kernel is None else ""
        self.left -= thread_time() - started
        row = self._with_repro(kernel, decided, row, evidence.sizes) if kernel is not None else row
        return replace(
            row,
            verdict=Invariance.COUPLED if decided.cause == "batch_coupling" else row.verdict,
            kernel=found.kernel if found is not None else "",
            shapes=kernel.shapes if kernel is not None else row.shapes,
            smallest_batch=evidence.smallest_batch,
            cause=decided.cause,
            confidence=decided.confidence,
            because="; ".join(filter(None, (why, decided.because)))[:LONGEST_REASON],
            advice=decided.advice[:LONGEST_REASON],
        )

    def _with_repro(
        self, kernel: ItemCall, decided: Decision, row: InvarianceRow, sizes: tuple[int, ...]
    ) -> InvarianceRow:
        if self.folder is None or kernel.name in self.shown:
            return row
        self.shown.add(kernel.name)
        name = Path("repro", f"{row.op}.{kernel.name}.{row.dtype}")
        chosen = range(sizes[0]) if sizes else another_order(kernel)
        try:
            write_item_repro(self.folder / name, kernel, decided, chosen=chosen, seen_in=f"the sample of {row.op}")
        except (HashbenchError, OSError) as error:
            return replace(row, reproduced=f"not written: {error}"[:200])
        return replace(row, repro=str(name), reproduced=run_item_repro(self.folder / name, timeout=REPRO_SECONDS))


def _whole(call: FunctionCall) -> ItemCall:
    """Return the call as a sample has it, its items not known yet."""
    kwargs = dict(call.kwargs or {})
    axes = (None,) * len(tensors_in([*call.args, *kwargs.values()]))
    return ItemCall(call.function, tuple(call.args), kwargs, 1, axes, (), settings=settings())


def _differs(call: ItemCall, size: int, reference: tuple[tuple[int, ...], ...]) -> bool:
    try:
        return call.at(size).rows() != reference[:size]
    except NotItemwiseError:  # of one item squeeze leaves no dimension
        return False


def measured(call: ItemCall) -> tuple[Invariance, tuple[int, ...]]:
    """Measure the items' rows: what became of them, and the numbers of items at which they are other than among all.
    All numbers are tried where one of a few shows a difference."""
    runs = [call.run()[0] for _ in range(2)]  # in other memory: the tensors of the first are still there
    reference, again = (digests_of(left, call.outputs, call.items) for left in runs)
    if again != reference:
        return Invariance.UNSTEADY, ()
    sizes: tuple[int, ...] = ()
    if any(_differs(call, size, reference) for size in FIRST_SIZES if size < call.items):
        sizes = tuple(size for size in SIZES if size < call.items and _differs(call, size, reference))
    if sizes:
        return Invariance.DEPENDS, sizes
    everybody = [*range(call.items)]
    for order in (everybody[::-1], [*everybody[1:], 0]):
        if call.select(order).rows() != tuple(reference[item] for item in order):
            return Invariance.PLACE, ()
    return Invariance.INVARIANT, ()
