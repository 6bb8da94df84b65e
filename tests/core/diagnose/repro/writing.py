"""A repro written to a folder and run, for the tests of repros."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from repro_helpers import said_of

from hashbench.core.diagnose.calls.call import CapturedCall
from hashbench.core.diagnose.repro import run_in_fresh_process, write_repro
from hashbench.core.records import ExperimentResult

REPEAT = ExperimentResult("repeat", "call", trials=20, differing=20, distinct=21, seconds=0.002)


def written(folder: Path, call: CapturedCall, *arms: ExperimentResult) -> Path:
    """The repro of a call in ``folder``."""
    write_repro(folder, call, said_of(*arms, op=call.op), seen_in="in a test")
    return folder


def ran(folder: Path, **kwargs: Any) -> str:
    return run_in_fresh_process(folder, timeout=600, **kwargs)


def differs(said: str) -> bool:
    """Return True if any call of a repro that ran to its end differed."""
    counted = re.fullmatch(r"in a fresh process (\d+) of \d+ calls differ", said)
    assert counted is not None, said
    return int(counted[1]) > 0
