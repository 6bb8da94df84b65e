"""``hashbench replay``: experiments on the call of a repro, in a child process."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from command_helpers import Main, run
from repro_helpers import adding_rows, aten, captured, said_of

from hashbench.core.diagnose.calls import ops
from hashbench.core.diagnose.repro import write_repro


def test_folder_of_repros_prints_commands_to_replay(main: Main, tmp_path: Path) -> None:
    folder = tmp_path
    for name in ("small.inference.a", "small.inference.b c"):
        (folder / "night" / "small" / "repro" / name).mkdir(parents=True)
        (folder / "night" / "small" / "repro" / name / "call.json").write_text("{}")
    for asked in ("night", "night/small", "night/small/repro"):
        done = main("replay", asked, cwd=folder)
        assert done.returncode == 2
        assert [shlex.split(line) for line in done.stdout.splitlines()] == [
            ["hashbench", "replay", f"night/small/repro/small.inference.{name}"] for name in ("a", "b c")
        ]
        assert done.stderr.startswith(f"hashbench: {asked} is not a repro, but has 2 inside: nothing was replayed.")


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "words"), [((), "replays differ\ncause: "), (("--json",), '"reproduced": true')])
def test_a_call_that_differs_exits_with_1(flags: tuple[str, ...], words: str, main: Main, tmp_path: Path) -> None:
    write_repro(tmp_path / "racing", adding_rows(), said_of())
    done = main("replay", "racing", "--replays", "20", "--budget", "4", *flags, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert words in done.stdout


@pytest.mark.slow
def test_replay_of_a_call_that_agrees_exits_with_0(main: Main, tmp_path: Path) -> None:
    write_repro(tmp_path / "steady", captured(aten.sort.default, torch.randn(100)), said_of())
    done = main("replay", "steady", "--replays", "2", "--budget", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "0 of 2 " in done.stdout


@pytest.mark.slow
def test_replay_of_a_custom_op_asks_for_import(tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text(
        "import torch\n"
        "@torch.library.custom_op('hashbench_cli::twice', mutates_args=())\n"
        "def twice(x: torch.Tensor) -> torch.Tensor:\n"
        "    return x * 2\n"
    )
    ops.load(str(tmp_path / "ops.py"))
    write_repro(tmp_path / "custom", captured(torch.ops.hashbench_cli.twice.default, torch.ones(2)), said_of())
    command = ("replay", "custom", "--replays", "2", "--budget", "5")
    done = run(*command, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "the op hashbench_cli.twice.default does not exist: nothing was run" in done.stderr
    assert "--import FILE" in done.stderr
    assert run(*command, "--import", "ops.py", cwd=tmp_path).returncode == 0
