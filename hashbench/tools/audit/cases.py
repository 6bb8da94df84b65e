"""What is run: single calls, from torch's own op database and from the stress table.

Importing torch's test helpers freezes torch's backend flags for the process, so that only worker processes may call
what is here for ``op_db``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hashbench.check.function import FunctionCall
from hashbench.run.rng import reset_rng_state
from hashbench.tools.audit import stress
from hashbench.tools.audit.choice import chosen_samples
from hashbench.trace.arguments import argument_text, tensors_in
from hashbench.trace.digest import dtype_name

LONGEST_INPUTS = 70
"""Characters of the text that describes a sample."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One op, one dtype, one sample. ``differentiable``: a backward pass is looked at too; ``moved``: the inputs lie
    elsewhere in every run; ``process``: what torch's own gradient tests make of the output before they differentiate
    (eigenvectors are unique up to a phase only)."""

    source: str
    op: str
    dtype: str
    sample: str
    inputs: str
    call: FunctionCall
    differentiable: bool = False
    moved: bool = False
    process: Callable[[Any], Any] | None = None


@functools.cache
def op_database() -> dict[str, Any]:
    """Torch's own entries by name, ``linalg.norm.subgradients_at_zero`` where an op has several. Freezes flags."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {f"{entry.name}.{entry.variant_test_name}".rstrip("."): entry for entry in op_db}


def catalog() -> list[tuple[str, str]]:
    """Every ``(source, op)`` that there is to audit."""
    stressed = dict.fromkeys(line.op for line in stress.stress_lines())
    return [*(("op_db", name) for name in op_database()), *(("stress", name) for name in stressed)]


def cases_of(
    source: str, op: str, *, dtypes: Sequence[str], samples: int, device: str, seed: int
) -> Iterator[tuple[str, list[Case] | Exception]]:
    """For each of the dtypes that the op takes: its name, and its cases or what making them raised."""
    for dtype in dtypes:
        reset_rng_state(seed)  # per dtype, so that inputs do not depend on what else was asked for
        try:
            if source == "stress":
                found = list(_stressed(op, dtype, device=device, seed=seed))
            else:
                found = _sampled(op, dtype, samples=samples, device=device)
        except Exception as error:
            yield dtype, error
            continue
        if found:
            yield dtype, found


def _stressed(op: str, dtype: str, *, device: str, seed: int) -> Iterator[Case]:
    for line in stress.stress_lines():
        if line.op == op and dtype in line.dtypes:
            call = stress.built(line, dtype=getattr(torch, dtype), device=device, seed=seed)
            yield Case("stress", op, dtype, line.sample, line.arguments, call, line.backward, line.moved)


def _sampled(op: str, dtype: str, *, samples: int, device: str) -> list[Case]:
    entry, kind, where = op_database()[op], getattr(torch, dtype), torch.device(device).type
    if kind not in entry.supported_dtypes(where):
        return []
    differentiable = entry.supports_autograd and kind in entry.supported_backward_dtypes(where)
    found = list(entry.sample_inputs(device, kind, requires_grad=differentiable))
    places = chosen_samples([_elements(sample) for sample in found], most=samples)
    return [_case(op, dtype, place, entry, found[place], differentiable) for place in places]


def _case(op: str, dtype: str, place: int, entry: Any, sample: Any, differentiable: bool) -> Case:
    call = FunctionCall(entry.op, (sample.input, *sample.args), sample.kwargs)
    return Case(
        "op_db", op, dtype, str(place), described(call), call, differentiable, process=sample.output_process_fn_grad
    )


def _elements(sample: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in([sample.input, *sample.args, *sample.kwargs.values()]))


def described(call: FunctionCall) -> str:
    """The arguments on one short line: shapes of tensors, values of the rest."""
    shown = argument_text([_shown(value) for value in call.args])
    named = ", ".join(f"{name}={argument_text([_shown(value)])}" for name, value in (call.kwargs or {}).items())
    text = ", ".join(filter(None, [shown, named])).replace("'", "")
    return text if len(text) <= LONGEST_INPUTS else f"{text[: LONGEST_INPUTS - 1]}…"


def _shown(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dtype = dtype_name(value.dtype)
        if value.is_nested:
            return f"{dtype}[nested]"
        return f"{dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return [_shown(item) for item in value]
    return value
