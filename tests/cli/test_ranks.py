"""``hashbench ranks``: two recorded runs, one recorded run, and what is refused. ``test_ranks_programs.py`` records."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from command_helpers import Main

from hashbench.cli.ranks import steps_of
from hashbench.ranks.step_file import rank_path
from tests.ranks.rank_traces import rank_trace, traces, write


def test_runs_that_agree_exit_with_0(main: Main, tmp_path: Path) -> None:
    write(tmp_path / "a", traces(3))
    write(tmp_path / "b", traces(3))
    done = main("ranks", "diff", "a", "b", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "agree" in done.stdout


def test_the_rank_and_kernel_of_runs_that_differ_are_named(main: Main, tmp_path: Path) -> None:
    write(tmp_path / "a", traces(3))
    write(tmp_path / "b", traces(3, guilty=2, run=1))
    done = main("ranks", "diff", "a", "b", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "rank 2" in done.stdout
    assert "aten.mul.Tensor" in done.stdout
    assert len(done.stdout.splitlines()) <= 10


def test_json_has_rank_kernel_and_path(main: Main, tmp_path: Path) -> None:
    write(tmp_path / "a", traces(2))
    write(tmp_path / "b", traces(2, guilty=1, run=1))
    done = main("ranks", "diff", "a", "b", "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    (first,) = json.loads(done.stdout)["first"]
    known = {name: first[name] for name in ("rank", "origin", "kernel", "module", "iteration", "missing")}
    assert known == {
        "rank": 1,
        "origin": "kernel",
        "kernel": "aten.mul.Tensor",
        "module": "Net",
        "iteration": 1,
        "missing": [],
    }
    assert "rank 0" in first["through"]


def test_json_names_collectives_as_the_flight_recorder_does(main: Main, tmp_path: Path) -> None:
    write(tmp_path / "a", traces(3))
    write(tmp_path / "b", traces(3, guilty=1, run=1))
    (first,) = json.loads(main("ranks", "diff", "a", "b", "--json", cwd=tmp_path).stdout)["first"]
    assert first["hops"] == [
        {
            "rank": 1,
            "ranks": [0, 2],
            "collective": "all_reduce",
            "process_group": [0, 1, 2],
            "is_p2p": False,
            "collective_seq_id": 2,
            "p2p_seq_id": None,
        }
    ]


def test_a_missing_rank_is_never_equal(main: Main, tmp_path: Path) -> None:
    write(tmp_path / "a", traces(3))
    write(tmp_path / "b", traces(3))
    rank_path(tmp_path / "b", 1).unlink()
    done = main("ranks", "diff", "a", "b", cwd=tmp_path)
    assert done.returncode != 0
    assert "b: no trace of rank 1" in done.stderr


def test_a_rank_that_died_is_never_equal(main: Main, tmp_path: Path) -> None:
    write(tmp_path / "a", traces(2))
    write(tmp_path / "b", {**traces(2), 1: rank_trace(1, steps=2, ended="SIGTERM")})
    done = main("ranks", "diff", "a", "b", cwd=tmp_path)
    assert done.returncode != 0
    assert "b: rank 1 did not end by itself: SIGTERM" in done.stderr


def test_folders_without_ranks_exit_with_2(main: Main, tmp_path: Path) -> None:
    write(tmp_path / "a", traces(2))
    (tmp_path / "empty").mkdir()
    for command in (("diff", "a", "empty"), ("diff", "a", "absent"), ("check", "empty")):
        done = main("ranks", *command, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1


def test_replicas_that_agree_exit_with_0(main: Main, tmp_path: Path) -> None:
    write(tmp_path / "a", _replicas(2))
    done = main("ranks", "check", "a", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_replicas_that_differ_are_named(main: Main, tmp_path: Path) -> None:
    run = _replicas(3)
    step = run[2].steps[1]
    (result,) = step.results
    other = replace(result, digest=result.digest._replace(value="0" * 16))
    steps = (run[2].steps[0], replace(step, results=(other,)), *run[2].steps[2:])
    write(tmp_path / "a", {**run, 2: replace(run[2], steps=steps)})
    done = main("ranks", "check", "a", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "rank 2" in done.stdout
    document = json.loads(main("ranks", "check", "a", "--json", cwd=tmp_path).stdout)
    assert document["differing"][0]["name"] == "w"


def _replicas(world_size: int) -> dict:
    """Make the traces of ranks whose parameter, what all have summed, is a replica."""
    made = {}
    for rank, trace in traces(world_size).items():
        sums = [record for record in trace.records if record.collective]
        steps = tuple(
            replace(
                step,
                results=tuple(
                    replace(
                        result,
                        digest=sums[number].outputs[0],
                        source=sums[number].id,
                        placement="DDP",
                        replicas=tuple(range(world_size)),
                    )
                    for result in step.results
                ),
            )
            for number, step in enumerate(trace.steps)
        )
        made[rank] = replace(trace, steps=steps, results=steps[-1].results)
    return made


@pytest.mark.parametrize(
    ("text", "steps"),
    [("2:4", range(2, 4)), ("3", range(3, 4)), (":2", range(2)), ("2:", range(2, sys.maxsize))],
)
def test_steps(text: str, steps: range) -> None:
    assert steps_of(text) == steps


@pytest.mark.parametrize("text", ["", "4:2", "2:2", "-1", "a:b", "1:2:3", "1.5"])
def test_what_are_no_steps_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        steps_of(text)


@pytest.mark.parametrize("command", [("record", "--output", "a"), ("run",), ("run", "--"), ("run", "-n", "2", "-m")])
def test_a_script_must_be_named(main: Main, command: tuple[str, ...], tmp_path: Path) -> None:
    done = main("ranks", *command, cwd=tmp_path)
    assert done.returncode == 2
    assert "no script to run" in done.stderr


def test_a_folder_with_an_earlier_recording_is_not_mixed_with_another(main: Main, tmp_path: Path) -> None:
    write(tmp_path / "out" / "first", traces(2))
    done = main("ranks", "run", "--output", "out", "--", "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "out/first exists" in done.stderr


@pytest.mark.slow
def test_reading_imports_no_torch(tmp_path: Path) -> None:
    write(tmp_path / "a", traces(2))
    write(tmp_path / "b", traces(2, guilty=1, run=1))
    code = (
        "import sys; from hashbench.cli import main; main(['ranks', 'diff', 'a', 'b']); main(['ranks', 'check', 'a']);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
