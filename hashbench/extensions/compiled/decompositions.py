"""Run every op of a model's graphs beside its decomposition, in float64, on the model's own tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hashbench.core.inductor.nodes import NodeFacts, facts_of
from hashbench.core.run import distance
from hashbench.core.trace.arguments import leaves, mapped
from hashbench.core.trace.op_schema import plan_of
from hashbench.extensions.compiled.aot import StepRunner, decomposition_table
from hashbench.extensions.compiled.aot_graphs import (
    Checked,
    NodeCall,
    NotedException,
    is_random,
    noted,
    visiting_backend,
)
from hashbench.extensions.compiled.evaluate import narrowed, widened
from hashbench.extensions.compiled.units import SUSPICIOUS, WRONG, WRONG_BESIDE_ROUNDING

Table = Mapping[Any, Callable[..., Any]]
Call = tuple[Sequence[Any], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class WrongDecomposition:
    """An op whose decomposition computes something else.

    Attributes:
        op: the overload that is decomposed.
        output: number of the tensor among its results, then among the arguments that it writes.
        relative: largest difference over the largest magnitude of the op's own result.
        error: the same in units of what the op loses in float32; ``inf`` if integers, shapes or NaN differ.
        facts: op, module and source of the first call. Its op contains this one, where a decomposition calls another
            op that is decomposed too.
        backward: that call belongs to a backward pass.
        calls: how many went wrong.
    """

    op: str
    output: int
    relative: float
    error: float
    facts: NodeFacts
    backward: bool = False
    calls: int = 1


def check_decompositions(
    run: StepRunner, *, dtype: torch.dtype | None = torch.float64, table: Table | None = None
) -> Checked[WrongDecomposition]:
    """Return which decompositions of a model's ops are wrong.

    The ops of both of AOTAutograd's graphs are called as they are, and through the table. Where a decomposition calls
    an op that the table holds, that one is checked too, and the outer one goes on with the op's own result: only the
    innermost wrong one is named.

    Args:
        run: called once.
        dtype: in which the model runs; ``None``: its own. Rounding is judged with more leniency below float64.
        table: decompositions by op overload; TorchInductor's by default.
    """
    check = _DecompositionCheck(decomposition_table() if table is None else table)
    raised = noted("the model", lambda: run(visiting_backend(check.visit), dtype))
    return Checked(tuple(check.wrong.values()), check.calls, (*check.raised.values(), *raised))


@dataclass(slots=True)
class _DecompositionCheck:
    table: Table
    wrong: dict[tuple[str, int], WrongDecomposition] = field(default_factory=dict)
    calls: int = 0
    raised: dict[str, NotedException] = field(default_factory=dict)
    node: torch.fx.Node | None = None
    backward: bool = False
    open: list[Any] = field(default_factory=list)

    def visit(self, call: NodeCall) -> Any:
        self.node, self.backward = call.node, call.backward
        return self.call(call.node.target, call.args, call.kwargs, read=_outputs_read(call.node))

    def call(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, read: frozenset[int] | None = None
    ) -> Any:
        """Call an op, and its decomposition on copies of what it writes. ``read``: the outputs that anything reads."""
        if func not in self.table or func in self.open or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        plan = plan_of(func)
        if plan.blank or is_random(func):
            return func(*args, **kwargs)
        wide = self._wide_call(func, args, kwargs, read) if _is_narrow(args, kwargs) else False
        given = _copied(args, kwargs) if plan.writes_arguments else (args, kwargs)
        before = _copied(args, kwargs) if plan.writes_arguments else given
        result = func(*args, **kwargs)
        if not wide:
            self._beside(func, (args, kwargs), result, given, before, read)
        return result

    def _wide_call(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], read: frozenset[int] | None
    ) -> bool:
        """Compare a call in float64, on its own tensors; return whether it runs there."""
        try:
            call, given, before = (_mapped(*_copied(args, kwargs), widened) for _ in range(3))
            result = func(*call[0], **call[1])
        except Exception:
            return False
        return self._beside(func, call, result, given, before, read)

    def _beside(
        self, func: Any, call: Call, result: Any, given: Call, before: Call, read: frozenset[int] | None
    ) -> bool:
        """Compare an op's ``result`` of a ``call`` with that of its decomposition, called with ``given``.

        Returns:
            Whether that ran.
        """
        plan = plan_of(func)
        self.open.append(func)
        try:
            with _Nested(self):
                decomposed = self.table[func](*given[0], **given[1])
        except Exception as error:
            self.raised.setdefault(str(func), NotedException.of(func, error))
            return False
        finally:
            self.open.pop()
        if decomposed is NotImplemented:
            return True
        self.calls += 1
        own = [*leaves(result), *plan.written_tensors(*call)]
        other = [*leaves(decomposed), *plan.written_tensors(*given)]
        for output, (reference, value) in enumerate(zip(own, other, strict=False)):
            if read is not None and output < len(list(leaves(result))) and output not in read:
                continue
            self._compare(func, before, output, reference, value)
        return True

    def _compare(self, func: Any, given: Call, output: int, reference: Any, value: Any) -> None:
        if not isinstance(reference, torch.Tensor) or not isinstance(value, torch.Tensor):
            return
        if not reference.numel() or not value.numel():  # what a mode of the op does not need
            return
        relative = distance.relative(value, reference)
        if relative <= max(SUSPICIOUS, 8 * _eps(reference)):
            return
        lower = _in_float32(func, given, output)
        error = distance.in_units(value, reference, lower, own_dtype=torch.float32)
        if error > (WRONG if _eps(reference) < SUSPICIOUS else WRONG_BESIDE_ROUNDING):
            self._note(func, output, relative, error)

    def _note(self, func: Any, output: int, relative: float, error: float) -> None:
        assert self.node is not None
        key = (str(func), output)
        made = WrongDecomposition(*key, relative, error, facts_of(self.node), self.backward, calls=0)
        first = self.wrong.setdefault(key, made)
        relative, error = max(relative, first.relative), max(error, first.error)
        self.wrong[key] = replace(first, relative=relative, error=error, calls=first.calls + 1)


class _Nested(TorchDispatchMode):
    """Check the ops that a decomposition calls."""

    def __init__(self, check: _DecompositionCheck) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._check = check

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._check.call(func, args, kwargs or {})


def _outputs_read(node: torch.fx.Node) -> frozenset[int] | None:
    """Return the outputs of a node that something reads; ``None``: all."""
    users = list(node.users)
    indices = [user.args[1] for user in users if user.target is operator.getitem and isinstance(user.args[1], int)]
    return frozenset(indices) if users and len(indices) == len(users) else None


def _copied(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    return _mapped(args, kwargs, lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)


def _mapped(args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[Any], Any]) -> Call:
    return tuple(mapped(list(args), change)), mapped(dict(kwargs), change)


def _eps(reference: torch.Tensor) -> float:
    return float(torch.finfo(reference.dtype).eps) if reference.is_floating_point() or reference.is_complex() else 0.0


def _in_float32(func: Any, given: Call, output: int) -> torch.Tensor | None:
    """Return an output of the op in float32; ``None`` if it cannot be called so."""
    try:
        args, kwargs = _mapped(*_copied(*given), narrowed)
        found = [*leaves(func(*args, **kwargs)), *plan_of(func).written_tensors(args, kwargs)][output]
    except Exception:
        return None
    return found if isinstance(found, torch.Tensor) else None


def _is_narrow(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    found = [leaf for leaf in leaves([list(args), dict(kwargs)]) if isinstance(leaf, torch.Tensor)]
    return any(widened(tensor.dtype) != tensor.dtype for tensor in found)
