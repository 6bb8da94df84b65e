"""Values of Inductor's index expressions (sympy) as integers and int64 tensors over an iteration domain."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor.utils import sympy_index_symbol_with_prefix
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.symbol import SymT

LARGEST_DOMAIN = 1 << 25
"""Maximum number of iterations of a buffer that is evaluated: each op makes a tensor of up to as many elements."""


class NotComputed(Exception):  # noqa: N818 - a finding, no error of the user
    """A buffer's value is not computed; the message is a short reason."""


class _IndexOps:
    """Functions of index expressions over integers and int64 tensors, by the names that ``sympy_interp`` calls."""

    add, mul, floordiv, mod, python_mod = operator.add, operator.mul, operator.floordiv, operator.mod, operator.mod
    eq, ne, lt, le, gt, ge = operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge
    and_, or_, bitwise_and, bitwise_or = operator.and_, operator.or_, operator.and_, operator.or_
    bitwise_xor, pow_by_natural, abs = operator.xor, operator.pow, operator.abs
    sym_sum = sum

    @staticmethod
    def constant(value: Any, dtype: torch.dtype) -> Any:
        if dtype is torch.int64:
            return int(value)
        return bool(value) if dtype is torch.bool else _double(float(value))

    @staticmethod
    def modular_indexing(base: Any, divisor: Any, modulus: Any) -> Any:
        return (base // divisor) % modulus

    @staticmethod
    def pow(a: Any, b: Any) -> Any:
        return _double(a) ** _double(b)

    @staticmethod
    def sqrt(a: Any) -> Any:
        return _double(a).sqrt()

    @staticmethod
    def truediv(a: Any, b: Any) -> Any:
        return _double(a) / _double(b)

    int_truediv = truediv

    @staticmethod
    def minimum(a: Any, b: Any) -> Any:
        return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))

    @staticmethod
    def maximum(a: Any, b: Any) -> Any:
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Any:
        return torch.where(torch.as_tensor(condition), torch.as_tensor(a), torch.as_tensor(b))

    @staticmethod
    def not_(a: Any) -> Any:
        return torch.as_tensor(a).logical_not()

    @staticmethod
    def identity(a: Any) -> Any:
        return a

    @staticmethod
    def to_dtype(a: Any, dtype: torch.dtype) -> Any:
        return torch.as_tensor(a).to(dtype)

    @staticmethod
    def trunc(a: Any) -> Any:
        return _double(a).trunc()

    @staticmethod
    def trunc_to_int(a: Any, dtype: torch.dtype) -> Any:
        return _double(a).trunc().to(dtype)

    @staticmethod
    def floor_to_int(a: Any, dtype: torch.dtype) -> Any:
        return _double(a).floor().to(dtype)

    @staticmethod
    def ceil_to_int(a: Any, dtype: torch.dtype) -> Any:
        return _double(a).ceil().to(dtype)

    @staticmethod
    def round_to_int(a: Any, dtype: torch.dtype) -> Any:
        return _double(a).round().to(dtype)

    @staticmethod
    def expr_cond_pair(expression: Any, condition: Any) -> Any:
        return expression, condition

    @staticmethod
    def piecewise(*pairs: Any) -> Any:
        value = pairs[-1][0]
        for expression, condition in reversed(pairs[:-1]):
            value = _IndexOps.where(condition, expression, value)
        return value


def _double(value: Any) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float64)


class Indices:
    """Values of index expressions: integers of sizes, and of loop indices tensors that broadcast to the domain."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._symbols: dict[str, Any] = dict(sizes)
        self.domain: list[int] = []

    def value(self, expression: Any) -> Any:
        """Return an integer or a tensor."""
        if not isinstance(expression, sympy.Basic):
            return expression
        return sympy_interp(_IndexOps, {}, expression, missing_handler=self._symbol)

    def _symbol(self, symbol: sympy.Symbol) -> Any:
        if symbol.name not in self._symbols:
            raise NotComputed(f"the size {symbol} is not known")
        return self._symbols[symbol.name]

    def integer(self, expression: Any) -> int:
        """Return the value of a size."""
        return int(self.value(expression))

    def tensor(self, expression: Any) -> torch.Tensor:
        """Return a tensor with the number of dimensions of the domain."""
        value = torch.as_tensor(self.value(expression))
        return value if value.ndim else value.view([1] * len(self.domain))

    def loops(self, groups: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Return the index symbols of loops over groups of sizes: the output's, and those of a reduction."""
        self.domain = [self.integer(size) for group in groups for size in group]
        if math.prod(self.domain) > LARGEST_DOMAIN:
            raise NotComputed(f"{math.prod(self.domain)} iterations")
        made, dims = [], iter(range(len(self.domain)))
        for group, prefix in zip(groups, (SymT.INDEX, SymT.R0_INDEX), strict=False):
            made.append([self._loop(next(dims), size, prefix, number) for number, size in enumerate(group)])
        return made

    def _loop(self, dim: int, size: Any, prefix: SymT, number: int) -> Any:
        if size == 1:
            return sympy.S.Zero
        along = torch.arange(self.domain[dim]).view([-1 if d == dim else 1 for d in range(len(self.domain))])
        return self._bind(sympy_index_symbol_with_prefix(prefix, number), along)

    def _bind(self, symbol: sympy.Symbol, value: torch.Tensor) -> sympy.Symbol:
        self._symbols[symbol.name] = value
        return symbol

    def indirect(self, value: torch.Tensor) -> sympy.Symbol:
        """Return an index symbol for a computed index."""
        return self._bind(sympy_index_symbol_with_prefix(SymT.TMP, len(self._symbols)), value)
