"""Start the ranks of a program: one process each, forked from a fork server, with a folder in which they meet.

    with started("package.module:function", (1, 2), world_size=2, folder=folder) as ranks:
        ends = ranks.wait(60.0)

Each rank calls ``function(peers, 1, 2)``, and joins a process group of ``torch.distributed`` inside
:meth:`Peers.group`. All end with the process that started them. The fork server is that of the fresh processes of a
sweep (:mod:`hashbench.core.diagnose.fresh_process`) where there is one, else that of this process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing.connection
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from time import monotonic
from typing import Any, NoReturn

from hashbench.core.diagnose.fresh_process import SERVER_VARIABLE
from hashbench.core.processes import describe_end, exit_at_once, last_words, printing_to
from hashbench.core.workers import LOST, START_SECONDS, WORKERS, Fork, ForkRequest, exit_status_of, request_for

PRELOAD = ("torch", "torch._dynamo", "hashbench.core.check.model")
"""What a server imports that is started for ranks alone."""

GRACE_SECONDS = 15.0
"""How long ranks may go on when another one has died: their collectives raise, or wait for ever."""

GROUP_SECONDS = 1800.0
"""Time limit of a collective, that of torch."""


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks of one program, as each of them sees the others.

    Attributes:
        rank: of this process, from 0.
        world_size: number of ranks.
        folder: in which they meet; new for every program.
    """

    rank: int
    world_size: int
    folder: Path

    def store(self, name: str) -> Any:
        """Return a store of all ranks, ``torch.distributed.FileStore``: a file of this name in the folder."""
        from torch import distributed

        return distributed.FileStore(str(self.folder / name), self.world_size)  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def group(self, *, number: int, device: str = "cpu") -> Iterator[None]:
        """Join the default process group; leave it on exit.

        Args:
            number: of the group among those of this program, the same on every rank: each has a store of its own.
            device: where the tensors are; decides the backend (:func:`backend_for`).
        """
        import torch
        import torch.distributed as dist

        backend = backend_for(device, self.world_size)
        if backend == "nccl":
            torch.cuda.set_device(self.rank)
        dist.init_process_group(
            backend,
            store=self.store(f"group{number}"),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=GROUP_SECONDS),
        )
        try:
            yield
        finally:
            if dist.is_initialized():  # the model may have left it
                dist.destroy_process_group()


def backend_for(device: str, world_size: int) -> str:
    """Return the backend of a group: NCCL if there is a GPU for every rank, else gloo, also for tensors of a GPU."""
    import torch

    if not device.startswith("cuda") or not torch.distributed.is_nccl_available():
        return "gloo"
    return "nccl" if torch.cuda.device_count() >= world_size else "gloo"


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: global rank.
        status: exit status, negative for a signal; ``None`` if it was killed because it went on.
        seconds: from the start of all until it ended.
        log: what it printed; removed if that is nothing.
    """

    rank: int
    status: int | None
    seconds: float
    log: Path

    @property
    def died(self) -> bool:
        """Whether it ended by itself without reaching its end."""
        return self.status is not None and self.status != 0

    def in_words(self) -> str:
        """Return how it ended and the last lines that it printed."""
        how = "did not end" if self.status is None else describe_end(self.status)
        how = "was lost: its fork server ended" if self.status == LOST else how
        return " | ".join([f"rank {self.rank} {how}", *last_words(self.log)])


class RankProcesses:
    """Ranks that run. :meth:`wait` waits for all of them."""

    def __init__(self, forks: Sequence[Fork], logs: Sequence[Path]) -> None:
        self._forks, self._logs, self._began = forks, logs, monotonic()

    @property
    def pids(self) -> tuple[int, ...]:
        """Their processes, by rank."""
        return tuple(fork.pid for fork in self._forks)

    def wait(self, seconds: float = float("inf")) -> tuple[RankEnd, ...]:
        """Wait until all have ended, at most ``seconds``, and at most :data:`GRACE_SECONDS` once one has died."""
        ends: dict[int, RankEnd] = {}
        deadline = self._began + seconds
        while len(ends) < len(self._forks) and (left := deadline - monotonic()) > 0:
            running = {fork: rank for rank, fork in enumerate(self._forks) if rank not in ends}
            waited: list[Any] = [*running]
            ready = multiprocessing.connection.wait(waited, timeout=None if left == float("inf") else left)
            for fork in ready:
                assert isinstance(fork, Fork)
                status = fork.wait(0.0)
                if status is None:
                    continue
                rank = running[fork]
                ends[rank] = RankEnd(rank, status, monotonic() - self._began, self._logs[rank])
                if ends[rank].died:
                    deadline = min(deadline, monotonic() + GRACE_SECONDS)
        took = monotonic() - self._began
        return tuple(ends.get(rank) or RankEnd(rank, None, took, self._logs[rank]) for rank in range(len(self._forks)))


@contextlib.contextmanager
def started(
    target: str,
    arguments: Sequence[object],
    *,
    world_size: int,
    folder: Path,
    logs: Sequence[Path] = (),
    preload: Sequence[str] = PRELOAD,
) -> Iterator[RankProcesses]:
    """Start the ranks; kill those that still run on exit.

    Args:
        target: ``module:function``, called with :class:`Peers` and the arguments.
        arguments: pickled.
        world_size: number of ranks.
        folder: in which they meet; new and empty.
        logs: of what each prints; by default files in ``folder``.
        preload: what the server imports if one has to be started.

    Raises:
        HashbenchError: no process could be started.
    """
    logs = tuple(logs) or tuple(folder / f"rank{rank}.txt" for rank in range(world_size))
    environment = dict(os.environ)
    with contextlib.ExitStack() as stack:
        forks = []
        for rank in range(world_size):
            peers = Peers(rank, world_size, folder)
            request = request_for(f"{__name__}:run_rank", target, peers, tuple(arguments), logs[rank], environment)
            forks.append(stack.enter_context(_forked(request, preload)))
        yield RankProcesses(forks, logs)


def _forked(request: ForkRequest, preload: Sequence[str]) -> Fork:
    address = os.environ.get(SERVER_VARIABLE, "")
    if address:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            fork = stack.enter_context(Fork(address, request, seconds=START_SECONDS))
            fork.start(START_SECONDS)
            stack.pop_all()
            return fork
    return WORKERS.fork(request, preload=preload)


def run_rank(
    target: str, peers: Peers, arguments: Sequence[object], log: Path, environment: Mapping[str, str], _report: int
) -> NoReturn:
    """Call the target in this process, a rank, and end it. ``environment`` is that of its starter."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(
        {"RANK": str(peers.rank), "LOCAL_RANK": str(peers.rank)}
        | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(peers.world_size))
    )
    with printing_to(log):
        faulthandler.enable(file=2)
        status = exit_status_of(lambda: resolve_name(target)(peers, *arguments))
    exit_at_once(status)
