"""What the runs of one call showed, until it is told."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hashbench.run.outputs import Difference
from hashbench.tools.bitwise.findings import Mismatch, Place
from hashbench.trace.digest import dtype_name


@dataclass(slots=True)
class Differing:
    """How one result differed from that of the first run: the number of the first run that did, and in ``others`` what
    each run left that did."""

    run: int
    one: Any = None
    others: tuple[Any, ...] = (None,)
    difference: Difference | None = None
    error: str = ""

    def mismatch(self, op: str, name: str, *, call: int, where: Place, runs: int) -> Mismatch:
        found = self.difference
        if found is not None:
            found = replace(found, names=(name,), representation=found.representation.replace("value", ""))
        return Mismatch(
            op=op,
            call=call,
            place=name,
            run=self.run,
            where=where,
            shape=_shape(self.one),
            other_shape=_shape(self.others[0]),
            dtype=_dtype(self.one),
            other_dtype=_dtype(self.others[0]),
            difference=found,
            runs_differing=len(self.others),
            runs=runs,
            error=self.error,
        )


@dataclass(slots=True)
class Found:
    """What the runs of one call showed."""

    checked: bool = False
    reason: str = ""
    differ: dict[str, Differing] = field(default_factory=dict)
    unwritten: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, differing: Differing) -> None:
        if name in self.differ:
            self.differ[name].others += differing.others
        else:
            self.differ[name] = differing


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) and not value.is_nested else None


def _dtype(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return dtype_name(value.dtype)
    return "" if value is None else type(value).__name__
