"""Index expressions of Inductor, over integers and over tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch.utils._sympy import functions

from hashbench.extensions.compiled.indices import LARGEST_DOMAIN, Indices, NotComputed

EXPRESSIONS: dict[str, tuple[Callable[[Any], Any], Callable[[int], float]]] = {
    "sum": (lambda i: 3 * i + 5, lambda i: 3 * i + 5),
    "difference": (lambda i: 2 - i, lambda i: 2 - i),
    "floor of a quotient": (lambda i: functions.FloorDiv(i, 3), lambda i: i // 3),
    "floor of a negative quotient": (lambda i: functions.FloorDiv(-i - 1, 3), lambda i: (-i - 1) // 3),
    "modular indexing": (lambda i: functions.ModularIndexing(i, 2, 3), lambda i: i // 2 % 3),
    "modulus": (lambda i: functions.Mod(i + 1, 3), lambda i: (i + 1) % 3),
    "modulus of a negative": (lambda i: functions.PythonMod(-i, 3), lambda i: -i % 3),
    "minimum": (lambda i: functions.Min(i, 4), lambda i: min(i, 4)),
    "maximum": (lambda i: functions.Max(i, 4), lambda i: max(i, 4)),
    "choice": (lambda i: functions.Where(i < 3, i, 7), lambda i: i if i < 3 else 7),
    "piecewise": (lambda i: sympy.Piecewise((1, i < 2), (2, i < 4), (3, True)), lambda i: 1 if i < 2 else 2 + (i >= 4)),
    "power": (lambda i: i**2, lambda i: i**2),
    "quotient": (lambda i: functions.IntTrueDiv(i, 3), lambda i: i / 3),
    "floor to int": (lambda i: functions.FloorToInt(functions.IntTrueDiv(i, 3)), lambda i: i // 3),
    "float": (lambda i: functions.ToFloat(i), float),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_loop_index_is_a_tensor_and_a_size_an_integer(name: str) -> None:
    make, wanted = EXPRESSIONS[name]
    loops = Indices({"s0": 5})
    ((index,),) = loops.loops([[8]])
    assert loops.tensor(make(index)).tolist() == [wanted(i) for i in range(8)]
    size = loops.value(make(sympy.Symbol("s0", integer=True, positive=True)))
    assert float(size) == wanted(5)


def test_loops_broadcast_over_the_domain() -> None:
    loops = Indices({"s0": 3})
    (i, one), (r,) = loops.loops([[2, 1], [sympy.Symbol("s0", integer=True)]])
    assert loops.domain == [2, 1, 3]
    assert one == 0
    assert loops.tensor(i * 10 + r).tolist() == [[[0, 1, 2]], [[10, 11, 12]]]
    assert loops.tensor(sympy.Integer(4)).shape == (1, 1, 1)


def test_computed_indices_are_symbols_of_their_own() -> None:
    loops = Indices({})
    loops.loops([[2]])
    one, other = loops.indirect(torch.tensor([4, 5])), loops.indirect(torch.tensor([7, 6]))
    assert loops.tensor(one * 10 + other).tolist() == [47, 56]


def test_unknown_sizes_and_large_domains_are_refused() -> None:
    with pytest.raises(NotComputed, match="the size s7 is not known"):
        Indices({}).integer(sympy.Symbol("s7"))
    with pytest.raises(NotComputed, match="iterations"):
        Indices({}).loops([[LARGEST_DOMAIN, 2]])
