"""Every output that a user reads is what its golden copy in ``expected/`` says, byte for byte."""

from __future__ import annotations

import csv
import difflib
import io
import re
import sys
from pathlib import Path

import pytest

import hashbench
from tests.golden import torch_producers  # noqa: F401 – registers what it makes
from tests.golden.producers import COMMANDS, PRODUCERS, written_again
from tests.golden.stage import EXPECTED, INPUTS, cli, made, stage

COMMAND = "python -m tests.golden"


def difference(name: str, expected: str, found: str) -> str:
    """A unified diff, and the command that makes the new text the expected one."""
    lines = difflib.unified_diff(
        expected.splitlines(), found.splitlines(), f"expected/{name}", "what it is now", lineterm="", n=1
    )
    shown = [line if len(line) <= 400 else f"{line[:400]}…" for line in lines]
    more = [f"… and {len(shown) - 60} more lines"] if len(shown) > 60 else []
    told = f"If that is meant: {COMMAND} {name} (all: {COMMAND})"
    return "\n".join(["", *(shown[:60] or ["only line ends differ"]), *more, "", told])


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCERS)
def test_output_is_as_its_golden_copy(name: str) -> None:
    if name == "help.txt" and sys.version_info >= (3, 13):
        pytest.skip("argparse of Python 3.13 lays help out in another way")
    found = made(PRODUCERS[name]).encode()
    expected = (EXPECTED / name).read_bytes() if (EXPECTED / name).exists() else b""
    if found != expected:
        pytest.fail(difference(name, expected.decode(), found.decode()), pytrace=False)


def test_every_golden_file_is_made() -> None:
    assert {path.name for path in EXPECTED.iterdir()} == set(PRODUCERS)


def test_help_of_every_subcommand_is_kept() -> None:
    found = re.findall(r"^  (\w+) {2,}", cli("--help")[0], re.MULTILINE)
    assert found
    assert set(found) == {command.split()[0] for command in COMMANDS}


OWN = sorted(path for path in INPUTS.glob("**/accuracy.csv") if path.parent.name not in ("dynamo", "future"))


@pytest.mark.parametrize("path", OWN, ids=lambda path: str(path.relative_to(INPUTS)))
def test_rows_are_written_as_they_were_read(path: Path) -> None:
    with stage():
        texts = (written_again(path).decode(), path.read_text(encoding="utf-8"))
        again, before = (list(csv.DictReader(io.StringIO(text, newline=""))) for text in texts)
    assert [cells_of(line) for line in again] == [cells_of(line) for line in before]


def cells_of(line: dict[str, str]) -> dict[str, str]:
    return {column: cell for column, cell in line.items() if cell}


def test_every_public_name_is_there() -> None:
    assert [name for name in hashbench.__all__ if getattr(hashbench, name, None) is None] == []


def test_every_public_name_is_completed() -> None:
    assert set(hashbench.__all__) <= set(dir(hashbench))
