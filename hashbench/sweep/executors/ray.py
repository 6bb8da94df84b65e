"""Models as tasks of a Ray cluster, one task each; rows, logs, traces and repros come back to this machine.

A task runs its model as this machine would (:mod:`hashbench.sweep.executors.remote`), in a process of its own with the
same time limit and the same handling of sudden ends; nothing but text, numbers and bytes crosses, and no file system
is shared. What belongs to a model is written here before its end is reported. A task whose machine or Ray worker is
lost runs again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import signal
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from hashbench import __version__
from hashbench.errors import HashbenchError
from hashbench.io import file_digest, replace_bytes, to_json
from hashbench.sweep.executors import Resources, Task, TaskResult, ray_cluster
from hashbench.sweep.executors.local import DEFAULT_PRELOAD
from hashbench.sweep.executors.ray_cluster import Demand, Node
from hashbench.text import squeezed

if TYPE_CHECKING:
    from hashbench.records import ModelSpec
    from hashbench.sweep.request import SweepRequest

RETRIES = 3
"""How often a task runs again after its machine or its Ray worker was lost, before it counts as the model's doing."""

PATIENCE = 30.0
"""Seconds without any machine that can run a task, after which the sweep gives up."""

DEFAULT_FINGERPRINT = "hashbench.run.environment:collect_in_child"

_PREPARE_SECONDS = 180.0
"""Longest wait for the machines to say that they are ready; those that did not, tell with their first row."""
_POLL_SECONDS = 1.0
_CANCEL_SECONDS = 5.0
_MIB = 2**20
# By name: what runs there knows torch, and nothing here may.
_PREPARE, _RUN = "hashbench.sweep.executors.remote:prepare", "hashbench.sweep.executors.remote:run"


def call_on_node(function: str, request: str) -> dict[str, Any]:
    """The task itself: call ``module:function`` there, and say where that was."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    module, _, name = function.partition(":")
    answer: dict[str, Any] = getattr(importlib.import_module(module), name)(
        json.dumps({**json.loads(request), "node": here})
    )
    return {**answer, "node": here}


@dataclass(frozen=True, slots=True)
class _Running:
    """One attempt. ``submitted`` is when the first attempt was; ``lost`` says how each earlier one ended."""

    task: Task
    demand: Demand
    submitted: float
    lost: tuple[str, ...] = ()


class RayExecutor:
    """Runs models on a Ray cluster.

    Args:
        address: ``HOST:PORT`` of a cluster that runs, or ``auto``; empty: see
            :func:`~hashbench.sweep.executors.ray_cluster.connect`. A cluster that was started here ends with
            :meth:`close`, any other stays.
        jobs: how many models are handed to the cluster at once, so that one that grows by itself sees what waits;
            ``None``: as many as it can run.
        threads: CPUs of a task, and threads of its model where the options do not say.
        device: the models' device. Ray chooses which one, so it has no number.
        gpus: what a task asks of Ray's resource ``GPU``; ``None``: 1 unless ``device`` is ``cpu``.
        resources: custom resources that a task asks for, by name.
        patience: seconds to wait for a machine that can run a task.
        suites, zoo_files: suites whose packages every machine must have, and files that must be the same there.
        preload: as for :class:`~hashbench.sweep.executors.local.LocalExecutor`, on every machine.
        fingerprint: the function of ``device`` and ``variables`` that tells the environment of a machine.

    """

    def __init__(
        self,
        *,
        address: str = "",
        jobs: int | None = None,
        threads: int = 1,
        device: str = "cpu",
        gpus: float | None = None,
        resources: Mapping[str, float] | None = None,
        patience: float = PATIENCE,
        suites: Sequence[str] = (),
        zoo_files: Sequence[str] = (),
        preload: Sequence[str] = DEFAULT_PRELOAD,
        fingerprint: str = DEFAULT_FINGERPRINT,
    ) -> None:
        self._ray = ray_cluster.imported()
        if ":" in device:
            tip = f"Use --device {device.partition(':')[0]}."
            raise HashbenchError(f"cannot run on {device} of a cluster", consequence="Ray chooses the device", tip=tip)
        self.resources = Resources(threads=threads, isolates=True)
        self._address, self._jobs, self._patience = address, jobs, patience
        wanted_gpus = (0.0 if device == "cpu" else 1.0) if gpus is None else gpus
        self._demand = Demand(cpus=threads, gpus=wanted_gpus, custom=dict(resources or {}))
        self._common = {
            "version": __version__,
            "threads": threads,
            "preload": list(preload),
            "fingerprint": fingerprint,
            "device": device,
            "suites": list(suites),
            "zoo_files": {path: file_digest(path) for path in zoo_files},
        }
        self._connected_here = False
        self._on_terminate: Any = signal.SIG_DFL
        self._environments: dict[str, Mapping[str, Any]] = {}
        self._running: dict[Any, _Running] = {}
        self._preparing: dict[Any, Node] = {}
        self._nodes: list[Node] = []
        self._looked = 0.0
        self._able_last = monotonic()

    @property
    def capacity(self) -> int:
        """What the machines that are there now can run, unless ``jobs`` says otherwise."""
        return self._jobs or ray_cluster.capacity(self._nodes, self._demand)

    # --------------------------------------------------------------------------------------------- getting ready

    def connect(self) -> None:
        """Join or start the cluster; :meth:`start` does it otherwise.

        Raises:
            HashbenchError: it cannot be reached.
        """
        before = signal.getsignal(signal.SIGTERM)
        if ray_cluster.connect(self._address):
            self._connected_here, self._on_terminate = True, before

    def start(self, *, target: str) -> None:
        """Let every machine that can run models import ``target`` and tell its environment."""
        self.connect()
        self._able_last = monotonic()
        self._wait_for_a_node(target)
        for node in ray_cluster.able(self._nodes, self._demand):
            self._preparing[self._prepare(node, target)] = node
        ready = self._wait_for(list(self._preparing), seconds=_PREPARE_SECONDS)
        for reference in ready:
            node = self._preparing.pop(reference)
            self._environments[node.id] = self._environment_of(reference, node)
        self._cancel(list(self._preparing))
        self._preparing.clear()

    def _wait_for_a_node(self, target: str) -> None:
        self._look()
        if ray_cluster.able(self._nodes, self._demand):
            return
        # A cluster that grows by itself does so for a task that waits.
        waiting = self._remote(self._demand).remote(_PREPARE, self._request(target=target))
        try:
            while not ray_cluster.able(self._nodes, self._demand):
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
            raise _unusable(node.address, _last_line(error), tip=_SAME_EVERYWHERE) from error
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
        demand = ray_cluster.settled(self._demand, self._nodes, memory=memory, alone=task.alone)
        request = self._request(
            spec=to_json(task.spec),
            options={**to_json(task.options), "output": ""},
            target=task.target,
            timeout=task.timeout,
            known=sorted(self._environments),
        )
        reference = self._remote(demand, name=f"hashbench {task.spec.name}").remote(_RUN, request)
        self._running[reference] = dataclasses.replace(attempt, demand=demand)

    def wait(self) -> tuple[TaskResult, ...]:
        """Sleep until a row is here, or more machines are there than before."""
        before = self.capacity
        while self._running:
            references = list(self._running)
            self._wait_for(references, seconds=_POLL_SECONDS, count=1)
            ended = tuple(filter(None, map(self._settle, self._wait_for(references, seconds=0))))
            self._look()
            if ended or self.capacity > before:
                return ended
            self._place_again()
        return ()

    def close(self) -> None:
        """Cancel what runs, let it end what it started, and leave the cluster; one that was started here ends."""
        references = [*self._running, *self._preparing]
        if references and self._ray.is_initialized():
            self._cancel(references)
        self._running.clear()
        self._preparing.clear()
        if self._connected_here:
            self._connected_here = False
            self._ray.shutdown()
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, self._on_terminate)  # Ray leaves its own behind

    def _settle(self, reference: Any) -> TaskResult | None:
        """What became of a task; ``None`` where it runs again."""
        attempt = self._running.pop(reference)
        try:
            answer = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            return self._lost(attempt, _loss(error))
        node = str(answer["node"])
        if "problem" in answer:
            if len(attempt.lost) >= RETRIES:
                raise _unusable(self._address_of(node), answer["problem"]["what"], tip=answer["problem"]["tip"])
            return self._lost(attempt, f"{self._address_of(node)}: {answer['problem']['what']}")
        if node not in self._environments:
            self._environments[node] = answer["environment"]
        _write_files(attempt.task, answer["files"])
        ended = dict(answer["ended"])
        if ended["storage_error"]:
            ended["storage_error"] = f"on {self._address_of(node)}: {ended['storage_error']}"
        retried = _described_losses(attempt.lost)
        return TaskResult(attempt.task, **ended, retried=retried, environment=self._environments[node])

    def _lost(self, attempt: _Running, how: str) -> TaskResult | None:
        attempt = dataclasses.replace(attempt, lost=(*attempt.lost, how))
        if len(attempt.lost) <= RETRIES:
            self._look(now=True)
            self._submit(attempt)
            return None
        text = f"hashbench: no answer from the cluster, {len(attempt.lost)} times: {_described_losses(attempt.lost)}\n"
        replace_bytes(Path(attempt.task.log_path), text.encode())
        return TaskResult(
            attempt.task,
            wall_seconds=monotonic() - attempt.submitted,
            exit_code=-signal.SIGKILL,
            retried=_described_losses(attempt.lost[:-1]),
            environment={},
        )

    # ---------------------------------------------------------------------------------------------------- machines

    def _look(self, *, now: bool = False) -> None:
        """See which machines are there, at most once a second."""
        if not now and monotonic() - self._looked < _POLL_SECONDS:
            return
        self._nodes = ray_cluster.nodes(self._ray)
        self._looked = monotonic()
        if ray_cluster.able(self._nodes, self._demand):
            self._able_last = self._looked

    def _place_again(self) -> None:
        """Ask for less where the machine that had as much as was asked for is gone; give up where all are gone."""
        self._refuse_to_wait_for_ever()
        if not ray_cluster.able(self._nodes, self._demand):
            return
        for reference, attempt in list(self._running.items()):
            if not ray_cluster.able(self._nodes, attempt.demand):
                self._cancel([reference])
                del self._running[reference]
                self._submit(attempt)

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


# ------------------------------------------------------------------------------------------------------ helpers

_SAME_EVERYWHERE = f"Install the same there: pip install 'hashbench[ray]=={__version__}'"


def requested(request: SweepRequest, specs: Sequence[ModelSpec]) -> RayExecutor:
    """The executor that a request for these models asks for, connected.

    Raises:
        HashbenchError: Ray is not installed, or the cluster cannot be reached.
    """
    cluster = request.cluster
    executor = RayExecutor(
        address=cluster.address,
        jobs=request.jobs,
        threads=request.options.threads or 1,
        device=request.options.device,
        gpus=cluster.gpus,
        resources=cluster.resources,
        patience=PATIENCE if cluster.patience is None else cluster.patience,
        suites=sorted({spec.suite for spec in specs if not spec.source}),
        zoo_files=sorted({spec.source for spec in specs} - {""}),
    )
    try:
        executor.connect()
    except BaseException:
        executor.close()
        raise
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


def _described_losses(losses: Sequence[str]) -> str:
    """How attempts ended; what happened several times is counted."""
    counts = Counter(losses)
    return "; ".join(f"{how} ({count} times)" if count > 1 else how for how, count in counts.items())


def _loss(error: Exception) -> str:
    """What Ray says of a task that gave no answer: the kind of error and its first sentence."""
    first_sentence = squeezed(str(error)).partition(". ")[0][:200]
    return f"{type(error).__name__}: {_last_line(error) if hasattr(error, 'cause') else first_sentence}"


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
