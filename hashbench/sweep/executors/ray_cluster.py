"""A Ray cluster: which machines have what a task asks for (plain numbers in, a decision out), and the connection to it.

Ray itself waits two minutes for a cluster that does not answer and then ends the process; here a child process tries
first, within a time limit.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hashbench.errors import HashbenchError
from hashbench.processes import python_calling, run, variables
from hashbench.text import squeezed

CONNECT_SECONDS = 60.0
"""How long a cluster may take to answer; one of this kind takes 1 s, and importing Ray on a busy machine many."""

_KNOCK_SECONDS = 5.0
_OWN = "local"
_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's announced default; the present one hides accelerators from tasks that ask for none, with a warning each.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_REHEARSAL = "hashbench.sweep.executors.ray_cluster:print_problem"
_TIP = "Check that it runs, that --address is HOST:PORT as `ray start` prints it, and that this machine belongs to it."


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


# ---------------------------------------------------------------------------------------------- the connection


def imported() -> Any:
    """The package ``ray``.

    Raises:
        HashbenchError: it is not installed, or cannot be imported.
    """
    try:
        import ray
    except ImportError as error:
        raise HashbenchError(
            "cannot run models on Ray",
            consequence=f"the package ray cannot be imported ({error})",
            tip="Install it with: pip install 'hashbench[ray]'",
        ) from error
    return ray


def connect(address: str) -> bool:
    """Join the cluster at ``address`` (``HOST:PORT``, or ``auto`` for the one that runs here); where that is empty, the
    one that ``RAY_ADDRESS`` names, else start one of this machine. Returns whether this process was not connected yet.

    Raises:
        HashbenchError: there is no such cluster within :data:`CONNECT_SECONDS`, or it is of another version.
    """
    ray = imported()
    if ray.is_initialized():
        return False
    chosen = address or os.environ.get("RAY_ADDRESS", "") or _OWN
    own = {"include_dashboard": False} if chosen == _OWN else {}
    if chosen != _OWN:
        _knock(chosen)
        _rehearse(chosen)
    try:
        with variables(_VARIABLES, unless_set=True):  # a cluster that is started here inherits them
            ray.init(address=chosen, log_to_driver=False, logging_level="ERROR", **own)
    except KeyboardInterrupt:
        ray.shutdown()
        raise
    except (Exception, SystemExit) as error:
        ray.shutdown()
        raise _unreachable(chosen, squeezed(f"{type(error).__name__}: {error}")) from error
    return True


def nodes(ray: Any) -> list[Node]:
    """The machines of the cluster that are alive."""
    return [
        Node(str(node["NodeID"]), str(node["NodeManagerAddress"]), dict(node["Resources"]))
        for node in ray.nodes()
        if node["Alive"]
    ]


def _knock(address: str) -> None:
    """See whether anything listens there, which takes no time where nothing does."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal() or int(port) > 65535:
        tip = "Give HOST:PORT as `ray start` prints it, or auto; run the sweep on a machine of the cluster."
        raise HashbenchError(f"{address!r} is not the address of a Ray cluster", consequence="nothing was run", tip=tip)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS).close()
    except OSError as error:
        raise _unreachable(address, error.strerror or str(error)) from error


def _rehearse(address: str) -> None:
    done = run(python_calling(_REHEARSAL, address), seconds=CONNECT_SECONDS)
    if done.status is None:
        raise _unreachable(address, f"it did not answer as Ray within {CONNECT_SECONDS:.0f} s")
    try:
        problem = str(json.loads(done.stdout.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        problem = f"the attempt ended with exit code {done.status}"
    if problem:
        raise _unreachable(address, problem)


def print_problem(address: str) -> None:
    """What the child does: try to connect, and print as JSON what went wrong, or an empty text."""
    try:
        imported().init(address=address, log_to_driver=False, logging_level="ERROR")
        problem = ""
    except BaseException as error:
        problem = squeezed(f"{type(error).__name__}: {error}")
    print("\n" + json.dumps(problem), flush=True)


def _unreachable(address: str, reason: str) -> HashbenchError:
    if address == _OWN:
        tip = "See Ray's messages above; or run without --executor ray."
        return HashbenchError("cannot start Ray on this machine", consequence=reason[:400], tip=tip)
    return HashbenchError(f"cannot join the Ray cluster at {address}", consequence=reason[:400], tip=_TIP)
