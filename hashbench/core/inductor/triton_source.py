"""Read the source of a Triton kernel as Inductor hands it over: its arguments, and which it reads and writes. Pure;
imports neither torch nor Triton.

What a kernel writes is what its text says, whoever wrote it: Inductor's kernels, templates, and kernels of the user.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class TritonArgument:
    """An argument that a launch passes.

    Attributes:
        name: of the parameter.
        kind: as the signature has it: ``*fp32``, ``i32``, ``constexpr`` for a size that is 1.
        reads: it points to memory whose earlier content the kernel reads.
        writes: it points to memory that the kernel writes.
    """

    name: str
    kind: str
    reads: bool = False
    writes: bool = False


_SIGNATURE = re.compile(r"""['"]signature['"]: (\{[^{}]*\})""")
_MUTATED = re.compile(r"""['"]mutated_arg_names['"]: (\[[^\[\]]*\])""")
_LAUNCHER = re.compile(r"""['"]extra_launcher_args['"]: (\[[^\[\]]*\])""")
_POINTER, _SIZE = "*", "i32"
_FILLED, _WORKSPACE = "out_ptr", ("ws_ptr", "sem_ptr")
"""Inductor's names of what is only written, and of scratch memory, which is in no list of what is mutated."""


def arguments_of(source: str) -> tuple[TritonArgument, ...]:
    """Return what a launch passes, in order; empty if the source has no signature.

    A parameter of type ``tl.constexpr`` is part of the configuration, and not passed; the grid of a template is, behind
    the arguments of the kernel. A pointer is written if Inductor
    says so (by its name, or ``mutated_arg_names``), if a store of the kernel reaches it, or if it is handed to a
    function that is not in the text.
    """
    kinds = _literal(_SIGNATURE, source, dict[str, str]())
    if not kinds:
        return ()
    updated = _literal(_MUTATED, source, list[str]())
    functions = _functions(source)
    kernel = functions.get(kernel_name(source))
    configured = set() if kernel is None else set(_constants(kernel))
    stored = set(kinds) if kernel is None else _Stores(functions).of(kernel.name)
    body = ("" if kernel is None else source.partition(f"\ndef {kernel.name}(")[2]).partition("):\n")[2]
    found = []
    for name, kind in kinds.items():
        if name in configured or (kernel is None and kind == "constexpr"):
            continue
        pointer = str(kind).startswith(_POINTER)
        named = name in updated or name.startswith((_FILLED, *_WORKSPACE))
        writes = pointer and (named or name in stored)
        fills = writes and (not is_loaded_first(name, body) if name in updated or not named else _FILLED in name)
        found.append(TritonArgument(str(name), str(kind), reads=pointer and not fills, writes=writes))
    grid = _literal(_LAUNCHER, source, list[str]())
    return (*found, *(TritonArgument(str(name), _SIZE) for name in grid))


def kernel_name(source: str) -> str:
    """Return the name of the function that Inductor's heuristics decorate, else of the last one; empty without any.

    Functions that a kernel of the user calls are behind it in the text.
    """
    functions = _functions(source)
    decorated = (name for name, each in functions.items() if any(map(_is_heuristic, each.decorator_list)))
    return next(decorated, next(reversed([*functions]), ""))


def _is_heuristic(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func).startswith("triton_heuristics.")


def is_loaded_first(name: str, body: str) -> bool:
    """Return True unless the first use of a pointer in the body of a kernel, in C++ or in Triton, is a store: then the
    kernel made what it updates, in memory whose earlier content is dead."""
    alias = re.compile(rf"auto (\w+) = {re.escape(name)};")
    names = "|".join([re.escape(name), *alias.findall(body)])
    store = rf"(?P<before>\.store\(|^[ \t]*)?\b(?:{names})\b(?P<assigned>\[.*\] = )?"
    use = re.search(store, alias.sub("", body), re.MULTILINE)
    if use is None or use["before"] is None:
        return True
    return use["before"] != ".store(" and use["assigned"] is None


_Value = TypeVar("_Value", dict[str, str], list[str])


def _literal(pattern: re.Pattern[str], source: str, default: _Value) -> _Value:
    found = pattern.search(source)
    try:
        value = default if found is None else ast.literal_eval(found[1])
    except (SyntaxError, ValueError):
        return default
    return value if isinstance(value, type(default)) else default


def _functions(source: str) -> Mapping[str, ast.FunctionDef]:
    """Return the functions of a source by name, in the order of the text."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}


def _constants(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the parameters of a function of type ``tl.constexpr``."""
    for parameter in function.args.args:
        kind = parameter.annotation
        text = kind.value if isinstance(kind, ast.Constant) else "" if kind is None else ast.unparse(kind)
        if isinstance(text, str) and text.rpartition(".")[2] == "constexpr":
            yield parameter.arg


_LIBRARIES = frozenset({"tl", "libdevice", "tl_math", "math", "triton", "triton_helpers"})
"""Names of modules whose functions write through no pointer that they get, but those of ``_WRITES``."""

_WRITES = re.compile(r"(^|_)(store|atomic|barrier|exclusive_scan)")
"""In the names of the functions that write what they get, or that a method is called on."""


class _Stores:
    """Which parameters of the functions of a source a store reaches.

    A name is reached if a reached name is made of it (``p = out + offsets``), but not through what is loaded.
    """

    def __init__(self, functions: Mapping[str, ast.FunctionDef]) -> None:
        self._functions = functions
        self._known: dict[str, set[str]] = {}

    def of(self, name: str) -> set[str]:
        """Return the names of a function's parameters that are written."""
        if name not in self._known:
            self._known[name] = set()  # a function that calls itself
            self._known[name] = self._reached(self._functions[name])
        return self._known[name]

    def _reached(self, function: ast.FunctionDef) -> set[str]:
        reached: set[str] = set()
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            for written in self._written(call):
                reached.update(_names_in(written))
        made = [
            ({target.id for target in ast.walk(node.targets[0]) if isinstance(target, ast.Name)}, node.value)
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
        ]
        while True:
            more = {name for targets, value in made if targets & reached for name in _names_in(value)} - reached
            if not more:
                return reached & {parameter.arg for parameter in function.args.args}
            reached |= more

    def _written(self, call: ast.Call) -> Iterator[ast.expr]:
        """Yield the expressions of pointers that a call writes through."""
        path = ast.unparse(call.func).split(".")
        owner, name = path[0], path[-1]
        passed = [*call.args, *(word.value for word in call.keywords)]
        if name in self._functions and len(path) == 1:
            parameters = [parameter.arg for parameter in self._functions[name].args.args]
            named = dict(zip(parameters, call.args, strict=False))
            named |= {word.arg: word.value for word in call.keywords if word.arg is not None}
            yield from (value for parameter, value in named.items() if parameter in self.of(name))
        elif _WRITES.search(name):
            yield from passed[:1] if owner in _LIBRARIES and name.startswith(("store", "atomic")) else passed
            if owner not in _LIBRARIES and isinstance(call.func, ast.Attribute):
                yield call.func.value
        elif owner not in _LIBRARIES and len(path) == 1 and name not in _BUILTINS:
            yield from passed


_BUILTINS = frozenset({"range", "min", "max", "abs", "len", "float", "int"})


def _names_in(expression: ast.expr) -> Iterator[str]:
    """Yield the names that a pointer is made of: not those inside what is loaded."""
    waiting: list[ast.AST] = [expression]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name):
            yield node.id
        elif not (isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _VALUES):
            waiting.extend(ast.iter_child_nodes(node))


_VALUES = frozenset({"load", "program_id", "num_programs", "sum", "dot"})
"""Functions whose results are no pointers."""
