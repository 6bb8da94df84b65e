"""Modules are reported once they are imported; nothing is imported for it, and nothing is reported afterwards."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hashbench.imports import ImportWatch


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that can be imported and is not yet."""
    (tmp_path / "watched_module.py").write_text("VALUE = 3\n", encoding="utf-8")
    (tmp_path / "watched_other.py").write_text("raise RuntimeError('half way')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield "watched_module"
    for name in ("watched_module", "watched_other"):
        sys.modules.pop(name, None)


@pytest.fixture
def loaded() -> Iterator[list[ModuleType]]:
    found: list[ModuleType] = []
    watch = ImportWatch(lambda name: name.startswith("watched_"), found.append)
    sys.meta_path.insert(0, watch)
    yield found
    watch.remove()


def test_watch_alone_imports_nothing(module: str, loaded: list[ModuleType]) -> None:
    assert importlib.util.find_spec(module) is not None
    assert module not in sys.modules
    assert loaded == []


def test_module_is_reported_after_it_ran(module: str, loaded: list[ModuleType]) -> None:
    imported = importlib.import_module(module)
    assert loaded == [imported]
    assert imported.VALUE == 3
    importlib.import_module(module)
    assert len(loaded) == 1


def test_module_keeps_its_own_loader(module: str, loaded: list[ModuleType]) -> None:
    imported = importlib.import_module(module)
    assert imported.__spec__ is not None
    assert type(imported.__loader__).__name__ == "SourceFileLoader"
    assert imported.__spec__.loader is imported.__loader__
    assert loaded


@pytest.mark.usefixtures("module")
def test_failed_import_is_not_reported(loaded: list[ModuleType]) -> None:
    with pytest.raises(RuntimeError, match="half way"):
        importlib.import_module("watched_other")
    assert loaded == []


def test_unwanted_and_missing_modules_are_left_alone(loaded: list[ModuleType]) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("watched_and_missing")
    importlib.import_module("colorsys")
    assert loaded == []


def test_nested_query_of_another_finder_finds_nothing(module: str, loaded: list[ModuleType]) -> None:
    """As finders of editable installs do, which ask all of ``sys.meta_path`` themselves."""
    nested = []

    class Asks:
        def find_spec(self, name: str, *_: object) -> None:
            if name == module:
                nested.append(sys.meta_path[0].find_spec(name, None))

    asking = Asks()
    sys.meta_path.insert(1, asking)  # type: ignore[arg-type]
    try:
        importlib.import_module(module)
    finally:
        sys.meta_path.remove(asking)  # type: ignore[arg-type]
    assert nested == [None]
    assert len(loaded) == 1


def test_removed_watch_reports_nothing(module: str) -> None:
    found: list[ModuleType] = []
    watch = ImportWatch(lambda name: name == module, found.append)
    sys.meta_path.insert(0, watch)
    spec = importlib.util.find_spec(module)
    watch.remove()
    watch.remove()
    assert watch not in sys.meta_path
    importlib.import_module(module)
    assert (found, spec is not None) == ([], True)
