"""What the fork server of :mod:`hashbench.executors.local` imports once, so that no worker pays for it.

Import it nowhere else: it loads torch. Importing these modules starts no OpenMP threads (they would not survive the
fork); running an op here would. A module that cannot be imported is left to the worker that needs it, whose error
then reaches a row or the user: an exception here would only kill the server.
"""

from __future__ import annotations

import contextlib
import importlib

MODULES = ("torch", "torch._dynamo", "torchvision", "hashbench.runner", "hashbench.suites.torchvision")

for _name in MODULES:
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
