"""What a node of an FX graph stands for in the user's program."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

_ROOT = re.compile(r"^[LG]\['?\w+'?\]")
_GETATTR = re.compile(r"getattr\((.*?), '([^']*)'\)")
_ITEM = re.compile(r"\._modules\['([^']*)'\]")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<function>.*)$')

_NOT_THE_PROGRAM = ("/site-packages/torch/", "/hashbench/run/workload.py")
"""Parts of the paths of files whose frames are no line of the program."""

_LIBRARY = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})
"""Folders of Python's own library, which hold those of installed packages, too."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Where a node comes from.

    Attributes:
        op: aten op of the user's program (``aten.gelu.default``); the node's own target where it has none.
        module: path of the module, its root named by its class (``Net.layers.0``); empty if unknown.
        source: ``file:line code`` of the innermost line of the program; empty if unknown.
    """

    op: str = ""
    module: str = ""
    source: str = ""


class BufferFacts(dict[str, NodeFacts]):
    """Facts of the buffers of a generated module, by name.

    Attributes:
        derived: what was made of them, kept as long as the module.
        lines: lines of the module, by the first line of a function and the place of an instruction in it.
    """

    def __init__(self, facts: Mapping[str, NodeFacts] = MappingProxyType({})) -> None:
        super().__init__(facts)
        self.derived: dict[Any, Any] = {}
        self.lines: dict[tuple[int, int], int] = {}


def facts_of(node: Any) -> NodeFacts:
    """Return the facts of a ``torch.fx.Node``, from ``original_aten``, ``nn_module_stack`` (``fwd_nn_module_stack`` in
    a backward graph) and ``stack_trace``.

    A write to an input that the compiler added (``copy_``, for a buffer that the program updates) has no stack trace;
    it has the facts of what it writes.
    """
    added = _is_mutable(node) and not node.meta.get("stack_trace")
    node = node.all_input_nodes[-1] if added and node.all_input_nodes else node
    meta = node.meta
    op = meta.get("original_aten") or (node.target if node.op == "call_function" else "")
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    return NodeFacts(_named(op), module_path(stack), source_line(meta.get("stack_trace") or ""))


def _named(target: Any) -> str:
    """Return the name of an op, or of what dynamo's graphs call; a builtin's own text has its address."""
    text = str(target)
    if not text.startswith("<"):
        return text
    name = getattr(target, "__name__", "") or text.partition(" at 0x")[0].strip("<")
    module = (getattr(target, "__module__", None) or "").removeprefix("_")
    return f"{module}.{name}" if module else name


def _is_mutable(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def module_path(stack: Mapping[str, tuple[str, Any]]) -> str:
    """Return the path of the innermost module of an ``nn_module_stack``, below the root if that is not in it."""
    entries = list(stack.values())
    if not entries:
        return ""
    (first, kind), (path, _) = entries[0], entries[-1]
    root = getattr(kind, "__name__", str(kind).rpartition(".")[2]) if _ROOT.fullmatch(first) else ""
    below = _ITEM.sub(r".\1", _ROOT.sub("", _GETATTR.sub(r"\1.\2", path)))
    return root + below if root else below.removeprefix(".")


def source_line(trace: str) -> str:
    """Return ``file:line code`` of the last frame of a stack trace as text that is a line of the program."""
    lines = trace.splitlines()
    frames = [(frame, at) for at, line in enumerate(lines) if (frame := _FRAME.match(line))]
    own = [frame for frame in frames if not _is_library(frame[0]["file"])]
    if not own:
        return ""
    frame, at = own[-1]
    code = lines[at + 1].strip() if at + 1 < len(lines) else ""
    return f"{frame['file']}:{frame['line']} {code}".rstrip()


def _is_library(file: str) -> bool:
    """Return whether a file is torch's, ours, or of Python's own library, which only does what the program asks for."""
    if any(part in file for part in _NOT_THE_PROGRAM) or file.startswith("<frozen "):
        return True
    return file.startswith(_LIBRARY) and "/site-packages/" not in file and "/dist-packages/" not in file


def common(facts: Iterable[NodeFacts]) -> NodeFacts:
    """Return the facts of the last node that has a module, else of the last one."""
    kept = list(facts)
    return next((facts for facts in reversed(kept) if facts.module), kept[-1] if kept else NodeFacts())
