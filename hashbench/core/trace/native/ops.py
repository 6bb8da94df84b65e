"""Op schemas in the form that the native recorder and the decoding of its records need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hashbench.core.native.library import CPlan, decomposes
from hashbench.core.trace import op_schema
from hashbench.core.trace.op_schema import OpPlan


class Op:
    """One op for both sides: its plan, and the names and types of its arguments."""

    def __init__(self, plan: OpPlan, names: Sequence[int | str], kinds: Sequence[str]) -> None:
        self.plan, self.names, self.kinds = plan, names, kinds
        self.places = _ArgumentNames(names)


def plan_of(func: Any) -> OpPlan:
    """Return the plan of an op. If its inner calls are recorded, so is the generator's state before it: equal before
    the op and different before an inner call, it shows that the op itself drew random numbers."""
    plan = op_schema.plan_of(func)
    open_ = func.namespace != "aten" and plan.traced and not plan.seeded
    return replace(plan, seeded=True, drawn_inside=True) if open_ else plan


class _ArgumentNames(dict[int, "int | str"]):
    """Cache of argument names in records, by ``Read::argument`` of ``tables.h``."""

    def __init__(self, names: Sequence[int | str]) -> None:
        super().__init__()
        self._names = names

    def __missing__(self, argument: int) -> int | str:
        name, index = self._names[argument & 0xFF], argument >> 8
        self[argument] = place = f"{name}.{index - 1}" if index else name
        return place


class Ops:
    """Ops that the recorder has met, by its number."""

    def __init__(self) -> None:
        self.by_number: dict[int, Op] = {}

    def describe(self, number: int, name: str, overload: str) -> CPlan:
        """Return the recorder's plan of an op."""
        namespace, _, short = name.partition("::")
        func = getattr(getattr(getattr(torch.ops, namespace), short), overload or "default")
        plan, schema = plan_of(func), func._schema
        names = [argument.name for argument in schema.arguments]
        shown = [argument.name if argument.kwarg_only else at for at, argument in enumerate(schema.arguments)]
        kinds = [str(argument.real_type).removeprefix("Optional[").removesuffix("]") for argument in schema.arguments]
        self.by_number[number] = Op(plan, shown, kinds)
        kept = {*plan.written_names}
        originals = plan.collective is not None or plan.shown is not None or plan.resizes
        odd = len(names) > 64 or any("torch.classes." in str(argument.type) for argument in schema.arguments)
        return CPlan(
            written=sum(1 << at for at, label in enumerate(names[:64]) if label in kept),
            statistics=sum(1 << at for at in plan.running_statistics),
            training=plan.training,
            traced=plan.traced,
            decomposes=decomposes(name, overload),
            python=originals or odd or plan.dropout >= 0,
            fresh=plan.fresh,
            blank=plan.blank,
            seeded=plan.seeded,
            open=namespace != "aten",
            originals=originals,
        )
