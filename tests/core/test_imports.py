"""Modules are reported once they are imported; nothing is imported for it, and nothing is reported afterwards."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hashbench.core.imports import ImportWatch, ModulePatch


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


# ------------------------------------------------------------------------------------------------------------ patches


class Patch(ModulePatch):
    """Appends its mark to what a function of the watched module returns, until it stops."""

    module = "watched_module"

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark = mark

    def _replace(self) -> None:
        holder = sys.modules[self.module]
        name = holder.name  # type: ignore[attr-defined]
        self._put(holder, name=lambda: name() + self.mark)

    def stop(self) -> None:
        super().stop()
        self.mark = ""


@pytest.fixture
def patched(module: str) -> ModuleType:
    imported = importlib.import_module(module)
    imported.name = lambda: "torch"  # type: ignore[attr-defined]
    return imported


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_patches_of_one_function_stop_in_any_order(patched: ModuleType, order: tuple[int, ...]) -> None:
    before = dict(vars(patched))
    patches = [Patch(mark) for mark in "abc"]
    for patch in patches:
        patch.start()
    assert patched.name() == "torchabc"
    left = "abc"
    for number in order:
        patches[number].stop()
        left = left.replace("abc"[number], "")
        assert patched.name() == f"torch{left}"
    assert vars(patched) == before


def test_what_another_library_put_on_top_stays(patched: ModuleType) -> None:
    patch = Patch("a")
    patch.start()
    ours = patched.name
    patched.name = lambda: ours() + "!"  # type: ignore[attr-defined]
    patch.stop()
    assert patched.name() == "torch!"


def test_a_patch_waits_for_the_import_and_a_stopped_one_does_not(module: str) -> None:
    waiting, stopped = Patch("a"), Patch("b")
    waiting.start()
    stopped.start()
    stopped.stop()
    with pytest.raises(AttributeError, match="name"):  # the patch ran, once the module was there
        importlib.import_module(module)
    waiting.stop()
    assert not [finder for finder in sys.meta_path if isinstance(finder, ImportWatch)]


def test_a_namespace_is_patched_like_a_module() -> None:
    class Values(ModulePatch):
        module = "sys"

    values = {"kernel": 1}
    patch = Values()
    patch._put(values, kernel=2)
    assert values["kernel"] == 2
    patch.stop()
    assert values == {"kernel": 1}
