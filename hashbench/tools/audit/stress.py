"""Inputs of ours that provoke races: large, with duplicate indices, ties, unaligned or overlapping views.

They are data (``data/audit_stress.csv``): a function below ``torch``, and its arguments as Python would write them,
from a handful of builders. Nothing in that text is executed: it is parsed, and only the builders below are called.
"""

from __future__ import annotations

import ast
import csv
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hashbench.check.function import FunctionCall
from hashbench.errors import HashbenchError

TABLE = Path(__file__).parents[2] / "data" / "audit_stress.csv"
HEADER = ("op", "sample", "call", "arguments", "dtypes", "options")
OPTIONS = frozenset({"backward", "moved", ""})


@dataclass(frozen=True, slots=True)
class StressLine:
    """One line of the table. ``call`` is a path below ``torch``; ``backward``: gradients of all random tensors are
    looked at as well; ``moved``: the memory of the inputs lies at another offset in every run."""

    op: str
    sample: str
    call: str
    arguments: str
    dtypes: tuple[str, ...]
    backward: bool
    moved: bool


@functools.cache
def stress_lines(table: Path = TABLE) -> tuple[StressLine, ...]:
    """The lines of the table.

    Raises:
        HashbenchError: it is damaged, or an option is unknown.
    """
    with table.open(encoding="utf-8", newline="") as file:  # of this package, and read by workers: without pandas
        header, *read = csv.reader(file)
    lines = []
    for number, cells in enumerate(read, start=2):
        if tuple(header) != HEADER or len(cells) != len(HEADER) or cells[-1] not in OPTIONS:
            raise HashbenchError(f"line {number} of {table} is no stress input", consequence="nothing was run")
        op, sample, call, arguments, dtypes, options = cells
        lines.append(
            StressLine(op, sample, call, arguments, tuple(dtypes.split()), options == "backward", options == "moved")
        )
    return tuple(lines)


def built(line: StressLine, *, dtype: torch.dtype, device: str, seed: int) -> FunctionCall:
    """The call of a line with fresh arguments, the same for the same seed.

    Raises:
        HashbenchError: the text of its arguments is none, or torch has no such function.
    """
    try:
        function = operator.attrgetter(line.call)(torch)
        tree = ast.parse(f"call({line.arguments})", mode="eval").body
        assert isinstance(tree, ast.Call)
        maker = _Maker(dtype, torch.device(device), torch.Generator().manual_seed(seed), line.backward)
        args = tuple(maker.value(node) for node in tree.args)
        kwargs = {str(keyword.arg): maker.value(keyword.value) for keyword in tree.keywords}
    except (AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise HashbenchError(
            f"cannot build {line.call}({line.arguments})", consequence=f"{type(error).__name__}: {error}"
        ) from error
    return FunctionCall(function, args, kwargs)


@dataclass(slots=True)
class _Maker:
    """Turns the parsed text of arguments into values."""

    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator
    differentiable: bool
    named: dict[str, Any] = field(default_factory=dict)

    def value(self, node: ast.expr) -> Any:
        """What ``node`` stands for: a literal, a list, ``(name := …)``, a name, or the call of a builder."""
        if isinstance(node, ast.NamedExpr):
            self.named[node.target.id] = self.value(node.value)
            return self.named[node.target.id]
        if isinstance(node, ast.Name):
            if node.id not in self.named:
                raise ValueError(f"{node.id} has no value")
            return self.named[node.id]
        if isinstance(node, ast.List):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            if node.func.id not in BUILDERS:
                raise ValueError(f"there is no builder {node.func.id}")
            return BUILDERS[node.func.id](self, *(self.value(item) for item in node.args))
        return ast.literal_eval(node)

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` in the dtype of the sample; what is differentiated asks for a gradient."""
        made = values.to(self.dtype).to(self.device)
        return made.requires_grad_(self.differentiable and made.is_floating_point())


def _normal(maker: _Maker, *shape: int) -> torch.Tensor:
    drawn = torch.randn(shape, generator=maker.generator)
    return maker.tensor(drawn if maker.dtype.is_floating_point or maker.dtype.is_complex else drawn * 100)


def _ties(maker: _Maker, *shape: int) -> torch.Tensor:
    return maker.tensor(torch.randint(0, 4, shape, generator=maker.generator))


def _zeros(maker: _Maker, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=maker.dtype, device=maker.device)


def _below(maker: _Maker, bound: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, bound, shape, generator=maker.generator).to(maker.device)


def _labels(maker: _Maker, bound: int, *shape: int) -> torch.Tensor:
    return _below(maker, bound, *shape) + 1


def _mask(maker: _Maker, *shape: int) -> torch.Tensor:
    return _below(maker, 2, *shape).bool()


def _lengths(maker: _Maker, count: int, value: int) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.int64, device=maker.device)


def _grid(maker: _Maker, *shape: int) -> torch.Tensor:
    return maker.tensor(torch.rand(shape, generator=maker.generator) * 0.1)


def _gram(maker: _Maker, size: int) -> torch.Tensor:
    drawn = torch.randn(size, size, generator=maker.generator)
    return maker.tensor(drawn @ drawn.T + size * torch.eye(size))


def _sparse(maker: _Maker, *sizes: int) -> torch.Tensor:
    """``sizes`` are the shape and the number of entries, of which many stand in one place."""
    *shape, count = sizes
    places = torch.stack([torch.randint(0, size, (count,), generator=maker.generator) for size in shape])
    values = torch.randn(count, generator=maker.generator).to(maker.dtype)
    return torch.sparse_coo_tensor(places, values, tuple(shape), check_invariants=True).to(maker.device)


def _part(_maker: _Maker, tensor: torch.Tensor, start: int, stop: int, step: int) -> torch.Tensor:
    return tensor[start:stop:step]


def _transposed(_maker: _Maker, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t()


def _columns(_maker: _Maker, tensor: torch.Tensor, count: int) -> torch.Tensor:
    return tensor[:, :count]


BUILDERS: Mapping[str, Callable[..., Any]] = {
    "normal": _normal,
    "ties": _ties,
    "zeros": _zeros,
    "below": _below,
    "labels": _labels,
    "mask": _mask,
    "lengths": _lengths,
    "grid": _grid,
    "gram": _gram,
    "sparse": _sparse,
    "part": _part,
    "t": _transposed,
    "columns": _columns,
}
"""What the text of arguments may call; ``docs/audit.md`` describes each."""

# ------------------------------------------------------------------------------------------------ moved memory

SHIFTS = (0, 1, 2, 3, 4, 6, 8, 12)
"""Elements. The offsets at which the moved inputs of successive runs lie, as views of larger tensors do."""


def moved(call: FunctionCall, run: int) -> FunctionCall:
    """The call with every plain tensor among its arguments at the offset of run number ``run`` in a larger one."""
    shift = SHIFTS[run % len(SHIFTS)]
    args = tuple(_moved(value, shift) if isinstance(value, torch.Tensor) else value for value in call.args)
    return FunctionCall(call.function, args, call.kwargs)


def _moved(tensor: torch.Tensor, shift: int) -> torch.Tensor:
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return tensor
    room = torch.zeros(tensor.numel() + shift, dtype=tensor.dtype, device=tensor.device)
    placed = room[shift:].view(tensor.shape)
    return placed.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)
