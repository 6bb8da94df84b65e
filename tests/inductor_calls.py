"""Compile with Inductor and record the calls of generated kernels and ops, for tests of what judges such calls.

Calls of a graph are kept until it returns, so that ``KernelCall.last`` is known; each written tensor is a copy.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config
import torch._inductor.config
from torch._inductor.graph import GraphLowering
from torch._inductor.output_code import CompiledFxGraph
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves, tree_leaves

from hashbench.inductor.graphs import CompiledGraph, KernelCall, Read, Write
from hashbench.trace.digest import digest, untraced


def content(tensor: torch.Tensor) -> str:
    return digest(tensor).value


def copied(tensor: torch.Tensor) -> torch.Tensor:
    with untraced():
        return tensor.detach().clone()


def reading(name: str | None, tensor: torch.Tensor) -> Read:
    return Read(name or "", content(tensor), tensor.data_ptr(), tensor.nbytes)


def writing(name: str | None, tensor: torch.Tensor) -> Write:
    return Write(name or "", copied(tensor), content(tensor), tensor.data_ptr(), tensor.nbytes)


@dataclass
class Kept:
    graphs: dict[str, CompiledGraph] = field(default_factory=dict)
    modules: list[Any] = field(default_factory=list)


@contextmanager
def graphs_kept() -> Iterator[Kept]:
    """Keep what Inductor compiles in this block, by path of the generated module. Only binaries come from a cache."""
    kept = Kept()
    original = GraphLowering.compile_to_module

    def compile_to_module(self: Any) -> Any:
        module = original(self)
        nodes = {buffer.get_name(): buffer.get_origin_node() for buffer in self.buffers}
        nodes = {name: node for name, node in nodes.items() if node is not None}
        buffers = {buffer.get_name(): buffer for buffer in self.buffers}
        kept.modules.append(module)
        kept.graphs[module.__file__] = CompiledGraph(
            module.__file__, self.module, nodes, buffers, bool(self.is_backward)
        )
        return module

    with (
        patch.object(GraphLowering, "compile_to_module", compile_to_module),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield kept


class Recorder:
    """Calls of compiled graphs: ``calls`` holds (path of the module, inputs as they were, kernel calls)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Any], list[KernelCall]]] = []
        self.written: set[int] = set()
        self.now: list[KernelCall] = []

    def generated(
        self, module: Any, name: str, signature: Sequence[str], kernel: Callable[..., Any]
    ) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            names = arguments_at(module.__file__, sys._getframe(1).f_lineno)[1]
            given = [
                (label, value, not kind.startswith("const"))
                for label, value, kind in zip([*names, *[None] * len(args)], args, signature, strict=False)
                if isinstance(value, torch.Tensor)
            ]
            reads = [
                reading(label, value)
                for label, value, writes in given
                if not writes or value.untyped_storage()._cdata in self.written
            ]
            result = kernel(*args)
            self.add(name, True, reads, [(label, value) for label, value, writes in given if writes])
            return result

        return run

    def add(
        self, name: str, generated: bool, reads: list[Read], written: list[tuple[str | None, torch.Tensor]]
    ) -> None:
        self.written |= {value.untyped_storage()._cdata for _, value in written}
        writes = tuple(writing(*item) for item in written)
        self.now.append(KernelCall(f"{len(self.now)}", name, generated, tuple(reads), writes))

    def extern(self, frame: Any, func: Any, args: Any, kwargs: Any) -> Any:
        while frame is not None and frame.f_code.co_name != "call":
            frame = frame.f_back
        path, line = (frame.f_code.co_filename, frame.f_lineno) if frame else ("", 0)
        targets, names = arguments_at(path, line)
        given = {
            item.name: kwargs.get(item.name, dict(enumerate(args)).get(i))
            for i, item in enumerate(func._schema.arguments)
        }
        changed = {item.name for item in func._schema.arguments if item.alias_info and item.alias_info.is_write}
        reads = [
            reading("", value)
            for name, item in given.items()
            if not (name in changed and name == "out")
            for value in tree_leaves(item)
            if isinstance(value, torch.Tensor)
        ]
        result = func(*args, **kwargs)
        out = re.search(r"out=(?:reinterpret_tensor\()?(\w+)", linecache.getline(path, line))
        written = [(out and out[1], given[name]) for name in changed if isinstance(given[name], torch.Tensor)]
        if not changed:
            fresh = [value for value in arg_tree_leaves(result) if isinstance(value, torch.Tensor)]
            written = [(targets[0] if targets and len(fresh) == 1 else None, value) for value in fresh]
            if targets and isinstance(result, (tuple, list)):
                pieces = dict(re.findall(rf"^\s*(\w+) = {targets[0]}\[(\d+)\]", Path(path).read_text(), re.M))
                named = {int(at): name for name, at in pieces.items()}
                written = [(named.get(i), value) for i, value in enumerate(result) if isinstance(value, torch.Tensor)]
        elif not out and written:
            written = [(names[0] if names else None, written[0][1])]
        self.add(str(func), False, reads, written)
        return result


class Extern(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recorder.extern(sys._getframe(1), func, args, kwargs or {})


def arguments_at(path: str, line: int) -> tuple[list[str], list[str | None]]:
    """Names assigned and names of the arguments of a call in a generated module."""
    try:
        tree = ast.parse(linecache.getline(path, line).strip())
    except SyntaxError:
        return [], []
    call = next((node for node in ast.walk(tree) if isinstance(node, ast.Call)), None)
    if call is None:
        return [], []
    first = tree.body[0]
    targets = (
        [x.id for x in ast.walk(first.targets[0]) if isinstance(x, ast.Name)] if isinstance(first, ast.Assign) else []
    )
    names = []
    for argument in call.args:
        found = [
            x.id for x in ast.walk(argument) if isinstance(x, ast.Name) and x.id not in {"reinterpret_tensor", "torch"}
        ]
        names.append(found[0] if found else None)
    return targets, names


def signatures(path: str) -> dict[str, list[str]]:
    text = Path(path).read_text(encoding="utf-8")
    found = re.finditer(r"^(\w+) = async_compile\.cpp_pybinding\((\[.*?\])", text, re.M)
    return {match[1]: ast.literal_eval(match[2]) for match in found}


@contextmanager
def recorded(kept: Kept) -> Iterator[Recorder]:
    """Record the calls of compiled graphs in this block."""
    recorder = Recorder()
    original = CompiledFxGraph.__call__

    def call(self: Any, inputs: Any) -> Any:
        code = getattr(self.current_callable, "__func__", self.current_callable).__code__
        given = [copied(value) if isinstance(value, torch.Tensor) else value for value in inputs]
        recorder.now = []
        recorder.written |= {v.untyped_storage()._cdata for v in inputs if isinstance(v, torch.Tensor)}
        with Extern(recorder):
            result = original(self, inputs)
        later: set[str] = set()
        calls = []
        for item in reversed(recorder.now):
            names = {write.buffer for write in item.writes}
            calls.append(replace(item, last=frozenset(names - later)))
            later |= names
        recorder.calls.append((code.co_filename, given, calls[::-1]))
        return result

    with ExitStack() as stack:
        for module in kept.modules:
            for name, signature in signatures(module.__file__).items():
                kernel = getattr(module, name)
                stack.enter_context(patch.object(module, name, recorder.generated(module, name, signature, kernel)))
        stack.enter_context(patch.object(CompiledFxGraph, "__call__", call))
        yield recorder
