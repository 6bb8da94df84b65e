"""What is said of a user's file that a command cannot use."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.core.suites.user_file import UserFile, takes_an_argument


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def read(folder: Path, content: str) -> UserFile:
    path = folder / "of_a_user.py"
    path.write_text(content, encoding="utf-8")
    return UserFile.read(path, example="make()")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("1 / 0", "its import raised ZeroDivisionError: division by zero. Try: python "),
        ("raise SystemExit(3)", "its import raised SystemExit: 3"),
        ("x = 1", "it has no function make. It needs make()"),
        ("make = 3", "its make is a int, not a function"),
        ("def make(): raise ValueError('a\\n b')", "make() raised ValueError: a b. Try: python -i "),
        ("def make(): return 3", "make() returned a value of type int, which is not a model"),
    ],
)
def test_what_cannot_be_used_is_said_with_what_to_do(content: str, said: str, tmp_path: Path) -> None:
    def made() -> object:
        file = read(tmp_path, content)
        return file.model("make", file.function("make"))

    with pytest.raises(HashbenchError) as raised:
        made()
    assert str(raised.value).startswith(f"cannot check {tmp_path / 'of_a_user.py'}: ")
    assert said in str(raised.value)


def test_a_file_that_is_not_there_and_one_that_is_no_python(tmp_path: Path) -> None:
    with pytest.raises(HashbenchError, match="does not exist"):
        UserFile.read(tmp_path / "absent.py", example="make()")
    (tmp_path / "a.txt").write_text("", encoding="utf-8")
    with pytest.raises(HashbenchError, match=r"it is not a Python file \(\.py\)\. Give a Python file with make\(\)"):
        UserFile.read(tmp_path / "a.txt", example="make()")


def test_inputs_are_not_none(tmp_path: Path) -> None:
    file = read(tmp_path, "def inputs(): pass\ndef make(): return len")
    assert file.model("make", file.function("make")) is len
    with pytest.raises(HashbenchError, match=r"inputs\(\) returned None"):
        file.inputs("inputs", file.function("inputs"))


def test_a_function_that_does_not_tell_is_given_an_argument() -> None:
    assert not takes_an_argument(lambda: 1)
    assert takes_an_argument(lambda x: x)
    assert takes_an_argument(dict.fromkeys)


def test_an_edit_that_keeps_size_and_time_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytecode is current for Python while the source's size and its time in seconds are as they were."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "of_a_user.py"
    for value in (1, 2):
        path.write_text(f"VALUE = {value}", encoding="utf-8")
        os.utime(path, (1_700_000_000, 1_700_000_000))
        assert UserFile.read(path, example="VALUE").names["VALUE"] == value
