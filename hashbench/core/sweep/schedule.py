"""Which model starts when, beside which others. Pure: knows neither processes nor clocks nor files.

Three rules, the first goes first (docs/scale.md has the measurements):

* Models that run at once may be expected to take no more than the budget together: by their peaks in an earlier sweep,
  else by their number of parameters, else an equal share. The same holds for the memory of each accelerator.
* A model that is expected to take more than the whole budget runs alone, first; what is repeated alone comes last.
* The longest start first, and before them those that no earlier sweep knows, the larger ones first. A model that does
  not fit may be overtaken by others, but only :data:`PATIENCE` times.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hashbench.core.catalog import INVARIANCES

PATIENCE = 8
"""How often the next model may be overtaken by others because it does not fit."""

_ROUNDING = 1 + 1e-9
"""Equal shares of a budget may add up to a little more than it."""

_MIB = 2**20
_PROCESS_MIB = {"training": 1000.0, "inference": 600.0} | dict.fromkeys(INVARIANCES, 600.0)
_COPIES = {"training": 10.0, "inference": 4.0} | dict.fromkeys(INVARIANCES, 4.0)
"""Peak of a process ≈ so many MiB + so many times the bytes of the parameters. From 230 rows of torchvision's models on
CPU (float32): below the real peak for none of 121 in inference and 3 of 109 in training; in the median 1.5 and 1.25
times it."""

CONTEXT_MIB = 700.0
"""What a process takes of a GPU's memory beside torch's allocator: the context, the kernels' code and the workspaces of
the libraries. An estimate, not measured here; too low a value shows as rows that ran out of memory and are repeated."""


@dataclass(frozen=True, slots=True)
class Job:
    """A model that waits. ``seconds``, ``memory_mib`` and ``device_memory_mib`` are what it is expected to take
    (``None``: not known); ``parameters`` is its size (0: not known); ``ranks`` are the processes that compute at once,
    each of which takes a worker's slot."""

    key: str
    seconds: float | None = None
    memory_mib: float | None = None
    parameters: int = 0
    device_memory_mib: float | None = None
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class EarlierSweep:
    """What ``label`` says of models, by ``(suite, name)``: seconds from the start of a worker to its end, the peak
    of its process in MiB, and that of an accelerator's memory; models are left out of what is not known of them."""

    label: str = ""
    seconds: Mapping[tuple[str, str], float] = field(default_factory=dict)
    memory_mib: Mapping[tuple[str, str], float] = field(default_factory=dict)
    device_memory_mib: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def job(
        self, key: str, model: tuple[str, str], *, parameters: int | None, mode: str, device: str, ranks: int = 1
    ) -> Job:
        """Estimate the time and memory of ``model``. The estimate of memory from ``parameters`` was measured on the CPU
        only."""
        memory = self.memory_mib.get(model)
        if memory is None and device == "cpu":
            memory = estimated_memory_mib(parameters, mode=mode)
            memory = None if memory is None else memory * ranks
        on_device = self.device_memory_mib.get(model)
        return Job(
            key,
            seconds=self.seconds.get(model),
            memory_mib=memory,
            parameters=parameters or 0,
            device_memory_mib=None if on_device is None else on_device + CONTEXT_MIB * ranks,
            ranks=ranks,
        )


def estimated_memory_mib(parameters: int | None, *, mode: str) -> float | None:
    """Estimate the peak memory, in MiB, of the process of a model with this number of parameters; ``None`` if not
    known."""
    return None if not parameters else _PROCESS_MIB[mode] + _COPIES[mode] * parameters * 4 / _MIB


@dataclass(frozen=True, slots=True)
class Start:
    """``job`` starts now, in the slots ``slots`` of workers and on the device ``device`` (both from 0; ``None``: there
    are no devices); ``alone``: nothing else runs until it ends."""

    job: Job
    slots: tuple[int, ...]
    alone: bool = False
    device: int | None = None


class _Devices:
    """The accelerators that workers share, by their ``budgets`` in MiB (``None``: not looked at). Of ``workers`` models
    at once, each device gets as many as others, or one more."""

    def __init__(self, budgets: Sequence[float | None], *, workers: int) -> None:
        self._budgets = tuple(budgets)
        self._at_once = max(1, -(-workers // max(1, len(budgets))))
        self._jobs: list[dict[str, Job]] = [{} for _ in budgets]

    def fits(self, job: Job) -> bool:
        """Return True if ``job`` could start now."""
        return not self._budgets or any(self._fits(job, device) for device in range(len(self._budgets)))

    def start(self, job: Job) -> int | None:
        """Put ``job`` on the device with the fewest models, of those that it fits on if there are any."""
        if not self._budgets:
            return None
        device = min(range(len(self._jobs)), key=lambda number: (not self._fits(job, number), len(self._jobs[number])))
        self._jobs[device][job.key] = job
        return device

    def end(self, start: Start) -> None:
        """Release what the job of ``start`` held."""
        if start.device is not None:
            del self._jobs[start.device][start.job.key]

    def _fits(self, job: Job, device: int) -> bool:
        budget, jobs = self._budgets[device], self._jobs[device]
        if not jobs or budget is None:
            return True
        return sum(self._expected(running, device) for running in (*jobs.values(), job)) <= budget * _ROUNDING

    def _expected(self, job: Job, device: int) -> float:
        share = (self._budgets[device] or 0.0) / self._at_once
        return share if job.device_memory_mib is None else job.device_memory_mib


def longest_first(jobs: Iterable[Job]) -> list[Job]:
    """Sort ``jobs`` into the order in which they should start; the sort is stable."""
    return sorted(
        jobs, key=lambda job: (0.0, -job.parameters) if job.seconds is None else (1.0, -max(0.0, job.seconds))
    )


class Schedule:
    """Hands out jobs one by one and is notified when they end.

    Args:
        jobs: in the order in which they should start.
        again: jobs that run alone at the end.
        memory_mib: what all may take together; ``None``: memory is not looked at.
        workers: how many are asked for; a job of unknown size counts as this share of the memory.
        isolates: jobs that are alone are kept from the others by whoever runs them, not by waiting.
        devices: what the jobs on each accelerator may take of its memory together (``None``: it is not looked at);
            empty where whoever runs the jobs chooses the device, or there is none.
    """

    def __init__(
        self,
        jobs: Iterable[Job],
        *,
        again: Iterable[Job] = (),
        memory_mib: float | None = None,
        workers: int = 1,
        isolates: bool = False,
        devices: Sequence[float | None] = (),
    ) -> None:
        self._budget = None if memory_mib is None else memory_mib * _ROUNDING
        self._share = (memory_mib or 0.0) / max(1, workers)
        self._isolates = isolates
        self._devices = _Devices(devices, workers=workers)
        kept = list(jobs)
        self._giants = deque(job for job in kept if self._too_large(job))
        self._waiting = [job for job in kept if not self._too_large(job)]
        self._again = deque(again)
        self._least = min(map(self._expected, self._waiting), default=0.0)
        self._running: dict[str, Start] = {}
        self._began: dict[str, tuple[int, int]] = {}
        self._free_slots: list[int] = []
        self._starts = 0
        self._overtaken = 0
        self._used = 0.0

    @property
    def unfinished(self) -> bool:
        """Whether any job waits or runs."""
        return bool(self._running or self._giants or self._waiting or self._again)

    def next(self, *, capacity: int) -> Start | None:
        """Return the job to start now; ``None`` if none may start before another one ends."""
        running, free = len(self._running), capacity - self._taken_slots
        if free <= 0:
            return None
        if running and not self._isolates and (self._giants or any(start.alone for start in self._running.values())):
            return None
        if self._giants:
            fits = _slots_of(self._giants[0], capacity) <= free
            return self._start(self._giants.popleft(), capacity, alone=True) if fits else None
        if self._waiting:
            position = self._position_of_next(free, capacity)
            return None if position is None else self._start(self._waiting.pop(position), capacity)
        if self._again and (self._isolates or not running) and _slots_of(self._again[0], capacity) <= free:
            return self._start(self._again.popleft(), capacity, alone=True)
        return None

    def end(self, key: str) -> tuple[Job, bool]:
        """Mark the job ``key`` as ended; return it, and whether any other ran meanwhile."""
        start = self._running.pop(key)
        running, starts = self._began.pop(key)
        for slot in start.slots:
            heapq.heappush(self._free_slots, slot)
        self._devices.end(start)
        self._used = self._used - self._expected(start.job) if self._running else 0.0
        return start.job, not start.alone and (running > 0 or self._starts > starts)

    def repeat(self, job: Job, *, alone: bool = True) -> None:
        """Run ``job`` again when all others have begun, or ``alone``, when they have ended."""
        (self._again if alone or self._too_large(job) else self._waiting).append(job)

    @property
    def _taken_slots(self) -> int:
        return sum(len(start.slots) for start in self._running.values())

    def _start(self, job: Job, capacity: int, *, alone: bool = False) -> Start:
        slots: list[int] = []
        for _ in range(_slots_of(job, capacity)):
            known = self._taken_slots + len(slots)
            slots.append(heapq.heappop(self._free_slots) if self._free_slots else known)
        start = Start(job, tuple(slots), alone, self._devices.start(job))
        self._starts += 1
        self._began[job.key] = (len(self._running), self._starts)
        self._running[job.key] = start
        self._used += self._expected(job)
        return start

    def _position_of_next(self, free: int, capacity: int) -> int | None:
        """Return the position in the queue of the next job that fits into ``free`` of ``capacity`` slots."""

        def fits(job: Job) -> bool:
            return _slots_of(job, capacity) <= free and self._fits(job)

        if fits(self._waiting[0]):
            self._overtaken = 0
            return 0
        if self._overtaken >= PATIENCE or (self._budget is not None and self._used + self._least > self._budget):
            return None
        position = next((position for position, job in enumerate(self._waiting) if fits(job)), None)
        self._overtaken += position is not None
        return position

    def _fits(self, job: Job) -> bool:
        if not self._running:
            return True
        in_memory = self._budget is None or self._used + self._expected(job) <= self._budget
        return in_memory and self._devices.fits(job)

    def _expected(self, job: Job) -> float:
        return self._share * job.ranks if job.memory_mib is None else job.memory_mib

    def _too_large(self, job: Job) -> bool:
        return self._budget is not None and job.memory_mib is not None and job.memory_mib > self._budget


def _slots_of(job: Job, capacity: int) -> int:
    """Return the slots that a job takes: one for each of its ranks, or all there are."""
    return max(1, min(job.ranks, capacity))
