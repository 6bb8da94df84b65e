"""The night that the documentation describes: GitHub's schema accepts the workflow, our parser its commands, and its
shell scripts do what they say, with stand-ins for what they call."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hashbench import cli
from hashbench.core.suites import registry

# At run time only: a module that cannot be imported is no test.
yaml = pytest.importorskip("ruamel.yaml", reason="comes with check-jsonschema, of the extra test")

ROOT = Path(__file__).parents[3]
WORKFLOW = ROOT / "docs" / "examples" / "nightly.yml"
TEXT = WORKFLOW.read_text(encoding="utf-8")
JOBS: Mapping[str, Any] = yaml.YAML(typ="safe").load(TEXT)["jobs"]
MATRIX: Mapping[str, list[Any]] = JOBS["sweep"]["strategy"]["matrix"]


def steps(job: str) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = JOBS[job]["steps"]
    return found


def script(job: str, name: str) -> str:
    return next(str(step["run"]) for step in steps(job) if step.get("name", "").startswith(name))


def filled_in() -> Iterator[dict[str, str]]:
    """Every way in which GitHub fills the matrix in."""
    for values in itertools.product(*MATRIX.values()):
        yield {f"matrix.{name}": str(value) for name, value in zip(MATRIX, values, strict=True)}


def fill(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$\{\{\s*([\w.]+)\s*\}\}", lambda match: values[match[1]], text)


def commands(text: str) -> list[list[str]]:
    """The hashbench commands in a script, as words; the shell's own variables stay as they are."""
    lines = text.replace("\\\n", " ").splitlines()
    calls = [shlex.split(line.partition(" || ")[0]) for line in lines if line.strip().startswith("hashbench ")]
    return [words[1:] for words in calls]


def check(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_githubs_schema_accepts_the_workflow() -> None:
    assert check(WORKFLOW).returncode == 0, check(WORKFLOW).stdout


@pytest.mark.slow
def test_the_linter_would_notice_a_mistake(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(TEXT.replace("runs-on:", "runs_on:", 1), encoding="utf-8")

    assert check(wrong).returncode == 1


@pytest.mark.parametrize("job", JOBS)
def test_every_hashbench_command_of_the_workflow_parses(job: str) -> None:
    texts = {fill(str(step["run"]), values) for step in steps(job) if "run" in step for values in filled_in()}
    calls = [words for text in texts for words in commands(text)]

    assert calls
    for words in calls:
        assert callable(cli._parser().parse_args(words).command)


def test_the_parts_of_the_matrix_are_all_parts_of_a_sweep() -> None:
    (words,) = commands(fill(script("sweep", "Sweep"), next(filled_in())))

    assert MATRIX["part"] == list(range(cli._parser().parse_args(words).total_partitions))


def test_the_suites_of_the_matrix_are_bundled_ones_and_all_of_them_are_joined(tmp_path: Path) -> None:
    assert set(MATRIX["suite"]) <= set(registry.SUITES)
    joined = run_script(tmp_path, script("report", "Join")).stdout

    places = {f"{suite}_{mode}" for suite in MATRIX["suite"] for mode in MATRIX["mode"]}
    assert set(re.findall(r"No part of (\S+) came back", joined)) == places


@pytest.mark.parametrize("job", JOBS)
def test_every_script_is_well_formed(job: str) -> None:
    for step in steps(job):
        text = fill(str(step.get("run", "")), next(filled_in()))
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0, step


def test_the_report_job_downloads_what_the_sweep_jobs_upload() -> None:
    uploaded = next(step["with"]["name"] for step in steps("sweep") if "upload" in step.get("uses", ""))
    pattern = next(step["with"]["pattern"] for step in steps("report") if "download" in step.get("uses", ""))
    names = {fill(uploaded, values) for values in filled_in()}

    assert len(names) == len(list(filled_in()))
    assert all(re.fullmatch(pattern.replace("*", ".*"), name) for name in names)
    assert "part-timm_training-3" in names  # what the step that joins them looks for


# --------------------------------------------------------------------------------------------------- its scripts


def run_script(folder: Path, text: str, **stand_ins: str) -> subprocess.CompletedProcess[str]:
    """Run a step as GitHub does (``shell: bash``), with shell scripts in place of the programs that it calls."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, body in stand_ins.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "GITHUB_WORKFLOW": "nightly", "GITHUB_REF_NAME": "main"}
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_parts_are_joined_in_one_folder_for_each_sweep_and_a_missing_one_fails_the_step(tmp_path: Path) -> None:
    for values in filled_in():
        name = "part-{matrix.suite}_{matrix.mode}-{matrix.part}".replace("{", "${{ ").replace("}", " }}")
        (tmp_path / "parts" / fill(name, values)).mkdir(parents=True)
    whole = run_script(tmp_path, script("report", "Join"), hashbench='echo "$@"')
    for part in (tmp_path / "parts").glob("part-timm_training-*"):
        part.rmdir()
    partial = run_script(tmp_path, script("report", "Join"), hashbench='echo "$@"')

    assert whole.returncode == 0, whole.stderr
    merged = [line.split() for line in whole.stdout.splitlines()]
    assert len(merged) == len(MATRIX["suite"]) * len(MATRIX["mode"])
    assert re.fullmatch(r"nights/\d{4}-\d\d-\d\d_\d{4}/torchvision_training", merged[0][1])
    assert merged[0][2:] == [f"parts/part-torchvision_training-{part}" for part in MATRIX["part"]] + ["--allow-missing"]
    assert partial.returncode == 1
    assert "::error::No part of timm_training came back." in partial.stdout
    assert len(partial.stdout.splitlines()) == len(merged)


def test_one_sweep_that_cannot_be_joined_does_not_keep_the_others_from_it(tmp_path: Path) -> None:
    for suite in MATRIX["suite"]:
        (tmp_path / "parts" / f"part-{suite}_training-0").mkdir(parents=True)
    done = run_script(tmp_path, script("report", "Join"), hashbench='echo "$2"; [[ $2 != *timm* ]]')

    assert done.returncode == 1
    assert "huggingface_training" in done.stdout


@pytest.mark.parametrize(
    ("gh", "code", "says"),
    [
        ('[ "$2" = list ] && echo "12 11" || { [ "$3" = 11 ] && echo got "$@"; }', 0, "got run download 11"),
        ('[ "$2" = list ] || exit 1', 0, "::warning::No earlier night"),
        ("echo cannot reach GitHub >&2; exit 4", 4, ""),
    ],
    ids=["the latest run that left nights", "the first night", "a failure is no first night"],
)
def test_earlier_nights_are_fetched(tmp_path: Path, gh: str, code: int, says: str) -> None:
    done = run_script(tmp_path, script("report", "Fetch the nights so far"), gh=gh)

    assert (done.returncode, says in done.stdout) == (code, True), done


def test_the_last_ninety_nights_are_kept_without_their_traces(tmp_path: Path) -> None:
    names = [f"2026-{month:02}-{day:02}_0117" for month in (7, 8, 9, 10) for day in range(1, 25)]
    for name in names:
        (tmp_path / "nights" / name / "timm_training" / "traces").mkdir(parents=True)
        (tmp_path / "nights" / name / "timm_training" / "accuracy.csv").write_text("")
    done = run_script(tmp_path, script("report", "Keep the last 90"))
    again = run_script(tmp_path, script("report", "Keep the last 90"))

    assert (done.returncode, again.returncode) == (0, 0), done.stderr + again.stderr
    assert sorted(path.name for path in (tmp_path / "nights").iterdir()) == names[-90:]
    assert len(list(tmp_path.glob("nights/*/*/accuracy.csv"))) == 90
    assert not list(tmp_path.glob("nights/*/*/traces"))


# ---------------------------------------------------------------------------------------------------------- cron


def cron_job() -> tuple[list[str], str, str]:
    """Return the five times of the page's cron line, its command, and the script that this runs."""
    page = (ROOT / "docs" / "nightly.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```cron\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    *times, command = block.strip().split(maxsplit=5)
    (script,) = re.findall(r"^```sh\n(#!/bin/sh\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    return times, command, script


def test_the_cron_line_has_five_times_and_a_command_that_parses() -> None:
    times, command, script = cron_job()
    match = re.search(r"\.venv/bin/(hashbench .*?) >>", script)

    assert all(re.fullmatch(r"\*|\d+", time) for time in times)
    assert "%" not in command  # cron ends the line there
    assert match is not None
    assert callable(cli._parser().parse_args(shlex.split(match[1])[1:]).command)


@pytest.mark.parametrize(
    ("hashbench", "mailed"),
    [("echo fine", ""), ("echo it got worse; exit 1", "it got worse\n")],
    ids=["a quiet night", "a night to hear of"],
)
def test_cron_mails_only_what_must_be_known(tmp_path: Path, hashbench: str, mailed: str) -> None:
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "hashbench").write_text(f"#!/bin/sh\n{hashbench}\n", encoding="utf-8")
    (programs / "hashbench").chmod(0o755)
    _, command, script = (part.replace("/srv/hashbench", str(tmp_path)) for part in map(str, cron_job()))
    Path(command).write_text(script, encoding="utf-8")
    Path(command).chmod(0o755)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)

    assert done.stdout == mailed, done.stderr
    assert (tmp_path / "nightly.log").read_text(encoding="utf-8")
