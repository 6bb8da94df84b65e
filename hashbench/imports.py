"""Run a callback when a module has been imported, and patch it then, without importing it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
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


class ModulePatch:
    """Monkeypatch of functions of one torch module, from :meth:`start` (or the module's later import) until
    :meth:`stop`. Setup cost matters: one object per trace, whose functions are not created anew."""

    module = ""

    def __init__(self) -> None:
        self._waiting: ImportWatch | None = None
        self._before: list[tuple[Any, str, Any]] = []

    def start(self) -> None:
        if self.module in sys.modules:
            self._replace()
        else:
            self._waiting = ImportWatch(self.module.__eq__, self._loaded)
            sys.meta_path.insert(0, self._waiting)

    def stop(self) -> None:
        if self._waiting is not None:
            self._waiting.remove()
        for holder, name, function in reversed(self._before):
            setattr(holder, name, function)
        self._waiting, self._before = None, []

    def _loaded(self, _: ModuleType) -> None:
        if self._waiting is not None:
            self._waiting.remove()
        self._replace()

    def _replace(self) -> None:
        """Patch the functions of the imported module."""

    def _put(self, holder: Any, **functions: Any) -> None:
        """Replace attributes of a module or class until :meth:`stop`."""
        for name, function in functions.items():
            self._before.append((holder, name, vars(holder)[name]))
            setattr(holder, name, function)
