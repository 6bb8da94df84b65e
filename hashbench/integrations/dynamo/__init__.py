"""Run PyTorch's own harness, ``benchmarks/dynamo``, unedited, with hashbench's trace around its two eager runs.

``harness`` checks its source and starts it with the folder ``site`` on ``PYTHONPATH``, so that each of its processes
waits here for the import of the harness and then loads ``hook``, which wraps ``check_accuracy``. ``model_check``
watches one such call and writes our row; ``session`` merges our rows with the harness's. Nothing of the harness is
copied: its function names are its interface.

Every Python that the harness starts imports this module first, so it imports nothing but the standard library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

from hashbench.imports import ImportWatch

OnImport = Callable[[ModuleType], object]


def watch_for_harness(on_import: OnImport) -> None:
    """Call ``on_import`` with every module called ``common`` once it is imported; replaces an earlier watch."""
    others = (finder for finder in sys.meta_path if not isinstance(finder, _HarnessWatch))
    sys.meta_path[:] = [_HarnessWatch(lambda name: name.rpartition(".")[2] == "common", on_import), *others]


class _HarnessWatch(ImportWatch):
    """Singleton per process."""


def plug_in(module: ModuleType) -> None:
    """Wrap the methods of ``class BenchmarkRunner`` in ``module`` if it has one; never raises."""
    if not hasattr(module, "BenchmarkRunner"):
        return
    try:
        from hashbench.integrations.dynamo import hook

        hook.attach(module)
    except Exception as error:
        print(f"hashbench: cannot plug into this process: {error}", file=sys.stderr)
