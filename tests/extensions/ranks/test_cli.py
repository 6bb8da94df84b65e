"""``hashbench ranks``: two recorded runs, one recorded run, and what is refused. ``test_cli_programs.py`` records."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from command_helpers import Main

from hashbench.core.trace.step_file import rank_path
from hashbench.extensions.ranks import launch
from hashbench.extensions.ranks.cli import steps_of
from hashbench.extensions.ranks.launch import RanksEnd
from hashbench.extensions.ranks.printing import printed_path
from tests.extensions.ranks.rank_traces import rank_trace, traces, write


def test_runs_that_agree_exit_with_0(main: Main, tmp_path: Path) -> None:
    write(tmp_path / "a", traces(3))
    write(tmp_path / "b", traces(3))
    done = main("ranks", "diff", "a", "b", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "equal on every rank" in done.stdout


def test_the_rank_and_kernel_of_runs_that_differ_are_named(main: Main, tmp_path: Path) -> None:
    write(tmp_path / "a", traces(3))
    write(tmp_path / "b", traces(3, guilty=2, run=1))
    done = main("ranks", "diff", "a", "b", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "rank 2" in done.stdout
    assert "aten.mul.Tensor" in done.stdout


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


@pytest.mark.parametrize(
    ("lines", "code", "begins"),
    [
        (("loss 0.5 took 1 s", "loss 0.6 took 2 s"), 1, "Printed lines differ: rank 0, line 1, a number: loss 0.5"),
        (("loss 0.5 took 1 s", "loss 0.5 took 2 s"), 0, "Both runs are equal on every rank"),
    ],
    ids=["a loss", "a duration"],
)
def test_what_ranks_print_is_a_result(
    main: Main, tmp_path: Path, lines: tuple[str, str], code: int, begins: str
) -> None:
    for name, line in zip("ab", lines, strict=True):
        write(tmp_path / name, traces(2))
        for rank in range(2):
            printed_path(tmp_path / name, rank).write_text(line if rank == 0 else "begin 1")
    done = main("ranks", "diff", "a", "b", cwd=tmp_path)
    assert done.stdout.startswith(begins)
    assert done.returncode == code
    assert bool(json.loads(main("ranks", "diff", "a", "b", "--json", cwd=tmp_path).stdout)["printed"]) == bool(code)


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
    write(tmp_path / "a", _drifted(3))
    done = main("ranks", "check", "a", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "rank 2" in done.stdout
    document = json.loads(main("ranks", "check", "a", "--json", cwd=tmp_path).stdout)
    assert document["differing"][0]["name"] == "w"


def _drifted(world_size: int) -> dict:
    """Make the traces of ranks the last of which holds another parameter from its second step on."""
    run, last = _replicas(world_size), world_size - 1
    step = run[last].steps[1]
    (result,) = step.results
    other = replace(result, digest=result.digest._replace(value="0" * 16))
    steps = (run[last].steps[0], replace(step, results=(other,)), *run[last].steps[2:])
    return {**run, last: replace(run[last], steps=steps)}


def _recorded_as(monkeypatch: pytest.MonkeyPatch, *runs: tuple[dict, RanksEnd]) -> list[Path]:
    """Have ``ranks run`` record these; return the folders that it has recorded into."""
    folders: list[Path] = []

    def record(_command: object, *, folder: Path, **_: object) -> RanksEnd:
        made, end = runs[len(folders)]
        folders.append(folder)
        if made:
            write(folder, made)
        return end

    monkeypatch.setattr(launch, "run_ranks", record)
    return folders


@pytest.mark.parametrize(
    ("made", "code", "says"),
    [
        (lambda: _drifted(3), 1, "Replicas differ: w on ranks 0, 1, 2 since step"),
        (lambda: _replicas(3), 0, "Replicas agree: 1 parameter"),
        (lambda: traces(3), 0, "No parameter is known to be a replica"),
    ],
    ids=["replicas that drift alike in both runs", "replicas that agree", "no replicas"],
)
def test_run_checks_the_replicas_of_runs_that_are_equal(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[[], dict], code: int, says: str
) -> None:
    (tmp_path / "train.py").touch()
    _recorded_as(monkeypatch, (made(), RanksEnd()), (made(), RanksEnd()))
    done = main("ranks", "run", "-n", 3, "--output", "out", "--", "train.py", cwd=tmp_path)
    assert done.stdout.startswith("Both runs are equal on every rank")
    assert says in done.stdout
    assert done.returncode == code


def test_replicas_are_in_the_document_of_run(main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    _recorded_as(monkeypatch, (_drifted(2), RanksEnd()), (_drifted(2), RanksEnd()))
    done = main("ranks", "run", "--json", "--output", "out", "--", "train.py", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert (document["first"], document["replicas"]["equal"], done.returncode) == ([], False, 1)


@pytest.mark.parametrize(
    ("made", "end", "says"),
    [
        (traces(2), RanksEnd("the ranks were ended after 5 s, the time limit", ("rank 0 waits",)), "rank 0 waits"),
        ({}, RanksEnd("the ranks were ended after 5 s, the time limit", ("rank 0 waits",)), "as long, so nothing was"),
        ({}, RanksEnd("the ranks failed (exit code 1 of torchrun)"), "no rank recorded anything"),
    ],
    ids=["a rank hangs", "a rank hangs in its first step", "the script fails before its first step"],
)
def test_there_is_no_second_run_where_it_would_not_tell_more(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: dict, end: RanksEnd, says: str
) -> None:
    (tmp_path / "train.py").touch()
    folders = _recorded_as(monkeypatch, (made, end))
    done = main("ranks", "run", "--output", "out", "--timeout", "5", "--", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout, len(folders)) == (2, "", 1)
    assert says in done.stderr
    assert end.problem in done.stderr.splitlines()[-1]


def test_a_script_that_is_not_there_is_refused_at_once(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = _recorded_as(monkeypatch)
    for words in (("nothere.py",), ("-m", "nothere.main")):
        done = main("ranks", "run", "--output", "out", "--", *words, cwd=tmp_path)
        assert (done.returncode, done.stdout, folders) == (2, "", [])
        assert "cannot run" in done.stderr


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
    (tmp_path / "train.py").touch()
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
