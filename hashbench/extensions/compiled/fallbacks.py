"""Compilations with one change: an op that runs eagerly, a pass left out, a setting of Inductor.

A finding that vanishes with the change that concerns it, and with no other, is proven. Each experiment is a compilation
inside :func:`applied`, after ``torch._dynamo.reset()`` or of a module that was not compiled before: dynamo's guards
know nothing of these changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch._inductor import config, decomposition, lowering
from torch._inductor.codegen.cpp import CppScheduling
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

from hashbench.core.errors import HashbenchError
from hashbench.core.inductor.internals import without_graph_caches

Target = Literal["", "op", "decomposition", "pass"]


@dataclass(frozen=True, slots=True)
class CompilerChange:
    """A change of how a program is compiled.

    Attributes:
        name: in tables and options.
        phrase: what was done, as in "cured by <phrase>"; ``{}`` stands for the op or the pass.
        target: what :func:`applied` must be told: an ``op`` (also of a ``decomposition``) or a ``pass``.
        settings: of ``torch._inductor.config``.
        separate: each loop nest becomes a kernel of its own; C++ kernels else hold all loop nests between two calls of
            extern kernels, fused or not.
    """

    name: str
    phrase: str
    target: Target = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    separate: bool = False


CHANGES: tuple[CompilerChange, ...] = (
    CompilerChange("eager_op", "{} runs eagerly", target="op"),
    CompilerChange("no_decomposition", "{} is not decomposed", target="decomposition"),
    CompilerChange("no_pass", "the pass {} is disabled", target="pass"),
    CompilerChange("scalar_code", "code is not vectorized (cpp.simdlen=1)", settings={"cpp.simdlen": 1}),
    CompilerChange(
        "no_fusion",
        "kernels are not fused",
        settings={"max_fusion_size": 1, "epilogue_fusion": False},
        separate=True,
    ),
    CompilerChange("no_buffer_reuse", "buffers are not reused", settings={"allow_buffer_reuse": False}),
    CompilerChange("no_inplace_buffers", "kernels do not write in place", settings={"inplace_buffers": False}),
    CompilerChange("one_thread", "kernels are compiled for one thread", settings={"cpp.threads": 1}),
    CompilerChange(
        "precision_casts",
        "casts to low precision are kept (emulate_precision_casts)",
        settings={"emulate_precision_casts": True},
    ),
)
"""In the order in which they are of use, a smaller change before a larger one."""


def supported(change: CompilerChange) -> bool:
    """Return whether this version of torch has all settings of a change."""
    return not _missing(change)


def _missing(change: CompilerChange) -> list[str]:
    return sorted(set(change.settings) - set(config.get_config_copy()))


@contextmanager
def applied(change: CompilerChange, *, op: str = "", pass_name: str = "", subsystem: str = "") -> Iterator[None]:
    """Compile with one change, graph caches off; all is as before afterwards.

    Args:
        change: one of :data:`CHANGES`.
        op: as ``aten.gelu.default`` or ``aten.gelu`` (all overloads), for the targets ``op`` and ``decomposition``.
        pass_name: as ``GraphTransformObserver`` has it, for the target ``pass``.
        subsystem: of the pass, ``joint_graph_passes`` or ``post_grad_passes``; empty: every pass of this name.

    Raises:
        HashbenchError: if the op is unknown or not given, the pass not given, or a setting missing in this torch.
    """
    if missing := _missing(change):
        raise HashbenchError(
            f"this torch has no setting {', '.join(missing)}", consequence=f"{change.name} cannot be tried"
        )
    with ExitStack() as stack:
        stack.enter_context(without_graph_caches())
        stack.enter_context(config.patch(dict(change.settings)))
        if change.target in ("op", "decomposition"):
            stack.enter_context(_kept(op_overloads(op), eager=change.target == "op"))
        elif change.target == "pass":
            if not pass_name:
                raise HashbenchError("no pass is named", consequence="none can be disabled", tip="Give pass_name.")
            stack.enter_context(_without_pass(pass_name, subsystem))
        if change.separate:
            stack.enter_context(patch.object(CppScheduling, "ready_to_flush", lambda _: True))
        yield


def op_overloads(op: str) -> tuple[torch._ops.OpOverload, ...]:
    """Return the overloads that a name such as ``aten.gelu.default`` or ``aten.gelu`` means.

    Raises:
        HashbenchError: if torch has no such op.
    """
    namespace, _, rest = op.removeprefix("torch.ops.").partition(".")
    name, _, overload = rest.partition(".")
    try:
        packet = getattr(getattr(torch.ops, namespace), name)
        names = [overload] if overload else list(packet.overloads())
        return tuple(getattr(packet, each) for each in names)
    except (AttributeError, RuntimeError):
        raise HashbenchError(
            f"torch has no op {op!r}", consequence="it cannot run eagerly", tip="Write it as aten.gelu.default."
        ) from None


@contextmanager
def _kept(overloads: tuple[torch._ops.OpOverload, ...], *, eager: bool) -> Iterator[None]:
    """Keep ops through decomposition, then run them eagerly; if not ``eager``, lower those that have a lowering."""
    fallen = [each for each in overloads if eager or each not in lowering.lowerings]
    if eager:  # reinplace_inplaceable_ops may turn index_put into index_put_
        fallen += [each for each in _inplace(overloads) if each in lowering.lowerings]
    handlers = {each: lowering.fallback_handler(each, add_to_fallback_set=False) for each in fallen}
    strides = dict.fromkeys(fallen, lowering.constrain_to_fx_strides)
    with ExitStack() as stack:
        for table in (decomposition.decompositions, decomposition.fast_random_decomps()):
            stack.enter_context(_replaced(table, dict.fromkeys(overloads, _absent)))
        stack.enter_context(_replaced(lowering.lowerings, handlers))
        stack.enter_context(_replaced(lowering._maybe_layout_constraints, strides))
        stack.enter_context(_added(lowering.needs_realized_inputs, fallen))
        stack.enter_context(_added(lowering.fallbacks, fallen))
        yield


def _inplace(overloads: tuple[torch._ops.OpOverload, ...]) -> list[torch._ops.OpOverload]:
    """Return the overloads that mutate their first argument and else do the same."""
    found = []
    for each in overloads:
        packet = getattr(getattr(torch.ops, each.namespace), f"{each._opname}_", None)
        inplace = getattr(packet, each._overloadname, None)
        if inplace is not None:
            found.append(inplace)
    return found


_absent: Any = object()


@contextmanager
def _replaced(table: MutableMapping[Any, Any], entries: Mapping[Any, Any]) -> Iterator[None]:
    """Replace entries of a table, or take them out of it, for a while."""
    before = {key: table.get(key, _absent) for key in entries}
    _put(table, entries)
    try:
        yield
    finally:
        _put(table, before)


def _put(table: MutableMapping[Any, Any], entries: Mapping[Any, Any]) -> None:
    for key, value in entries.items():
        if value is _absent:
            table.pop(key, None)
        else:
            table[key] = value


@contextmanager
def _added(members: Any, new: list[Any]) -> Iterator[None]:
    added = [each for each in new if each not in members]
    members.update(added)
    try:
        yield
    finally:
        for each in added:
            members.discard(each)


@contextmanager
def _without_pass(name: str, subsystem: str) -> Iterator[None]:
    """Disable the passes of a name, as ``config.disabled_passes`` does for all names that are part of its text."""
    check: Callable[[Any], bool] = GraphTransformObserver._check_disable_pass

    def is_disabled(self: Any) -> bool:
        named = self.passname == name and subsystem in ("", self.subsystem)
        return named or check(self)

    with patch.object(GraphTransformObserver, "_check_disable_pass", is_disabled):
        yield


CHANGES_BY_NAME: Mapping[str, CompilerChange] = MappingProxyType({change.name: change for change in CHANGES})
