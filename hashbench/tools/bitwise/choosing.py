"""Policy: which ops are run again, and which of their arguments are copied. Pure: facts in, a decision out."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hashbench.errors import HashbenchError

Choice = str | torch._ops.OpOverloadPacket | torch._ops.OpOverload | Callable[[Any], bool]


class Copies(enum.Enum):
    """What the runs after the first need copies of."""

    NOTHING = "no argument: the op writes none"
    WRITTEN = "written arguments, and whatever shares memory with them"
    ALL = "all arguments: what the op writes is not known"


@dataclass(frozen=True, slots=True)
class Treatment:
    """``copies`` of ``None``: the op is run once. With a ``reason``, that is named as unchecked; without, there is
    nothing to check."""

    copies: Copies | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What is known of an op before it is called.

    ``wanted``: the user's filter lets it through. ``schema``: it has one. ``tensors``: it deals with tensors or gives
    numbers. ``allocates``: the content of its result is no result. ``metadata_only``: it changes no content (a view, a
    resize). ``collective``: it exchanges data with other processes. ``custom``: code other than torch's computes it.
    ``writes``: the schema declares it, or it moves running statistics. ``trusted``: torch's own schemas are believed.
    """

    wanted: bool = True
    schema: bool = True
    tensors: bool = True
    allocates: bool = False
    metadata_only: bool = False
    collective: bool = False
    custom: bool = False
    writes: bool = False
    trusted: bool = True


NOTHING_TO_CHECK = Treatment(None)
HIGHER_ORDER = Treatment(None, "a higher-order operator, which has no schema to say what it writes")
COLLECTIVE = Treatment(None, "exchanges data with other processes")


def treatment_of(facts: OpFacts) -> Treatment:
    """How calls of an op are treated, as far as the op alone decides."""
    if not facts.wanted or not facts.tensors or facts.allocates or facts.metadata_only:
        return NOTHING_TO_CHECK
    if not facts.schema:
        return HIGHER_ORDER
    if facts.collective:
        return COLLECTIVE
    if facts.custom or not facts.trusted:
        return Treatment(Copies.ALL)
    return Treatment(Copies.WRITTEN if facts.writes else Copies.NOTHING)


# ------------------------------------------------------------------------------------------------------ the filter


def chooser(ops: Choice | Iterable[Choice] | None) -> Callable[[Any], bool]:
    """From ``ops=`` to a question: is this overload wanted?

    Raises:
        HashbenchError: there is no op of that name, or nothing that could be one; an empty choice.
    """
    if ops is None:
        return lambda _: True
    # A packet of overloads is callable and iterable.
    choices = list(ops) if isinstance(ops, Iterable) and not isinstance(ops, str) and not callable(ops) else [ops]
    tests = [_one(choice) for choice in choices]
    if not tests:
        raise HashbenchError("ops= is empty", consequence="nothing would be checked", tip="Leave it out to check all.")
    return lambda func: any(test(func) for test in tests)


def _one(choice: Any) -> Callable[[Any], bool]:
    found = _resolve(choice) if isinstance(choice, str) else choice
    if isinstance(found, torch._ops.OpOverload):
        return lambda func: func is found
    if isinstance(found, torch._ops.OpOverloadPacket):
        return lambda func: getattr(func, "overloadpacket", None) is found
    if callable(found):
        return lambda func: bool(found(func))
    raise HashbenchError(
        f"ops= holds a {type(choice).__name__}",
        consequence="it names no op",
        tip='Give "aten.index_put_", torch.ops.aten.index_put_, one of its overloads, or a function of the overload.',
    )


def _resolve(name: str) -> Any:
    """The packet or overload called ``aten.add``, ``aten::add`` or ``aten.add.Tensor``."""
    parts = name.replace("::", ".").split(".")
    found: Any = None
    if len(parts) in (2, 3) and all(parts):
        try:
            packet = getattr(getattr(torch.ops, parts[0]), parts[1])
            found = packet if len(parts) == 2 else getattr(packet, parts[2])
        except (AttributeError, RuntimeError):
            found = None
    if isinstance(found, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return found
    raise HashbenchError(f"there is no op {name!r}", consequence="nothing would be checked", tip=_alike(name))


def _alike(name: str) -> str:
    known = {full.partition(".")[0].replace("::", ".") for full in torch._C._dispatch_get_all_op_names()}
    wanted = name.replace("::", ".")
    close = difflib.get_close_matches(wanted if "." in wanted else f"aten.{wanted}", sorted(known), n=3)
    return f"Names like it: {', '.join(close)}." if close else 'Names are like "aten.index_put_".'
