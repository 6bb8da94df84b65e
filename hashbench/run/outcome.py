"""Outcomes of runs: failures, statuses, differences between two runs, and whether further pairs confirm them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hashbench.errors import ran_out_of_memory
from hashbench.records import Diagnosis, Divergence, Failure, Result, RunCounts, Trace, Verdict, contiguous_stride
from hashbench.run import outputs
from hashbench.trace.callbacks import TraceCallback

_REFUSED = re.compile(
    r"(?P<kernel>[^\n]*?) does not have a deterministic implementation|deterministic.*CUBLAS_WORKSPACE_CONFIG",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Run:
    """What one run left: its trace (``None`` when untraced), its results by name, and the settings that it changed."""

    trace: Trace | None
    results: Mapping[str, Any] = field(repr=False)
    settings_changed: tuple[str, ...] = ()


class Attempt(Protocol):
    """Makes one run from the reset state: untraced, or with every input hashed, or with a watcher of its calls."""

    def __call__(
        self, *, traced: bool = True, diagnosing: bool = False, watcher: TraceCallback | None = None
    ) -> Run | Failure: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What repeated runs of one thing show: the status word, and all that is known about it."""

    accuracy: str
    deterministic: str
    runs: int = 0
    iterations: int | None = None
    failure: Failure | None = None
    verdict: Verdict | None = None
    difference: outputs.Difference | None = None
    run_counts: RunCounts | None = None
    confirmed: str = ""
    untraced: str = ""
    diagnosis: Diagnosis | None = None
    perturbed_ops: str = ""
    nondeterministic_op: str = ""
    settings_changed: tuple[str, ...] = ()
    ops: int | None = None
    benign: tuple[str, ...] | None = None
    traces: tuple[Trace, ...] = field(default=(), repr=False)


def failure_of(error: Exception, *, op: str = "") -> Failure:
    """An exception as a value. ``op`` is the dispatched op that raised it; torch's texts tell the rest."""
    text = f"{type(error).__name__}: {error}"
    refused = _REFUSED.search(str(error))
    refused_op = "" if refused is None else op or refused["kernel"] or "unknown"
    return Failure(text, out_of_memory=ran_out_of_memory(error), op=op, nondeterministic_op=refused_op)


def refused_op(outcome: Outcome) -> str:
    """The op that torch refused for having no deterministic implementation; empty where that did not happen."""
    return outcome.failure.nondeterministic_op if outcome.failure is not None else ""


def failed_status(failure: Failure, *, number: int) -> str:
    """The status word for a failure of run ``number``; dynamo counts two runs, so any later one is the second."""
    if failure.op == "results":
        return "results_not_comparable"
    ordinal = "1st" if number == 1 else "2nd"
    return f"eager_{ordinal}_run_{'OOM' if failure.out_of_memory else 'fail'}"


def difference_between(first: Run, second: Run) -> outputs.Difference | None:
    """How two traced runs differ, by the digests that the traces noted; a tensor that both hold (a buffer that survives
    the deep copy) has changed since the first run noted it. Where strides differ, the tensors are compared."""
    old, new = (
        {} if run.trace is None else {item.name: item.digest for item in run.trace.results} for run in (first, second)
    )
    noted = {name: old[name] != new[name] for name in old.keys() & new.keys() if old[name].stride == new[name].stride}
    return outputs.compare(first.results, second.results, noted=noted)


def fingerprint(run: Run) -> int:
    """Equal for runs whose results are equal bit by bit, whatever their strides."""
    if run.trace is None:
        return 0
    return hash(tuple((result.name, *_logical(result, run.results[result.name])) for result in run.trace.results))


def _logical(result: Result, value: Any) -> tuple[object, ...]:
    dtype, shape, stride, text = result.digest
    if isinstance(value, torch.Tensor) and stride != contiguous_stride(shape):
        text = outputs.logical_value(value)
    return dtype, shape, text


def confirmation(plain: Verdict | None, hashed: Verdict, *, pairs: int) -> str:
    """What the column ``confirmed`` says of a further pair that differed, the ``pairs``-th one tried."""
    old = plain.divergence if plain is not None else None
    new = hashed.divergence
    times = "" if pairs == 1 else f" (in pair {pairs})"
    if old is None or new is None or same_place(old, new):
        return f"yes{times}"
    if old.origin == "kernel":
        return f"yes{times}: with inputs hashed; without, {old.origin} at {old.node}"
    return f"differs again{times}, there by {new.origin} at {new.node}"


def same_place(one: Divergence, other: Divergence | None) -> bool:
    """Whether two pairs of runs part at the same record or leaf, and in the same way."""
    return other is not None and (one.origin, one.node) == (other.origin, other.node)


def replaces(hashed: Verdict, plain: Verdict | None, traces: Sequence[Trace]) -> bool:
    """Whether the verdict on a pair with hashed inputs, on these ``traces``, says more than a plain one before it.

    It does where it looked past what the plain one blamed, which differs in this pair too: a view that shows the same,
    or a tensor of which nothing that differs was read.
    """
    old, new = plain.divergence if plain is not None else None, hashed.divergence
    if old is None or old.origin == "kernel" or same_place(old, new):
        return True
    looked_past = new is not None and new.origin == "kernel" and (new.op_index or 0) >= (old.op_index or 0)
    return looked_past and _differs_at(old.node, traces)


def _differs_at(node: str, traces: Sequence[Trace]) -> bool:
    """Whether two traces differ at this record or leaf: what is past it then differs in spite of it."""
    contents = [
        {leaf.id: (leaf.digest, leaf.initial) for leaf in trace.leaves}
        | {record.id: (record.arguments, record.outputs) for record in trace.records}
        for trace in traces
    ]
    held = [content.get(node) for content in contents]
    return None not in held and held[0] != held[-1]
