"""Inductor's virtualized ops over tensors.

The values of :class:`TensorHandler` are tensors that broadcast to the whole iteration domain of a buffer: one dimension
a loop, the loops of a reduction last. Ops are torch's functions of the same name, but for those in ``_FUNCTIONS``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor.ops_handler import DefaultHandler
from torch._inductor.virtualized import OpsValue

from hashbench.extensions.compiled.indices import Indices, NotComputed


@dataclass(frozen=True, slots=True)
class FlatMemory:
    """A buffer's flat memory.

    Attributes:
        content: one-dimensional, on the CPU.
        known: bool, which elements of it have a known content; None if all have.
    """

    content: torch.Tensor
    known: torch.Tensor | None = None


def _wide(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Compute in float64 and round once."""

    def compute(*values: torch.Tensor) -> torch.Tensor:
        dtype = functools.reduce(torch.promote_types, (value.dtype for value in values))
        exact: torch.Tensor = function(*(value.double() for value in values))
        return exact.to(dtype)

    return compute


def _polygamma(order: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    orders = order.unique().tolist()
    if len(orders) != 1:
        raise NotComputed("polygamma of several orders")
    value: torch.Tensor = torch.special.polygamma(int(orders[0]), x)
    return value


_FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "and_": torch.bitwise_and,
        "or_": torch.bitwise_or,
        "xor": torch.bitwise_xor,
        "lshift": torch.bitwise_left_shift,
        "rshift": torch.bitwise_right_shift,
        "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
        "truediv": torch.true_divide,
        "div_rn": torch.true_divide,
        "int_truediv": lambda a, b: a.double() / b.double(),
        "mod": torch.fmod,
        "mul_rn": torch.mul,
        "fma": _wide(lambda a, b, c: a * b + c),
        "fmaximum": torch.fmax,
        "identity": lambda a: a,
        "polygamma": _polygamma,
        "check_bounds": lambda *_: None,
        "device_assert_async": lambda *_: None,
    }
)
"""Virtualized ops whose namesake in torch is missing or differs: ``mod`` takes its sign from the first operand."""

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("load_seed", "rand", "randn", "rand_eager", "randint64"), "random numbers"),
        **dict.fromkeys(("scan", "sort", "dot", "inline_asm_elementwise", "partial_accumulate"), ""),
        **dict.fromkeys(("halide_clamp", "output", "placeholder"), ""),
    }
)
"""Virtualized ops that are not evaluated, with the reason if their name is none."""


def _function(name: str) -> Callable[..., Any]:
    """Return torch's function for a pointwise virtualized op."""
    if name in _REFUSED:
        raise NotComputed(_REFUSED[name] or name)
    if name.endswith("_to_int"):
        rounded = _function(name.removesuffix("_to_int"))
        return lambda x, dtype: rounded(x).to(dtype)
    function = _FUNCTIONS.get(name) or getattr(torch, name, None) or getattr(torch.special, name, None)
    if not callable(function):
        raise NotComputed(f"virtualized op {name}")
    return function


class TensorHandler(DefaultHandler):
    """Handler of virtualized ops whose values are tensors that broadcast to the iteration domain.

    Attributes:
        result: memory of the buffer that is computed; stores write to it.
    """

    def __init__(
        self,
        indices: Indices,
        *,
        reduced: int,
        result: FlatMemory,
        read: Callable[[str], FlatMemory],
        compute_dtype: Callable[[torch.dtype], torch.dtype],
        keep_precision: bool,
    ) -> None:
        """Evaluate over the domain of ``indices``, whose last ``reduced`` dimensions are a reduction's.

        ``read`` returns the memory of a buffer, ``compute_dtype`` the dtype in which values of a dtype are computed; if
        ``keep_precision``, no cast rounds.
        """
        self._indices, self._reduced, self.result, self._read = indices, reduced, result, read
        self._compute_dtype, self._keep_precision = compute_dtype, keep_precision
        self._masks: list[torch.Tensor] = []

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _function(name)(*(self._value(arg) for arg in args), **kwargs)

    def _value(self, arg: Any) -> Any:
        return self._number(arg) if isinstance(arg, bool | int | float) else arg

    def constant(self, value: Any, dtype: torch.dtype) -> torch.Tensor:
        made = self._number(value).to(self._compute_dtype(dtype))
        return made if made.ndim else made.view([1] * len(self._indices.domain))

    def _number(self, value: Any) -> torch.Tensor:
        value = self._indices.value(value)
        return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else torch.as_tensor(value)

    def index_expr(self, expr: Any, dtype: torch.dtype) -> torch.Tensor:
        return self._indices.tensor(expr).to(self._compute_dtype(dtype))

    value_expr = index_expr

    def to_dtype(
        self,
        x: Any,
        dtype: torch.dtype,
        src_dtype: torch.dtype | None = None,  # noqa: ARG002 - as OpsHandler has it
        use_compute_types: bool = True,
    ) -> torch.Tensor:
        value: torch.Tensor = self._value(x)
        if not use_compute_types and not self._keep_precision:
            return value.to(dtype)
        return value.to(self._compute_dtype(dtype))

    def to_dtype_bitcast(self, x: Any, dtype: torch.dtype, src_dtype: torch.dtype) -> torch.Tensor:
        value: torch.Tensor = self._value(x)
        return value.to(src_dtype).contiguous().view(dtype).to(self._compute_dtype(dtype))

    def where(self, condition: Any, input: Any, other: Any) -> torch.Tensor:  # noqa: A002 - as OpsHandler has it
        return torch.where(self._value(condition).bool(), self._value(input), self._value(other))

    def masked(self, mask: Any, body: Callable[[], Any], other: Any) -> torch.Tensor:
        mask = self._value(mask).bool()
        with self._under(mask):
            value = body()
        value = self._value(value.value if isinstance(value, OpsValue) else value)
        return torch.where(mask, value, torch.tensor(other).to(value.dtype))

    @contextmanager
    def _under(self, mask: torch.Tensor) -> Iterator[None]:
        self._masks.append(mask & self._masks[-1] if self._masks else mask)
        try:
            yield
        finally:
            self._masks.pop()

    def _required(self, bad: torch.Tensor) -> torch.Tensor:
        """Return those of the bad elements that the current mask does not leave out."""
        return bad & self._masks[-1] if self._masks else bad

    def indirect_indexing(self, x: Any, size: Any, check: bool = True, wrap_neg: bool = True) -> sympy.Symbol:
        value, limit = self._value(x).to(torch.int64), self._indices.value(size)
        if wrap_neg:
            value = torch.where(value < 0, value + limit, value)
        if check and bool(self._required((value < 0) | (value >= limit)).any()):
            raise NotComputed(f"an index is out of range of {size}")
        return self._indices.indirect(value)

    def load(self, name: str, index: Any) -> torch.Tensor:
        return self._gather(name, self._indices.tensor(index))

    def _gather(self, name: str, where: torch.Tensor) -> torch.Tensor:
        memory = self._read(name)
        outside = (where < 0) | (where >= len(memory.content))
        if bool(self._required(outside).any()):
            raise NotComputed(f"reads beyond the {len(memory.content)} elements of {name}")
        if not len(memory.content):
            return memory.content.new_zeros(where.shape)
        where = where.masked_fill(outside, 0)
        if memory.known is not None and bool(self._required(~memory.known[where]).any()):
            raise NotComputed(f"reads between the elements of {name}")
        return memory.content[where]

    def bucketize(
        self,
        values: Any,
        boundaries: tuple[str, Any, Any, Any],
        boundary_indices: Any,
        indexing_dtype: torch.dtype,
        right: bool,
        sorter: tuple[str, Any] | None = None,
        sorter_indices: Any = None,
    ) -> torch.Tensor:
        name, size, _, stride = boundaries
        count = torch.zeros([1] * len(self._indices.domain), dtype=torch.int64)
        base = self._value(boundary_indices).to(torch.int64)
        for number in range(self._indices.integer(size)):
            where = base + number * self._indices.value(stride)
            if sorter is not None:
                order = self._gather(sorter[0], self._value(sorter_indices).to(torch.int64) + number)
                where = base + order * self._indices.value(stride)
            edge = self._gather(name, where)
            count = count + ~((edge > values) if right else (edge >= values))
        return count.to(indexing_dtype)

    # a store ends the program of a buffer

    def store(self, name: str, index: Any, value: Any, mode: Any = None) -> None:  # noqa: ARG002 - of one buffer
        where, value = torch.broadcast_tensors(self._indices.tensor(index), self._value(value))
        where, value = (t.expand(self._indices.domain).reshape(-1) for t in (where, value))
        self._write(where, value, mode)

    def store_reduction(self, name: str, index: Any, value: Any) -> None:  # noqa: ARG002 - of one buffer
        where, value = torch.broadcast_tensors(self._indices.tensor(index), value)
        self._write(where.reshape(-1), value.reshape(-1), None)

    def _write(self, where: torch.Tensor, value: torch.Tensor, mode: Any) -> None:
        content = self.result.content
        if mode not in (None, "atomic_add"):
            raise NotComputed(f"store with {mode}")
        if where.numel() and (int(where.min()) < 0 or int(where.max()) >= len(content)):
            raise NotComputed(f"writes beyond the {len(content)} elements of the buffer")
        value = value.to(content.dtype)
        content.index_put_((where,), value, accumulate=mode is not None)
        if mode is None and not bool(((content[where] == value) | (value != value)).all()):
            raise NotComputed("several values are stored to one element")

    def reduction(
        self,
        dtype: torch.dtype,
        src_dtype: torch.dtype,  # noqa: ARG002 - as OpsHandler has it
        reduction_type: Any,
        value: Any,
    ) -> Any:
        values = value if isinstance(value, tuple) else (value,)
        split = len(self._indices.domain) - self._reduced
        shape = self._indices.domain
        rows = [self._value(v).expand(shape).reshape([*shape[:split], -1]) for v in values]
        wanted = self._compute_dtype(dtype)
        reduced = _reduce(str(reduction_type), rows, wanted)
        results = tuple(r.reshape([*shape[:split], *[1] * self._reduced]) for r in reduced)
        return results if len(results) > 1 else results[0]


# ----------------------------------------------------------------------------------------------------------- reductions


def _reduce(kind: str, rows: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return the results of a reduction over the last dimension."""
    if kind.startswith(("argmax", "argmin")):
        return _select(kind, rows)
    if kind in ("welford_reduce", "welford_combine"):
        return _welford(*(row.to(dtype) for row in rows))
    if kind == "online_softmax_reduce":
        largest = rows[0].amax(-1)
        return largest, (rows[0] - largest.unsqueeze(-1)).exp().sum(-1)
    if kind not in _REDUCTIONS:
        raise NotComputed(f"reduction {kind}")
    return (_REDUCTIONS[kind](rows[0] if kind == "any" else rows[0].to(dtype)).to(dtype),)


def _xor(row: torch.Tensor) -> torch.Tensor:
    while row.shape[-1] > 1:
        if row.shape[-1] % 2:
            row = torch.nn.functional.pad(row, (0, 1))
        row = row[..., ::2] ^ row[..., 1::2]
    return row[..., 0]


def _fmax(row: torch.Tensor) -> torch.Tensor:
    unknown = row.isnan()
    return row.masked_fill(unknown, -math.inf).amax(-1).masked_fill(unknown.all(-1), math.nan)


_REDUCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "sum": lambda row: row.sum(-1, dtype=row.dtype),
        "dot": lambda row: row.sum(-1, dtype=row.dtype),
        "prod": lambda row: row.prod(-1, dtype=row.dtype),
        "max": lambda row: row.amax(-1),
        "min": lambda row: row.amin(-1),
        "fmax": _fmax,
        "any": lambda row: row.bool().any(-1),
        "xor_sum": _xor,
    }
)


def _select(kind: str, rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the index of the extreme value (of equal ones the lowest, a NaN is beyond all), the value, or both."""
    row = rows[0]
    index = rows[1].to(torch.int64) if len(rows) > 1 else torch.arange(row.shape[-1]).expand(row.shape)
    best = row.amin(-1, keepdim=True) if kind.startswith("argmin") else row.amax(-1, keepdim=True)
    hit = (row == best) | (row.isnan() & best.isnan())
    first = index.masked_fill(~hit, torch.iinfo(torch.int64).max).amin(-1)
    if kind.endswith("_with_value"):
        return best.squeeze(-1), first
    return (best.squeeze(-1),) if kind.endswith("_value") else (first,)


def _welford(
    mean: torch.Tensor, squares: torch.Tensor | None = None, weight: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the mean, the sum of squared deviations, and the weight, of values or of such triples."""
    if squares is None or weight is None:
        squares, weight = torch.zeros_like(mean), torch.ones_like(mean)
    total = weight.sum(-1)
    centre = (mean * weight).sum(-1) / total
    deviations = squares.sum(-1) + (weight * (mean - centre.unsqueeze(-1)).square()).sum(-1)
    return centre, deviations, total
