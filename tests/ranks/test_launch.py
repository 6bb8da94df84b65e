"""Ranks started on this machine: what each is told, how they end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hashbench.ranks import launch
from hashbench.ranks.launch import run_ranks

pytestmark = pytest.mark.slow

_TELL = """
import json, os, pathlib, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "OMP_NUM_THREADS")
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps([os.environ.get(name) for name in names]))
print("said by", os.environ["RANK"])
"""


def test_each_rank_runs_the_command_with_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert run_ranks([sys.executable, "-c", _TELL, str(tmp_path)], ranks=2) == ""
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert [one[:3] for one in told] == [["0", "2", "0"], ["1", "2", "1"]]
    assert told[0][3] == told[1][3]
    assert {one[4] for one in told} == {"1"}


def test_what_ranks_print_goes_to_standard_error(tmp_path: Path) -> None:
    code = (
        "import sys; from hashbench.ranks.launch import run_ranks; "
        "print(run_ranks([sys.executable, '-c', sys.argv[1], sys.argv[2]], ranks=1))"
    )
    done = subprocess.run([sys.executable, "-c", code, _TELL, tmp_path], capture_output=True, text=True, check=False)
    assert done.stdout == "\n"
    assert "said by 0" in done.stderr


def test_a_rank_that_fails_is_told() -> None:
    code = "import os, sys; sys.exit(3 if os.environ['RANK'] == '1' else 0)"
    assert run_ranks([sys.executable, "-c", code], ranks=2).startswith("the ranks failed (exit code 1 of torchrun")


def test_ranks_that_hang_are_ended() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    others = set(psutil.Process().children(recursive=True))  # fork servers of other tests
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "TERMINATION_SECONDS", 0.5)
        ended = run_ranks([sys.executable, "-c", code], ranks=1, seconds=10.0)
    assert ended == "the ranks were ended after 10 s, the time limit"
    assert set(psutil.Process().children(recursive=True)) <= others
