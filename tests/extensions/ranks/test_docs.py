"""What docs/ranks.md shows is printed: its script is recorded twice on two ranks, then compared again and checked."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from command_helpers import Main

PAGE = (Path(__file__).parents[3] / "docs" / "ranks.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
DIGITS = re.compile(r"\b[0-9a-f]{8,16}\b")


def _blocks(language: str) -> list[str]:
    return [block["text"] for block in BLOCK.finditer(PAGE) if block["language"] == language]


def _shown(block: str) -> tuple[list[str], str]:
    """Return the command of a console block and what it prints; digests are another in each run."""
    command, _, printed = block.partition("\n")
    return shlex.split(command.removeprefix("$ hashbench ")), _steady(printed)


def _steady(text: str) -> str:
    unwrapped = re.sub(r"\n {4,}(?=[^ \"{}\[\]])", " ", text)  # long lines are wrapped
    return DIGITS.sub("…", unwrapped)


def _matches(shown: str, printed: str) -> bool:
    """Return True if the lines are the same, where a line of three dots stands for any lines."""
    parts = [re.escape(part) for part in re.split(r"^…\n", shown, flags=re.MULTILINE)]
    return re.fullmatch(r"(?:.*\n)*?".join(parts), printed) is not None


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_the_page_shows_what_is_printed(main: Main, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_blocks("python")[0])
    commands = [_shown(block) for block in _blocks("console")]
    assert [command[1] for command, _ in commands] == ["run", "check", "diff"]
    for command, shown in commands:
        done = main(*command, cwd=tmp_path)
        assert _matches(shown, _steady(done.stdout)), f"{command}\n{_steady(done.stdout)}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a\n…\nd\n", "a\nb\nc\nd\n", True),
        ("a\n…\n", "a\n", True),
        ("a\n", "a\nb\n", False),
        ("a\n…\nd\n", "a\n", False),
    ],
)
def test_three_dots_stand_for_any_lines(shown: str, printed: str, same: bool) -> None:
    assert _matches(shown, printed) is same
