"""The command line in a process of its own. The fixture ``main`` calls it in this one, in a hundredth of the time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, Protocol

import hashbench

CHECKOUT = Path(hashbench.__file__).parents[1]

ZOO = """
def drifting():
    import torch

    class Drifts(torch.nn.Module):
        runs = 0

        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

        def __deepcopy__(self, memo):
            self.runs += 1
            return self

        def forward(self, x):
            return self.second(self.first(x) + self.runs)

    return Drifts(), torch.ones(1, 2)

def steady():
    import torch

    return torch.nn.Linear(2, 2), torch.ones(1, 2)

MODELS = {"drifting": drifting, "steady": steady}
"""
"""A file with two models, one of which differs from run to run. It imports torch when a model is built, so that listing
its names takes no time."""


class Said(NamedTuple):
    """What a command ended with and printed."""

    returncode: int
    stdout: str
    stderr: str


class Main(Protocol):
    """The fixture ``main``: ``hashbench …`` in this process, in the folder ``cwd``."""

    def __call__(self, *arguments: object, cwd: Path) -> Said: ...


def run(*arguments: object, cwd: Path, path: Path | None = None, code: str = "") -> subprocess.CompletedProcess[str]:
    """``python -m hashbench …`` in ``cwd``; ``path`` comes first on the module path; ``code`` runs in its place."""
    command = [sys.executable, *(("-c", code) if code else ("-m", "hashbench")), *map(str, arguments)]
    paths = os.pathsep.join(map(str, [*([path] if path else []), CHECKOUT]))
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900, check=False)
