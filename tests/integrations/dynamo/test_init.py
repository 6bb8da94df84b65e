"""The import hook: finding the module ``common`` whoever else finds modules."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hashbench.integrations.dynamo import harness, hook, plug_in, watch_for_harness
from tests.integrations.dynamo.dynamo_helpers import Standin, a_session
from tests.integrations.dynamo.standin_helpers import planted_fault


def test_other_processes_load_almost_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print(*sys.modules)"]
    standard = set(sys.stdlib_module_names)
    loaded = []
    for path in ("", str(harness.SITE)):
        variables = {**os.environ, **a_session(tmp_path).environment(), "PYTHONPATH": path}
        printed = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout
        loaded.append({name for name in printed.split() if name.partition(".")[0] not in standard})
    package = ["hashbench", "hashbench.core", "hashbench.core.imports"]
    package += ["hashbench.integrations", "hashbench.integrations.dynamo"]
    assert loaded[1] - loaded[0] == {"sitecustomize", *package} - loaded[0]


@pytest.mark.slow
def test_every_module_called_common_is_found(standin: Standin) -> None:
    assert [name for name in standin.found if not name.startswith("torch.")] == ["common"]


class Asking:
    """A finder of somebody's own that asks all others, without thinking of one that asks back."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        others = [finder for finder in sys.meta_path if finder is not self]
        return next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)


@pytest.mark.parametrize(
    "order", ["ours", "asking ours", "ours asking", "ours ours", "ours asking ours", "asking ours ours"]
)
def test_watch_calls_once_beside_other_finders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    (tmp_path / "common.py").write_text("LOADER, SPEC = __loader__, __spec__.loader\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "common", raising=False)
    found: list[ModuleType] = []
    for finder in reversed(order.split()):
        if finder == "ours":
            watch_for_harness(found.append)
        else:
            sys.meta_path.insert(0, Asking())
    module = importlib.import_module("common")
    monkeypatch.delitem(sys.modules, "common")
    assert found == [module]
    for loader in (module.LOADER, module.SPEC, module.__loader__, module.__spec__.loader):
        assert type(loader).__name__ == "SourceFileLoader"


def test_fault_of_plug_in_is_one_line(
    standin: Standin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hook, "attach", planted_fault())
    plug_in(standin.common)
    assert capsys.readouterr().err == "hashbench: cannot plug into this process: a planted fault\n"
