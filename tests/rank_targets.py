"""What ranks do that tests start: each writes what it saw into the folder in which the ranks meet."""

from __future__ import annotations

import os
import signal
import time

from hashbench.core.diagnose.rank_processes import Peers


def meets(peers: Peers, number: int) -> None:
    """Add up the ranks in two groups, one after the other."""
    import torch
    import torch.distributed as dist

    told = []
    for group in range(number):
        with peers.group(number=group):
            total = torch.tensor(float(peers.rank + 1))
            dist.all_reduce(total)
            told.append(f"{dist.get_rank()}/{dist.get_world_size()}: {total.item():g} {os.environ['RANK']}")
    (peers.folder / f"told{peers.rank}").write_text("; ".join(told))


def one_dies(peers: Peers, how: str) -> None:
    """Rank 1 ends, rank 0 waits for it for ever."""
    if peers.rank == 1:
        print("the last words of rank 1", flush=True)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("no data")
    waits(peers)


def waits(peers: Peers) -> None:
    """Wait until somebody kills this rank."""
    (peers.folder / f"pid{peers.rank}").write_text(str(os.getpid()))
    time.sleep(600)


def check_a_model_that_hangs(zoo: str, folder: str, _report: int) -> None:
    """Check the model, as the worker of a sweep does; rank 1 says that it hangs in the file ``hangs``."""
    from hashbench.core.check.model import run_model
    from hashbench.core.records import ModelSpec, RunOptions

    os.environ["RANKED_ZOO_FOLDER"] = folder
    run_model(ModelSpec("ranked_zoo", "hangs", source=zoo, world_size=2), RunOptions())
