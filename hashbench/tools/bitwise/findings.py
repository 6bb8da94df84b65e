"""Mismatches found by the bitwise mode, as frozen values with their text, and where in the program a call stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from hashbench.core.run.distance import Difference
from hashbench.core.text import ulps
from hashbench.core.trace.arguments import caller_line
from hashbench.core.trace.module_paths import ModulePaths

_current_autograd_node = torch._C._current_autograd_node
_get_sequence_nr = torch._C._autograd._get_sequence_nr


class BitwiseMismatchError(RuntimeError):
    """An op gave two results from identical inputs (``raise_on_mismatch``): ``mismatches``, those of one call."""

    def __init__(self, message: str, mismatches: Sequence[Mismatch] = ()) -> None:
        super().__init__(message)
        self.mismatches = tuple(mismatches)


class BitwiseMismatchWarning(UserWarning):
    """The same without ``raise_on_mismatch``."""


@dataclass(frozen=True, slots=True)
class ProgramPlace:
    """Where a call stood: ``phase`` is ``forward``, ``backward`` or ``optimizer``; ``source`` the caller's line, which
    a call in autograd's own threads does not have. A backward op belongs to the call of ``forward_op``."""

    phase: str = "forward"
    module: str = ""
    source: str = ""
    forward_op: str = ""
    forward_module: str = ""
    forward_source: str = ""

    def text(self, *, full: bool = False) -> str:
        """Format the place in brackets, to stand after an op; ``full``: with the forward call."""
        words = [self.phase, self.module, f"at {self.source}" if self.source else ""]
        forward = f"; {self.forward_call}" if full and self.forward_op else ""
        return f"({', '.join(filter(None, words))}{forward})"

    @property
    def forward_call(self) -> str:
        """``forward call: aten.embedding.default in Net.embed, at train.py:12 forward``."""
        module = f" in {self.forward_module}" if self.forward_module else ""
        source = f", at {self.forward_source}" if self.forward_source else ""
        return f"forward call: {self.forward_op}{module}{source}"


class Places:
    """Keeps, for each autograd node made while it watches, the op and the line that made it: autograd gives both the
    same number. Texts only, shared between equal calls, and of the last ``MOST`` nodes."""

    MOST = 200_000

    def __init__(self) -> None:
        self._modules = ModulePaths()
        self._forward: dict[int, tuple[str, str, str]] = {}
        self._known: dict[tuple[str, str, str], tuple[str, str, str]] = {}
        self._first = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follow module calls and optimizer steps of this thread."""
        self._first = _get_sequence_nr()
        with self._modules.watched():
            yield

    def note(self, op: object, frame: FrameType | None) -> None:
        """Note that an op is about to be called. Where it makes an autograd node, that node has its number already; the
        first op of a ``torch.autograd.Function``, and a forward that a checkpoint computes again, have theirs too."""
        number = _get_sequence_nr() - 1
        if number < self._first or number in self._forward:
            return
        if len(self._forward) >= self.MOST:
            for old in list(self._forward)[: self.MOST // 2]:
                del self._forward[old]
        call = str(op), self._modules.current, caller_line(frame)
        self._forward[number] = self._known.setdefault(call, call)

    def now(self, frame: FrameType | None) -> ProgramPlace:
        """Return the place of the call that is being made."""
        node = _current_autograd_node()
        source = caller_line(frame)
        if node is None:
            return ProgramPlace("optimizer" if self._modules.optimizing else "forward", self._modules.current, source)
        return ProgramPlace("backward", self._modules.current, source, *self._forward.get(node._sequence_nr(), ()))


@dataclass(frozen=True, slots=True)
class Mismatch(Mapping[str, Any]):
    """One tensor (or number) that an op left in two ways.

    ``call`` counts the ops that the mode has run again, from 1. ``place`` says what differs: ``output``, ``output.1``,
    ``argument 0``, ``generator cpu``. ``run`` is the first run that differed from run 1, ``runs_differing`` how many
    did. Shapes and dtypes are those of run 1 and of that run. ``difference`` has the numbers; ``None`` where there are
    none to give. ``error`` is what a later run raised, while the first did not.

    It is also a mapping with the keys of the records of ``bitwise_equivalence_mode``: ``function``, ``tensor1_shape``,
    ``tensor2_shape``, and ``max_diff`` (a number, ``None`` or ``"Shape mismatch"``).
    """

    op: str
    call: int
    place: str
    run: int
    where: ProgramPlace
    shape: tuple[int, ...] | None = None
    other_shape: tuple[int, ...] | None = None
    dtype: str = ""
    other_dtype: str = ""
    difference: Difference | None = None
    runs_differing: int = 1
    runs: int = 2
    error: str = ""

    @property
    def phase(self) -> str:
        """``forward``, ``backward`` or ``optimizer``."""
        return self.where.phase

    @property
    def module(self) -> str:
        """The module that was being called; for a backward op, the one that its forward op was called in."""
        return self.where.forward_module if self.where.forward_op else self.where.module

    @property
    def forward_op(self) -> str:
        """The forward op that a backward op belongs to; else empty."""
        return self.where.forward_op

    @property
    def forward_source(self) -> str:
        """The line that called it; else empty."""
        return self.where.forward_source

    @property
    def source(self) -> str:
        """The line that made this call (of a backward op: that called ``backward``); empty in autograd's threads."""
        return self.where.source

    def text(self) -> str:
        """Describe the difference in one line without the op."""
        if self.error:
            return f"run {self.run} raised {self.error}"
        return f"{self.place} differs in {self.runs_differing} of {self.runs - 1} repetitions: {self._how()}"

    def _how(self) -> str:
        if self.shape != self.other_shape:
            shapes = ("none" if shape is None else str(list(shape)) for shape in (self.shape, self.other_shape))
            return f"shapes {' and '.join(shapes)}"
        if self.dtype != self.other_dtype:
            return f"dtypes {self.dtype} and {self.other_dtype}"
        difference = self.difference
        if difference is None or difference.elements is None:
            return "its content"
        counted = f"{difference.elements} of {difference.total} elements"
        if difference.representation:
            return f"{counted}, {difference.representation} only"
        far = f", by at most {difference.max_abs:.3g}" if difference.max_abs is not None else ""
        ulp = ulps(difference.max_ulp)
        return counted + far + (f" ({ulp})" if ulp else "")

    def _as_mapping(self) -> dict[str, Any]:
        size = None if self.difference is None else self.difference.max_abs
        return {
            "function": self.op,
            "tensor1_shape": self.shape,
            "tensor2_shape": self.other_shape,
            "max_diff": "Shape mismatch" if self.shape != self.other_shape else size,
        }

    def __getitem__(self, key: str) -> Any:
        return self._as_mapping()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._as_mapping())

    def __len__(self) -> int:
        return len(self._as_mapping())


@dataclass(frozen=True, slots=True)
class Unwritten:
    """An output of which the op left ``elements`` unwritten: they hold whatever was in the memory before. That was
    shown: they took each of two values that fresh memory was filled with. All the rest is the same in all runs."""

    op: str
    call: int
    place: str
    elements: int
    where: ProgramPlace = field(default_factory=ProgramPlace)


@dataclass(frozen=True, slots=True)
class Unchecked:
    """Calls of an op that were made once only, and why; their results are not known to be the same in a second run."""

    op: str
    reason: str
    calls: int = 1


def message(mismatches: Sequence[Mismatch]) -> str:
    """Format the warning or exception on the mismatches of one call."""
    op, where = mismatches[0].op, mismatches[0].where
    lines = [f"Bitwise mismatch detected in {op} {where.text()}"]
    lines += [f"  {mismatch.text()}" for mismatch in mismatches]
    if where.forward_op:
        lines.append(f"  {where.forward_call}")
    return "\n".join(lines)
