"""Stand-ins for ``BenchmarkRunner`` in fresh processes, without torch; what a model does is in its arguments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from hashbench.core.records import Failure, ModelSpec, OpRecord, RunOptions, TensorDigest, Trace
from hashbench.core.run.addresses import arranged_addresses

RUNS_HERE: list[int] = []
"""State of the process: how many runs it made."""


def preloaded() -> None:
    """What a server may be asked to call before it forks."""
    RUNS_HERE.append(-1)


class Thing:
    """Something that a set orders by its address."""


class Runner:
    """``traces_of`` as the real one has it: each trace is one record, whose arguments tell what the run saw."""

    def __init__(self, options: RunOptions) -> None:
        self.options = options

    def traces_of(self, spec: ModelSpec, *, level: str, runs: int, threads: int | None = None) -> list[Trace | Failure]:  # noqa: ARG002
        behaviour = getattr(self, spec.arguments["do"])
        return [behaviour(spec, level, number) for number in range(runs)]

    def tell(self, spec: ModelSpec, level: str, number: int) -> Trace:
        RUNS_HERE.append(number)
        return trace(
            f"{spec.name} {spec.input_shape} {spec.arguments['list']} {self.options.seed} {level} {len(RUNS_HERE)}"
        )

    def order(self, spec: ModelSpec, _level: str, _number: int) -> Trace:
        """Also writes 50 files into the folder ``written``, where it is given one."""
        for number in range(50 if "written" in spec.arguments else 0):
            Path(spec.arguments["written"], f"{os.getpid()}_{number}").touch()
        things = [Thing() for _ in range(30)]
        by_address = [things.index(thing) for thing in set(things)]
        return trace(f"{by_address} {list({'a', 'b', 'c', 'd', 'e'})} {id(things[0])}")

    def processors(self, *_: object) -> Trace:
        return trace(str(sorted(os.sched_getaffinity(0))))

    def arranged(self, *_: object) -> Trace:
        """What a set of new objects is ordered by, in a process whose memory has random holes."""
        _ = [Thing() for _ in range(30)]  # since Python 3.13 each of the first of a class has another size
        holes = [bytes(length) for length in os.urandom(20_000)]
        del holes[:: 2 + os.urandom(1)[0] % 7]
        kept = arranged_addresses()
        things = [Thing() for _ in range(30)]
        return trace(f"{[things.index(thing) for thing in set(things)]}{'' if kept else 'nothing is kept'}")

    def where(self, _spec: ModelSpec, _level: str, _number: int) -> Trace:
        return trace(f"{sys.path} {os.environ.get('FRESH_TEST')} {sys.stdin.read()!r} {uuid.uuid4()}")

    def loud(self, *_: object) -> Trace:
        os.system("echo from a shell; echo and its errors >&2")
        print("from Python", flush=True)
        return trace("quiet")

    def fail(self, _spec: ModelSpec, _level: str, number: int) -> Trace | Failure:
        return Failure("RuntimeError: no such kernel") if number else trace("fine")

    def error(self, *_: object) -> Trace:
        raise RuntimeError("the file has changed\nand more")

    def exit(self, *_: object) -> Trace:
        os._exit(7)

    def crash(self, *_: object) -> Trace:
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(600)
        raise AssertionError

    def hang(self, spec: ModelSpec, *_: object) -> Trace:
        child = subprocess.Popen(["sleep", "600"])
        note = Path(spec.arguments["folder"], f"{os.getpid()}.pids")
        note.with_suffix(".partial").write_text(f"{os.getpid()} {child.pid}")
        note.with_suffix(".partial").rename(note)
        time.sleep(600)
        raise AssertionError

    def meet(self, spec: ModelSpec, *_: object) -> Trace:
        """Ends once another process is here, too."""
        folder = Path(spec.arguments["folder"])
        (folder / str(os.getpid())).touch()
        ends = time.monotonic() + 300
        while len(list(folder.iterdir())) < 2 and time.monotonic() < ends:
            time.sleep(0.01)
        return trace(str(len(list(folder.iterdir()))))

    def count(self, spec: ModelSpec, *_: object) -> Trace:
        """How many processes were seen to run together within a second."""
        folder = Path(spec.arguments["folder"])
        mark = folder / str(os.getpid())
        mark.touch()
        ends, most = time.monotonic() + 1, 1
        while most < 2 and time.monotonic() < ends:
            time.sleep(0.01)
            most = max(most, len(list(folder.iterdir())))
        time.sleep(0.1)  # the other one looks, too
        mark.unlink()
        return trace(str(most))

    def half(self, _spec: ModelSpec, _level: str, number: int) -> Trace:
        return trace("fine") if number else damaged()


def trace(arguments: str) -> Trace:
    """One op that says this."""
    digest = TensorDigest("float32", (2,), (1,), "0123456789abcdef")
    return Trace((OpRecord("forward//aten.rand#0", "forward", 0, "", "aten.rand", (), arguments, (digest,)),))


def damaged() -> Trace:
    """One that can be written, but says of an op that it reads what is not there."""
    record = trace("").records[0]
    return Trace((record, record))
