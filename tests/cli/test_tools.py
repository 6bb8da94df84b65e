"""``hashbench dynamo``, ``pipeline``, ``numeric`` and ``audit``: what their flags ask for, and exit codes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from command_helpers import Main

from hashbench.cli.tools import DTYPES, FEWEST_THREADS, _exit_code
from hashbench.tools.audit import driver
from hashbench.tools.audit.audit_table import AuditOptions

TWO_MODELS = """
import torch
def before():
    torch.manual_seed(0)
    return torch.nn.Linear(2, 2)
def after(model):
    model.bias.data += {by}
    return model
def inputs():
    return (torch.ones(1, 2),)
"""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("dynamo nowhere.py --inference", "nowhere.py"),
        ("dynamo --trace never suite.py", "invalid choice: 'never' (choose from always, on-demand)"),
        ("pipeline check --config c.py", "the following arguments are required: --output-dir"),
        ("pipeline check --config none.py --output-dir out", "none.py"),
        ("pipeline compare none other", "none"),
        ("numeric none.py", "none.py"),
        ("numeric two.py --training --inference", "not allowed with"),
        ("numeric two.py --atol -1", "--atol: must be >= 0, got -1"),
        ("audit --dtypes float7", "'float7' is not a dtype"),
        ("audit --rows --results out", "--rows cannot be combined with --results"),
        ("audit --resume", "--resume requires --output"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(command: str, said: str, main: Main, tmp_path: Path) -> None:
    done = main(*command.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("status", "code"), [(0, 0), (3, 3), (-9, 137), (-15, 143)])
def test_signals_become_the_codes_of_shells(status: int, code: int) -> None:
    assert _exit_code(status) == code


@pytest.mark.parametrize(("by", "flags", "code"), [(0, (), 0), (1, (), 1), (1, ("--atol", "2"), 0)])
def test_numeric_exits_with_1_where_values_differ(
    by: int, flags: tuple[str, ...], code: int, main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "two.py").write_text(TWO_MODELS.format(by=by))
    done = main("numeric", "two.py", "--inference", "--stages", "outputs", "--json", *flags, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (code, "")
    assert json.loads(done.stdout)["equal_within_tolerance"] is (code == 0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What an audit is asked for, which is not made."""
    kept: dict[str, Any] = {}

    def audit(request: driver.AuditRequest, **arguments: Any) -> tuple[()]:
        kept.update(arguments, request=request)
        return ()

    monkeypatch.setattr("hashbench.core.run.environment.collect_in_child", lambda **_: {"device": {"type": "cpu"}})
    monkeypatch.setattr(driver, "audit", audit)
    return kept


@pytest.mark.parametrize(
    ("flags", "threads", "dtypes"),
    [
        ((), max(FEWEST_THREADS, os.cpu_count() or 1), DTYPES),
        (("--rows",), None, ("float32", "bfloat16")),
        (("--threads", "3", "--dtypes", "int8", "int8", "bool"), 3, ("int8", "bool")),
    ],
)
def test_threads_and_dtypes_of_an_audit(
    flags: tuple[str, ...], threads: int | None, dtypes: tuple[str, ...], asked: Any, main: Main, tmp_path: Path
) -> None:
    done = main("audit", "--ops", "add", "mm", "-k", "x", *flags, "--output", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    request = asked["request"]
    assert isinstance(request.options, AuditOptions)
    assert (request.options.threads, request.options.dtypes) == (threads, dtypes)
    assert (request.only, request.filters) == (("add", "mm"), ("x",))
