"""Contributions to a collective: saved as plain values, and repeated by a script that needs torch alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks

from hashbench import HashDebugTrace
from hashbench.core.diagnose.rank_processes import started
from hashbench.extensions.ranks.contributions import ContributionWatcher, counts_in, save, write_script


def reduced(content: torch.Tensor) -> dict[str, Any]:
    """The call of an ``all_reduce``, as a watcher saves it."""
    return {"op": "c10d.allreduce_.default", "arguments": [[content], {"group": ""}, {"reduce": "SUM"}, None, False]}


def repro(folder: Path, *calls: dict[str, Any]) -> Path:
    """Write the calls of the members of a group and their script."""
    folder.mkdir()
    for member, call in enumerate(calls):
        save(call, folder, member=member)
    write_script(folder, members=len(calls), backend="gloo", claim="A collective.")
    return folder


def differing(folder: Path, meeting: Path, *, members: int) -> int | None:
    """Run the script on ranks of its own; return what it counts."""
    meeting.mkdir()
    with started(
        "hashbench.extensions.ranks.contributions:repeat", (folder, {}), world_size=members, folder=meeting
    ) as ranks:
        ranks.wait()
    return counts_in(meeting)


def test_a_call_is_saved_with_its_group_and_its_operation_by_name() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        content = torch.tensor([1.0, 2.0])
        watcher, other = ContributionWatcher("forward//c10d.allreduce_.default#1"), ContributionWatcher("none")
        for one in (watcher, other):
            with HashDebugTrace(watcher=one):
                dist.all_reduce(torch.ones(2))
                dist.all_reduce(content, dist.ReduceOp.MAX)
    finally:
        dist.destroy_process_group()

    assert watcher.call is not None
    (given,), *rest = watcher.call["arguments"]
    assert given.tolist() == [1.0, 2.0]
    assert given.data_ptr() != content.data_ptr()
    assert (watcher.call["op"], rest[:2]) == ("c10d.allreduce_.default", [{"group": ""}, {"reduce": "MAX"}])
    assert other.call is None


@pytest.mark.slow
@pytest.mark.usefixtures("shared_servers")
def test_a_collective_that_gives_the_same_again_and_one_that_does_not(tmp_path: Path) -> None:
    equal = repro(tmp_path / "equal", *(reduced(torch.rand(64)) for _ in range(2)))
    drawn = {"op": "aten.rand_like.default", "arguments": [torch.ones(4)]}
    odd = repro(tmp_path / "odd", drawn, drawn)

    assert differing(equal, tmp_path / "first", members=2) == 0
    assert differing(odd, tmp_path / "second", members=2) == 20


@pytest.mark.slow
@pytest.mark.usefixtures("shared_servers")
def test_the_script_runs_as_under_torchrun_and_names_torch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = repro(tmp_path / "repro", *(reduced(torch.rand(64)) for _ in range(2)))
    monkeypatch.chdir(folder)

    end = run_ranks([sys.executable, "repro.py"])

    printed = capfd.readouterr().err
    assert (end.problem, printed) == ("", "0 of 20 repetitions differ from the first\n")
    assert "import hashbench" not in (folder / "repro.py").read_text()
