"""Facts of an FX node, kept in its ``meta`` through all passes: op, module and line of the user's program."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_FRAME = re.compile(
    r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in .*\n(?:\s*(?!File ")(?P<code>\S.*))?', re.MULTILINE
)
_ROOT = re.compile(r"^(L\['[^']*'\]|self)\.?")
_GETATTR = re.compile(r"getattr\((.*?), '([^']*)'\)")
_MODULES = re.compile(r"(^|\.)_modules\.")
_ITEM = re.compile(r"\['?([^']+?)'?\]")
_FACTS = ("original_aten", "nn_module_stack", "fwd_nn_module_stack", "stack_trace")
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Where a node comes from.

    Attributes:
        op: aten op of the user's program before decompositions (``aten.gelu.default``); without one the node's target.
        module: path of the innermost ``nn.Module`` (``layers.0.norm``); empty in the root or if unknown.
        source: ``file:line code``; empty if unknown.
    """

    op: str = ""
    module: str = ""
    source: str = ""


def facts_of(node: torch.fx.Node) -> NodeFacts:
    """Return the facts of a node, from ``original_aten``, ``nn_module_stack`` (``fwd_nn_module_stack`` in a backward
    graph) and ``stack_trace``. A node that the compiler added (``copy_`` to an input that the program mutated) has
    none of them; it has those of its last operand that has."""
    operands = reversed(node.all_input_nodes)
    known = next((item for item in (node, *operands) if any(map(item.meta.get, _FACTS))), node)
    meta = known.meta
    modules = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    path = next((entry[0] for entry in reversed(list(modules.values()))), "")
    return NodeFacts(
        op=str(meta.get("original_aten") or known.target),
        module=module_path(path),
        source=source_line(meta.get("stack_trace") or ""),
    )


def module_path(path: Any) -> str:
    """Return dynamo's name of a module (``L['self'].layers[0]``) as ``named_modules`` has it (``layers.0``)."""
    text = _ROOT.sub("", _GETATTR.sub(r"\1.\2", str(path)))
    return _MODULES.sub(".", _ITEM.sub(r".\1", text)).strip(".")


def source_line(stack_trace: str) -> str:
    """Return the innermost frame of a stack trace outside of torch, else the innermost, as ``file:line code``."""
    frames = list(_FRAME.finditer(stack_trace))
    if not frames:
        return ""
    frame = next((item for item in reversed(frames) if not item["file"].startswith(_TORCH)), frames[-1])
    return f"{frame['file']}:{frame['line']} {(frame['code'] or '').strip()}".rstrip()
