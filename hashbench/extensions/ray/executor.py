"""Models as tasks of a Ray cluster, one task each; rows, logs, traces and repros come back to this machine.

A task runs its model as this machine would (:mod:`hashbench.extensions.ray.remote`), in a process of its own with the
same time limit and the same handling of sudden ends; nothing but text, numbers and bytes crosses, and no file system
is shared. What belongs to a model is written here before its end is reported. A task whose machine or Ray worker is
lost runs again.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from time import monotonic, sleep
from typing import Any

from hashbench import __version__
from hashbench.core.errors import HashbenchError
from hashbench.core.io import file_digest, replace_bytes, to_json
from hashbench.core.records import ModelSpec, RunOptions
from hashbench.core.sweep.executors import RayCluster, Resources, Task, TaskResult
from hashbench.core.workers import START_SECONDS
from hashbench.extensions.ray.client import Lost, RayClient

DEFAULT_FINGERPRINT = "hashbench.core.run.environment:collect_in_child"

_RETRIES = 3
"""How often a task runs again after a machine could not run it, before the sweep ends."""

_PREPARE_SECONDS = 180.0
"""Longest wait for the machines to say that they are ready; those that did not, tell with their first row."""

_CONFIRM_SECONDS = 60.0
"""How long a machine may take to say that it has outlived a model that was killed there."""

ANSWER_SECONDS = START_SECONDS + 60.0
"""How long a machine may take for a model beside the model's own time: to start a fork server, to hand over files."""

_POLL_SECONDS = 1.0
_MIB = 2**20
# By name: what runs there knows torch, and nothing here may.
_PREPARE, _RUN, _CONFIRM = (f"hashbench.extensions.ray.remote:{name}" for name in ("prepare", "run", "confirm"))
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
        """Format for a message: ``CPU 1, hashbench_cuda 1``."""
        amounts = self.resources()
        memory = amounts.pop("memory", 0.0)
        words = [f"{name} {amount:g}" for name, amount in amounts.items()]
        return ", ".join([*words, *([f"memory {memory / _MIB:.0f} MiB"] if memory else [])]) or "nothing"

    def options(self) -> dict[str, Any]:
        """The same as options of a Ray task."""
        custom = dict(self.custom)
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "memory": self.memory or None, "resources": custom}


def tasks_at_once(node: Node, demand: Demand) -> int:
    """Return the number of such tasks that an otherwise idle machine can run at once."""
    parts = [node.resources.get(name, 0.0) / amount for name, amount in demand.resources().items()]
    return int(min(parts, default=1.0))


def able(nodes: Iterable[Node], demand: Demand) -> list[Node]:
    """Filter the machines that can run such a task."""
    return [node for node in nodes if tasks_at_once(node, demand)]


def capacity(nodes: Iterable[Node], demand: Demand) -> int:
    """Return the number of such tasks that all machines can run at once; 1 if none can, so that the sweep waits for
    one."""
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


@dataclass(frozen=True, slots=True)
class _SubmittedTask:
    """One attempt, ``submitted`` when it was handed to the cluster. ``answer`` is that of a model which was killed, and
    ``believe_by`` until when its machine may say that it lives: else whatever ended the machine killed it, too."""

    task: Task
    demand: Demand
    submitted: float
    answer: Mapping[str, Any] | None = None
    believe_by: float = 0.0


class _Machines:
    """The machines of a cluster that can run a task of ``demand``, read at most once a second; ``patience`` is how many
    seconds a sweep waits for one."""

    def __init__(self, demand: Demand, patience: float) -> None:
        self.demand, self._patience = demand, patience
        self.forget()

    def forget(self) -> None:
        """Begin anew: a cluster that is started again has other machines."""
        self.alive: tuple[Node, ...] = ()
        self.phases: Mapping[str, str] = {}
        self._read, self._able_last = 0.0, monotonic()

    def look(self, cluster: RayClient) -> None:
        """Read the machines that are alive, and the phases of models."""
        if monotonic() - self._read < _POLL_SECONDS:
            return
        self.alive = tuple(
            Node(str(node["NodeID"]), str(node["NodeManagerAddress"]), dict(node["Resources"]))
            for node in cluster.nodes()
            if node["Alive"]
        )
        self.phases = cluster.phases()
        self._read = monotonic()
        if self.able():
            self._able_last = self._read

    def able(self, demand: Demand | None = None) -> list[Node]:
        """List the machines that can run a task of this demand; by default of that of every task."""
        return able(self.alive, demand or self.demand)

    def refuse_to_wait_for_ever(self) -> None:
        """Raise :class:`HashbenchError` if no machine has been able for too long."""
        if monotonic() - self._able_last > self._patience:
            raise HashbenchError(
                "no machine of the Ray cluster can run a model",
                consequence=f"a task asks for {self.demand.text()}, and for {self._patience:g} s none had that",
                tip="Start one or ask for less, then run the same command with --resume.",
            )

    def address_of(self, node: str) -> str:
        """Return the address of a machine, the beginning of its id if it is gone."""
        return next((known.address for known in self.alive if known.id == node), node[:8])


def connected(specs: Sequence[ModelSpec], options: RunOptions, **how: Any) -> RayExecutor:
    """Return an executor that has reached its cluster; arguments and errors are those of :class:`RayExecutor`."""
    executor = RayExecutor(specs, options, **how)
    executor.connect()
    return executor


class RayExecutor:
    """Runs models on a Ray cluster. One that was started here ends with :meth:`close`, any other stays.

    A task takes as many CPUs as its model has threads, 1 where the options do not say. Every machine must have the
    suites of ``specs``, and zoo files must be the same there.

    Args:
        specs: the models.
        options: how they run: their device, threads and tracer.
        cluster: what is asked of the cluster.
        jobs: how many tasks are handed to the cluster at once, so that one that grows by itself sees what waits;
            ``None``: as many as it can run.
        preload: as for :class:`~hashbench.core.sweep.executors.local.LocalExecutor`, on every machine.
        fingerprint: the function of ``device``, ``variables`` and ``tracer`` that tells the environment of a machine.

    Raises:
        HashbenchError: the device has a number, which Ray chooses.
    """

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        options: RunOptions,
        *,
        cluster: RayCluster = RayCluster(),  # noqa: B008 – frozen
        jobs: int | None = None,
        preload: Sequence[str] = (),
        fingerprint: str = DEFAULT_FINGERPRINT,
    ) -> None:
        device, threads = options.device, options.threads or 1
        if ":" in device:
            tip = f"Use --device {device.partition(':')[0]}."
            raise HashbenchError(f"cannot run on {device} of a cluster", consequence="Ray chooses the device", tip=tip)
        self.resources = Resources(threads=threads, isolates=True)
        self._address, self._jobs = cluster.address, jobs
        gpus = float(device != "cpu") if cluster.gpus is None else cluster.gpus
        self._machines = _Machines(Demand(cpus=threads, gpus=gpus, custom=cluster.resources), cluster.patience)
        self._common = {
            "version": __version__,
            "threads": threads,
            "preload": list(preload),
            "fingerprint": fingerprint,
            "device": device,
            "tracer": options.tracer,
            "suites": sorted({spec.suite for spec in specs if not spec.source}),
            "zoo_files": {path: file_digest(path) for path in sorted({spec.source for spec in specs} - {""})},
        }
        self._client: RayClient | None = None
        self._environments: dict[str, Mapping[str, Any]] = {}
        self._running: dict[int, _SubmittedTask] = {}
        self._problems: Counter[str] = Counter()

    @property
    def capacity(self) -> int:
        """What the machines that are there now can run, unless the caller says otherwise."""
        return self._jobs or capacity(self._machines.alive, self._machines.demand)

    # --------------------------------------------------------------------------------------------- getting ready

    def connect(self) -> None:
        """Join or start the cluster; :meth:`start` does it otherwise.

        Raises:
            HashbenchError: Ray is not installed, or the cluster cannot be reached.
        """
        if self._client is None:
            self._client = RayClient(self._address)

    def start(self, *, target: str) -> None:
        """Let every machine that can run models import ``target`` and tell its environment."""
        self.connect()
        self._machines.forget()
        request = self._request(target=target)
        self._wait_for_a_node(request)
        # No CPU, so that a machine that is busy answers; but what has an accelerator is seen only by who asked for it.
        asked = Demand(cpus=0, gpus=self._machines.demand.gpus).options()
        preparing = {
            self._cluster.submit(_PREPARE, request, node=node.id, **asked): node for node in self._machines.able()
        }
        try:
            for task in self._cluster.ended(list(preparing), seconds=_PREPARE_SECONDS):
                node = preparing.pop(task)
                self._environments[node.id] = _environment(self._cluster.answer(task), node.address)
        finally:
            self._cluster.cancel(list(preparing))

    @property
    def _cluster(self) -> RayClient:
        assert self._client is not None, "the executor is connected"
        return self._client

    def _wait_for_a_node(self, request: str) -> None:
        self._machines.look(self._cluster)
        if self._machines.able():
            return
        # A cluster that grows by itself does so for a task that waits.
        waiting = self._cluster.submit(_PREPARE, request, **self._machines.demand.options())
        try:
            while not self._machines.able():
                self._machines.refuse_to_wait_for_ever()
                sleep(_POLL_SECONDS / 2)
                self._machines.look(self._cluster)
        finally:
            self._cluster.cancel([waiting])

    # ------------------------------------------------------------------------------------------------------ tasks

    def submit(self, task: Task) -> None:
        """Submit ``task`` to the cluster."""
        self._submit(_SubmittedTask(task, self._machines.demand, submitted=monotonic()))

    def _submit(self, attempt: _SubmittedTask) -> None:
        task = attempt.task
        memory = int((task.memory_mib or 0.0) * _MIB)
        demand = settled(self._machines.demand, self._machines.alive, memory=memory, alone=task.alone)
        request = self._request(
            spec=to_json(task.spec),
            options={**to_json(task.options), "output": ""},
            target=task.target,
            timeout=task.timeout,
            known=sorted(self._environments),
        )
        names = {"name": f"hashbench {task.spec.name}", "phase_key": task.key}
        number = self._cluster.submit(_RUN, request, **demand.options(), **names)
        self._running[number] = replace(attempt, demand=demand)

    def wait(self) -> tuple[TaskResult, ...]:
        """Sleep until a row is here, or more machines are there than before."""
        before = self.capacity
        while self._running:
            answered = self._cluster.ended(list(self._running), seconds=_POLL_SECONDS, count=1)
            ended = (*filter(None, map(self._settle, answered)), *self._overdue())
            if ended and not self._running:
                return ended
            self._machines.look(self._cluster)
            if ended or self.capacity > before:
                return ended
            self._place_again()
        return ()

    def phase(self, key: str) -> str:
        """Return the last phase that the machine of a task reported."""
        return self._machines.phases.get(key, "")

    def close(self) -> None:
        """Cancel what runs, let it end what it started, and leave the cluster; one that was started here ends. The
        executor can be started again."""
        if self._client is not None:
            with contextlib.suppress(HashbenchError):  # it does not answer: its tasks end with the process that asks it
                self._client.cancel(list(self._running))
            self._client.close()
            self._client = None
        self._running.clear()

    def _settle(self, task: int) -> TaskResult | None:
        """Return the result of a task; ``None`` if its machine is asked first."""
        attempt, answer = self._running.pop(task), self._cluster.answer(task)
        if isinstance(answer, Lost):
            return _lost(attempt, answer.reason)
        if attempt.answer is not None:
            answer = dict(attempt.answer)
        elif answer.get("ended", {}).get("exit_code", 0) < 0:
            self._confirm(attempt, answer)
            return None
        node = str(answer["node"])
        if "problem" in answer:
            self._problems[attempt.task.key] += 1
            if self._problems[attempt.task.key] > _RETRIES:
                raise _unusable(
                    self._machines.address_of(node), answer["problem"]["what"], tip=answer["problem"]["tip"]
                )
            return _lost(attempt, f"{self._machines.address_of(node)}: {answer['problem']['what']}")
        if node not in self._environments:
            self._environments[node] = answer["environment"]
        _write_files(attempt.task, answer["files"])
        ended = dict(answer["ended"])
        if ended["storage_error"]:
            ended["storage_error"] = f"on {self._machines.address_of(node)}: {ended['storage_error']}"
        return TaskResult(attempt.task, **ended, environment=self._environments[node])

    def _confirm(self, attempt: _SubmittedTask, answer: Mapping[str, Any]) -> None:
        """Let the machine where a model was killed say that it lives: if it does not, that is what killed the model."""
        task = self._cluster.submit(_CONFIRM, "{}", node=str(answer["node"]), **Demand(cpus=0).options())
        self._running[task] = replace(attempt, answer=answer, believe_by=monotonic() + _CONFIRM_SECONDS)

    def _overdue(self) -> list[TaskResult]:
        """Return tasks whose answer is overdue: a process on their machine is stopped, or hangs."""
        now, running = monotonic(), self._cluster.running()
        late = {
            task: attempt
            for task, attempt in self._running.items()
            if 0.0 < attempt.believe_by < now or running.get(task, 0.0) > attempt.task.timeout + ANSWER_SECONDS
        }
        self._cluster.abandon(list(late))
        for task in late:
            del self._running[task]
        return [_lost(attempt, "its machine has not said in time how it ended") for attempt in late.values()]

    def _place_again(self) -> None:
        """Ask for less where the machine that had as much as was asked for is gone; give up where all are gone."""
        self._machines.refuse_to_wait_for_ever()
        if not self._machines.able():
            return
        for task, attempt in list(self._running.items()):
            if attempt.answer is None and not self._machines.able(attempt.demand):
                self._cluster.cancel([task])
                self._submit(self._running.pop(task))

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


def _environment(answer: Mapping[str, Any] | Lost, address: str) -> Mapping[str, Any]:
    if isinstance(answer, Lost):
        raise _unusable(address, answer.detail, tip=_SAME_EVERYWHERE)
    if "problem" in answer:
        raise _unusable(address, answer["problem"]["what"], tip=answer["problem"]["tip"])
    environment: Mapping[str, Any] = answer["environment"]
    return environment


def _write_files(task: Task, files: Mapping[str, bytes]) -> None:
    """Put what a task left into the results folder; its row last, since a row says that all the rest is there."""
    folder, row = Path(task.options.output), Path(task.row_path)
    for name, content in sorted(files.items(), key=lambda file: (folder / file[0]) == row):
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts:
            raise ValueError(f"a machine of the cluster sent a file called {name!r}")
        (folder / relative).parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(folder / relative, content, links=False)


def _unusable(address: str, problem: str, *, tip: str) -> HashbenchError:
    return HashbenchError(
        f"the machine {address} of the Ray cluster cannot run models",
        consequence=problem,
        tip=tip or "Mend it, or choose others with --ray-resource.",
    )


def _lost(attempt: _SubmittedTask, how: str) -> TaskResult:
    """Return the result of a task without an answer, of an unknown machine."""
    seconds = monotonic() - attempt.submitted
    return TaskResult(attempt.task, seconds, exit_code=-signal.SIGKILL, lost=how, environment={})
