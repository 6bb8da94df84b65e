"""Write the repro of a compiled kernel whose results rounding does not explain.

A folder that needs torch, and a C++ compiler or Triton: ``repro.py`` makes the call once and prints its error in units
of what rounding explains; ``tensors.pt`` holds inputs, float64 references and the errors that rounding explains;
``kernel.cpp`` or ``kernel.py`` is the source of the kernel.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hashbench.core.diagnose.calls.call import CapturedCall, CompiledKernel, Slot, compiled_kernel
from hashbench.core.diagnose.repro import script, writer
from hashbench.core.diagnose.repro.call_arguments import bad
from hashbench.core.diagnose.repro.call_file import payload
from hashbench.core.errors import HashbenchError
from hashbench.core.processes import new_python
from hashbench.core.run.rounding import LIMIT

_RATIO = re.compile(r"^largest ratio ([^,]+),", re.MULTILINE)
"""In what a script prints."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedResult:
    """What a result should be.

    Attributes:
        name: of its buffer.
        place: position among the arguments of the kernel.
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
    """A call of a generated kernel, with results that rounding does not explain.

    Attributes:
        call: with the inputs as they were.
        results: those that are compared, at least one.
        stage: of the compiler.
        op: aten op of the user's program.
        semantic: whether float64 shows the mistake too: ``yes``, ``no`` or ``unknown``.
    """

    call: CapturedCall
    results: tuple[ExpectedResult, ...]
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
        HashbenchError: the call has an argument that cannot be written to a file, or the source of its kernel is gone.
        OSError: the folder cannot be written.
    """
    kernel = compiled_kernel(blamed.call.func)
    with writer.new_folder(folder) as new:
        try:
            if kernel is None or not kernel.source:
                bad("the source of its kernel is gone")
            text = _script(blamed, kernel, limit=limit, seen_in=seen_in)
        except ValueError as error:
            raise HashbenchError(
                f"the call of {blamed.call.op} cannot be written to a file", consequence=str(error)
            ) from None
        saved = payload(blamed.call)
        saved["references"] = [result.reference.detach().cpu().contiguous().clone() for result in blamed.results]
        saved["allowed"] = [result.allowed.detach().cpu().contiguous().clone() for result in blamed.results]
        writer.write(new, text, saved, kernel=kernel)


def _script(blamed: BlamedCall, kernel: CompiledKernel, *, limit: float, seen_in: str) -> str:
    call = blamed.call
    for result in blamed.results:
        if result.reference.shape != result.allowed.shape:
            bad(f"{result.name} has a different shape than its allowed error")
    device = interpreted_as(kernel)
    requirements = writer.metadata(packages=filter(None, [writer.distribution_of("hashbench") if device else ""]))
    values = script.call_values(call, heading=_heading(blamed, kernel, seen_in=seen_in), requirements=requirements)
    if device:  # hashbench makes it, not torch
        values |= {"triton": False, "kernel_types": ""}
    expected = [(repr(result.name), _place(blamed, result), _number(result.eager)) for result in blamed.results]
    return writer.render(
        "accuracy.py.jinja",
        package=__package__,
        **{
            **values,
            "variant": "accuracy",
            "demo": "Makes the call once, from the recorded inputs, and compares it with a float64 reference.",
            "limit": script.as_python(limit),
            "expected": expected,
            "interpreted_as": device,
        },
    )


def interpreted_as(kernel: CompiledKernel) -> str:
    """Return the device that is not there for which a kernel was made (``cuda:90``); empty if it is where it runs."""
    stand_in: Any = getattr(kernel.plan.call, "kernel", None)
    return f"cuda:{stand_in.triton_meta['device'].cc}" if hasattr(stand_in, "refused") else ""


def _place(blamed: BlamedCall, result: ExpectedResult) -> int:
    """Return the index of a result among the call's tensors in the script."""
    value = blamed.call.args[result.place] if 0 <= result.place < len(blamed.call.args) else None
    return value.index if isinstance(value, Slot) else bad(f"{result.name} is no argument of the kernel")


def _number(value: float | None) -> str:
    return "None" if value is None or not math.isfinite(value) else repr(value)


def _heading(blamed: BlamedCall, kernel: CompiledKernel, *, seen_in: str) -> str:
    call = blamed.call
    facts = [
        writer.place_words(call, seen_in=seen_in),
        f"It computes {blamed.op}." if blamed.op and blamed.op != call.op else "",
        f"Stage of the compiler: {blamed.stage}." if blamed.stage else "",
        f"The mistake also shows in float64: {blamed.semantic}." if blamed.semantic else "",
    ]
    claim = f"{call.op} gives results that rounding does not explain."
    return writer.heading(claim, " ".join(filter(None, facts)), needs=_needs(kernel, call.device.type))


def _needs(kernel: CompiledKernel, device: str) -> str:
    missing = interpreted_as(kernel)
    if not missing:
        return writer.needs_of(kernel, device)
    return f"It needs hashbench and Triton: kernel.py was made for {missing}, and is interpreted."


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
