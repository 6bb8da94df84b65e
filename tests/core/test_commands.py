"""Commands that a report proposes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hashbench.core.commands import CALL_FILE, replay_command


@pytest.mark.parametrize(
    ("recorded", "files", "flags"),
    [
        pytest.param({"imports": "zoo.py"}, (), "--import zoo.py ", id="a file by its name"),
        pytest.param({"imports": "zoo.py"}, ("a/other.py", "my zoos/zoo.py"), "--import 'my zoos/zoo.py' ", id="known"),
        pytest.param({"imports": "package.ops"}, ("zoo.py",), "--import package.ops ", id="a module"),
        pytest.param({"imports": ""}, ("zoo.py",), "", id="an op of torch"),
        pytest.param({}, ("zoo.py",), "", id="a repro of an earlier version"),
        pytest.param({"imports": "../zoo.py"}, (), "", id="a path, which no repro records"),
        pytest.param({"imports": "--html"}, (), "", id="a flag"),
        pytest.param([], (), "", id="nonsense"),
        pytest.param(None, (), "", id="no file"),
    ],
)
def test_a_repro_is_replayed_with_what_defines_its_op(
    tmp_path: Path, recorded: object, files: tuple[str, ...], flags: str
) -> None:
    if recorded is not None:
        (tmp_path / CALL_FILE).write_text(json.dumps({"recorded": recorded}))
    assert replay_command(tmp_path, files=files) == f"hashbench replay {flags}{tmp_path}"
