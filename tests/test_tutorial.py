"""Follow the README and docs/tutorial.md: their commands run one after the other, and print what the page shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_helpers import CHECKOUT, Main

BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def _blocks(page: str, language: str) -> list[str]:
    text = (CHECKOUT / page).read_text(encoding="utf-8")
    return [block["text"] for block in BLOCK.finditer(text) if block["language"] == language]


def _steady(text: str) -> str:
    """Return the text with any number as 0: without its lines, and the widths of its columns."""
    return " ".join(re.sub("-{2,}", "-", NUMBER.sub("0", text)).split())


def _matches(shown: str, printed: str) -> bool:
    """Return True if the texts are the same, where three dots in what is shown stand for anything."""
    parts = (re.escape(part.strip()) for part in _steady(shown).split("…"))
    return re.fullmatch(r".*?".join(f"{part} ?" for part in parts), _steady(printed) + " ") is not None


@pytest.mark.slow
@pytest.mark.usefixtures("shared_servers")
def test_each_command_of_the_tutorial_prints_what_the_page_shows(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _follow("docs/tutorial.md", "zoo.py", main, tmp_path, monkeypatch)
    page = (tmp_path / "nights" / "tuesday" / "report.html").read_text(encoding="utf-8")
    assert "write_race" in page


@pytest.mark.slow
def test_the_commands_of_the_readme_name_the_kernel_and_leave_no_file(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # as on a machine of two cores: alone, a thread races with nobody
    _follow("README.md", "train.py", main, tmp_path, monkeypatch)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def _follow(page: str, file: str, main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the code of a page as ``file``, and run its commands."""
    (code_of_page,) = _blocks(page, "python")
    (tmp_path / file).write_text(code_of_page, encoding="utf-8")
    monkeypatch.setattr(sys, "stderr", sys.stdout)
    code = 0
    for command, shown in (each for block in _blocks(page, "console") for each in COMMAND.findall(block)):
        program, *words = shlex.split(command)
        if program == "hashbench":
            code, printed, _ = main(*words, cwd=tmp_path)
        elif command == "echo $?":
            printed = f"{code}\n"
        else:
            printed = subprocess.run(
                [program, *words], cwd=tmp_path, check=True, stdout=subprocess.PIPE, text=True
            ).stdout
        assert _matches(shown, printed), f"{command}\n{printed}"


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("memory  pass  9 s\n", "memory  pass  0.25 s\n", True),
        ("a: …\nd\n", "a: b\nc\nd\n", True),
        ("name    cause\n------  -----\n", "name  cause\n----  -----------\n", True),
        ("memory  pass  9 s\n", "memory  crashed  9 s\n", False),
        ("a\n", "a\nb\n", False),
        ("a: …\nd\n", "a: b\n", False),
    ],
)
def test_numbers_and_widths_vary_and_three_dots_stand_for_anything(shown: str, printed: str, same: bool) -> None:
    assert _matches(shown, printed) is same
