"""Activation patching: replaces what known sources computed by what was recorded, to look past their difference.

In one run a :class:`Recorder` keeps what the sources of known differences wrote or held; in the next a
:class:`Replacer` puts that content in place before anything reads it. What still differs then has another source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from hashbench.run.outputs import bitwise_equal
from hashbench.trace.arguments import tensors_in
from hashbench.trace.callbacks import TraceCallback

Contents = dict[tuple[str, int], list[torch.Tensor]]
"""By id of a record or leaf, and how often it was met before: copies of its tensors."""


class Recorder(TraceCallback):
    """Keeps what the records and leaves of these ids leave behind, in ``contents``."""

    def __init__(self, nodes: Collection[str]) -> None:
        self.nodes = frozenset(nodes)
        self.contents: Contents = {}
        self._met: Counter[str] = Counter()

    def after(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        del func
        if node in self.nodes:
            self._keep(node, _written_by(args, kwargs, output))

    def leaf(self, node: str, tensor: torch.Tensor) -> None:
        if node in self.nodes:
            self._keep(node, [tensor])

    def _keep(self, node: str, tensors: Sequence[torch.Tensor]) -> None:
        self.contents[node, self._met[node]] = [tensor.detach().clone() for tensor in tensors]
        self._met[node] += 1


class Replacer(TraceCallback):
    """Puts recorded content in place. ``replaced`` are the ids at which that could be done."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.replaced: set[str] = set()
        self._met: Counter[str] = Counter()

    def after(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        del func
        self._replace(node, _written_by(args, kwargs, output))

    def leaf(self, node: str, tensor: torch.Tensor) -> None:
        self._replace(node, [tensor])

    def _replace(self, node: str, tensors: Sequence[torch.Tensor]) -> None:
        kept = self.contents.get((node, self._met[node]))
        self._met[node] += 1
        if kept is None or [tensor.shape for tensor in kept] != [tensor.shape for tensor in tensors]:
            return
        with torch.no_grad():
            for tensor, content in zip(tensors, kept, strict=True):
                if not bitwise_equal(tensor, content):  # an argument that was only read may be expanded: never written
                    tensor.detach().copy_(content)
        self.replaced.add(node)


def _written_by(args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> list[torch.Tensor]:
    """Everything a call may have written: its outputs and, declared or not, its arguments."""
    return list({id(tensor): tensor for tensor in tensors_in([output, list(args), dict(kwargs)])}.values())
