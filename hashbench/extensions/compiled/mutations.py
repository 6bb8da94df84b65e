"""Find custom ops that do what AOTAutograd is not told: write or return memory of their arguments although their schema
says no such thing, or return something else than their fake implementation."""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hashbench.core.diagnose.calls.ops import is_custom
from hashbench.core.inductor.nodes import NodeFacts, facts_of
from hashbench.core.trace.arguments import caller_line, leaves, tensors_in
from hashbench.core.trace.digest import digest
from hashbench.core.trace.storage_writers import storage_key
from hashbench.extensions.compiled.aot import StepRunner, dynamo_backend
from hashbench.extensions.compiled.aot_graphs import Checked, NodeCall, noted, visited, visiting_backend


class EffectKind(enum.Enum):
    """What an op does with an argument, undeclared in its schema."""

    WRITES = "writes it"
    RETURNS = "returns memory of it"


@dataclass(frozen=True, slots=True)
class UndeclaredEffect:
    """A custom op whose schema does not say what it does with an argument.

    Attributes:
        op: its overload.
        argument: name in the schema.
        effect: what it does.
        facts: op, module and source of the first such call.
        backward: that call belongs to a backward pass.
    """

    op: str
    argument: str
    effect: EffectKind
    facts: NodeFacts
    backward: bool = False


@dataclass(frozen=True, slots=True)
class WrongFake:
    """An op whose fake implementation promises another result than it returns.

    Attributes:
        op: its overload.
        output: number of the tensor among its results.
        what: ``shape``, ``dtype``, ``device`` or ``stride``.
        fake, real: what was promised and what was returned.
        facts: op, module and source of the first such call.
        custom: the op is not torch's own.
        backward: that call belongs to a backward pass.
    """

    op: str
    output: int
    what: str
    fake: str
    real: str
    facts: NodeFacts
    custom: bool = True
    backward: bool = False


def undeclared_effects(run: StepRunner, *, dtype: torch.dtype | None = None) -> Checked[UndeclaredEffect]:
    """Return what custom ops do with their arguments that their schemas do not declare.

    Forward passes run as dynamo captured them; then a step in eager mode shows backward passes and frames that dynamo
    left out, where the module is not known. Contents are compared bit by bit before and after every call: a write that
    leaves the same bits is not seen. torch's own ops are not checked: AOTAutograd knows what those do.

    Args:
        run: called twice.
        dtype: in which the model runs; ``None``: its own.
    """
    watch = _EffectsWatch()

    def located(call: NodeCall) -> Any:
        watch.node = call.node
        with watch:
            return call.run()

    captured = dynamo_backend(lambda graph, inputs: visited(graph, inputs, located))
    raised = noted("dynamo's graphs", lambda: run(captured, dtype))
    watch.node = None
    with watch:
        raised += noted("eager mode", lambda: run(None, dtype))
    return Checked(tuple(watch.found.values()), watch.custom_calls, raised)


class _EffectsWatch(TorchDispatchMode):
    """Compare the arguments of every custom op before and after it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.node: torch.fx.Node | None = None
        self.found: dict[tuple[str, str, EffectKind], UndeclaredEffect] = {}
        self.custom_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)  # higher-order operators have none
        if schema is None or not is_custom(func):
            return func(*args, **kwargs)
        self.custom_calls += 1
        given = [(argument, tensors_in([value])) for argument, value in _bound(schema, args, kwargs)]
        unwritten = [(argument, tensors) for argument, tensors in given if not _is_written(argument)]
        before = [[digest(tensor.detach()) for tensor in tensors] for _, tensors in unwritten]
        result = func(*args, **kwargs)
        for (argument, tensors), old in zip(unwritten, before, strict=True):
            # Of two names of the same memory the declared one may be written.
            if any(digest(tensor.detach()) != was for tensor, was in zip(tensors, old, strict=True)) and not any(
                _share(tensors, others) for other, others in given if _is_written(other)
            ):
                self._note(func, argument.name, EffectKind.WRITES)
        for output, item in zip(_outputs(schema, result), schema.returns, strict=False):
            for argument, tensors in given:
                if _share(tensors_in([output]), tensors) and not _is_declared(argument, item):
                    self._note(func, argument.name, EffectKind.RETURNS)
        return result

    def _note(self, func: Any, argument: str, effect: EffectKind) -> None:
        key = (str(func), argument, effect)
        if key not in self.found:
            backward = torch._C._current_autograd_node() is not None
            self.found[key] = UndeclaredEffect(*key, self._facts(func), backward)

    def _facts(self, func: Any) -> NodeFacts:
        if self.node is None:
            return NodeFacts(str(func), source=caller_line(sys._getframe(1)))
        return dataclasses.replace(facts_of(self.node), op=str(func))


def _bound(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    for position, argument in enumerate(schema.arguments):
        if position < len(args):
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _outputs(schema: Any, result: Any) -> Sequence[Any]:
    return (result,) if len(schema.returns) == 1 else tuple(result or ())


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _is_declared(argument: Any, returned: Any) -> bool:
    """Return whether the schema says that this output may share memory with the argument."""
    if argument.alias_info is None or returned.alias_info is None:
        return False
    before, after = argument.alias_info, returned.alias_info
    names = set(before.before_set) | set(before.after_set)
    return "*" in names | set(after.before_set) or not names.isdisjoint(set(after.before_set) | set(after.after_set))


def _share(first: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return not {storage_key(tensor) for tensor in first if tensor.numel()}.isdisjoint(
        storage_key(tensor) for tensor in other if tensor.numel()
    )


# ------------------------------------------------------------------------------------------------ fake implementations


@dataclass(slots=True)
class _FakesWatch:
    found: dict[tuple[str, int, str], WrongFake] = field(default_factory=dict)
    calls: int = 0

    def visit(self, call: NodeCall) -> Any:
        result, node = call.run(), call.node
        self.calls += 1
        promised = [leaf for leaf in leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
        for number, (fake, real) in enumerate(zip(promised, tensors_in([result]), strict=False)):
            for what, first, other in _differences(fake, real):
                key = (str(node.target), number, what)
                custom = is_custom(node.target)
                self.found.setdefault(key, WrongFake(*key, first, other, facts_of(node), custom, call.backward))
        return result


def wrong_fakes(run: StepRunner, *, dtype: torch.dtype | None = None) -> Checked[WrongFake]:
    """Return the ops that return a different shape, dtype, device or stride than their fake implementation.

    AOTAutograd traces with fake tensors, and TorchInductor generates code for what they promise. Symbolic sizes are not
    compared, nor strides of
    dimensions with less than two elements.

    Args:
        run: called once.
        dtype: in which the model runs; ``None``: its own.
    """
    fakes = _FakesWatch()
    raised = noted("aot_eager", lambda: run(visiting_backend(fakes.visit), dtype))
    return Checked(tuple(fakes.found.values()), fakes.calls, raised)


def _differences(fake: torch.Tensor, real: torch.Tensor) -> Iterator[tuple[str, str, str]]:
    if fake.dtype != real.dtype:
        yield "dtype", str(fake.dtype), str(real.dtype)
    if fake.device.type != real.device.type:
        yield "device", str(fake.device), str(real.device)
    if fake.dim() != real.dim() or any(
        isinstance(first, int) and first != other for first, other in zip(fake.shape, real.shape, strict=True)
    ):
        yield "shape", str(tuple(fake.shape)), str(tuple(real.shape))
        return
    if fake.layout != torch.strided or real.layout != torch.strided or not real.numel():
        return
    strides = zip(fake.stride(), real.stride(), real.shape, strict=True)
    if any(isinstance(first, int) and first != other and size > 1 for first, other, size in strides):
        yield "stride", str(tuple(fake.stride())), str(tuple(real.stride()))
