"""What ``within_rounding`` says of right kernels: ops of torch's op database and their references in Python.

``python -m benchmarks.op_database [OP …]`` judges each op against its Python reference (``torch._refs``), and that
reference as a kernel against the op. Each verdict but "within rounding" is printed; not all of them are false, since
torch has faults of its own.

Importing the op database freezes the flags of ``torch.backends``: keep this a process of its own.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hashbench.core.trace.arguments import tensors_in
from hashbench.extensions.kernels.check import within_rounding

SAMPLES = 10
"""Sample inputs that are looked at; the one of most elements is judged."""


@dataclass(frozen=True, slots=True)
class Pair:
    """An op, its Python reference and inputs.

    Attributes:
        name: of the op in the database.
        op: takes the tensors among the inputs.
        reference: takes the same.
        inputs: the tensors among the inputs.
    """

    name: str
    op: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """What was said of one pair, as a line of the table."""

    name: str
    dtype: str
    kernel: str
    outcome: str
    kind: str = ""
    variation: str = ""
    where: str = ""
    detail: str = ""
    ratio: float | None = None
    shapes: str = ""
    seconds: float = 0.0


def bound(function: Callable[..., Any], leaves: Sequence[Any], spec: Any, places: Sequence[int]) -> Callable[..., Any]:
    """Return ``function`` of the tensors alone; other arguments stay."""

    def call(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        args, kwargs = tree_unflatten(filled, spec)
        return function(*args, **kwargs)

    return call


def repeats(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> bool:
    """Say whether two calls give equal results: an op that draws, or returns memory as it is, has no right answer."""
    one, other = (tensors_in(function(*(x.clone() for x in inputs))) for _ in range(2))
    return bool(one) and all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True))


def paired(entry: Any, dtype: torch.dtype) -> Pair | None:
    """Return the pair of an entry of the database, or nothing where it has no floating-point sample that repeats."""
    best: Pair | None = None
    most = 0
    for sample in itertools.islice(entry.torch_opinfo.sample_inputs("cpu", dtype), SAMPLES):
        leaves, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = tuple(leaves[i].detach() for i in places)
        size = sum(x.numel() for x in tensors if x.is_floating_point())
        if size > most:
            op, reference = (bound(f, leaves, spec, places) for f in (entry.torch_opinfo.op, entry.op))
            best, most = Pair(entry.torch_opinfo.full_name, op, reference, tensors), size
    if best is None:
        return None
    torch.manual_seed(0)
    return best if repeats(best.op, best.inputs) and repeats(best.reference, best.inputs) else None


def database(names: Sequence[str], dtype: torch.dtype) -> Iterator[Pair]:
    """Return pairs of the database that take ``dtype``, one for each op."""
    from torch.testing._internal.common_methods_invocations import python_ref_db

    seen = set()
    for entry in python_ref_db:
        name = entry.torch_opinfo.full_name
        if name in seen or (names and name not in names) or dtype not in entry.torch_opinfo.dtypes:
            continue
        seen.add(name)
        torch.manual_seed(0)
        try:
            pair = paired(entry, dtype)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError) as error:
            print(f"{name} {dtype}: not paired: {str(error).splitlines()[0]}", flush=True)
            continue
        if pair:
            yield pair


def judged(pair: Pair, dtype: str) -> Iterator[Judged]:
    """Judge the op as a kernel, and the Python reference as one."""
    shapes = " ".join(str(list(x.shape)) for x in pair.inputs)
    for name, kernel, reference in (("op", pair.op, pair.reference), ("reference", pair.reference, pair.op)):
        began = monotonic()
        try:
            verdict = within_rounding(kernel, reference, *(x.clone() for x in pair.inputs))
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            detail = f"{type(error).__name__}: {error} at {Path(last.filename).name}:{last.lineno}"
            yield Judged(pair.name, dtype, name, "raised", detail=detail.replace("\n", " "), shapes=shapes)
            continue
        line = Judged(pair.name, dtype, name, verdict.outcome.value, shapes=shapes, seconds=monotonic() - began)
        if verdict.faults:
            first = verdict.faults[0]
            found = (first.kind.value, first.variation, first.where, first.detail, first.ratio)
            line = Judged(pair.name, dtype, name, verdict.outcome.value, *found, shapes, line.seconds)
        elif verdict.reason:
            line = Judged(pair.name, dtype, name, verdict.outcome.value, detail=verdict.reason, shapes=shapes)
        yield line


def main() -> None:
    """Print the score."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.op_database", description=(__doc__ or "").partition("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help="of the database; without: all")
    parser.add_argument(
        "--dtype", action="append", choices=("float32", "bfloat16", "float16"), help="default: the first two"
    )
    parser.add_argument("--every", type=int, default=1, help="of so many ops one")
    parser.add_argument("--csv", type=Path, help="write a line for each verdict to this file")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    found = []
    for dtype in asked.dtype or ("float32", "bfloat16"):
        for pair in itertools.islice(database(asked.ops, getattr(torch, dtype)), 0, None, asked.every):
            for line in judged(pair, dtype):
                found.append(line)
                if line.outcome != "within rounding":
                    print(*(value for value in astuple(line) if value not in ("", None)), sep=" | ", flush=True)
    if asked.csv:
        with asked.csv.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(
                [[field.name for field in fields(Judged)], *map(astuple, found)]
            )
    print(f"{len({line.name for line in found})} ops, {len(found)} verdicts")
    for outcome, count in Counter(line.outcome for line in found).most_common():
        print(f"{outcome:20} {count}, of {len({line.name for line in found if line.outcome == outcome})} ops")


if __name__ == "__main__":
    main()
