"""Run a callback when a module has been imported, and patch it then, without importing it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _ignore(_: ModuleType) -> None:
    """Do nothing: the callback after :meth:`ImportWatch.remove`."""


class ImportWatch(MetaPathFinder):
    """Meta path finder that calls ``loaded`` with each ``wanted`` module once it is imported.

    Finds modules through the finders behind it in ``sys.meta_path``. If one of those asks all of ``sys.meta_path`` in
    turn, the nested query finds nothing here.
    """

    def __init__(self, wanted: Callable[[str], bool], loaded: Callable[[ModuleType], object]) -> None:
        self._wanted, self._loaded = wanted, loaded
        self._asking: set[int] = set()  # threads

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        thread = threading.get_ident()
        if not self._wanted(fullname) or thread in self._asking:
            return None
        self._asking.add(thread)
        try:
            spec = self._found_behind(fullname, path, target)
        finally:
            self._asking.discard(thread)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _NotifyingLoader(spec.loader, self._loaded)
        return spec

    def remove(self) -> None:
        """Stop watching for good; release the callback."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._loaded = _ignore

    def _found_behind(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        finders = list(sys.meta_path)
        behind = finders[finders.index(self) + 1 :] if self in finders else []
        able = (finder for finder in behind if hasattr(finder, "find_spec"))
        return next(filter(None, (finder.find_spec(fullname, path, target) for finder in able)), None)


class _NotifyingLoader(Loader):
    """Delegates to ``loader``, puts it back in its own place, and calls ``loaded`` with the module."""

    def __init__(self, loader: Any, loaded: Callable[[ModuleType], object]) -> None:
        self._loader, self._loaded = loader, loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        create = getattr(self._loader, "create_module", None)
        return None if create is None else create(spec)

    def exec_module(self, module: ModuleType) -> None:
        for holder, name in ((module, "__loader__"), (module.__spec__, "loader")):
            if getattr(holder, name, None) is self:
                setattr(holder, name, self._loader)
        self._loader.exec_module(module)
        self._loaded(module)


@dataclass(slots=True, eq=False)
class _AttributePatch:
    """A replaced attribute of a module or class, or value of a namespace."""

    holder: Any
    name: str
    before: Any
    mine: Any

    def undo(self) -> None:
        """Put back what was there. A later patch of the same attribute stays, and will put that back in its turn."""
        patches = _patches_of(self.holder)
        patches.remove(self)
        later = next((patch for patch in patches if patch.name == self.name and patch.before is self.mine), None)
        if later is not None:
            later.before = self.before
        elif _namespace(self.holder).get(self.name) is self.mine:  # else another library has replaced ours
            _put(self.holder, self.name, self.before)
        if not patches:
            _remove(self.holder, _PATCHES)


_PATCHES = "_hashbench_patches"
"""Attribute of a patched module, class or namespace while it is patched: its patches, in order."""


def _namespace(holder: Any) -> Mapping[str, Any]:
    return holder if isinstance(holder, dict) else vars(holder)


def _put(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


def _remove(holder: Any, name: str) -> None:
    if isinstance(holder, dict):
        del holder[name]
    else:
        delattr(holder, name)


def _patches_of(holder: Any) -> list[_AttributePatch]:
    if _PATCHES not in _namespace(holder):
        _put(holder, _PATCHES, [])
    patches: list[_AttributePatch] = _namespace(holder)[_PATCHES]
    return patches


class ModulePatch:
    """Monkeypatch of functions of one torch module, from :meth:`start` (or the module's later import) until
    :meth:`stop`. Several may patch one function, and stop in any order. Setup cost matters: one object per trace, whose
    functions are not created anew."""

    module = ""

    def __init__(self) -> None:
        self._waiting: ImportWatch | None = None
        self._before: list[_AttributePatch] = []

    def start(self) -> None:
        if self.module in sys.modules:
            self._replace()
        else:
            self._waiting = ImportWatch(self.module.__eq__, self._loaded)
            sys.meta_path.insert(0, self._waiting)

    def stop(self) -> None:
        if self._waiting is not None:
            self._waiting.remove()
        for patch in reversed(self._before):
            patch.undo()
        self._waiting, self._before = None, []

    def _loaded(self, _: ModuleType) -> None:
        if self._waiting is not None:
            self._waiting.remove()
        self._replace()

    def _replace(self) -> None:
        """Patch the functions of the imported module."""

    def _put(self, holder: Any, **functions: Any) -> None:
        """Replace attributes of a module or class, or values of a namespace, until :meth:`stop`."""
        for name, function in functions.items():
            patch = _AttributePatch(holder, name, _namespace(holder)[name], function)
            self._before.append(patch)
            _patches_of(holder).append(patch)
            _put(holder, name, function)
