"""Parse the text of a module that Inductor generated: sources of its kernels, and what each line of its functions
calls, reads, writes and renames. Pure; imports no torch.

What is not known is left out. Names are those of Inductor's buffers (``buf3``, ``primals_1``). A module of
``cpp_wrapper`` has no kernels here: its calls are C++.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hashbench.core.inductor.triton_source import arguments_of, is_loaded_first

Argument = int | str
"""Position or keyword of an argument."""


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A generated kernel.

    Attributes:
        name: in the module.
        kind: ``cpp``, ``triton``, or another method of ``AsyncCompile`` (``pallas``, ``metal``).
        argument_types: of the arguments of a call, in C++ (``const float*``) or as Triton has them (``*fp32``); empty
            if unknown.
        source: as it was handed to the compiler.
        reads: positions of the tensors that it reads: inputs, and an ``in_out_ptr0`` that it loads before it stores.
        writes: positions of the tensors that it writes.
    """

    name: str
    kind: str
    argument_types: tuple[str, ...]
    source: str = field(repr=False)
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WrapperCall:
    """A line that calls a kernel or an op, or that gives memory another name.

    Attributes:
        line: from 1.
        kernel: name of the generated kernel, or the op as written (``extern_kernels.addmm``); empty for
            ``buf2 = buf1``, ``buf2 = reinterpret_tensor(buf1, …)`` and ``buf7 = buf6[0]``, which run nothing.
        arguments: names of the buffers in the leaves of the arguments, then of those passed by name; ``""`` for a leaf
            that is no buffer, and for a size.
        reads: positions of those whose earlier content it reads. Not what it fills (``out=``, ``out_ptr0``), not memory
            that was only allocated, nor memory of a dead buffer that was taken over for another one.
        targets: names of the buffers that it writes or assigns, in order, each once.
        pieces: names of the elements of the tuple that it returns; ``""`` for an element without a name.
    """

    line: int
    kernel: str
    arguments: tuple[str, ...] = ()
    reads: tuple[int, ...] = ()
    targets: tuple[str, ...] = ()
    pieces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A generated module.

    Attributes:
        kernels: in the order of the text.
        calls: by line.
        reuses: old and new name of memory that is taken over, by line; the old name is gone.
        last_writers: names of the buffers that no later line writes, by the line that writes them last. A write to a
            view (``# alias``) is one to the buffer that it views as long as that has a name; a write to memory that was
            taken over is one to its new name only.
        returned: names of the inputs, which belong to the caller, and of the buffers in what is returned.
        others: what else ``async_compile`` makes: its method (``multi_kernel``) by the name.
    """

    kernels: tuple[KernelSource, ...] = ()
    calls: Mapping[int, WrapperCall] = field(default_factory=dict)
    reuses: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    last_writers: Mapping[int, frozenset[str]] = field(default_factory=dict)
    returned: frozenset[str] = frozenset()
    others: Mapping[str, str] = field(default_factory=dict)

    def kernel(self, name: str) -> KernelSource | None:
        """Return the kernel of this name; ``None`` if there is none."""
        return next((kernel for kernel in self.kernels if kernel.name == name), None)

    def used(self) -> frozenset[str]:
        """Return the names of the buffers whose content is used: returned, or read by a later call under this name, or
        under one that takes its memory over. Code generation may leave the others with any content: also what a kernel
        was to update, if nothing reads the result."""
        found, unread = set(self.returned), set[str]()
        for call in reversed(list(self.calls.values())):
            if call.kernel:
                unread.update(name for name in call.targets if name not in found)
                found.update(call.arguments[at] for at in call.reads if at < len(call.arguments))
            elif not found.isdisjoint(call.targets):
                found.update(call.arguments)
        return frozenset(found - unread - {""})


def mutated_by_name(op: str) -> Sequence[Argument]:
    """Return the arguments that an op in the text of a wrapper mutates, by torch's naming of ops: the first one if its
    name ends in ``_`` (``aten.index_put_``), and ``out``. A custom op that mutates is known from its schema alone."""
    parts = op.split(".")
    return (0, "out") if any(part.endswith("_") and not part.endswith("__") for part in parts[1:]) else ("out",)


Mutated = Callable[[str], Sequence[Argument]]
"""The arguments that an op mutates, by its text (``torch.ops.aten.sort.stable``)."""


def parse(text: str, *, mutated: Mutated = mutated_by_name) -> Wrapper:
    """Parse a generated module; empty if the text is no Python.

    Args:
        text: of the whole file.
        mutated: the arguments that an op, as its text has it, mutates.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Wrapper()
    sources = tuple(_kernels(tree))
    reader = _FunctionReader(
        {kernel.name: kernel for kernel in sources}, _op_namespaces(tree), _imported(tree), mutated
    )
    for function in _functions(tree):
        reader.read(function)
    known = {kernel.name for kernel in sources}
    others = {name: method for name, method, _ in _made_by_async_compile(tree) if name not in known}
    return replace(reader.wrapper(sources), others=others)


def kernels(text: str) -> tuple[KernelSource, ...]:
    """Return the generated kernels of a module."""
    return parse(text).kernels


def calls(text: str, *, mutated: Mutated = mutated_by_name) -> Mapping[int, WrapperCall]:
    """Return the calls of a module by line; see :class:`WrapperCall`."""
    return parse(text, mutated=mutated).calls


def reuses(text: str) -> Mapping[int, tuple[str, str]]:
    """Return the old and new name of memory that is taken over, by line."""
    return parse(text).reuses


def last_writers(text: str, *, mutated: Mutated = mutated_by_name) -> Mapping[int, frozenset[str]]:
    """Return the names of the buffers that no later line writes, by line; see :class:`Wrapper`."""
    return parse(text, mutated=mutated).last_writers


# --------------------------------------------------------------------------------------------- sources of kernels

_CPP = {"cpp", "cpp_pybinding"}


def _kernels(tree: ast.Module) -> Iterator[KernelSource]:
    """Yield ``name = async_compile.kind(…, '''source''', …)``."""
    for name, method, arguments in _made_by_async_compile(tree):
        texts = [each.value for each in arguments if isinstance(each, ast.Constant)]
        source = next((value for value in reversed(texts) if isinstance(value, str) and "\n" in value), "")
        if source:
            yield _kernel(name, method, source, arguments)


def _made_by_async_compile(tree: ast.Module) -> Iterator[tuple[str, str, Sequence[ast.expr]]]:
    """Yield name, method and arguments of ``name = async_compile.method(…)``."""
    for statement in tree.body:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Attribute(value=ast.Name(id="async_compile"), attr=method), args=arguments),
            ):
                yield name, method, arguments


def _kernel(name: str, method: str, source: str, arguments: Sequence[ast.expr]) -> KernelSource:
    if method == "triton":
        passed = arguments_of(source)
        types = tuple(argument.kind for argument in passed)
        written, read = [argument.writes for argument in passed], [argument.reads for argument in passed]
    else:
        types = next((_strings(each) for each in arguments if isinstance(each, ast.List)), ())
        written = ["*" in kind and not kind.startswith("const ") for kind in types]
        names, body = _cpp_names(source, len(types))
        updates = [name.startswith("in_out_ptr") and is_loaded_first(name, body) for name in names] or written
        read = [
            "*" in kind and (not writes or both) for kind, writes, both in zip(types, written, updates, strict=True)
        ]
    kind = "cpp" if method in _CPP else method
    return KernelSource(name, kind, types, source, reads=_positions(read), writes=_positions(written))


def _positions(which: Sequence[bool]) -> tuple[int, ...]:
    return tuple(index for index, true in enumerate(which) if true)


def _strings(node: ast.List) -> tuple[str, ...]:
    return tuple(str(each.value) for each in node.elts if isinstance(each, ast.Constant))


_CPP_ARGUMENTS = re.compile(r'extern "C"[^(;]*\(([^()]*)\)')


def _cpp_names(source: str, number: int) -> tuple[tuple[str, ...], str]:
    """Return the names of the arguments of a kernel in C++, none if they are not that many, and what follows them."""
    found = _CPP_ARGUMENTS.search(source)
    if found is None:
        return (), ""
    names = tuple(each.split()[-1].lstrip("*&") for each in found[1].split(",") if each.strip())
    return (names if len(names) == number else ()), source[found.end() :]


# ------------------------------------------------------------------------------------------------------ functions

_OP_ROOTS = frozenset({"extern_kernels", "aten", "inductor_ops", "_quantized"})
_VIEWS = frozenset({"reinterpret_tensor", "inductor_ops._reinterpret_tensor", "torch.ops.inductor._reinterpret_tensor"})
_SIZE = re.compile(r"(?:s|u|ks|ps|zuf)\d+")
"""Sizes that depend on the input, as Inductor spells them."""

_BESIDE = frozenset({"get_args", "benchmark_compiled_module", "recursively_apply_fns", "__init__"})
"""Functions of a module that no compiled program calls."""


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Yield ``call``, also that of the class ``Runner``, partitions and subgraphs, in the order of the text, which is
    that of execution for partitions."""
    for statement in tree.body:
        inside = statement.body if isinstance(statement, ast.ClassDef) else [statement]
        yield from (each for each in inside if isinstance(each, ast.FunctionDef) and each.name not in _BESIDE)


def _op_namespaces(tree: ast.Module) -> frozenset[str]:
    """Return the names of namespaces of ops: of ``aten = torch.ops.aten``, not of ``f = torch.ops.inductor.f``."""
    named = (each for each in tree.body if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name))
    pairs = ((each.targets[0], _dotted(each.value).split(".")) for each in named)
    return _OP_ROOTS | {name.id for name, path in pairs if path[:2] == ["torch", "ops"] and len(path) == 3}  # type: ignore[attr-defined]


def _imported(tree: ast.Module) -> frozenset[str]:
    imports = (each for each in tree.body if isinstance(each, (ast.Import, ast.ImportFrom)))
    return frozenset((alias.asname or alias.name).partition(".")[0] for each in imports for alias in each.names)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a function, also those inside ``with``, ``if``, ``for`` and ``try``."""
    for statement in body:
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            for name in ("body", "handlers", "orelse", "finalbody"):
                yield from _statements(getattr(statement, name, ()))


def _dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` of an attribute or a name; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join((node.id, *reversed(parts))) if isinstance(node, ast.Name) else ""


@dataclass(slots=True)
class _NamedMemory:
    """Memory, the ``name`` that it has now (empty: none any more), and the memory that it is a view of."""

    name: str
    viewed: _NamedMemory | None = None


class _Memories:
    """The memory behind each name of a function."""

    def __init__(self) -> None:
        self._of: dict[str, _NamedMemory] = {}

    def viewed_by(self, name: str) -> Iterator[str]:
        """Yield the name of the memory that ``name`` views, and of what that views."""
        memory = self._of.get(name)
        while memory is not None and memory.viewed is not None:
            memory = memory.viewed
            if memory.name:
                yield memory.name

    def view(self, name: str, base: str) -> None:
        """Let ``name`` view the memory of ``base``."""
        self._of[name] = _NamedMemory(name, self._of.setdefault(base, _NamedMemory(base)))

    def rename(self, old: str, new: str) -> None:
        """Give the memory of ``old`` another name."""
        memory = self._of.pop(old, None) or _NamedMemory(old)
        memory.name = new
        self._of[new] = memory

    def forget(self, name: str) -> None:
        """Let memory have no name; its views stay."""
        memory = self._of.pop(name, None)
        if memory is not None:
            memory.name = ""


class _FunctionReader:
    """Reads functions statement by statement, in the order of the text."""

    def __init__(
        self,
        sources: Mapping[str, KernelSource],
        namespaces: frozenset[str],
        imported: frozenset[str],
        mutated: Mutated,
    ) -> None:
        self._sources = sources
        self._namespaces = namespaces
        self._no_buffers = imported | namespaces
        self._mutated = mutated
        self._calls: dict[int, WrapperCall] = {}
        self._reuses: dict[int, tuple[str, str]] = {}
        self._last: dict[str, int] = {}
        self._unwritten: dict[str, bool] = {}  # name that nothing wrote yet -> its memory was written under another one
        self._pieces: dict[int, dict[int, str]] = {}
        self._memories = _Memories()
        self._returned: set[str] = set()

    def wrapper(self, sources: tuple[KernelSource, ...]) -> Wrapper:
        """Return what was read."""
        last: dict[int, set[str]] = {}
        for name, line in self._last.items():
            last.setdefault(line, set()).add(name)
        for line, pieces in self._pieces.items():
            names = tuple(pieces.get(index, "") for index in range(max(pieces) + 1))
            self._calls[line] = replace(self._calls[line], pieces=names)
        frozen = {line: frozenset(names) for line, names in sorted(last.items())}
        return Wrapper(sources, self._calls, self._reuses, frozen, frozenset(self._returned))

    def read(self, function: ast.FunctionDef) -> None:
        """Read one function. Memory of another function has another name in it."""
        self._memories, self._unwritten = _Memories(), {}
        deleted = _deleted_on_lines(function)
        for statement in _statements(function.body):
            match statement:
                case ast.Assign(targets=[target], value=value):
                    self._assign(statement.lineno, target, value, deleted.get(statement.lineno, frozenset()))
                case ast.Expr(value=ast.Call() as call):
                    self._call(call, ())
                case ast.Return(value=ast.expr() as value):
                    self._returned.update(self._leaves(value))
                case ast.Delete(targets=targets):
                    for each in targets:
                        self._memories.forget(_dotted(each))

    # ------------------------------------------------------------------------------------------------ statements

    def _assign(self, line: int, target: ast.expr, value: ast.expr, deleted: frozenset[str]) -> None:
        names = tuple(_names(target))
        if isinstance(value, ast.Name) and value.id == "args":
            self._returned.update(names)
            return
        element = value.slice if isinstance(value, ast.Subscript) else None
        while isinstance(value, ast.Subscript):
            value = value.value
        if isinstance(value, ast.Call) and _dotted(value.func) not in _VIEWS:
            self._call(value, names)
            if _allocates(value):
                self._unwritten |= dict.fromkeys(names, False)
        elif isinstance(target, ast.Name) and (old := self._buffer(value)) and not _SIZE.fullmatch(target.id):
            self._calls.setdefault(line, WrapperCall(line, "", (old,), targets=names))
            if element is None:
                self._name(line, target.id, old, taken_over=old in deleted)
            else:
                self._piece(old, target.id, element)

    def _name(self, line: int, name: str, old: str, *, taken_over: bool) -> None:
        self._unwritten[name] = self._unwritten.get(old, True)
        if taken_over:
            self._reuses[line] = old, name
            self._memories.rename(old, name)
        else:
            self._memories.view(name, old)

    def _piece(self, whole: str, name: str, element: ast.expr) -> None:
        line = self._last.get(whole)
        if line is None or whole not in self._calls[line].targets:
            return
        self._last[name] = line
        if isinstance(element, ast.Constant) and type(element.value) is int and 0 <= element.value < 1000:
            self._pieces.setdefault(line, {})[element.value] = name

    # ----------------------------------------------------------------------------------------------------- calls

    def _call(self, call: ast.Call, assigned: tuple[str, ...]) -> None:
        function = _dotted(call.func)
        source = self._sources.get(function.removesuffix(".run"))
        if source is not None:
            self._enter(self._kernel_call(call, source, assigned))
        elif self._is_op(function):
            self._enter(self._op_call(call, function, assigned))
        elif function.endswith("_") and function.count(".") == 1:  # ``workspace_0.zero_()``
            self._unwritten.pop(function.partition(".")[0], None)

    def _kernel_call(self, call: ast.Call, source: KernelSource, assigned: tuple[str, ...]) -> WrapperCall:
        names = tuple(name for each in call.args for name in self._leaves(each))
        reads = [
            index
            for index, name in enumerate(names)
            if name and self._is_read(name, index in source.reads, index in source.writes)
        ]
        written = [names[index] for index in source.writes if index < len(names)]
        return WrapperCall(call.lineno, source.name, names, tuple(reads), _targets(*written, *assigned))

    def _op_call(self, call: ast.Call, op: str, assigned: tuple[str, ...]) -> WrapperCall:
        passed: list[tuple[Argument, ast.expr]] = [*enumerate(call.args)]
        passed += [(word.arg, word.value) for word in call.keywords if word.arg is not None]
        leaves = [(place, name) for place, value in passed for name in self._leaves(value)]
        mutated = frozenset(self._mutated(op))
        filled = {place for place in mutated if isinstance(place, str)}
        reads = [
            index
            for index, (place, name) in enumerate(leaves)
            if name and place not in filled and self._is_read(name, True, place in mutated)
        ]
        written = [name for place, name in leaves if place in mutated]
        names = tuple(name for _, name in leaves)
        return WrapperCall(call.lineno, op, names, tuple(reads), _targets(*written, *assigned))

    def _is_read(self, name: str, reads: bool, writes: bool) -> bool:
        """Return True if the earlier content of an argument is read: what is only filled may have been written before,
        and is then mutated; what is updated may be memory that nothing wrote."""
        if not writes:
            return reads
        return name not in self._unwritten or (reads and self._unwritten[name])

    def _enter(self, call: WrapperCall) -> None:
        self._calls.setdefault(call.line, call)
        for target in call.targets:
            for written in (target, *self._memories.viewed_by(target)):
                self._last[written] = call.line
                self._unwritten.pop(written, None)

    def _is_op(self, function: str) -> bool:
        if function in _VIEWS or function.endswith("._alloc_from_pool"):
            return False
        return function.startswith("torch.ops.") or function.partition(".")[0] in self._namespaces

    def _leaves(self, node: ast.expr) -> Iterator[str]:
        if isinstance(node, (ast.List, ast.Tuple)):
            for each in node.elts:
                yield from self._leaves(each)
        else:
            yield self._buffer(node)

    def _buffer(self, node: ast.expr) -> str:
        """Return the name of the buffer in ``buf3``, ``buf3[0]`` and ``reinterpret_tensor(buf3, …)``; else empty."""
        while not isinstance(node, ast.Name):
            if isinstance(node, ast.Subscript):
                node = node.value
            elif isinstance(node, ast.Call) and node.args:
                node = node.args[0]
            else:
                return ""
        return "" if node.id in self._no_buffers or _SIZE.fullmatch(node.id) else node.id


def _targets(*names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, names)))


def _allocates(call: ast.Call) -> bool:
    """Return True for ``empty_strided_cpu(…)``, also with ``.as_strided(…)`` behind it, and ``alloc_from_pool(…)``."""
    while isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call):
        call = call.func.value
    return _dotted(call.func).rpartition(".")[2].lstrip("_").startswith(("empty", "alloc_from_pool"))


def _names(target: ast.expr) -> Iterator[str]:
    for each in target.elts if isinstance(target, (ast.Tuple, ast.List)) else (target,):
        if isinstance(each, ast.Name):
            yield each.id


def _deleted_on_lines(function: ast.FunctionDef) -> Mapping[int, frozenset[str]]:
    """Return the names that each line deletes."""
    deletions = (each for each in _statements(function.body) if isinstance(each, ast.Delete))
    return {
        each.lineno: frozenset(name.id for name in each.targets if isinstance(name, ast.Name)) for each in deletions
    }
