"""``hashbench ranks``: the call of a kernel that differs, or what ranks give to a collective, is captured."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from command_helpers import Main
from forked_ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_ranks")]

OPS = """
import os
import torch

@torch.library.custom_op("planted::drawn", mutates_args=())
def drawn(x: torch.Tensor) -> torch.Tensor:
    return x + int.from_bytes(os.urandom(6), "little") * 2.0**-48
"""

TRAINING = """
import sys
import torch
import torch.distributed as dist
from planted_ops import drawn

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(4, 4)
with torch.no_grad():
    model.weight.fill_(0.5)
    model.bias.fill_(0.25)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    optimizer.zero_grad()
    x = torch.full((3, 4), rank + 1.0)
    if rank == 1 and step == 1 and len(sys.argv) > 1:
        x = drawn(x)
    model(x).square().sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
dist.destroy_process_group()
"""

REDUCED = "forward.1//c10d.allreduce_.default#0"


AGREE = "0 of 20 repetitions differ from the first\n"


@pytest.fixture(autouse=True)
def _in_the_folder_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planted_ops.py").write_text(OPS)
    (tmp_path / "train.py").write_text(TRAINING)


def printed_by(*words: str, ranks: int, capfd: pytest.CaptureFixture[str]) -> tuple[bool, str]:
    """Return whether ranks that run a script, or ``-m`` and a module, ended well, and what they printed."""
    capfd.readouterr()
    end = run_ranks([sys.executable, *words], ranks=ranks)
    return not end.problem, capfd.readouterr().err


def record(*words: str, capfd: pytest.CaptureFixture[str]) -> tuple[bool, str]:
    """Record once, as torchrun is used."""
    return printed_by("-m", "hashbench", "ranks", "record", "--output", "a", *words, ranks=2, capfd=capfd)


def repeated(torchrun: str, capfd: pytest.CaptureFixture[str]) -> str:
    """Return what is printed by the command that a verdict gives for a collective."""
    launcher, flag, ranks, script = shlex.split(torchrun)
    assert (launcher, flag) == ("torchrun", "--nproc-per-node")
    well, printed = printed_by(script, ranks=int(ranks), capfd=capfd)
    assert well, printed
    return printed


def test_a_kernel_that_differs_on_one_rank_is_captured_there_and_its_repro_differs(
    main: Main, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done = main("ranks", "run", "--output", "out", "--", "train.py", "planted", cwd=tmp_path)

    assert done.returncode == 1, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("repro:"))
    words = line.partition(":")[2].strip()
    command = done.stdout.partition("\nNext: ")[2].splitlines()[0]
    assert re.fullmatch(r"(\d+) of \1 replays differ \(outside_value, proven\)", words), done.stdout
    assert command == "hashbench replay --import planted_ops.py out/repro"
    assert sorted(path.name for path in (tmp_path / "out" / "repro").iterdir()) == [
        "REPORT.md",
        "call.json",
        "repro.py",
        "tensors.pt",
    ]
    assert "on rank 1" in (tmp_path / "out" / "repro" / "REPORT.md").read_text()
    well, printed = printed_by("out/repro/repro.py", "planted_ops.py", ranks=1, capfd=capfd)
    assert (well, "calls differ" in printed) == (False, True), printed
    again = main(*shlex.split(command)[1:], "--budget", "5", cwd=tmp_path)
    assert again.returncode == 1, again.stdout + again.stderr
    assert "planted.drawn" in again.stdout


def test_runs_that_agree_are_not_made_a_third_time(main: Main, tmp_path: Path) -> None:
    done = main("ranks", "run", "--output", "out", "--json", "--", "train.py", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "repro" not in json.loads(done.stdout)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["first", "second"]


def test_what_each_rank_gives_to_a_collective_is_saved_and_repeated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    well, printed = record("--capture", REDUCED, "--", "train.py", capfd=capfd)

    assert well, printed
    assert sorted(path.name for path in (tmp_path / "a" / "repro").iterdir()) == ["rank0.pt", "rank1.pt", "repro.py"]
    command = "torchrun --nproc-per-node 2 a/repro/repro.py"
    assert f"hashbench: rank 1, {REDUCED}: saved its contribution; {command}" in printed
    assert repeated(command, capfd) == AGREE


def test_what_cannot_be_captured_is_said_in_a_line_and_the_program_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    well, printed = record("--capture", "forward/absent#0@1", "--", "train.py", capfd=capfd)

    assert well, printed
    said = [line for line in printed.splitlines() if line.startswith("hashbench:")]
    assert said == ["hashbench: rank 1, forward/absent#0: not captured: the call was not made"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "rank0.log.gz",
        "rank0.stdout.txt",
        "rank1.capture.json",
        "rank1.log.gz",
        "rank1.stdout.txt",
    ]


OVERWRITTEN = """
import os
import numpy
import torch
import torch.distributed as dist
import hashbench

dist.init_process_group("gloo")
x = torch.full((4,), dist.get_rank() + 1.0)
work = dist.all_reduce(x, async_op=True)
work.wait()
if dist.get_rank() == 1:
    x.numpy()[:] = int.from_bytes(os.urandom(3), "little")
hashbench.result("sum", x.sum())
dist.destroy_process_group()
"""


def test_a_collective_that_is_to_blame_is_repeated_by_ranks_of_its_own(
    main: Main, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(OVERWRITTEN)

    done = main("ranks", "run", "--output", "out", "--json", "--", "train.py", cwd=tmp_path)

    document = json.loads(done.stdout)
    assert document["first"][0]["origin"] == "collective", done.stderr
    assert document["repro"] == "out/repro"
    assert document["reproduced"] == "0 of 20 repetitions differ"
    assert repeated(document["repeat_with"], capfd) == AGREE
