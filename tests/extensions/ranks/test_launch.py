"""Ranks started on this machine: what each is told, how they end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import pytest

from hashbench.core.errors import HashbenchError
from hashbench.core.run.script import refuse_missing
from hashbench.extensions.ranks import launch
from hashbench.extensions.ranks.launch import run_ranks

_TELL = """
import json, os, pathlib, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "OMP_NUM_THREADS")
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps([os.environ.get(name) for name in names]))
print("said by", os.environ["RANK"], flush=True)
while len(list(pathlib.Path(sys.argv[1]).iterdir())) < 2:
    time.sleep(0.01)
sys.exit(3 if os.environ["RANK"] == "1" else 0)
"""


_HANGS = """
import signal, time
import torch
import torch.distributed as dist
signal.signal(signal.SIGTERM, signal.SIG_IGN)
dist.init_process_group("gloo")
def reduced(last):
    x = torch.ones(2)
    if last and dist.get_rank() == 1:
        time.sleep(600)
    else:
        dist.all_reduce(x)
reduced(False)
reduced(True)
"""


@pytest.mark.slow
def test_each_rank_runs_the_command_with_its_number_and_one_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    end = run_ranks([sys.executable, "-c", _TELL, str(tmp_path)], ranks=2)
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert [one[:3] for one in told] == [["0", "2", "0"], ["1", "2", "1"]]
    assert told[0][3] == told[1][3]
    assert {one[4] for one in told} == {"1"}
    assert end.problem.startswith("the ranks failed (exit code 1 of torchrun")
    printed = capfd.readouterr()
    assert printed.out == ""
    assert {"said by 0", "said by 1"} <= set(printed.err.splitlines())
    assert "Setting OMP_NUM_THREADS" not in printed.err  # as torchrun does where it is not set


@pytest.mark.slow
def test_ranks_that_hang_are_ended_and_say_where_they_are(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(_HANGS)
    code = (
        "import sys; from hashbench.extensions.ranks.record import run_script; run_script(sys.argv[1], sys.argv[2], [])"
    )
    others = set(psutil.Process().children(recursive=True))  # fork servers of other tests
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "TERMINATION_SECONDS", 0.5)
        patch.setattr(launch, "NOTE_SECONDS", 60.0)
        folder = tmp_path / "run"
        command = [sys.executable, "-c", code, str(folder), str(script)]
        ended = run_ranks(command, ranks=2, seconds=20.0, folder=folder)
    assert ended.problem == "the ranks were ended after 20 s, the time limit"
    assert ended.waiting == (
        "rank 0 waits in all_reduce #2 of group 0-1 (hangs.py:12 reduced)",
        "rank 1 waits in no collective (hangs.py:10 reduced); its last one is all_reduce #1 of group 0-1",
    )
    assert set(psutil.Process().children(recursive=True)) <= others


@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
def test_what_is_not_there_is_refused_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, module: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("program", "there"):
        (tmp_path / folder).mkdir()
    (tmp_path / "there" / "__main__.py").write_text("raise RuntimeError('nobody runs it')")
    before = list(sys.path)
    refuse_missing("there", module=module)
    with pytest.raises(HashbenchError, match="cannot run"):
        refuse_missing("not_there.main" if module else "not_there.py", module=module)
    assert sys.path == before
