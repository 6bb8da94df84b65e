"""Values of Inductor's index expressions (sympy) as integers and int64 tensors over an iteration domain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor.utils import sympy_index_symbol_with_prefix
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import TensorReferenceAnalysis
from torch.utils._sympy.symbol import SymT

LARGEST_DOMAIN = 1 << 25
"""Maximum number of iterations of a buffer that is evaluated: each op makes a tensor of up to as many elements."""


class NotComputed(Exception):  # noqa: N818 - a finding, no error of the user
    """A buffer's value is not computed; the message is a short reason."""


class _IndexOps(TensorReferenceAnalysis):
    """Functions of index expressions over tensors, by the names that ``sympy_interp`` calls; those that torch lacks."""

    mod: Any = staticmethod(torch.remainder)
    python_mod, where, trunc, sym_sum = mod, staticmethod(torch.where), staticmethod(torch.trunc), staticmethod(sum)
    identity = staticmethod(lambda a: a)
    int_truediv: Any = staticmethod(lambda a, b: a.double() / b.double())
    modular_indexing = staticmethod(lambda base, divisor, modulus: base // divisor % modulus)
    expr_cond_pair = staticmethod(lambda expression, condition: (expression, condition))

    @staticmethod
    def piecewise(*pairs: Any) -> Any:
        value = pairs[-1][0]
        for expression, condition in reversed(pairs[:-1]):
            value = torch.where(condition, expression, value)
        return value


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
        return torch.as_tensor(self._symbols[symbol.name])

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
