"""A pool of gloo ranks: processes that have imported torch once, and run functions in process groups of their own.

::

    with RankPool(ranks=4) as pool:
        outcomes = pool.call("tests.extensions.ranks.pool:doubled", 3, ranks=2, folder=tmp_path)

A rank that raises, dies, or does not answer in time is replaced before the next call. All ranks end with the pool and
with the process that has made it.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from pkgutil import resolve_name
from types import TracebackType
from typing import Any, Self

from hashbench.core.processes import NO_VARIABLES
from hashbench.core.workers import Fork, ServerProcess, request_for

PRELOADED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "hashbench",
)
"""What every rank needs, imported once before the ranks are forked."""

SECONDS = 60.0
"""How long a call may take."""

_GROUP_SECONDS = 30
_START_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a function returned on one rank.

    Attributes:
        value: as returned; ``None`` where it did not return.
        error: what it raised, with its traceback, or how the rank ended; empty if it returned.
        status: exit status of the process, negative for a signal, where it ended.
    """

    value: Any = None
    error: str = ""
    status: int | None = None


@dataclass(frozen=True, slots=True)
class _Call:
    target: str
    arguments: tuple[Any, ...]
    ranks: int
    folder: str


class RankPool:
    """Processes that act as ranks 0, 1, … of one process group for each call.

    Args:
        ranks: number of processes.
        preload: modules that they have imported, and functions that were called, before they are forked.
        environment: additional variables.
    """

    def __init__(
        self,
        ranks: int = 4,
        *,
        preload: Sequence[str] = PRELOADED,
        environment: Mapping[str, str] = NO_VARIABLES,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._log = (self._folder / "log").open("wb")
        self._server = ServerProcess(
            preload, environment={"OMP_NUM_THREADS": "1", **environment}, output=self._log.fileno()
        )
        self._listener = Listener(str(self._folder / "ranks"), family="AF_UNIX")
        self._forks: dict[int, Fork] = {}
        self._lines: dict[int, Connection] = {}
        self._ranks = ranks

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.end()

    @property
    def pids(self) -> dict[int, int]:
        """The processes that are there, by rank."""
        return {rank: fork.pid for rank, fork in self._forks.items()}

    @property
    def server_pid(self) -> int:
        """The process that forks them."""
        return self._server.child.pid

    def call(
        self, target: str, *arguments: Any, ranks: int = 2, folder: Path, seconds: float = SECONDS
    ) -> tuple[Outcome, ...]:
        """Call ``module:function`` with rank, number of ranks and ``arguments`` on every rank of a new group.

        Args:
            target: the function; what it returns must be picklable.
            arguments: picklable.
            ranks: number of ranks.
            folder: for the store of the group; it must not have been used for another call.
            seconds: kill the ranks that have not answered by then.

        Raises:
            FileExistsError: the folder was used before: gloo would wait for what is written there.
        """
        store = folder / "store"
        store.mkdir(parents=True)
        self._ensure(range(ranks))
        call = pickle.dumps(_Call(target, arguments, ranks, str(store)))
        for rank in range(ranks):
            with contextlib.suppress(OSError):  # it has died since: no answer will come
                self._lines[rank].send_bytes(call)
        outcomes = self._answers(range(ranks), time.monotonic() + seconds)
        for rank, outcome in outcomes.items():
            if outcome.error:
                self._forget(rank)
            else:  # all have answered: none takes the store along while another needs it
                with contextlib.suppress(OSError):
                    self._lines[rank].send_bytes(b"")
        for rank in [rank for rank in outcomes if rank in self._lines]:
            if not self._lines[rank].poll(seconds) or not self._left(rank):
                self._forget(rank)
        return tuple(outcomes[rank] for rank in range(ranks))

    def end(self) -> None:
        """Kill all ranks and the process that forks them."""
        for rank in list(self._forks):
            self._forget(rank)
        self._listener.close()
        self._server.end()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def log(self) -> str:
        """What ranks have printed."""
        return (self._folder / "log").read_text(errors="replace")

    def _ensure(self, ranks: Sequence[int]) -> None:
        """Fork the ranks that are not there; find the dead by the end of their line."""
        for rank in ranks:
            line = self._lines.get(rank)
            if line is not None and line.poll():
                self._forget(rank)
        new = [rank for rank in ranks if rank not in self._forks]
        for rank in new:
            request = request_for("tests.extensions.ranks.pool:serve", self._listener.address, rank)
            fork = Fork(self._server.address, request, seconds=_START_SECONDS)
            try:
                fork.start(_START_SECONDS)
            except BaseException:
                fork.close()
                raise
            self._forks[rank] = fork
        for _ in new:
            line = self._listener.accept()
            self._lines[line.recv()] = line

    def _answers(self, ranks: Sequence[int], until: float) -> dict[int, Outcome]:
        outcomes: dict[int, Outcome] = {}
        while waiting := {self._lines[rank]: rank for rank in ranks if rank not in outcomes}:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, until - time.monotonic()))
            for line in ready:
                assert isinstance(line, Connection)
                outcomes[waiting[line]] = self._answer(line, waiting[line])
            if not ready:
                outcomes |= {rank: Outcome(error="no answer in time") for rank in waiting.values()}
        return outcomes

    def _answer(self, line: Connection, rank: int) -> Outcome:
        try:
            outcome: Outcome = line.recv()
        except (EOFError, OSError):
            status = self._forks[rank].wait(_GROUP_SECONDS)
            return Outcome(error=f"ended with status {status}", status=status)
        return outcome

    def _left(self, rank: int) -> bool:
        """Whether a rank has left its group and can serve in another."""
        try:
            return bool(self._lines[rank].recv())
        except (EOFError, OSError):
            return False

    def _forget(self, rank: int) -> None:
        self._forks.pop(rank).close()
        line = self._lines.pop(rank, None)
        if line is not None:
            line.close()


# ------------------------------------------------------------------------------------------------------- in a rank


def serve(address: str, rank: int, _report: int) -> None:
    """Answer calls until the line to the pool ends."""
    import torch

    torch.set_num_threads(1)
    with Client(address, family="AF_UNIX") as line:
        line.send(rank)
        while True:
            try:
                call: _Call = pickle.loads(line.recv_bytes())
            except EOFError:
                return
            outcome = _outcome(call, rank)
            try:
                content = pickle.dumps(outcome)
            except Exception:
                content = pickle.dumps(Outcome(error=traceback.format_exc()))
            line.send_bytes(content)
            line.recv_bytes()
            _leave()
            line.send(True)


def _outcome(call: _Call, rank: int) -> Outcome:
    import torch.distributed as dist

    try:
        store = dist.FileStore(os.path.join(call.folder, "store"), call.ranks)  # noqa: PTH118
        limit = timedelta(seconds=_GROUP_SECONDS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=call.ranks, timeout=limit)
        return Outcome(resolve_name(call.target)(rank, call.ranks, *call.arguments))
    except Exception:
        return Outcome(error=traceback.format_exc())


def _leave() -> None:
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    torch.manual_seed(0)


def doubled(rank: int, ranks: int, number: int) -> tuple[int, int, int]:
    """Return the rank, the number of ranks, and twice a number that all ranks have summed up."""
    import torch
    import torch.distributed as dist

    total = torch.tensor([number])
    dist.all_reduce(total)
    return rank, ranks, int(total.item()) * 2 // ranks
