"""Seconds until each command refuses what it cannot do, and until this machine is described.

Everything is started as a user starts it, in a new Python; the smallest of several starts is shown.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.table import Table, against

GOAL = 2.0
"""Seconds."""

_STARTS = 3

_ZOO = """\
import hashbench

@hashbench.model
def linear():
    import torch

    return torch.nn.Linear(4, 2), (torch.randn(3, 4),)
"""

_SWEEP = ("sweep", "--suite", "zoo.py", "--training")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A command line that is refused: ``words`` behind ``hashbench``, a part of what it ``says``, and whether it has to
    import torch, or code of a user, to know."""

    words: tuple[str, ...]
    says: str
    imports: bool = False


REFUSALS: tuple[Refusal, ...] = (
    Refusal((*_SWEEP, "--output", "used"), "already holds the results"),
    Refusal((*_SWEEP, "--output", "file/below"), "cannot write results"),
    Refusal((*_SWEEP, "--output", "new", "--resume", "--times-from", "nowhere"), "nowhere"),
    Refusal((*_SWEEP, "-d", "cuda:9"), "the device cuda:9 does not exist here", imports=True),
    Refusal((*_SWEEP, "-d", "nonsense"), "'nonsense' is not a device", imports=True),
    Refusal((*_SWEEP, "--only", "nothing"), "unknown model 'nothing'", imports=True),
    Refusal(("sweep", "--training", "--only", "nothing"), "unknown model 'nothing'"),
    Refusal(("sweep", "--training", "--suite", "nothing"), "unknown suite 'nothing'"),
    Refusal(("sweep", "--training", "--suite", "nothing.py"), "nothing.py"),
    Refusal((*_SWEEP, "--stress", "--invariance", "batch"), "--stress cannot be combined"),
    Refusal((*_SWEEP, "--backend", "nothing"), "torch.compile has no backend 'nothing'", imports=True),
    Refusal(("nightly", "--suite", "nothing.py"), "nothing.py"),
    Refusal(("nightly", "--suite", "zoo.py", "--output", "file/below"), "cannot write"),
    Refusal(("nightly", "--suite", "zoo.py", "--only", "nothing"), "unknown model 'nothing'", imports=True),
    Refusal(("nightly", "--suite", "zoo.py", "--expected", "nowhere"), "nowhere"),
    Refusal(
        ("nightly", "--suite", "zoo.py", "--", "-d", "cuda:9"), "the device cuda:9 does not exist here", imports=True
    ),
    Refusal(("compare", "nowhere", "used"), "nowhere"),
    Refusal(("report", "nowhere"), "nowhere"),
    Refusal(("expect", "nowhere", "--output", "new"), "nowhere"),
    Refusal(("merge", "used", "nowhere"), "used is not an empty folder"),
    Refusal(("ranks", "run", "--", "nothing.py"), "cannot run nothing.py"),
    Refusal(("ranks", "run", "--output", "used", "--", "zoo.py"), "used/first exists"),
    Refusal(("ranks", "run", "--output", "file/below", "--", "zoo.py"), "cannot write file/below"),
    Refusal(("ranks", "run", "--html", "file/page.html", "--", "zoo.py"), "cannot write file/page.html"),
    Refusal(("ranks", "diff", "nowhere", "used"), "nowhere"),
    Refusal(("ranks", "check", "nowhere"), "nowhere"),
    Refusal(("numeric", "nothing.py"), "nothing.py"),
    Refusal(("numeric", "zoo.py"), "zoo.py", imports=True),
    Refusal(("pipeline", "check", "--config", "nothing.py", "--output-dir", "new"), "nothing.py"),
    Refusal(("pipeline", "check", "--config", "zoo.py", "--output-dir", "used"), "used already exists"),
    Refusal(("pipeline", "check", "--config", "zoo.py", "--output-dir", "file/below"), "file/below"),
    Refusal(("pipeline", "compare", "nowhere", "used"), "nowhere"),
    Refusal(("audit", "--ops", "nothing"), "nothing", imports=True),
    Refusal(("audit", "-d", "cuda:9"), "the device cuda:9 does not exist here", imports=True),
    Refusal(("audit", "--ops", "add", "--output", "used"), "already holds"),
    Refusal(("audit", "--ops", "add", "--output", "file/below"), "file/below"),
    Refusal(("audit", "--results", "nowhere"), "nowhere"),
    Refusal(("fingerprint", "record", "--training", "--only", "nothing", "-o", "new"), "unknown model 'nothing'"),
    Refusal(("fingerprint", "record", "--training", "-d", "cuda:9", "-o", "new"), "the device cuda:9", imports=True),
    Refusal(("fingerprint", "record", "--training", "-o", "file/below"), "file/below"),
    Refusal(("fingerprint", "verify", "nothing.json"), "nothing.json"),
    Refusal(("dynamo", "nothing.py"), "nothing.py"),
    Refusal(("replay", "nowhere"), "nowhere"),
    Refusal(("diff", "nothing.log", "nothing.log"), "nothing.log"),
    Refusal(("watch", "diff", "nowhere", "nowhere"), "nowhere"),
    Refusal(("watch", "resume", "nothing.py", "--at", "2"), "nothing.py"),
    Refusal(("watch", "resume", "zoo.py", "--at", "2", "--output", "used"), "cannot make the folder used"),
)
"""Every kind of request that needs no model to be refused."""


def prepare(folder: Path) -> None:
    """Write into ``folder`` what :data:`REFUSALS` name: a zoo file, a file, and a folder that holds a sweep."""
    (folder / "zoo.py").write_text(_ZOO, encoding="utf-8")
    (folder / "file").touch()
    (folder / "used" / "first").mkdir(parents=True)
    (folder / "used" / "accuracy.csv").touch()


def answered(words: Sequence[str], *, folder: Path, variables: Mapping[str, str] = {}) -> tuple[float, str]:
    """Run ``hashbench`` with ``words`` in ``folder`` and return the seconds until it ended, and what it printed."""
    command = [sys.executable, "-P", "-m", "hashbench", *words]
    environment = {**os.environ, "NO_COLOR": "1", **variables}
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return time.perf_counter() - began, done.stdout + done.stderr


def measure() -> list[Table]:
    """The time of every refusal, and of the look at this machine with an empty cache and with a filled one."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="hashbench-bench-") as name:
        folder = Path(name)
        prepare(folder)
        for refusal in REFUSALS:
            starts = [answered(refusal.words, folder=folder) for _ in range(_STARTS)]
            figure = min(seconds for seconds, _ in starts)
            said = all(refusal.says in text for _, text in starts)
            rows.append(
                (" ".join(refusal.words), *against(figure, goal=GOAL, unit=" s"), "" if said else "OTHER WORDS")
            )
        return [
            Table("Seconds until a refusal", ("hashbench …", "figure", "goal", "reached", ""), tuple(rows)),
            _machine_table(folder),
        ]


def _machine_table(folder: Path) -> Table:
    """The time of ``hashbench env``."""
    looked = [answered(["env", *more], folder=folder)[0] for more in (["--fresh"], [])]
    rows = tuple(
        (what, *against(figure, goal=GOAL, unit=" s")) for what, figure in zip(("fresh", "known"), looked, strict=True)
    )
    return Table("Seconds of the look at this machine", ("hashbench env", "figure", "goal", "reached"), rows)


if __name__ == "__main__":
    for table in measure():
        print(table.text())
