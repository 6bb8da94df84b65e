"""Items of a batch in a model's inputs and outputs: count them, take the first ones, and compare them between two
runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hashbench.core.run import outputs
from hashbench.core.run.distance import Difference
from hashbench.core.run.leaves import LeftOut
from hashbench.core.run.outcome import Run
from hashbench.core.run.workload import map_tensors
from hashbench.core.trace.arguments import tensors_in
from hashbench.extensions.invariance.neighbours import Neighbours


def why_not(inputs: Any, batch: int | None) -> str:
    """Return why a model with these inputs cannot be run with a smaller batch, else ""."""
    if batch is None:
        return "no batch size is known: its inputs have several first dimensions, or none"
    if batch < 2:
        return "its batch has one item, and nothing is smaller"
    if not any(_has_batch(tensor, batch) for tensor in tensors_in(inputs)):
        return f"no input has the batch of {batch} as its first dimension"
    return ""


def first_items(inputs: Any, size: int, batch: int, beside: Neighbours | None = None) -> Any:
    """Cut example inputs to their first ``size`` items: each tensor whose first dimension is ``batch``, with its stride
    order.

    Other inputs are kept. ``beside`` gives some items other content.
    """
    if size == batch and beside is None:
        return inputs

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if not _has_batch(tensor, batch):
            return tensor
        items = tensor.detach()[:size].clone().requires_grad_(tensor.requires_grad)
        if beside is not None:
            beside.change(items)
        return items

    return map_tensors(inputs, cut)


def _has_batch(tensor: torch.Tensor, batch: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == batch


def halves(batch: int) -> Iterator[int]:
    """Yield the sizes that are compared with ``batch``: a half, a quarter … one."""
    while batch := batch // 2:
        yield batch


# ------------------------------------------------------------------------------------------------- what is compared


@dataclass(frozen=True, slots=True)
class Compared:
    """Comparison of the outputs of a small batch with those of the full one.

    Attributes:
        compared: number of compared outputs.
        difference: ``None`` without one.
        left_out: why each other output was not compared.
    """

    compared: int
    difference: Difference | None
    left_out: tuple[str, ...] = ()


Rows = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None]
"""Returns the compared parts of a tensor of the reference and of the other run; ``None``: nothing is compared."""


def item_rows(batch: int, size: int) -> Rows:
    """Return the rows by which the first ``size`` items of a ``batch`` are compared with a batch of ``size``: those of
    tensors whose first dimension is the batch. Others (a loss, a table) show nothing about single items."""

    def rows(reference: torch.Tensor, small: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        return (reference[:size], small) if _has_batch(reference, batch) and _has_batch(small, size) else None

    return rows


NO_ITEMS = "its first dimension is not the batch"


def compare_items(
    reference: outputs.Results, small: outputs.Results, rows: Rows, *, missing: str = NO_ITEMS
) -> Compared:
    """Compare the ``rows`` of the outputs of two runs, bit by bit. Outputs of another structure differ; ``missing`` is
    why an output without rows is left out."""
    kinds = [{name: isinstance(value, torch.Tensor) for name, value in run.items()} for run in (reference, small)]
    if kinds[0] != kinds[1]:
        only = sorted(name for name in {*kinds[0], *kinds[1]} if kinds[0].get(name) != kinds[1].get(name))
        return Compared(0, Difference((f"their structure: {only[0]}",)))
    first: dict[str, Any] = {}
    second: dict[str, Any] = {}
    left_out = []
    for name, value in reference.items():
        other = small[name]
        if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
            left_out.append(str(value) if isinstance(value, LeftOut) else f"{name}: not a tensor")
        elif (both := rows(value, other)) is None:
            left_out.append(f"{name}: {missing}")
        else:
            first[name], second[name] = both
    return Compared(len(first), outputs.compare(first, second), tuple(left_out))


_OF_ITERATION = re.compile(r"output\.(?P<iteration>\d+)(?P<place>.*)")


def differing_earlier(names: Sequence[str], reference: Run, small: Run, rows: Rows) -> tuple[str, ...]:
    """Return the names of outputs that differ, and of the same outputs of earlier iterations that differ."""
    numbered = [match for name in names if (match := _OF_ITERATION.fullmatch(name))]
    earlier = [f"output.{n}{match['place']}" for match in numbered for n in range(int(match["iteration"]))]
    known = [name for name in earlier if name in reference.results and name in small.results]
    first, second = ({name: run.results[name] for name in known} for run in (reference, small))
    found = compare_items(first, second, rows).difference
    return (*(found.names if found is not None else ()), *names)
