"""Check the invariance of a plain Python function: its items in another batch, or its tokens beside others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hashbench.core.check.function import (
    SUITE,
    FunctionCall,
    FunctionRuns,
    fresh_copy,
    inputs_of,
    parts_of,
    row_of_check,
)
from hashbench.core.check.subject import Subject
from hashbench.core.errors import HashbenchError
from hashbench.core.records import BATCH_INVARIANCE, ModelSpec, Row, RunOptions
from hashbench.core.run.outcome import Run
from hashbench.core.run.workload import Tokens, batch_of
from hashbench.extensions.invariance.check import InvarianceCheck
from hashbench.extensions.invariance.variants import NotApplicableError, smaller_batches, variants_of


def check_invariance(
    call: FunctionCall, name: str, options: RunOptions, *, sizes: Sequence[int] = (), tokens: Tokens | None = None
) -> Row:
    """Call a function with its items in a smaller batch or in another order, or with its tokens beside padding or after
    a cache, as the mode of ``options`` says, and compare what the calls return.

    Modules among the arguments, and the function itself, are in ``eval`` mode. Exceptions are raised unchanged.

    Args:
        call: the function and its arguments. Items are the first dimension of all tensors among them that have the same
            first dimension; arguments of tokens are all by name.
        name: its name in the row.
        options: as in :func:`~hashbench.core.check.function.check_function`; its mode is that of one invariance.
        sizes: of smaller batches; none: halves of the batch.
        tokens: which arguments hold the tokens, their mask, positions and cache; ``None``: those of these names that it
            takes.

    Raises:
        HashbenchError: the invariance cannot be checked on it, nothing can be compared, or a copy, a result or the
            tracer is unusable.
    """
    call = _in_eval(call)
    inputs = inputs_of(call)
    spec = ModelSpec(SUITE, name)
    subject = Subject(
        FunctionRuns(call, options, every_op=False, allow_empty=True),
        spec,
        model=call.function,
        inputs=inputs,
        batch=batch_of(inputs, None),
        tokens=tokens,
        outputs=_outputs,
    )
    of_sizes = options.mode == BATCH_INVARIANCE
    try:
        variants = smaller_batches(subject, sizes) if of_sizes else variants_of(subject, options.invariance)
    except NotApplicableError as error:
        what = "no smaller batch can be run" if of_sizes else f"{options.invariance} invariance cannot be checked"
        tip = "Give tensors with one batch." if of_sizes else ""
        raise HashbenchError(what, consequence=str(error), tip=tip) from None
    return row_of_check(spec, options, lambda level: InvarianceCheck(subject, options, level, variants).run())


def _in_eval(call: FunctionCall) -> FunctionCall:
    """Copy a call, with its modules in ``eval`` mode."""
    call = fresh_copy(call)
    for _, part in parts_of(call):
        if isinstance(part, torch.nn.Module):
            part.eval()
    return call


def _outputs(run: Run) -> dict[str, Any]:
    return {name: value for name, value in run.results.items() if name.partition(".")[0] == "output"}
