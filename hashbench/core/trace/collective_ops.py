"""What the ops of ``torch.distributed`` exchange with other ranks, which no schema says: ``data/collectives.csv``.

The table has a line for each op of the namespaces :data:`NAMESPACES`. Columns, with arguments by their names in the
schema, separated by spaces:

``op``: name without overload. ``kind``: see :data:`KINDS`. ``contributed``: arguments whose content goes to others.
``written``: arguments that are written although the schema does not say so. ``returned``: arguments whose memory is
returned, likewise. ``shown``: index of the output that shows the part of such an argument that was written. ``group``:
arguments that name the process group. ``root``, ``peer``: arguments with a rank within that group. ``tag``: the tag of
a message.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

TABLE = Path(__file__).with_name("collectives.csv")

NAMESPACES = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp", "symm_mem"}
)
"""Namespaces of ``torch.distributed`` (torch/csrc/distributed/c10d/Ops.cpp, Functional.cpp, SymmetricMemory.cpp;
torch/distributed/_functional_collectives.py, tensor/_collective_utils.py, fsdp/_fully_shard/_fsdp_collectives.py)."""

UNKNOWN, RECEIVE, LOCAL, WAIT = "unknown", "receive", "local", "wait"
FROM_ROOT = frozenset({"broadcast", "scatter"})
"""Kinds by which the root alone contributes."""

NO_EXCHANGE = frozenset({LOCAL, WAIT})
"""Kinds by which nothing passes between ranks."""


KINDS: Mapping[str, str] = MappingProxyType(
    {
        "combine": "every rank contributes, and receives a reduction of these; with a root, only the root does",
        "reduce_scatter": "every rank contributes, and receives its part of a reduction",
        "gather": "every rank contributes, and receives all contributions; with a root, only the root does",
        "all_to_all": "every rank contributes a part to each rank",
        "broadcast": "the root sends the same to every rank",
        "scatter": "the root sends a part to each rank",
        "send": "sends a message to one peer",
        RECEIVE: "receives a message from one peer; without a peer, from any",
        "barrier": "ranks wait for each other and contribute nothing",
        LOCAL: "exchanges nothing",
        WAIT: "exchanges nothing, and returns its argument once its data have arrived",
        UNKNOWN: "memory of other ranks is read or written, and the call does not say which",
    }
)
"""Kinds of ops; the last is also that of an op without a line."""


@dataclass(frozen=True, slots=True)
class CollectiveOp:
    """A line of the table: an op of ``torch.distributed``, its arguments by name."""

    op: str
    kind: str
    contributed: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    shown: int | None = None
    group: tuple[str, ...] = ()
    root: str = ""
    peer: str = ""
    tag: str = ""

    @property
    def exchanges(self) -> bool:
        """True if data or signals pass between ranks."""
        return self.kind not in NO_EXCHANGE


def _read_table() -> Mapping[str, CollectiveOp]:
    with TABLE.open(newline="", encoding="utf-8") as file:
        return MappingProxyType({line["op"]: _line(line) for line in csv.DictReader(file)})


def _line(line: Mapping[str, str]) -> CollectiveOp:
    contributed, written, returned, group = (
        tuple(line[name].split()) for name in ("contributed", "written", "returned", "group")
    )
    shown = int(line["shown"]) if line["shown"] else None
    return CollectiveOp(
        line["op"], line["kind"], contributed, written, returned, shown, group, line["root"], line["peer"], line["tag"]
    )


COLLECTIVE_OPS = _read_table()
"""Lines of the table by op. Read when this module loads: a program that is traced may have used up its files."""


def collective_op(schema: Any) -> CollectiveOp | None:
    """Return the line of an op; an op without one is of kind :data:`UNKNOWN` if its schema shows that it communicates
    (a namespace, class or group of ``torch.distributed``), else ``None``."""
    line = COLLECTIVE_OPS.get(schema.name)
    if line is not None:
        return line
    names = {argument.name for argument in schema.arguments}
    communicates = (
        schema.name.partition("::")[0] in NAMESPACES
        or any("torch.classes.c10d." in str(item.type) for item in [*schema.arguments, *schema.returns])
        or not {"group_name", "ranks", "peer"}.isdisjoint(names)
    )
    group = tuple(name for name in ("process_group", "group_name") if name in names)
    return CollectiveOp(schema.name, UNKNOWN, group=group) if communicates else None


class CollectivePlan:
    """A line of the table with its arguments in the form in which calls pass them.

    Attributes:
        kind: a word of :data:`KINDS`.
    """

    __slots__ = ("_contributed", "_group", "_peer", "_root", "_tag", "kind")

    def __init__(self, line: CollectiveOp, schema: Any) -> None:
        self.kind = line.kind
        places = {
            argument.name: (at, argument.name, argument.default_value) for at, argument in enumerate(schema.arguments)
        }
        self._contributed, self._group = ([places[name] for name in names] for names in (line.contributed, line.group))
        self._root, self._peer, self._tag = map(places.get, (line.root, line.peer, line.tag))

    def group(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what a call names its process group by."""
        return tuple([_value(place, args, kwargs) for place in self._group])

    def root(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
        """Return the root's rank within the group, if there is one."""
        return self._root and _value(self._root, args, kwargs)

    def peer(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
        """Return the rank within the group at the other end of a message, if it is known."""
        return self._peer and _value(self._peer, args, kwargs)

    def tag(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Return the tag of a message."""
        return (self._tag and _value(self._tag, args, kwargs)) or 0

    def contributed(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_root: bool) -> list[tuple[str, Any]]:
        """Return the arguments that go to other ranks, by position or name; ``is_root``: this rank may be the
        root."""
        if self.kind in FROM_ROOT and not is_root:
            return []
        return [
            (str(at), args[at]) if at < len(args) else (name, kwargs[name])
            for at, name, _ in self._contributed
            if at < len(args) or name in kwargs
        ]


def _value(place: tuple[int, str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    at, name, default = place
    return args[at] if at < len(args) else kwargs.get(name, default)
