"""Where in the program a call stands, and which forward op a backward op belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from hashbench.tools.bitwise.findings import ForwardCall, Place
from hashbench.trace.arguments import caller_line
from hashbench.trace.module_paths import ModulePaths

_current_autograd_node = torch._C._current_autograd_node
_get_sequence_nr = torch._C._autograd._get_sequence_nr


class Places:
    """Keeps, for each autograd node made while it watches, the op and the line that made it: autograd gives both the
    same number. Texts only, shared between equal calls, and of the last ``MOST`` nodes."""

    MOST = 200_000

    def __init__(self) -> None:
        self._modules = ModulePaths()
        self._forward: dict[int, ForwardCall] = {}
        self._known: dict[ForwardCall, ForwardCall] = {}
        self._first = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follow module calls and optimizer steps of this thread."""
        self._first = _get_sequence_nr()
        with self._modules.watched():
            yield

    def note(self, op: object, frame: FrameType | None) -> None:
        """An op is about to be called. Where it makes an autograd node, that node has its number already; the first
        op of a ``torch.autograd.Function``, and a forward that a checkpoint computes again, have theirs too."""
        number = _get_sequence_nr() - 1
        if number < self._first or number in self._forward:
            return
        if len(self._forward) >= self.MOST:
            for old in list(self._forward)[: self.MOST // 2]:
                del self._forward[old]
        call = ForwardCall(str(op), self._modules.current, caller_line(frame))
        self._forward[number] = self._known.setdefault(call, call)

    def now(self, frame: FrameType | None) -> Place:
        """The place of the call that is being made."""
        node = _current_autograd_node()
        source = caller_line(frame)
        if node is None:
            return Place("optimizer" if self._modules.optimizing else "forward", self._modules.current, source)
        return Place("backward", self._modules.current, source, self._forward.get(node._sequence_nr()))
