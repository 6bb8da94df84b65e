"""The connection to a Ray cluster: one that is there, or one of this machine alone that ends with the sweep.

Ray itself waits two minutes for a cluster that does not answer and then ends the process; here a child process tries
first, within a time limit.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from hashbench.errors import HashbenchError
from hashbench.processes import python_calling, run, variables
from hashbench.sweep.executors.placement import Node
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
