"""Ranks that are forks of a Python which has loaded torch: ``torchrun`` and each of its ranks import it for seconds.

The launcher itself is tested in ``extensions/ranks/test_launch.py``, a command of ours under it in
``extensions/ranks/test_cli_programs.py``.
"""

from __future__ import annotations

import runpy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hashbench.core.diagnose.rank_processes import Peers, started
from hashbench.core.processes import variables
from hashbench.extensions.ranks.launch import RanksEnd


def run_ranks(
    command: Sequence[str | Path], *, ranks: int = 2, seconds: float | None = None, folder: Path | None = None
) -> RanksEnd:
    """Do what :func:`hashbench.extensions.ranks.launch.run_ranks` does, but for the time limit."""
    from torch.distributed import TCPStore

    del seconds, folder
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # of the launcher, as torchrun's is
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with tempfile.TemporaryDirectory() as temporary, variables(meeting):
        words = tuple(map(str, command))
        with started("forked_ranks:run_command", words, world_size=ranks, folder=Path(temporary)) as processes:
            ends = processes.wait()
        for end in ends:
            sys.stderr.write(end.log.read_text() if end.log.exists() else "")
    return RanksEnd("the ranks failed (exit code 1 of torchrun)" if any(end.status for end in ends) else "")


def run_command(_peers: Peers, _python: str, *words: str) -> None:
    """Run ``-c CODE …``, ``-m MODULE …`` or ``SCRIPT …`` in this process as a new Python would."""
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, "" if words[0].startswith("-") else str(Path(words[0]).parent))
    match words:
        case ["-c", code, *rest]:
            sys.argv[:] = ["-c", *rest]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case ["-m", module, *rest]:
            sys.argv[:] = [module, *rest]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *_]:
            sys.argv[:] = words
            runpy.run_path(script, run_name="__main__")
