"""Captured calls and what is said of them, for the tests of repros."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from hashbench.core.diagnose.calls.call import CapturedCall
from hashbench.core.diagnose.calls.capture import capture
from hashbench.core.records import CallFacts, Decision, Diagnosis, Evidence, ExperimentResult, Rate

aten: Any = torch.ops.aten

PLACE = {
    "node": "backward/0/Net.pick/aten.index_put_.default#0",
    "phase": "backward",
    "module": "Net.pick",
    "forward_op": "forward/0/Net.pick/aten.index.Tensor#0",
    "source": "net.py:12 forward",
}


def captured(func: Any, *args: Any, threads: int = 1, **kwargs: Any) -> CapturedCall:
    """The call as it is captured in a backward pass, with so many threads."""
    call = capture(func, args, kwargs, limit_bytes=2**28)
    settings = {**call.settings, "num_threads": str(threads)}
    return dataclasses.replace(call, threads=threads, settings=settings, **PLACE)


def said_of(*arms: ExperimentResult, op: str = "aten.index_put_.default") -> Diagnosis:
    """A diagnosis with these arms."""
    decision = Decision("accumulation_order", "likely", "20 of 20 replays differ", "Add in one order.")
    rate = Rate(20, 20, of="replays", low=0.861, high=1.0, distinct=21)
    return Diagnosis(decision, Evidence("kernel", call=CallFacts(op), arms=arms), rate=rate)


def adding_rows(*, accumulate: bool = True) -> CapturedCall:
    """An ``index_put_`` that adds many rows to few, large enough for eight threads to race on any machine."""
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, 20, (200_000,), generator=generator)
    rows = torch.randn(200_000, 8, generator=generator)
    return captured(aten.index_put_.default, torch.zeros(20, 8), [index], rows, accumulate, threads=8)


def document_in(folder: Path) -> dict[str, Any]:
    """``call.json`` of a folder."""
    found: dict[str, Any] = json.loads((folder / "call.json").read_text())
    return found


def signed_again(folder: Path, found: dict[str, Any]) -> None:
    """Write ``call.json`` as somebody does who knows how its digests are made."""
    found["tensors_sha256"] = hashlib.sha256((folder / "tensors.pt").read_bytes()).hexdigest()
    rest = {key: value for key, value in found.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    (folder / "call.json").write_text(json.dumps({**rest, "sha256": digest}))
