"""What a task asks of a machine of a cluster, and which machines have it. Pure: plain numbers in, a decision out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Node:
    """A machine that is alive. ``resources`` are the totals that the cluster counts: ``CPU``, ``GPU``, ``memory`` in
    bytes, and custom names."""

    id: str
    address: str
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Demand:
    """What one task takes of a machine while it runs: ``memory`` in bytes, ``custom`` resources by name."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory: int = 0
    custom: Mapping[str, float] = field(default_factory=dict)

    def resources(self) -> dict[str, float]:
        """The same by the names in :attr:`Node.resources`, without what it does not ask for."""
        named = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(self.memory), **self.custom}
        return {name: amount for name, amount in named.items() if amount > 0}

    def text(self) -> str:
        """In words for a message: ``CPU 1, hashbench_cuda 1``."""
        amounts = self.resources()
        memory = amounts.pop("memory", 0.0)
        words = [f"{name} {amount:g}" for name, amount in amounts.items()]
        return ", ".join([*words, *([f"memory {memory / 2**20:.0f} MiB"] if memory else [])]) or "nothing"


def tasks_at_once(node: Node, demand: Demand) -> int:
    """How many such tasks the machine can run at once when nothing else runs there."""
    parts = [node.resources.get(name, 0.0) / amount for name, amount in demand.resources().items()]
    return int(min(parts, default=1.0))


def able(nodes: Iterable[Node], demand: Demand) -> list[Node]:
    """The machines that can run such a task."""
    return [node for node in nodes if tasks_at_once(node, demand)]


def capacity(nodes: Iterable[Node], demand: Demand) -> int:
    """How many such tasks all machines together can run at once; 1 where none can, so that somebody waits for one."""
    return max(1, sum(tasks_at_once(node, demand) for node in nodes))


def settled(demand: Demand, nodes: Sequence[Node], *, memory: int, alone: bool) -> Demand:
    """``demand`` for one task that is expected to take ``memory`` bytes.

    Nobody has more than the largest machine: a task that needs more asks for all of that one instead of waiting for
    ever. A task that is ``alone`` asks for all CPUs of the machine that has the most memory.
    """
    candidates = able(nodes, demand)
    if not candidates:
        return replace(demand, memory=memory)
    largest = max(candidates, key=lambda node: node.resources.get("memory", 0.0))
    cpus = max(demand.cpus, largest.resources.get("CPU", 0.0)) if alone else demand.cpus
    return replace(demand, cpus=cpus, memory=min(memory, int(largest.resources.get("memory", 0.0))))
