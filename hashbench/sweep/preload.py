"""What the fork server of :mod:`hashbench.sweep.executors.local` imports once, so that no worker pays for it.

Import it nowhere else: it loads torch. Importing these modules starts no OpenMP threads (they would not survive the
fork); running an op here would. A module that cannot be imported is left to the worker that needs it, whose error
then reaches a row or the user: an exception here would only kill the server.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib

MODULES = ("torch", "torch._dynamo", "torchvision", "hashbench.check.model", "hashbench.suites.torchvision")

for _name in MODULES:
    with contextlib.suppress(Exception):
        importlib.import_module(_name)

# The 500 000 objects of these modules live as long as the workers do. Frozen, they are neither searched by the
# collector (0.2 s a time) nor copied with the pages that it would touch in every worker.
gc.collect()
gc.freeze()
# What is frozen when the server ends counts as leaked: triton's bindings would print a page about it.
atexit.register(gc.unfreeze)
