"""Record hashes in one run, check them in another process, another day.

>>> with ObserverContext(dump_dir, "reference") as observer:
...     observe("output", model(inputs))
>>> with ObserverContext(dump_dir, "check", reference_hash_file=f"{dump_dir}/reference.json") as observer:
...     observe("output", model(inputs))
>>> observer.mismatches
{}
"""

from __future__ import annotations

from hashbench.tools.observer.files import read as read_recording
from hashbench.tools.observer.mode import HashMode
from hashbench.tools.observer.observer import (
    MismatchError,
    Observer,
    ObserverContext,
    current_observer,
    disable_hash_mode,
    enable_hash_mode,
    marking_non_deterministic,
    observe,
    observe_grad,
    observe_non_deterministic,
    observe_non_deterministic_grad,
)
from hashbench.tools.observer.recording import Kind, Mismatch

__all__ = [
    "HashMode",
    "Kind",
    "Mismatch",
    "MismatchError",
    "Observer",
    "ObserverContext",
    "current_observer",
    "disable_hash_mode",
    "enable_hash_mode",
    "marking_non_deterministic",
    "observe",
    "observe_grad",
    "observe_non_deterministic",
    "observe_non_deterministic_grad",
    "read_recording",
]
