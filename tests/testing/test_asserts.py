"""The checks as plain functions: in this process, in unittest, in a script, and in a session that has no file."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hashbench.testing
from hashbench.integrations.pytest import plugin
from hashbench.testing import (
    CheckFailedError,
    assert_batch_invariant,
    assert_compiled_equals_eager,
    assert_kernels_unchanged,
    assert_ranks_deterministic,
    assert_runs_equal,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "testing.md"

_CALLS = itertools.count(1)


def counted(x: torch.Tensor) -> torch.Tensor:
    return x * next(_CALLS)


def words_of(check: Callable[[], Any]) -> str:
    """What a check says when it fails, on one line."""
    with pytest.raises(CheckFailedError) as failed:
        check()
    return " ".join(str(failed.value).split())


def run_python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=environment, timeout=300)


# ------------------------------------------------------------------------------------------------- in this process


def test_every_fixture_is_a_function() -> None:
    fixtures = {name for name, value in vars(plugin).items() if type(value).__name__ == "FixtureFunctionDefinition"}
    functions = {name for name in hashbench.testing.__all__ if name.startswith("assert")}
    assert {name for name in fixtures if name.startswith("assert")} == functions


@pytest.mark.slow
def test_equal_runs_return_the_first_value() -> None:
    assert assert_runs_equal(torch.add, torch.ones(2), 1, runs=2).tolist() == [2, 2]


@pytest.mark.slow
def test_unequal_runs_are_an_assertion_error_with_its_report(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as failed:
        assert_runs_equal(counted, torch.ones(3), output=tmp_path / "kept", diagnose=False)
    (finding,) = failed.value.findings
    assert str(failed.value) == str(finding)
    assert "counted: runs differ in output" in finding.headline
    traces = re.findall(r"\S+\.log\.gz", finding.next[-1])
    assert len(traces) == 2
    assert all(Path(trace).is_file() for trace in traces)


@pytest.mark.slow
def test_an_exception_of_the_function_is_its_own() -> None:
    def raises() -> None:
        raise AssertionError("mine")

    with pytest.raises(AssertionError, match="mine") as failed:
        assert_runs_equal(raises)
    assert type(failed.value) is AssertionError


class Coupled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.sum(dim=0, keepdim=True)


@pytest.mark.slow
def test_items_that_depend_on_their_batch_fail() -> None:
    x = torch.arange(16.0).reshape(4, 4)
    assert assert_batch_invariant(torch.nn.ReLU(), x) is None
    said = words_of(lambda: assert_batch_invariant(Coupled(), x, diagnose=False))
    assert said.startswith("Coupled: ")
    assert "aten.sum.dim_IntList" in said


def test_kernels_are_recorded_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = torch.ones(2, 3)
    missing = words_of(lambda: assert_kernels_unchanged(torch.exp, x, "base.json", name="it"))
    assert missing == (
        "it: there is no base.json, so nothing was compared. Record it: `assert_kernels_unchanged(…, record=True)`."
    )
    assert assert_kernels_unchanged(torch.exp, x, "base.json", name="it", record=True) is None
    assert (tmp_path / "base.json").is_file()
    assert assert_kernels_unchanged(torch.exp, x, "base.json", name="it") is None
    said = words_of(lambda: assert_kernels_unchanged(torch.tan, x, "base.json", name="it", output="kept"))
    assert "not recorded: aten.tan.default" in said
    assert "each kernel: kept/kernels.txt" in said
    assert said.endswith("Next: assert_kernels_unchanged(…, record=True)")


@pytest.mark.slow
@pytest.mark.xdist_group("inductor")
def test_what_the_compiler_makes_wrong_fails() -> None:
    x = torch.arange(6.0)
    assert assert_compiled_equals_eager(torch.sin, x, backend="aot_eager") is None

    def depends(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.compiler.is_compiling() else x

    assert "depends" in words_of(lambda: assert_compiled_equals_eager(depends, x, backend="eager", diagnose=False))


class OnRankOne(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(_CALLS) if dist.get_rank() == 1 else x


def planted() -> Any:
    return torch.nn.Sequential(OnRankOne(), torch.nn.Linear(8, 4)), (torch.ones(2, 8),)


def clean() -> Any:
    return torch.nn.Linear(8, 4), (torch.ones(2, 8),)


@pytest.mark.slow
@pytest.mark.usefixtures("shared_servers")
def test_ranks_that_differ_are_named() -> None:
    assert assert_ranks_deterministic(clean, training=False) is None
    said = words_of(lambda: assert_ranks_deterministic(planted, training=False, diagnose=False))
    assert "aten.mul.Tensor (on rank 1 of 2" in said


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (lambda: assert_runs_equal(torch.ones(1)), "assert_runs_equal needs a function to run, not a Tensor: pass it"),
        (lambda: assert_runs_equal(lambda seed: seed, seed=3), "seed= could be meant for the function too"),
        (lambda: assert_batch_invariant(torch.sin, [torch.ones(2)], ops=True), "has no option ops; it has sizes, inv"),
        (lambda: assert_batch_invariant(torch.sin, [torch.ones(2)], invariance=()), "invariance must not be empty"),
        (lambda: assert_compiled_equals_eager(torch.sin, [], tolerance=-1), "tolerance must be a number >= 0, got -1"),
        (lambda: assert_ranks_deterministic(clean, ranks=0), "ranks must be an int >= 1, got 0"),
        (lambda: assert_kernels_unchanged(torch.sin, [], "x.json", threads=0), "threads must be an int >= 1, got 0"),
    ],
)
def test_a_wrong_request_fails_in_words(check: Callable[[], Any], words: str) -> None:
    assert words in words_of(check)


# ---------------------------------------------------------------------------------------- where nothing has a file


SESSION = """
import itertools, secrets
import torch
from hashbench.testing import assert_ranks_deterministic, assert_runs_equal

@torch.library.custom_op("typed::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + secrets.randbits(20)

def typed(x):
    return noisy(x.cos()).sin()

def factory():
    return torch.nn.Linear(2, 2), (torch.ones(1, 2),)
"""


def in_session(code: str) -> str:
    """What a check says of a function that was typed into IPython, on one line."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SESSION, "<ipython-input-1-abc>", "exec"), space)
    return words_of(lambda: eval(code, space))


@pytest.mark.slow
@pytest.mark.usefixtures("shared_servers")
def test_a_function_without_a_file_has_its_line_and_an_op_without_one_is_not_looked_for() -> None:
    said = in_session("assert_runs_equal(typed, torch.ones(3), replays=3)")
    assert "typed.noisy.default (forward, op 3 of 4, at <ipython-input-1-abc>:11 typed)" in said
    assert "cause: outside_value, proven: " in said
    assert "repro: not run: no file defines typed::noisy, as in an interactive session; put it into one and" in said


@pytest.mark.slow
def test_ranks_cannot_import_what_was_typed() -> None:
    said = in_session("assert_ranks_deterministic(factory)")
    assert said == (
        "factory: the ranks cannot import factory: each calls it in a process of its own, and it was typed into a "
        "session that has no file. Make it a function at the top of a module, and import it."
    )


COMMAND = """
import sys, itertools, torch
from hashbench.testing import assert_runs_equal
assert "torch" in sys.modules and "pytest" not in sys.modules
count = itertools.count(1)
print(assert_runs_equal(torch.neg, torch.ones(1)).item())
assert_runs_equal(lambda x: x * next(count), torch.ones(2), diagnose=False, output="kept")
"""


@pytest.mark.slow
def test_a_command_without_a_file_says_which_kernel(tmp_path: Path) -> None:
    done = run_python("-c", COMMAND, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "-1.0\n")
    said = " ".join(done.stderr.split())
    assert "hashbench.testing.CheckFailedError: <lambda>: runs differ in output" in said
    assert "aten.mul.Tensor (forward, op 1 of 1" in said


SCRIPT = f"""
open("started", "a").write("x")
{SESSION}
for check in (lambda: assert_ranks_deterministic(factory), lambda: assert_runs_equal(typed, torch.ones(3), replays=3)):
    try:
        check()
    except AssertionError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_script_that_checks_itself_runs_once(tmp_path: Path) -> None:
    """Neither its ranks nor its repros load it again: they would check it again, without end."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    done = run_python("script.py", cwd=tmp_path)
    said = " ".join(done.stdout.split())
    assert "the ranks cannot import factory: each calls it in a process of its own, which would run the whole" in said
    assert "repro: not run: script.py defines typed::noisy, and is the running program; put it into another" in said
    assert (tmp_path / "started").read_text(encoding="utf-8") == "x"


def test_nothing_of_pytest_or_torch_is_imported() -> None:
    code = "import hashbench.testing, sys; print({'torch', 'numpy', 'pytest', '_pytest'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    files = Path(inspect.getfile(hashbench.testing)).parent.glob("*.py")
    assert not [file for file in files if re.search(r"^\s*(import|from) _?pytest", file.read_text(), re.MULTILINE)]


# ------------------------------------------------------------------------------------------------- documentation


def _blocks() -> tuple[str, str]:
    page = PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(import unittest.*?)^```", page, re.MULTILINE | re.DOTALL)
    (shown,) = re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return code, shown


def _without_numbers(text: str) -> str:
    """A text on one line, without what differs between runs and machines."""
    text = re.sub(r'File "[^"]*/', 'File "', re.sub(r"generator state [0-9a-f]{16}", "generator state", text))
    return " ".join(re.sub(r"\d[\d.]*|, ULP", "", text).split())


@pytest.mark.slow
def test_the_test_case_of_the_page_fails_as_shown(tmp_path: Path) -> None:
    code, shown = _blocks()
    (tmp_path / "test_noise.py").write_text(code, encoding="utf-8")
    done = run_python("-m", "unittest", "test_noise", cwd=tmp_path)
    assert done.returncode == 1
    assert "FAILED (failures=1)" in done.stderr
    assert _without_numbers(shown) in _without_numbers(done.stderr)


@pytest.mark.slow
def test_pytest_runs_the_test_case_of_the_page(tmp_path: Path) -> None:
    code, _ = _blocks()
    (tmp_path / "test_noise.py").write_text(code, encoding="utf-8")
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_noise.py", cwd=tmp_path)
    assert "1 failed, 2 passed" in done.stdout
    assert "CheckFailedError: noisy: runs differ in output" in done.stdout
