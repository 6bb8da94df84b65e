"""Run PyTorch's own harness, ``benchmarks/dynamo``, unedited, with hashbench's trace around its two eager runs.

``harness`` checks its source and starts it with the folder ``site`` on ``PYTHONPATH``, so that each of its processes
waits here for the import of the harness and then loads ``hook``, which wraps ``check_accuracy``. ``model_check``
watches one such call and writes our row; ``session`` merges our rows with the harness's. Nothing of the harness is
copied: its function names are its interface.

Every Python that the harness starts imports this module first, so it imports nothing but the standard library; of ours
it loads three modules (0.03 s of CPU). Inductor's children load none.

While a model is checked, ``same`` in the harness's module is observed. The pair are its arguments, known by the
identity of their tensors. Digests are kept, no tensors. Before anything runs, the script and the ``common.py`` beside
it are parsed. A harness that lacks what is needed is refused with exit code 2 and the name of what is missing: ``class
BenchmarkRunner``; its methods ``check_accuracy``, ``run_n_iterations``, ``deepcopy_and_maybe_parallelize``,
``init_optimizer``, ``pick_grad``; in ``check_accuracy`` calls of ``reset_rng_state``, ``same``, ``clone_inputs`` and
``self.run_n_iterations``.

The cause is sought after the harness has written its row, by the code of ``hashbench sweep``: confirming pairs,
experiments, fresh processes (in which the harness builds the model again) and the repro, with the harness's copies,
optimizer, inputs and iterations. A model of ``--only path:FILE,class:CLASS`` is built before the harness seeds
anything: a fresh process begins with the states that the global generators of torch, NumPy and Python had then; one
whose weights still differ does not count. In a sweep the diagnosis takes at most 70 % of what is left of the harness's
``--timeout`` (a child killed then has two rows in the harness's CSV), and is skipped if twelve eager runs do not fit.

A run that fails has failed: the harness's word is what it would be without us. Only if our own code raised, or if an op
raises in a second traced run too and not in an untraced one, is the failure the trace's, and the untraced run counts. A
fault of ours is one line on standard error and in our row. A traceback of a failed run that the harness prints has
frames of ours between its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

from hashbench.core.imports import ImportWatch

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
