"""Values of Inductor's IR, computed by torch: they tell a wrong lowering from wrong code generation.

A ``ComputedBuffer`` holds Python functions of index expressions that call the virtualized ops (``ops.load``,
``ops.add``; ``torch._inductor.ops_handler.OpsHandler``). Code generation calls them with handlers that print C++; here
the handler's values are tensors. What lowering made is so executed without scheduler, fusion and compiler.

Not evaluated: random numbers, scans, sorts, inline assembly, templates; results of extern kernels must be given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal
from unittest.mock import patch

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from hashbench.core.errors import named_line, ran_out_of_memory
from hashbench.core.inductor.internals import mutated_by
from hashbench.core.run.distance import wide
from hashbench.extensions.compiled.indices import Indices, NotComputed
from hashbench.extensions.compiled.tensor_ops import FlatMemory, TensorHandler

__all__ = ["NotComputed", "Stage", "evaluate", "reads", "stage_of"]


def evaluate(
    buffer: ir.Buffer,
    values: Mapping[str, torch.Tensor],
    *,
    graph: GraphLowering,
    float64: bool = False,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> torch.Tensor:
    """Compute the value of a buffer of Inductor's IR by torch.

    Buffers missing in ``values`` (fused away, or never written to memory) are computed from what they read in turn.
    Under its own name a mutated buffer has the content before any mutation; under the name of a mutating buffer it has
    the content after that mutation (see :func:`reads`).

    Args:
        buffer: a ``ComputedBuffer`` or ``ConcatKernel`` of ``graph``. Of one that mutates, the value is the whole
            content of the mutated buffer.
        values: contents by buffer name, with the shape of the buffer's layout, any strides, on the CPU or its device.
        graph: the compiled graph's ``GraphLowering``.
        float64: compute in float64 whatever is floating point; casts among floating-point dtypes then keep the value.
            Otherwise as Inductor computes: bfloat16 and float16 in float32.
        sizes: values of size symbols by name; others are taken from the shapes of ``values``.

    Returns:
        Contiguous tensor in the shape of the buffer; its dtype, or float64 for a floating-point one if ``float64``.

    Raises:
        NotEvaluated: with the reason.
    """
    try:
        with torch.no_grad(), V.set_graph_handler(graph), patch.object(ir.FlexibleLayout, "allow_indexing", True):
            return _IrProgram(graph, values, float64, _sizes(graph, values, sizes)).value(buffer)
    except NotComputed:
        raise
    except Exception as error:
        if ran_out_of_memory(error):
            raise
        raise NotComputed(named_line(error, limit=200)) from error


def reads(buffer: ir.Buffer, graph: GraphLowering) -> tuple[str, ...]:
    """Return the names under which :func:`evaluate` looks for what a buffer reads, sorted.

    A read of a buffer that an earlier one of the graph mutated has the name of the last mutating buffer.
    """
    with V.set_graph_handler(graph), patch.object(ir.FlexibleLayout, "allow_indexing", True):
        names = {str(dep.name) for dep in buffer.get_read_writes().reads} if _is_computed(buffer) else set()
        mutated = mutated_by(buffer)
        return tuple(sorted({_version(graph, name, buffer) for name in names | ({mutated} if mutated else set())}))


Stage = Literal["lowering", "codegen", ""]


def stage_of(
    reference: torch.Tensor, lowered: torch.Tensor, kernel_output: torch.Tensor, allowed: torch.Tensor | float
) -> Stage:
    """Return the stage that made a kernel's output wrong; empty if it is not wrong.

    Wrong are the elements of ``kernel_output`` farther than ``allowed`` from ``reference``. If the IR, evaluated in
    float64, is farther from it at one of them too, lowering made it, whatever code generation did with it; else code
    generation. Not told apart: the kernel's own mistake on elements where lowering's is present.

    Args:
        reference: value of the FX subgraph, in float64 (integers and bools: their dtype).
        lowered: value of the IR, by :func:`evaluate` in float64 from the same inputs.
        kernel_output: what the kernel wrote, in its own dtype.
        allowed: differences that rounding explains, shape of ``reference`` or a number; unused for integers and bools.
            A less exact formula of the IR is no mistake: include ``abs(lowered - evaluate(..., float64=False))``.
    """
    wrong = ~_agree(kernel_output, reference, allowed, kernel_output.dtype)
    if not bool(wrong.any()):
        return ""
    right = _agree(lowered, reference, allowed, kernel_output.dtype)
    return "codegen" if bool(right[wrong].all()) else "lowering"


def _agree(
    value: torch.Tensor, reference: torch.Tensor, allowed: torch.Tensor | float, dtype: torch.dtype
) -> torch.Tensor:
    """Return which elements agree: equal once rounded to ``dtype``, both NaN, or not farther apart than allowed."""
    near, exact = value.to(dtype), reference.to(dtype)
    same = (near == exact) | (near.isnan() & exact.isnan())
    if not (dtype.is_floating_point or dtype.is_complex):
        return same
    return same | ((wide(value) - wide(reference)).abs() <= allowed)


# ---------------------------------------------------------------------------------------------------------- the program


def _is_computed(buffer: object) -> bool:
    return isinstance(buffer, ir.ComputedBuffer) and buffer.has_store_function()


def _version(graph: GraphLowering, name: str, reader: ir.Buffer) -> str:
    """Return the last buffer before ``reader`` that mutated ``name``; ``name`` itself if none did."""
    version = name
    for buffer in graph.buffers:
        if buffer.get_name() == reader.get_name():
            return version
        if name in buffer.get_mutation_names() or name == mutated_by(buffer):
            version = str(buffer.get_name())
    return version


def _sizes(graph: GraphLowering, values: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the value of each size symbol by name: as given, or from the shape of a value whose layout has it."""
    known = dict(sizes)
    for name, value in values.items():
        layout = _layout(graph, name)
        for expression, size in zip(layout.size if layout else (), value.shape, strict=False):
            if isinstance(expression, sympy.Symbol):
                known.setdefault(expression.name, int(size))
    for symbol, expression in getattr(graph.sizevars, "inv_precomputed_replacements", {}).items():
        if all(free.name in known for free in expression.free_symbols):
            known[symbol.name] = Indices(known).integer(expression)
    return known


def _layout(graph: GraphLowering, name: str) -> ir.Layout | None:
    """Return where the elements of a buffer lie in its memory; None for one without a layout of its own."""
    buffer = graph.try_get_buffer(name)
    if buffer is None:
        return None
    layout = buffer.get_output_spec() if not isinstance(buffer, ir.Buffer) else buffer.layout
    if isinstance(layout, ir.MutationLayoutSHOULDREMOVE):
        layout = layout.real_layout()
    return layout if isinstance(layout, ir.Layout) else None


@dataclass(frozen=True, slots=True)
class _IrProgram:
    """The buffers of a graph as a program over ``values``; each is computed at most once."""

    graph: GraphLowering
    values: Mapping[str, torch.Tensor]
    float64: bool
    sizes: Mapping[str, int]
    memories: dict[str, FlatMemory] = field(default_factory=dict)

    def value(self, buffer: ir.Buffer) -> torch.Tensor:
        """Return the value of a buffer, in its shape and dtype."""
        layout = _layout(self.graph, _name(buffer))
        if layout is None:
            raise NotComputed(f"{type(buffer).__name__} has no layout")
        memory = self._computed(buffer)
        where = self.positions(layout)
        result = memory.content[where] if where.numel() else memory.content.new_empty(where.shape)
        return result if self.float64 and result.is_floating_point() else result.to(layout.dtype)

    def positions(self, layout: ir.Layout) -> torch.Tensor:
        """Return where each element lies in flat memory, int64, in the shape of the layout."""
        indices = Indices(self.sizes)
        shape = [indices.integer(size) for size in layout.size]
        where = torch.full(shape, indices.integer(layout.offset), dtype=torch.int64)
        for dim, (size, stride) in enumerate(zip(shape, layout.stride, strict=True)):
            along = torch.arange(size) * indices.integer(stride)
            where = where + along.view([-1 if d == dim else 1 for d in range(len(shape))])
        return where

    def read(self, name: str, reader: ir.Buffer) -> FlatMemory:
        """Return the memory of a buffer as ``reader`` finds it."""
        return self._memory(_version(self.graph, name, reader))

    def _memory(self, name: str) -> FlatMemory:
        if name not in self.memories:
            given = self.values.get(name, self.graph.constants.get(name))
            buffer = self.graph.try_get_buffer(name)
            if given is not None:
                self.memories[name] = self._laid_out(name, given)
            elif isinstance(buffer, ir.Buffer) and (_is_computed(buffer) or isinstance(buffer, ir.ConcatKernel)):
                self.memories[name] = self._computed(buffer)
            else:
                raise NotComputed(f"the value of {name} ({type(buffer).__name__}) is needed and not given")
        return self.memories[name]

    def _laid_out(self, name: str, value: torch.Tensor) -> FlatMemory:
        layout = _layout(self.graph, name)
        if layout is None:
            raise NotComputed(f"{name} has no layout")
        where = self.positions(layout)
        if where.numel() != value.numel():
            raise NotComputed(f"{name} has shape {tuple(value.shape)}, in the IR {tuple(where.shape)}")
        flat = value.detach().cpu().to(self.compute_dtype(value.dtype)).reshape(-1)
        size = int(where.max()) + 1 if where.numel() else 0
        if size == where.numel() and bool((where.reshape(-1) == torch.arange(size)).all()):
            return FlatMemory(flat)
        content, known = flat.new_zeros(size), torch.zeros(size, dtype=torch.bool)
        content[where.reshape(-1)] = flat
        known[where.reshape(-1)] = True
        return FlatMemory(content, known)

    def _computed(self, buffer: ir.Buffer) -> FlatMemory:
        if isinstance(buffer, ir.ConcatKernel):
            return self._concatenated(buffer)
        if not isinstance(buffer, ir.ComputedBuffer) or not buffer.has_store_function():
            raise NotComputed(f"{type(buffer).__name__} is no loop")
        data = buffer.data
        if not isinstance(data, ir.Pointwise | ir.Reduction):
            raise NotComputed(type(data).__name__.lower())
        indices = Indices(self.sizes)
        reduced = data.get_reduction_size()
        arguments = indices.loops([data.get_pointwise_size(), *([reduced] if reduced else [])])
        mutated = mutated_by(buffer)
        memory = self.read(mutated, buffer) if mutated else self._blank(buffer)
        handler = TensorHandler(
            indices,
            reduced=len(reduced),
            result=FlatMemory(memory.content.clone(), memory.known),
            read=lambda name: self.read(name, buffer),
            compute_dtype=self.compute_dtype,
            keep_precision=self.float64,
        )
        if math.prod(indices.domain):
            with V.set_ops_handler(handler):
                buffer.get_store_function()(*arguments)
        return handler.result

    def _blank(self, buffer: ir.Buffer) -> FlatMemory:
        layout = _layout(self.graph, _name(buffer))
        if layout is None:
            raise NotComputed(f"{_name(buffer)} has no layout")
        where = self.positions(layout)
        size = int(where.max()) + 1 if where.numel() else 0
        return FlatMemory(torch.zeros(size, dtype=self.compute_dtype(layout.dtype)))

    def _concatenated(self, buffer: ir.ConcatKernel) -> FlatMemory:
        memory = self._blank(buffer)
        for piece in buffer.inputs:
            layout = piece.layout if isinstance(piece, ir.Buffer) else None
            if not isinstance(layout, ir.NonOwningLayout):
                raise NotComputed(f"a piece of {_name(buffer)} lies elsewhere")
            own = self._memory(_name(piece)).content
            memory.content[self.positions(layout.view.get_layout())] = own[self.positions(layout)]
        return memory

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which values of a dtype are computed."""
        if not dtype.is_floating_point:
            return dtype
        if self.float64:
            return torch.float64
        return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype


def _name(buffer: Any) -> str:
    return str(buffer.get_name())
