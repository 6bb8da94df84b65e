"""Models as tasks of a Ray cluster, one task each; rows, logs, traces and repros come back to this machine.

A task runs its model as this machine would (:mod:`hashbench.sweep.executors.remote`), in a process of its own with the
same time limit and the same handling of sudden ends; nothing but text, numbers and bytes crosses, and no file system
is shared. What belongs to a model is written here before its end is reported. A task whose machine or Ray worker is
lost runs again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from pkgutil import resolve_name
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from hashbench import __version__
from hashbench.errors import HashbenchError, last_line
from hashbench.io import file_digest, replace_bytes, to_json
from hashbench.processes import python_calling, run, variables
from hashbench.sweep.executors import Resources, Task, TaskResult
from hashbench.sweep.executors.local import DEFAULT_PRELOAD
from hashbench.text import squeezed

if TYPE_CHECKING:
    from hashbench.records import ModelSpec
    from hashbench.sweep.request import SweepRequest

DEFAULT_FINGERPRINT = "hashbench.run.environment:collect_in_child"

CONNECT_SECONDS = 60.0
"""How long a cluster may take to answer; one of this kind takes 1 s, and importing Ray on a busy machine many."""

_RETRIES = 3
"""How often a task runs again after a machine could not run it, before the sweep ends."""

_PREPARE_SECONDS = 180.0
"""Longest wait for the machines to say that they are ready; those that did not, tell with their first row."""

_KNOCK_SECONDS = 5.0
_POLL_SECONDS = 1.0
_CANCEL_SECONDS = 5.0
_MIB = 2**20
_OWN = "local"
_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's announced default; the present one hides accelerators from tasks that ask for none, with a warning each.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
# By name: what runs there knows torch, and nothing here may.
_PREPARE, _RUN = "hashbench.sweep.executors.remote:prepare", "hashbench.sweep.executors.remote:run"
_REHEARSAL = "hashbench.sweep.executors.ray:print_problem"
_SAME_EVERYWHERE = f"Install the same there: pip install 'hashbench[ray]=={__version__}'"

# ------------------------------------------------------------------- which machines have what a task asks for: numbers


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
        return ", ".join([*words, *([f"memory {memory / _MIB:.0f} MiB"] if memory else [])]) or "nothing"


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


# ------------------------------------------------------------------------------------------------- the executor


def call_on_node(function: str, request: str) -> dict[str, Any]:
    """The task itself: call ``module:function`` there, and say where that was."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    answer: dict[str, Any] = resolve_name(function)(json.dumps({**json.loads(request), "node": here}))
    return {**answer, "node": here}


@dataclass(frozen=True, slots=True)
class _Running:
    """One attempt, ``submitted`` when it was handed to the cluster."""

    task: Task
    demand: Demand
    submitted: float


class RayExecutor:
    """Runs models on a Ray cluster. One that was started here ends with :meth:`close`, any other stays.

    A task takes as many CPUs as its model has threads, 1 where the options do not say. Every machine must have the
    suites of ``specs``, and zoo files must be the same there.

    Args:
        request: what is asked of the cluster, and how the models run. Its ``jobs`` are handed to the cluster at once,
            so that one that grows by itself sees what waits; ``None``: as many as it can run.
        specs: the models.
        preload: as for :class:`~hashbench.sweep.executors.local.LocalExecutor`, on every machine.
        fingerprint: the function of ``device`` and ``variables`` that tells the environment of a machine.

    Raises:
        HashbenchError: Ray is not installed, or the device has a number, which Ray chooses.
    """

    def __init__(
        self,
        request: SweepRequest,
        specs: Sequence[ModelSpec],
        *,
        preload: Sequence[str] = DEFAULT_PRELOAD,
        fingerprint: str = DEFAULT_FINGERPRINT,
    ) -> None:
        self._ray = _imported()
        device, cluster, threads = request.options.device, request.cluster, request.options.threads or 1
        if ":" in device:
            tip = f"Use --device {device.partition(':')[0]}."
            raise HashbenchError(f"cannot run on {device} of a cluster", consequence="Ray chooses the device", tip=tip)
        self.resources = Resources(threads=threads, isolates=True)
        self._address, self._jobs, self._patience = cluster.address, request.jobs, cluster.patience
        gpus = float(device != "cpu") if cluster.gpus is None else cluster.gpus
        self._demand = Demand(cpus=threads, gpus=gpus, custom=cluster.resources)
        self._common = {
            "version": __version__,
            "threads": threads,
            "preload": list(preload),
            "fingerprint": fingerprint,
            "device": device,
            "suites": sorted({spec.suite for spec in specs if not spec.source}),
            "zoo_files": {path: file_digest(path) for path in sorted({spec.source for spec in specs} - {""})},
        }
        self._connected_here = False
        self._on_terminate: Any = signal.SIG_DFL
        self._environments: dict[str, Mapping[str, Any]] = {}
        self._running: dict[Any, _Running] = {}
        self._problems: Counter[str] = Counter()
        self._nodes: list[Node] = []
        self._looked = 0.0
        self._able_last = monotonic()

    @property
    def capacity(self) -> int:
        """What the machines that are there now can run, unless the request says otherwise."""
        return self._jobs or capacity(self._nodes, self._demand)

    # --------------------------------------------------------------------------------------------- getting ready

    def connect(self) -> None:
        """Join or start the cluster; :meth:`start` does it otherwise.

        Raises:
            HashbenchError: it cannot be reached.
        """
        before = signal.getsignal(signal.SIGTERM)
        if connect(self._address):
            self._connected_here, self._on_terminate = True, before

    def start(self, *, target: str) -> None:
        """Let every machine that can run models import ``target`` and tell its environment."""
        self.connect()
        self._able_last = monotonic()
        self._wait_for_a_node(target)
        preparing = {self._prepare(node, target): node for node in able(self._nodes, self._demand)}
        try:
            for reference in self._wait_for(list(preparing), seconds=_PREPARE_SECONDS):
                node = preparing.pop(reference)
                self._environments[node.id] = self._environment_of(reference, node)
        finally:
            self._cancel(list(preparing))

    def _wait_for_a_node(self, target: str) -> None:
        self._look()
        if able(self._nodes, self._demand):
            return
        # A cluster that grows by itself does so for a task that waits.
        waiting = self._remote(self._demand).remote(_PREPARE, self._request(target=target))
        try:
            while not able(self._nodes, self._demand):
                self._refuse_to_wait_for_ever()
                sleep(_POLL_SECONDS / 2)
                self._look()
        finally:
            self._cancel([waiting])

    def _prepare(self, node: Node, target: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # No CPU, so that a machine that is busy answers; but what has an accelerator is seen only by who asked for it.
        asked = Demand(cpus=0, gpus=self._demand.gpus)
        strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
        return self._remote(asked, scheduling_strategy=strategy).remote(_PREPARE, self._request(target=target))

    def _environment_of(self, reference: Any, node: Node) -> Mapping[str, Any]:
        try:
            answer = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise _unusable(node.address, _final_line(error), tip=_SAME_EVERYWHERE) from error
        if "problem" in answer:
            raise _unusable(node.address, answer["problem"]["what"], tip=answer["problem"]["tip"])
        environment: Mapping[str, Any] = answer["environment"]
        return environment

    # ------------------------------------------------------------------------------------------------------ tasks

    def submit(self, task: Task) -> None:
        """Hand ``task`` to the cluster."""
        self._submit(_Running(task, self._demand, submitted=monotonic()))

    def _submit(self, attempt: _Running) -> None:
        task = attempt.task
        memory = int((task.memory_mib or 0.0) * _MIB)
        demand = settled(self._demand, self._nodes, memory=memory, alone=task.alone)
        request = self._request(
            spec=to_json(task.spec),
            options={**to_json(task.options), "output": ""},
            target=task.target,
            timeout=task.timeout,
            known=sorted(self._environments),
        )
        reference = self._remote(demand, name=f"hashbench {task.spec.name}").remote(_RUN, request)
        self._running[reference] = replace(attempt, demand=demand)

    def wait(self) -> tuple[TaskResult, ...]:
        """Sleep until a row is here, or more machines are there than before."""
        before = self.capacity
        while self._running:
            references = list(self._running)
            self._wait_for(references, seconds=_POLL_SECONDS, count=1)
            ended = tuple(map(self._settle, self._wait_for(references, seconds=0)))
            self._look()
            if ended or self.capacity > before:
                return ended
            self._place_again()
        return ()

    def phase(self, key: str) -> str:  # noqa: ARG002 – nothing comes from there before a task ends
        """Nothing: the machines tell no phases."""
        return ""

    def close(self) -> None:
        """Cancel what runs, let it end what it started, and leave the cluster; one that was started here ends."""
        if self._running and self._ray.is_initialized():
            self._cancel(list(self._running))
        self._running.clear()
        if self._connected_here:
            self._connected_here = False
            self._ray.shutdown()
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, self._on_terminate)  # Ray leaves its own behind

    def _settle(self, reference: Any) -> TaskResult:
        """What became of a task."""
        attempt = self._running.pop(reference)
        try:
            answer = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            return _lost(attempt, _loss(error))
        node = str(answer["node"])
        if "problem" in answer:
            self._problems[attempt.task.key] += 1
            if self._problems[attempt.task.key] > _RETRIES:
                raise _unusable(self._address_of(node), answer["problem"]["what"], tip=answer["problem"]["tip"])
            return _lost(attempt, f"{self._address_of(node)}: {answer['problem']['what']}")
        if node not in self._environments:
            self._environments[node] = answer["environment"]
        _write_files(attempt.task, answer["files"])
        ended = dict(answer["ended"])
        if ended["storage_error"]:
            ended["storage_error"] = f"on {self._address_of(node)}: {ended['storage_error']}"
        return TaskResult(attempt.task, **ended, environment=self._environments[node])

    # ---------------------------------------------------------------------------------------------------- machines

    def _look(self, *, now: bool = False) -> None:
        """See which machines are there, at most once a second."""
        if not now and monotonic() - self._looked < _POLL_SECONDS:
            return
        self._nodes = [
            Node(str(node["NodeID"]), str(node["NodeManagerAddress"]), dict(node["Resources"]))
            for node in self._ray.nodes()
            if node["Alive"]
        ]
        self._looked = monotonic()
        if able(self._nodes, self._demand):
            self._able_last = self._looked

    def _place_again(self) -> None:
        """Ask for less where the machine that had as much as was asked for is gone; give up where all are gone."""
        self._refuse_to_wait_for_ever()
        if not able(self._nodes, self._demand):
            return
        for reference, attempt in list(self._running.items()):
            if not able(self._nodes, attempt.demand):
                self._cancel([reference])
                self._submit(self._running.pop(reference))

    def _refuse_to_wait_for_ever(self) -> None:
        if monotonic() - self._able_last > self._patience:
            raise HashbenchError(
                "no machine of the Ray cluster can run a model",
                consequence=f"a task asks for {self._demand.text()}, and for {self._patience:g} s none had that",
                tip="Start one or ask for less, then run the same command with --resume.",
            )

    def _address_of(self, node: str) -> str:
        return next((known.address for known in self._nodes if known.id == node), node[:8])

    # --------------------------------------------------------------------------------------------------------- Ray

    def _remote(self, demand: Demand, **more: Any) -> Any:
        """The remote function with its demands. Ray's own retries would hide a lost machine from the row."""
        return self._ray.remote(call_on_node).options(
            num_cpus=demand.cpus,
            num_gpus=demand.gpus,
            memory=demand.memory or None,
            resources=dict(demand.custom),
            max_retries=0,
            **more,
        )

    def _request(self, **more: Any) -> str:
        try:
            return json.dumps({**self._common, "known": [], **more})
        except (TypeError, ValueError) as error:
            name = more.get("spec", {}).get("name", "a model")
            raise HashbenchError(
                f"cannot send {name} to a cluster",
                consequence=f"its data cannot be written as JSON ({error})",
                tip="Leave it out with --exclude-exact, or run without --executor ray.",
            ) from error

    def _wait_for(self, references: list[Any], *, seconds: float, count: int | None = None) -> list[Any]:
        if not references:
            return []
        ready, _ = self._ray.wait(references, num_returns=count or len(references), timeout=seconds)
        return list(ready)

    def _cancel(self, references: list[Any]) -> None:
        """First by an exception, so that what a model has started is ended too; then by force."""
        for force in (False, True):
            done = set(self._wait_for(references, seconds=0))
            references = [reference for reference in references if reference not in done]
            for reference in references:
                with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
                    self._ray.cancel(reference, force=force)
            self._wait_for(references, seconds=_CANCEL_SECONDS)


def requested(request: SweepRequest, specs: Sequence[ModelSpec]) -> RayExecutor:
    """The executor that a request for these models asks for, connected.

    Raises:
        HashbenchError: Ray is not installed, or the cluster cannot be reached.
    """
    executor = RayExecutor(request, specs)
    executor.connect()
    return executor


def _write_files(task: Task, files: Mapping[str, bytes]) -> None:
    """Put what a task left into the results folder; its row last, since a row says that all the rest is there."""
    folder, row = Path(task.options.output), Path(task.row_path)
    for name, content in sorted(files.items(), key=lambda file: (folder / file[0]) == row):
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts:
            raise ValueError(f"a machine of the cluster sent a file called {name!r}")
        (folder / relative).parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(folder / relative, content)


def _unusable(address: str, problem: str, *, tip: str) -> HashbenchError:
    return HashbenchError(
        f"the machine {address} of the Ray cluster cannot run models",
        consequence=problem,
        tip=tip or "Mend it, or choose others with --ray-resource.",
    )


def _lost(attempt: _Running, how: str) -> TaskResult:
    """A task of which there is no answer; nobody knows which machine it was on."""
    seconds = monotonic() - attempt.submitted
    return TaskResult(attempt.task, seconds, exit_code=-signal.SIGKILL, lost=how, environment={})


def _loss(error: Exception) -> str:
    """What Ray says of a task that gave no answer: the kind of error and its first sentence."""
    first_sentence = squeezed(str(error)).partition(". ")[0][:200]
    return f"{type(error).__name__}: {_final_line(error) if hasattr(error, 'cause') else first_sentence}"


def _final_line(error: Exception) -> str:
    return last_line(str(error))[:300] or type(error).__name__


# ----------------------------------------------------------------------------------------------- the connection


def _imported() -> Any:
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
    ray = _imported()
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
        problem = str(json.loads(last_line(done.stdout)))
    except ValueError:
        problem = f"the attempt ended with exit code {done.status}"
    if problem:
        raise _unreachable(address, problem)


def print_problem(address: str) -> None:
    """What the child does: try to connect, and print as JSON what went wrong, or an empty text."""
    try:
        _imported().init(address=address, log_to_driver=False, logging_level="ERROR")
        problem = ""
    except BaseException as error:
        problem = squeezed(f"{type(error).__name__}: {error}")
    print("\n" + json.dumps(problem), flush=True)


def _unreachable(address: str, reason: str) -> HashbenchError:
    if address == _OWN:
        tip = "See Ray's messages above; or run without --executor ray."
        return HashbenchError("cannot start Ray on this machine", consequence=reason[:400], tip=tip)
    tip = (
        "Check that it runs, that --address is HOST:PORT as `ray start` prints it, and that this machine belongs to it."
    )
    return HashbenchError(f"cannot join the Ray cluster at {address}", consequence=reason[:400], tip=tip)
