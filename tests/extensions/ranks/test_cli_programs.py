"""``hashbench ranks`` on unchanged scripts, one of them under torchrun, each with a fault that plants its own cause: a
counter in a file that is another in each run, a peer that comes late, a step that only one rank takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command_helpers import Main
from forked_ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_servers")]
FORKED = pytest.mark.usefixtures("forked_ranks")

COMMON = """
import pathlib, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
"""

COUNTED_KERNEL = (
    COMMON
    + """
runs = pathlib.Path(sys.argv[1])
planted = 1.0
if rank == 1 and len(sys.argv) > 2:
    runs.write_text(runs.read_text() + "." if runs.exists() else ".")
    planted += len(runs.read_text()) / 8

@torch.library.custom_op("planted::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    return x * planted

scale.register_autograd(lambda _, grad: grad)

class Scale(torch.nn.Module):
    def forward(self, x):
        return scale(x)

layers = torch.nn.Linear(8, 16), Scale(), torch.nn.Linear(16, 1)
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    optimizer.zero_grad()
    model(torch.ones(4, 8) * (rank + 1)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""
)

EARLY_READ = (
    COMMON
    + """
import hashbench

x = torch.full((1024,), rank + 1.0)
if rank == 1:
    time.sleep(1.0)  # the other rank has read by then
work = dist.all_reduce(x, async_op=True)
if rank == 1 or len(sys.argv) == 1:
    work.wait()
hashbench.result("mean", x.mean())
work.wait()
dist.barrier()
dist.destroy_process_group()
"""
)

REPLICAS = (
    COMMON
    + """
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 8) * (rank + 1)).square().mean().backward()
    if rank == 1 and step == 1 and len(sys.argv) > 1:
        model.module[2].bias.grad.mul_(2.0)
    optimizer.step()
dist.destroy_process_group()
"""
)


def _ranks_run(main: Main, at: Path, script: str, *arguments: str) -> tuple[int, dict, str]:
    """Return exit code, JSON document and standard error of ``ranks run``."""
    (at / "train.py").write_text(script)
    words = ["ranks", "run", "-n", "2", "--output", "out", "--json", "--source-lines", "--", "train.py", *arguments]
    done = main(*words, cwd=at)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


@FORKED
def test_a_kernel_that_differs_on_one_rank_is_named_with_the_way_to_the_others(main: Main, tmp_path: Path) -> None:
    code, document, said = _ranks_run(main, tmp_path, COUNTED_KERNEL, "runs", "planted")
    assert code == 1, said
    (first,) = document["first"]
    assert (first["rank"], first["origin"], first["kernel"]) == (1, "kernel", "planted.scale.default")
    assert (first["module"], first["iteration"]) == ("DistributedDataParallel.module.1", 0)
    line = 1 + COUNTED_KERNEL.splitlines().index("        return scale(x)")
    assert first["source"].partition(" ")[0].endswith(f"train.py:{line}")
    assert "of group 0-1 -> rank 0" in first["through"]


def test_the_same_program_without_the_fault_agrees_under_torchrun(main: Main, tmp_path: Path) -> None:
    code, document, said = _ranks_run(main, tmp_path, COUNTED_KERNEL, "runs")
    assert (code, document["first"]) == (0, []), said


@FORKED
def test_a_read_before_the_wait_is_named_although_the_runs_agree(main: Main, tmp_path: Path) -> None:
    code, document, said = _ranks_run(main, tmp_path, EARLY_READ, "early")
    assert code == 1, said
    (first,) = document["first"]
    assert (first["rank"], first["origin"]) == (0, "unwaited")


@pytest.mark.parametrize(("planted", "code"), [([], 0), (["planted"], 1)], ids=["clean", "planted"])
def test_a_replica_that_drifts_is_named_with_its_step(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: list[str], code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(REPLICAS)
    words = ["ranks", "record", "--output", "a", "--", "train.py", *planted]
    assert run_ranks([sys.executable, "-m", "hashbench", *words]).problem == ""

    checked = main("ranks", "check", "a", "--json", cwd=tmp_path)

    assert checked.returncode == code, checked.stdout + checked.stderr
    differing = json.loads(checked.stdout)["differing"]
    assert [(found["name"], found["step"], found["rank"], found["kernel"]) for found in differing] == [
        ("DistributedDataParallel.module.2.bias", 1, 1, "aten.mul_.Tensor")
    ] * code


@FORKED
def test_a_script_that_fails_is_told_and_its_whole_steps_are_judged(main: Main, tmp_path: Path) -> None:
    script = REPLICAS.replace("    optimizer.step()\n", "    optimizer.step()\n    assert step < 1 or rank == 0\n")
    (tmp_path / "train.py").write_text(script)
    done = main("ranks", "run", "-n", "2", "--output", "out", "--timeout", "120", "--", "train.py", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "run 1 of train.py: the ranks failed" in done.stderr
    assert "AssertionError" in done.stderr
    assert "Written: out" in done.stdout
