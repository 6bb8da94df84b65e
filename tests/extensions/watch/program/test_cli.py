"""``hashbench run``: an unchanged program, run in fresh processes and compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

TRAINING = """
import random, sys, time
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
fault = int(sys.argv[1]) if len(sys.argv) > 1 else -1
for step in range(12):
    hidden = model[1](model[0](torch.randn(16, 4)))
    if step == fault:
        hidden = hidden * (1 + random.random())
    loss = model[2](hidden).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("loss", loss.item())
"""


@pytest.fixture
def judged(main, tmp_path: Path):
    """A function that runs a script, and returns the exit code and the document."""

    def judge(text: str, *words: str, flags: Sequence[str] = ()) -> tuple[int, dict[str, Any]]:
        (tmp_path / "script.py").write_text(text)
        said = main("run", "--json", *flags, "script.py", *words, cwd=tmp_path)
        assert said.returncode in (0, 1), said.stderr
        return said.returncode, json.loads(said.stdout)

    return judge


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 9], ids=["in the first look", "in a second look"])
def test_a_fault_is_named_with_its_line(judged, step: int) -> None:
    code, found = judged(TRAINING, str(step))
    assert code == 1
    assert found["divergence"]["iteration"] == step
    assert found["divergence"]["kernel"] == "aten.mul.Tensor"
    assert found["divergence"]["source"].startswith("script.py:12")
    assert (found["second_look"] is not None) == (step == 9)


@pytest.mark.slow
def test_its_clean_twin_is_equal_in_what_is_said(judged) -> None:
    code, found = judged(TRAINING)
    assert code == 0
    assert "1 printed line, 12 steps" in found["headline"]


@pytest.mark.slow
def test_a_clock_is_told_and_not_blamed(judged) -> None:
    code, found = judged("import time, torch\nprint('a')\nprint(time.time())\n")
    assert code == 0
    assert found["explained"][0]["text"]["lines"][0]["number"] == 2
    assert found["explained"][0]["shows"] == "the clock"


@pytest.mark.slow
def test_the_address_of_an_object_is_told_and_not_blamed(judged) -> None:
    script = (
        "import ctypes, os\nclass Net: pass\nkept = [Net() for _ in range(os.getpid() % 97 + 1)]\nprint(kept[-1])\n"
    )
    code, found = judged(script)
    assert code == 0
    assert found["explained"][0]["shows"] == "the address of an object"


@pytest.mark.slow
def test_an_unseeded_generator_beside_a_clock_is_a_difference(judged) -> None:
    code, found = judged("import random, time\nprint(time.time(), random.random())\n")
    assert code == 1
    assert found["headline"] == "The runs differ in printed output, line 1"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["gone.py"], "cannot run gone.py: there is no such file"),
        (["-m", "gone_module"], "cannot run the module gone_module: there is none of that name"),
        ([], "no program to run"),
        (["--output", "there", "script.py"], "there exists"),
        (["watches.py"], "watches.py uses hashbench.watch itself"),
        (["--output", "new", "--nonsense", "script.py"], "unknown flag --nonsense"),
    ],
)
def test_what_cannot_be_run_is_refused(main, tmp_path: Path, words: Sequence[str], what: str) -> None:
    (tmp_path / "script.py").write_text("print(1)")
    (tmp_path / "there").mkdir()
    (tmp_path / "watches.py").write_text("import hashbench\nwith hashbench.watch('a', model=None): pass\n")
    said = main("run", *words, cwd=tmp_path)
    assert said.returncode == 2
    assert what in said.stderr
    assert not (tmp_path / "new").exists()


def test_a_rank_is_refused(main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text("print(1)")
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = main("run", "script.py", cwd=tmp_path)
    assert said.returncode == 2
    assert "hashbench ranks run" in said.stderr
