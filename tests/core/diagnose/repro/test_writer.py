"""What all scripts that need torch alone share: their header and heading, and how a run of one ends."""

from __future__ import annotations

import ast
import importlib.metadata
import platform
import re
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from repro_helpers import adding_rows

import hashbench
from hashbench.core.diagnose.repro import writer
from hashbench.core.processes import Finished
from tests.core.diagnose.repro.writing import REPEAT, written

HEADER = re.compile(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$")
"""The reference expression of PEP 723."""


def header_of(text: str) -> dict[str, Any]:
    """The one header of a script, read as PEP 723 says."""
    (found,) = HEADER.finditer(text)
    assert found["type"] == "script"
    lines = found["content"].splitlines(keepends=True)
    return tomllib.loads("".join(line[2:] if line.startswith("# ") else line[1:] for line in lines))


def test_a_repro_names_the_torch_that_it_was_written_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.14.1+cu128")
    text = (written(tmp_path / "repro", adding_rows(), REPEAT) / "repro.py").read_text()
    assert text.startswith("# /// script\n")
    major, minor, _ = platform.python_version_tuple()
    assert header_of(text) == {"requires-python": f"=={major}.{minor}.*", "dependencies": ["torch==2.14.1"]}
    assert "\n    uv run repro.py\n" in (ast.get_docstring(ast.parse(text), clean=False) or "")
    assert "`uv run repro.py`" in (tmp_path / "repro" / "REPORT.md").read_text()


@pytest.mark.parametrize(
    ("torch_version", "python", "packages", "expected"),
    [
        pytest.param("2.11.0", "3.12.1", (), ("==3.12.*", ["torch==2.11.0"]), id="a release"),
        pytest.param("2.14.1+cpu", "3.13.0rc1", (), ("==3.13.*", ["torch==2.14.1"]), id="a local build"),
        pytest.param("2.9.0", "3.10.4", ("a==1",), ("==3.10.*", ["torch==2.9.0", "a==1"]), id="further packages"),
    ],
)
def test_a_header_is_read_back(
    torch_version: str, python: str, packages: tuple[str, ...], expected: tuple[str, list[str]]
) -> None:
    found = header_of(
        f"{writer.metadata(torch_version=torch_version, python=python, packages=packages)}\nimport torch\n"
    )
    assert (found["requires-python"], found["dependencies"]) == expected


def test_only_installed_packages_are_required() -> None:
    assert writer.distribution_of("jinja2.environment") == f"Jinja2=={importlib.metadata.version('jinja2')}"
    assert writer.distribution_of("address_ops") == "", "a file beside the tests"
    assert writer.distribution_of("json") == "", "the standard library"
    assert writer.distribution_of("nowhere_to_be_found") == ""


def test_a_heading_has_the_claim_the_wrapped_paragraphs_and_what_it_needs() -> None:
    text = writer.heading("It differs.", "", "a " * 60)
    claim, blank, first, second, by = text.split("\n")
    assert (claim, blank) == ("It differs.", "")
    assert max(len(first), len(second)) <= 100
    assert by == f"Written by hashbench {hashbench.__version__} on torch {torch.__version__}. It needs torch alone."


# ------------------------------------------------------------------------------------------------------ running it

ENDS = {
    "a difference": (Finished(1, "3 of 4\n", ""), writer.Ran("", ("3",), True, "3 of 4\n")),
    "none": (Finished(0, "0 of 4\n", "warned"), writer.Ran("", ("0",), False, "0 of 4\nwarned")),
    "an error": (Finished(1, "", "a\nb: c\n"), writer.Ran("failed: b: c", output="a\nb: c\n")),
    "a signal": (Finished(-11, "3 of 4\n", ""), writer.Ran("failed: exit code -11", output="3 of 4\n")),
    "no end": (Finished(None, "3 of 4\n", ""), writer.Ran("timeout after 5 s")),
}


@pytest.mark.parametrize(("end", "ran"), ENDS.values(), ids=ENDS)
def test_a_run_shows_what_it_printed_or_why_it_shows_nothing(end: Finished, ran: writer.Ran, tmp_path: Path) -> None:
    asked: list[tuple[str, ...]] = []

    def by(code: str, *arguments: str, seconds: float) -> Finished:
        assert code
        assert seconds == 5
        asked.append(arguments)
        return end

    assert writer.run(tmp_path, re.compile(r"^(\d+) of", re.MULTILINE), "ops.py", timeout=5, by=by) == ran
    assert asked == [(str(tmp_path / "repro.py"), "ops.py")]


def test_a_python_that_does_not_start_is_a_problem(tmp_path: Path) -> None:
    by = mock.Mock(side_effect=OSError(12, "no memory"))
    assert writer.run(tmp_path, re.compile("(.)"), timeout=5, by=by).problem == "failed: [Errno 12] no memory"


@pytest.mark.slow
def test_a_script_runs_as_the_main_program_with_its_own_arguments(tmp_path: Path) -> None:
    lines = ("import sys", "print(__name__, __file__ == sys.argv[0], sys.argv[1:])", "sys.exit({})")
    for code, problem in (("1", ""), ("0", ""), ("'Say what.'", "failed: Say what.")):
        (tmp_path / "repro.py").write_text("\n".join(lines).format(code))
        ran = writer.run(tmp_path, re.compile("(.+)"), "a", timeout=60)
        assert (ran.problem, ran.differs, ran.shows) == (
            problem,
            code == "1",
            () if problem else ("__main__ True ['a']",),
        )
