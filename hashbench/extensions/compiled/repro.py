"""Write the repro of a compiled kernel, or of a graph of aten ops, whose results rounding does not explain.

A folder that needs torch alone, for a generated kernel also a C++ compiler: ``repro.py`` makes the call once and prints
its error in units of what rounding explains; ``tensors.pt`` holds the inputs, the float64 references and the errors
that rounding explains; ``kernel.cpp`` is the C++ of a generated kernel.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx.node import Node

from hashbench.core.diagnose.calls.call import CapturedCall, Slot, compiled_kernel
from hashbench.core.diagnose.calls.capture import capture
from hashbench.core.diagnose.repro import script, writer
from hashbench.core.diagnose.repro.call_arguments import bad
from hashbench.core.diagnose.repro.call_file import payload
from hashbench.core.errors import HashbenchError
from hashbench.core.processes import new_python
from hashbench.core.trace.op_schema import OpPlan, plan_of
from hashbench.extensions.compiled.rounding import LIMIT

FUNCTION = "subgraph"
"""Name of the function of aten ops in a script."""

_RATIO = re.compile(r"^largest ratio ([^,]+),", re.MULTILINE)
"""In what a script prints."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedResult:
    """What a result should be.

    Attributes:
        name: of its buffer or node.
        place: position among the arguments of the kernel, or among what the function returns.
        reference: its value from the recorded inputs: float64 or complex128, or the integers or bools that it has; in
            the shape of its node, any strides.
        allowed: the error that rounding explains for each element, float64, in the same shape; 0 for integers and
            bools.
        eager: largest error of eager mode's own result in these units; ``None`` if unknown.
    """

    name: str
    place: int
    reference: torch.Tensor = field(repr=False)
    allowed: torch.Tensor = field(repr=False)
    eager: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BlamedCall:
    """A call of a kernel, or of a function of aten ops, with results that rounding does not explain.

    Attributes:
        call: with the inputs as they were; its callee is a generated kernel, or anything if there is a ``function``.
        results: those that are compared, at least one.
        function: Python of a function :data:`FUNCTION` of the call's arguments (:func:`function_of`), for stages before
            code generation; empty for a generated kernel.
        stage: of the compiler.
        op: aten op of the user's program.
        semantic: whether float64 shows the mistake too: ``yes``, ``no`` or ``unknown``.
    """

    call: CapturedCall
    results: tuple[ExpectedResult, ...]
    function: str = ""
    stage: str = ""
    op: str = ""
    semantic: str = ""


def write_accuracy_repro(folder: Path, blamed: BlamedCall, *, limit: float = LIMIT, seen_in: str = "") -> None:
    """Write the repro to ``folder``, atomically; an old one is replaced.

    Args:
        blamed: what is called, and what it should give.
        limit: ratio from which the script's exit code is 1.
        seen_in: in which model, in words.

    Raises:
        HashbenchError: the call has an argument that cannot be written to a file, or the C++ of its kernel is gone.
        OSError: the folder cannot be written.
    """
    kernel = compiled_kernel(blamed.call.func)
    with writer.new_folder(folder) as new:
        try:
            if not blamed.function and (kernel is None or not kernel.source):
                bad("the C++ of its kernel is gone")
            text = _script(blamed, limit=limit, seen_in=seen_in)
        except ValueError as error:
            raise HashbenchError(
                f"the call of {blamed.call.op} cannot be written to a file", consequence=str(error)
            ) from None
        saved = payload(blamed.call)
        saved["references"] = [result.reference.detach().cpu().contiguous().clone() for result in blamed.results]
        saved["allowed"] = [result.allowed.detach().cpu().contiguous().clone() for result in blamed.results]
        writer.write(new, text, saved, kernel="" if kernel is None or blamed.function else kernel.source)


def _script(blamed: BlamedCall, *, limit: float, seen_in: str) -> str:
    call = blamed.call
    for result in blamed.results:
        if result.reference.shape != result.allowed.shape:
            bad(f"{result.name} has a different shape than its allowed error")
    values = script.call_values(
        call,
        heading=_heading(blamed, seen_in=seen_in),
        requirements=writer.metadata(),
        function=FUNCTION if blamed.function else "",
    )
    expected = [(repr(result.name), _place(blamed, result), _number(result.eager)) for result in blamed.results]
    return writer.render(
        "accuracy.py.jinja",
        package=__package__,
        **{
            **values,
            "variant": "accuracy",
            "demo": "Makes the call once, from the recorded inputs, and compares it with a float64 reference.",
            "function": blamed.function,
            "limit": script.as_python(limit),
            "expected": expected,
        },
    )


def _place(blamed: BlamedCall, result: ExpectedResult) -> int:
    """Return the index of a result in the script: among the call's tensors, or among what the function returns."""
    if blamed.function:
        return result.place
    value = blamed.call.args[result.place] if 0 <= result.place < len(blamed.call.args) else None
    return value.index if isinstance(value, Slot) else bad(f"{result.name} is no argument of the kernel")


def _number(value: float | None) -> str:
    return "None" if value is None or not math.isfinite(value) else repr(value)


def _heading(blamed: BlamedCall, *, seen_in: str) -> str:
    call = blamed.call
    facts = [
        writer.place_words(call, seen_in=seen_in),
        f"It computes {blamed.op}." if blamed.op and blamed.op != call.op else "",
        f"Stage of the compiler: {blamed.stage}." if blamed.stage else "",
        f"The mistake also shows in float64: {blamed.semantic}." if blamed.semantic else "",
    ]
    claim = f"{call.op} gives results that rounding does not explain."
    needs = writer.TORCH_ALONE if blamed.function else writer.TORCH_AND_COMPILER
    return writer.heading(claim, " ".join(filter(None, facts)), needs=needs)


# ------------------------------------------------------------------------------------------------------- aten as text

Operand = Callable[[Node, Node], Node]
"""Maps a node and one of its operands to the node whose value it reads."""


def function_of(
    ops: Sequence[Node],
    inputs: Sequence[Node],
    results: Sequence[Node],
    *,
    operand: Operand = lambda _, read: read,
) -> str:
    """Return a Python function of the values of ``inputs`` that runs aten ops and returns a tuple.

    Args:
        ops: ``call_function`` nodes of ops, of ``getitem`` and of Python's arithmetic on sizes, in order of execution.
        inputs: nodes that they read, ``get_attr`` nodes among them, in the order of the parameters.
        results: nodes whose values are returned.
        operand: as after ops that write in place (``Operands.of``).

    Raises:
        BadCallError: a node runs something else, or has an argument that cannot be written.
    """
    names = {node: _identifier(node) for node in (*inputs, *ops)}
    head = f"def {FUNCTION}({', '.join(names[node] for node in inputs)}):"
    body = [f"    {names[node]} = {_call_text(node, names, operand)}" for node in ops]
    returned = ", ".join(_name(names, node) for node in results)
    return "\n".join([head, *body, f"    return ({returned},)", ""])


def captured_inputs(name: str, values: Sequence[Any], *, limit_bytes: int = 2**30) -> CapturedCall:
    """Return the call of a function of :func:`function_of` with these values of its inputs: tensors and numbers.

    Raises:
        CaptureError: a value cannot be copied, or they take more than ``limit_bytes``.
    """
    return capture(_Function(OpPlan(name, call=_nothing)), tuple(values), {}, limit_bytes=limit_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class _Function:
    """Stands for a function that only a script has."""

    plan: OpPlan

    def __call__(self, *_: Any) -> None:
        raise NotImplementedError(f"{self.plan.name} is only run by its script")


def _nothing(*_: Any) -> None:
    """Placeholder callable."""


def _call_text(node: Node, names: Mapping[Node, str], operand: Operand) -> str:
    target: Any = node.target
    written: list[Any] = []
    if isinstance(target, torch._ops.OpOverload):
        plan = plan_of(target)
        function = script.op_name(str(target))
        written = plan.written_values(node.args, node.kwargs) if plan.writes_arguments else []
    else:
        function = _plain(target)

    def text(value: Any) -> str:
        if isinstance(value, Node):
            copied = any(value is one for one in written)
            return _name(names, operand(node, value)) + (".clone()" if copied else "")
        if isinstance(value, (list, tuple)):
            items = ", ".join(map(text, value))
            return f"[{items}]" if isinstance(value, list) else f"({items}{',' * (len(value) == 1)})"
        return script.as_python(value)

    arguments = [text(value) for value in node.args]
    for key, value in node.kwargs.items():
        named = f"**{{{key!r}: {text(value)}}}" if keyword.iskeyword(key) else f"{key}={text(value)}"
        arguments.append(named)
    return f"{function}({', '.join(arguments)})"


def _plain(target: Any) -> str:
    """Format a Python function on sizes, or ``getitem``."""
    name = getattr(target, "__name__", "")
    module = {"_operator": "operator.", "math": "math.", "builtins": ""}.get(getattr(target, "__module__", ""))
    if module is not None and name.isidentifier():
        return f"{module}{name}"
    if name.startswith("sym_") and getattr(torch, name, None) is target:
        return f"torch.{name}"
    return bad(f"{name or target} is no op")


def _identifier(node: Node) -> str:
    return f"{node.name}_" if keyword.iskeyword(node.name) or node.name in _TAKEN else node.name


_TAKEN = frozenset({"torch", "math", "operator", FUNCTION})
"""Names that the script has already."""


def _name(names: Mapping[Node, str], node: Node) -> str:
    return names[node] if node in names else bad(f"{node.name} is neither an input nor computed")


def run_accuracy_repro(folder: Path, *, timeout: float, by: writer.RunsPython = new_python) -> str:
    """Run the script of a repro in a new process, and return what came of it.

    Args:
        folder: of the repro.
        timeout: seconds.
        by: runs the program.

    Returns:
        ``in a fresh process 3.2e+07x the rounding bound``, ``not reproduced: …``, ``failed: …`` or
        ``timeout after 300 s``.
    """
    ran = writer.run(folder, _RATIO, timeout=timeout, by=by)
    where = "in a fresh process" if ran.differs else "not reproduced:"
    return ran.problem or "{} {}x the rounding bound".format(where, *ran.shows)
