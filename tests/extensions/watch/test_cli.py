"""``hashbench watch``: two runs of one script, the first difference, and the kernel at the second look."""

from __future__ import annotations

import json
import runpy
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_helpers import Main, Said, run
from extensions.watch.loops import Plan, train
from extensions.watch.test_file import BEFORE, END, end, step, written

from hashbench.core.errors import HashbenchError
from hashbench.extensions.watch import file

SCRIPT = """
import os
from pathlib import Path

import torch
from extensions.watch.loops import race

import hashbench

runs = Path("runs.txt")
number = len(runs.read_text()) if runs.exists() else 0
runs.write_text("x" * (number + 1))


class Pooled(torch.nn.Module):
    def forward(self, x):
        return torch.ops.planted_loops.racy(x).sum(1)


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), Pooled())
optimizer = torch.optim.Adam(model.parameters())
with hashbench.watch("a", model=model, optimizer=optimizer):
    for step in range(8):
        with race(step >= 5 and number in ODD):
            model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


class Shell:
    """Follow the commands that hashbench prints, in this process: new ones would import torch for most of a minute."""

    def __init__(self, folder: Path, main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.main, self.patch = folder, main, monkeypatch

    def follow(self, command: str) -> Said | None:
        with self.patch.context() as patch:
            patch.chdir(self.folder)
            words = shlex.split(command)
            while "=" in words[0]:
                name, _, value = words.pop(0).partition("=")
                patch.setenv(name, value)
            if words[0] == "hashbench":
                return self.main(*words[1:], cwd=self.folder)
            assert words[0] == "python"
            patch.setattr("sys.orig_argv", words)
            runpy.run_path(words[1])
        return None

    def twice(self, odd: str) -> str:
        """Run a script of which the runs ``odd`` have a race from step 5 on; return the last of the next commands."""
        (self.folder / "train.py").write_text(SCRIPT.replace("ODD", odd))
        for name in ("a", "b"):
            self.follow(f"HASHBENCH_WATCH={name} python train.py")
        said = self.follow("hashbench watch diff a b")
        assert said is not None
        assert said.returncode == 1, said.stderr
        facts = "first difference: step 5 (equal until step 4)\nwhat differs:     loss\n"
        assert said.stdout.startswith(f"The runs differ from step 5 on: loss\n{facts}")
        commands = [line.strip() for line in said.stdout.partition("Next:")[2].splitlines()]
        assert len(commands) == 3
        for command in commands[:2]:
            self.follow(command)
        return commands[2]


@pytest.fixture
def shell(tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(tmp_path, main, monkeypatch)


@pytest.mark.slow
def test_the_commands_that_it_prints_name_the_kernel(shell: Shell) -> None:
    said = shell.follow(shell.twice("{1, 3}"))
    assert said is not None
    assert said.returncode == 1
    facts = dict(line.split(":", 1) for line in said.stdout.splitlines() if ": " in line)
    assert facts["trace of steps 4 to 5"].startswith(" kernel planted_loops.racy.default in Sequential.2 (forward")
    assert facts["module"].strip() == "Sequential.2"
    assert facts["source line"].strip().startswith("train.py:")
    assert "HASHBENCH_TRACE_STEP" not in said.stdout, "no further look"


@pytest.mark.slow
def test_what_does_not_come_again_names_no_kernel(shell: Shell) -> None:
    last = shell.twice("{1}")
    said = shell.follow(last)
    assert said is not None
    assert said.returncode == 0
    assert "did not reproduce in the traced steps in 1 of 1 comparison" in said.stdout
    assert "racy" not in said.stdout
    said = shell.follow(f"{last} a b")
    assert said is not None
    assert "1 of 3 runs differ from a.steps4-5 (33 %)." in said.stdout


# ---------------------------------------------------------------------------------------------------- in this process


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    train(tmp_path / "a", Plan(at=3, steps=6))
    train(tmp_path / "b", Plan(at=3, steps=6))
    train(tmp_path / "c", Plan(at=3, steps=6, fault="generator"))
    return tmp_path


@pytest.mark.parametrize("words", ["train.py --at 3 -- --rate {run}", "--at 3 train.py -- --rate {run}"])
def test_a_script_is_given_the_words_behind_the_dashes(
    tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    given: list[Sequence[str]] = []

    def resume(_script: Path, arguments: Sequence[str], *, at: int, output: Path, steps: int) -> None:
        given.append(arguments)
        raise HashbenchError(f"stopped at {at}, {steps} steps", consequence=f"no {output}")

    monkeypatch.setattr("hashbench.extensions.watch.rerun.resume", resume)
    said = main("watch", "resume", *words.split(), cwd=tmp_path)
    assert (given, said.returncode) == ([["--rate", "{run}"]], 2), said.stderr


def test_exit_codes_and_formats(runs: Path, main: Main) -> None:
    equal = main("watch", "diff", "a", "b", cwd=runs)
    assert (equal.returncode, equal.stdout) == (0, "The runs agree in steps 0 to 5\n")
    said = main("watch", "diff", "a", "c", "--json", cwd=runs)
    document = json.loads(said.stdout)
    assert said.returncode == 1
    assert (document["step"], document["differing"][0]["part"]) == (3, "generator")


@pytest.mark.parametrize("ended", ["", "killed", "MemoryError"])
def test_what_only_one_run_has_is_no_agreement(tmp_path: Path, main: Main, ended: str) -> None:
    steps = [step(number, batch=["x"]) for number in range(3)]
    written(tmp_path / "a", *BEFORE, *steps, END)
    other = written(tmp_path / "b", *BEFORE, *steps[:2])
    if ended != "killed":
        lines = other.read_text().splitlines(keepends=True)
        other.write_text("".join([*lines, end(lines, ended=ended)]))
    said = main("watch", "diff", "a", "b", "a", "b", cwd=tmp_path)
    assert said.returncode == 2
    assert said.stdout.startswith("The runs agree in steps 0 to 1; not all was compared\n")
    assert "a has steps 0 to 2, b steps 0 to 1; compared: steps 0 to 1." in said.stdout
    assert "\na: agrees with the first\nb: agrees with the first in what both have\n0 of 3 runs differ" in said.stdout
    document = json.loads(main("watch", "diff", "a", "b", "--json", cwd=tmp_path).stdout)
    assert (document["equal"], document["differs"]) == (False, False)
    changed = step(2, batch=["y"])
    written(tmp_path / "c", *BEFORE, *steps[:2], changed, END)
    written(tmp_path / "d", *BEFORE, *steps, step(3, batch=["x"]), END)
    assert main("watch", "diff", "c", "d", cwd=tmp_path).returncode == 1


def test_the_page_is_written(runs: Path, main: Main) -> None:
    said = main("watch", "diff", "a", "c", "--html", "page.html", cwd=runs)
    assert said.returncode == 1
    assert "The runs differ from step 3 on: generator" in (runs / "page.html").read_text(encoding="utf-8")
    failed = main("watch", "diff", "a", "c", "--html", "a/rank0.jsonl/page.html", cwd=runs)
    assert failed.returncode == 2


def test_resume_of_two_recordings(runs: Path, main: Main) -> None:
    said = main("watch", "resume", "a", "c", "--at", "0", cwd=runs)
    assert said.returncode == 1
    assert said.stdout.startswith("Everything recorded was restored at step 0; the runs differ from step 3 on\n")
    assert said.stdout.endswith("\nNext: hashbench watch diff a c\n")
    assert main("watch", "resume", "a", "b", "--at", "0", cwd=runs).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("diff", "a", "none"), "holds no recording of a training loop"),
        (("diff", "a", "other"), "has schema version 9, this hashbench reads 2"),
        (("diff", "a", "changed"), "line 2 was changed"),
        (("diff", "a", "elsewhere"), "their digests are different functions"),
        (("diff", "a", "stranger"), "they have no parameter in common"),
        (("diff", "a", "later"), "have no step in common"),
        (("diff", "a", "rank"), "have no rank in common"),
        (("resume", "a", "b"), "has no start step"),
        (("resume", "a"), "needs the folders of two recordings, got 1"),
        (("resume", "train.py"), "needs --at N"),
    ],
)
def test_what_cannot_be_compared_is_one_line_and_2(
    runs: Path, main: Main, arguments: tuple[str, ...], words: str
) -> None:
    (runs / "none").mkdir()
    written(runs / "other", END, schema=9)
    written(runs / "changed", step(0, batch=["x"]).replace("x", "y"), END)
    written(runs / "elsewhere", *BEFORE, step(0, batch=["x"]), END, device="cuda")
    written(runs / "stranger", *BEFORE, step(0, batch=["x"]), END)
    before = file.line("start", {"step": 89, "complete": True})
    names = ["first.weight", "first.bias"]
    written(runs / "later", before, BEFORE[1], step(90, batch=["x"]), END, parameter=names)
    written(runs / "rank", END, name="rank5.jsonl")
    said = main("watch", *arguments, cwd=runs)
    assert said.returncode == 2
    assert words in said.stderr
    assert len(said.stderr.splitlines()) == 1


def test_without_a_command_the_help_is_shown(tmp_path: Path, main: Main) -> None:
    assert main("watch", cwd=tmp_path).returncode == 2


@pytest.mark.slow
def test_diff_does_not_import_torch(runs: Path) -> None:
    code = (
        "import sys; from hashbench.cli import main; main(['watch', 'diff', 'a', 'c']); print('torch' in sys.modules)"
    )
    done = run(cwd=runs, code=code)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
