"""Prints how many calls of torch's own op database replay to the recorded digests, and which do not.


``python tests/core/diagnose/calls/op_database_replays.py``: a script of its own, since importing the database freezes
backend flags.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db

from hashbench.core.diagnose.calls.call import CapturedCall
from hashbench.core.diagnose.calls.capture import capture
from hashbench.core.diagnose.calls.live import LiveCall, OutcomeDigests, captured_environment
from hashbench.core.records import TensorDigest
from hashbench.core.run.rng import preserved_rng
from hashbench.core.trace import arguments
from hashbench.core.trace.api import HashDebugTrace
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.op_schema import plan_of

LIMIT = 2**26


class Capturing(TraceCallback):
    """Captures every call of a trace."""

    def __init__(self) -> None:
        self.calls: dict[str, CapturedCall] = {}

    def before(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.calls[node] = capture(func, args, kwargs, limit_bytes=LIMIT)


UNWRITTEN = ("aten._ctc_loss", "aten._sparse_mm_reduce_impl", "aten.mkldnn_rnn_layer")
"""Some elements of their outputs are never written: reported by the poison arm, different in every run."""

DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool, torch.float16)


def traced_samples() -> Iterator[tuple[CapturedCall, tuple[TensorDigest, ...]]]:
    """Calls from samples of torch's own op database, forward and backward, with the outputs that the trace recorded."""
    for number, op in enumerate(op_db[::6]):
        dtype = next(
            (DTYPES[(number + step) % 5] for step in range(5) if DTYPES[(number + step) % 5] in op.dtypes), None
        )
        differentiable = dtype in (torch.float32, torch.complex64) and op.supports_autograd
        samples: list[Any] = []
        with suppress(Exception):  # some samples need what this build lacks
            samples = list(op.sample_inputs("cpu", dtype, requires_grad=differentiable))[:1]
        for sample in samples:
            captured = Capturing()
            with HashDebugTrace(watcher=captured) as trace, suppress(Exception):  # some samples are for GPUs
                outputs = arguments.tensors_in(op(sample.input, *sample.args, **sample.kwargs))
                roots = [output.abs().sum() for output in outputs if output.requires_grad]
                torch.autograd.backward(roots)
            yield from ((captured.calls[record.id], record.outputs) for record in trace)


def replayed(call: CapturedCall) -> OutcomeDigests:
    """What one replay of ``call`` leaves."""
    with captured_environment(call):
        live = LiveCall(call)
        live.reset()
        return live.run().digests()


def main() -> None:
    """Print ``{"seen": 900, "wrong": []}``."""
    seen = 0
    wrong: list[str] = []
    with preserved_rng():
        for call, recorded in traced_samples():
            if plan_of(call.func).blank or call.op.startswith(UNWRITTEN):
                continue
            seen += 1
            outcome = replayed(call)
            if [digest.word() for digest in outcome.written] != [digest.word() for digest in recorded]:
                wrong.append(call.op)
    print(json.dumps({"seen": seen, "wrong": wrong}))


if __name__ == "__main__":
    main()
