"""Parse the text of a generated module (placeholder until the full parser)."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class KernelSource:
    name: str
    kind: str
    argument_types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WrapperCall:
    line: int
    kernel: str
    arguments: tuple[str, ...]
    targets: tuple[str, ...]


@functools.lru_cache(64)
def kernels_of(path: str) -> tuple[KernelSource, ...]:
    text = Path(path).read_text()
    return tuple(
        KernelSource(m.group(1), "cpp", tuple(ast.literal_eval(m.group(2))))
        for m in re.finditer(r"^(\w+) = async_compile\.cpp_pybinding\((\[.*?\])", text, re.M)
    )


@functools.lru_cache(64)
def calls_of(path: str) -> Mapping[int, WrapperCall]:
    found = {}
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        match = re.match(r"\s+(?:(\w+) = )?([\w.]+)\((.*)\)$", line)
        if not match:
            continue
        try:
            (statement,) = ast.parse(line.strip()).body
        except SyntaxError:
            continue
        call = statement.value
        if not isinstance(call, ast.Call):
            continue

        def name(node):
            return next(
                (
                    x.id
                    for x in ast.walk(node)
                    if isinstance(x, ast.Name) and x.id not in ("reinterpret_tensor", "torch")
                ),
                "",
            )

        targets = [match.group(1)] if match.group(1) else [name(k.value) for k in call.keywords if k.arg == "out"]
        found[number] = WrapperCall(number, match.group(2), tuple(name(a) for a in call.args), tuple(targets))
    return found
