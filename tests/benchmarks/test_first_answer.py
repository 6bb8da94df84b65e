"""What can be refused at once is refused before torch is imported and before any process is started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import hashbench

pytestmark = pytest.mark.skipif(
    not (Path(hashbench.__file__).parents[1] / "benchmarks").exists(),
    reason="hashbench is installed, there are no benchmarks",
)

ANSWERS = """
import contextlib, io, json, subprocess, sys
from hashbench.cli import main

class Refused(Exception):
    pass

class NoTorch:
    def find_spec(self, name, *_):
        if name == "torch":
            raise Refused("torch is imported")

def no_process(*_, **__):
    raise Refused("a process is started")

sys.meta_path.insert(0, NoTorch())
subprocess.Popen.__init__ = no_process
answers = []
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = main(words)
    answers.append((code, said.getvalue()))
print(json.dumps(answers))
"""


def answers(folder: Path, *requests: tuple[str, ...]) -> list[tuple[int, str]]:
    from benchmarks.first_answer import prepare

    prepare(folder)
    command = [sys.executable, "-c", ANSWERS, json.dumps(requests)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [(code, said) for code, said in json.loads(done.stdout)]


def test_refusals_come_before_torch_and_before_any_process(tmp_path: Path) -> None:
    from benchmarks.first_answer import REFUSALS

    cheap = [refusal for refusal in REFUSALS if not refusal.imports]
    for refusal, (code, said) in zip(cheap, answers(tmp_path, *(each.words for each in cheap)), strict=True):
        assert code == 2, (refusal.words, said)
        assert refusal.says in said, (refusal.words, said)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "used", "zoo.py"]


def test_what_needs_torch_is_seen_to_need_it(tmp_path: Path) -> None:
    [(code, said)] = answers(tmp_path, ("sweep", "--suite", "zoo.py", "--training", "--output", "new"))
    assert code == 70
    assert "a process is started" in said
