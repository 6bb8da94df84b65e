"""Which of two verdicts on the same model is kept: that of the plain pair, or that of the pair with hashed inputs."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from hashbench.core.records import Divergence, Leaf, OpRecord, Ref, RunOptions, TensorDigest, Trace, Verdict
from hashbench.core.run import outcome
from hashbench.core.run.outcome import Prepared, Run, attempt, replaces, traces_of
from hashbench.core.trace.api import HashDebugTrace, Recording
from hashbench.core.trace.callbacks import TraceCallback

CONTENT = TensorDigest("float32", (4,), (1,), "a")
OTHER = CONTENT._replace(value="b")
POOL = Leaf("other/#0", "other", CONTENT, 0)
VIEW = OpRecord("v", "forward", 0, "Net", "aten.slice.Tensor", arguments="0, 4")
PLAIN = Divergence("outside", "v", "aten.slice.Tensor", 0, "forward", 0, "Net", "", "")
KERNEL = Divergence("kernel", "k", "aten.mv.default", 3, "forward", 0, "Net", "", "")


def verdict(divergence: Divergence | None) -> Verdict:
    return Verdict(("output",), divergence, ())


def traces(view: OpRecord = VIEW, pool: Leaf = POOL) -> tuple[Trace, Trace]:
    """The pair with hashed inputs: its second trace holds ``view`` and ``pool``."""
    return Trace((VIEW,), (POOL,)), Trace((view,), (pool,))


WRITE = replace(VIEW, arguments="", inputs=(Ref("0", "other/#0", 0, written=True),), outputs=(CONTENT,))
HIDDEN = replace(KERNEL, origin="outside", opaque_producer=True)
MOVED = traces(view=replace(VIEW, arguments="2, 6"))
CHANGED = traces(pool=replace(POOL, digest=OTHER))
TENSOR, LATE = replace(PLAIN, node="other/#0"), replace(PLAIN, op_index=5)


@pytest.mark.parametrize(
    ("hashed", "plain", "pair", "expected"),
    [
        pytest.param(PLAIN, replace(KERNEL, node="m"), traces(), True, id="a kernel was blamed, memory not looked at"),
        pytest.param(KERNEL, KERNEL, traces(), True, id="both blame the same"),
        pytest.param(KERNEL, PLAIN, MOVED, True, id="a view was blamed that shows the same at another place"),
        pytest.param(HIDDEN, PLAIN, MOVED, True, id="a view was blamed, and memory was written behind torch"),
        pytest.param(replace(HIDDEN, opaque_producer=False), PLAIN, MOVED, False, id="an argument is blamed instead"),
        pytest.param(
            KERNEL,
            PLAIN,
            (Trace((WRITE,)), Trace((replace(WRITE, inputs=(WRITE.inputs[0]._replace(offset=4),)),))),
            True,
            id="a write was blamed that went to another part",
        ),
        pytest.param(KERNEL, PLAIN, traces(), False, id="a view was blamed that did not move this time"),
        pytest.param(KERNEL, TENSOR, CHANGED, True, id="a tensor was blamed of which nothing else was read"),
        pytest.param(KERNEL, TENSOR, traces(), False, id="a tensor was blamed that is equal this time"),
        pytest.param(replace(KERNEL, op_index=0), LATE, MOVED, False, id="the kernel lies before what was blamed"),
        pytest.param(replace(KERNEL, origin="rng"), PLAIN, MOVED, False, id="a generator is blamed instead"),
    ],
)
def test_which_verdict_is_kept(
    hashed: Divergence, plain: Divergence, pair: tuple[Trace, Trace], expected: bool
) -> None:
    assert replaces(verdict(hashed), verdict(plain), pair) is expected


def test_hashed_divergence_replaces_none() -> None:
    assert replaces(verdict(KERNEL), None, traces())


def test_addresses_are_arranged_before_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(outcome, "arranged_addresses", lambda: done.append("arranged") or [])  # type: ignore[func-returns-value]

    def prepare() -> Prepared:
        done.append("copied")
        raise RuntimeError("enough")

    assert len(traces_of(prepare, RunOptions(), runs=2)) == 2
    assert done == ["arranged", "copied"] * 2


@pytest.mark.parametrize("tracer", ["auto", "python"])
def test_trace_of_watched_run_is_built_on_demand(tracer: str) -> None:
    watching = TraceCallback()

    def prepare() -> Prepared:
        model = torch.nn.Identity()

        def execute(trace: HashDebugTrace | None) -> dict[str, torch.Tensor]:
            with trace or nullcontext():
                return {"output": torch.ones(2) + 1}

        return Prepared(model, (), execute)

    run = attempt(prepare, RunOptions(tracer=tracer), watcher=watching)
    assert isinstance(run, Run)
    assert isinstance(run.recorded, Recording)
    assert run.recorded._trace._finished is None
    assert run.trace is not None
    assert len(run.trace.records) == 2


PREPARED = """
import torch
from hashbench.core.records import RunOptions
from hashbench.core.run.outcome import Prepared, traces_of

drawn = []

def prepare():
    drawn.append(float(torch.rand(())))
    return Prepared(torch.nn.Linear(2, 2), (), lambda trace: {})

traces_of(prepare, RunOptions(), runs=1)
print(len(drawn), drawn[-1])
"""


@pytest.mark.slow
def test_fixed_addresses_use_the_second_copy() -> None:
    def prepared(seed: str) -> tuple[str, str]:
        command = [sys.executable, "-c", PREPARED]
        made = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, check=True)
        copies, drawn = made.stdout.decode().split()
        return copies, drawn

    (once, drawn), (twice, again) = prepared("random"), prepared("0")
    assert (once, twice) == ("1", "2")
    assert drawn == again
