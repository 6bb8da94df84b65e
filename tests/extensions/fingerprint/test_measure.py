"""Signatures run in isolation; ops without a repeatable result are left out with a reason."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from hashbench.core.diagnose.calls.call import CapturedCall
from hashbench.core.trace.api import HashDebugTrace
from hashbench.extensions.fingerprint import document, measure
from hashbench.extensions.fingerprint.calls import KernelCollector
from hashbench.extensions.fingerprint.measure import RANDOM, VARIES, record
from hashbench.extensions.fingerprint.values import Arena
from tests.extensions.fingerprint.fingerprint_helpers import verified


def test_unrepeatable_ops_are_left_out() -> None:
    counted = iter(range(1000))
    library = torch.library.Library("fingerprint_test", "DEF")
    library.define("varies(Tensor x) -> Tensor")
    library.define("picky(Tensor x) -> Tensor")
    library.impl("varies", lambda x: x + next(counted), "CPU")
    library.impl("picky", lambda x: x + 1 if float(x[0]) == 7 else 1 // 0, "CPU")

    def run() -> None:
        torch.ops.fingerprint_test.varies(torch.ones(3))
        torch.ops.fingerprint_test.picky(torch.full((3,), 7.0))
        torch.rand(3).bernoulli_(0.5)

    made = record(run, name="all kinds")

    left_out = made.models[0].left_out
    assert left_out[VARIES] == {"fingerprint_test.varies.default": 1}
    assert "aten.bernoulli_.float" in left_out[RANDOM]
    (raised,) = [reason for reason in left_out if reason.startswith("raises on synthetic inputs")]
    assert left_out[raised] == {"fingerprint_test.picky.default": 1}
    library._destroy()


def test_resizing_op_has_a_fingerprint() -> None:
    def run() -> None:
        torch.mul(torch.ones(2, 3), 2, out=torch.empty(0))
        torch.max(torch.ones(2, 3), 1, out=(torch.empty(0), torch.empty(7, dtype=torch.long)[:0]))

    recorded = record(run, name="out")
    (model,) = recorded.models
    outputs = {kernel.op: tuple(word.partition(":")[0] for word in kernel.outputs) for kernel in model.kernels}

    assert not set(model.left_out) - {"a view", "allocates memory"}
    assert outputs["aten.mul.out"] == ("float32[2,3]",)
    assert outputs["aten.max.dim_max"] == ("float32[2]", "int64[2]")
    assert verified(recorded).same == len(model.kernels)


def test_sparse_and_nested_outputs_are_left_out(tmp_path: Path) -> None:
    def run() -> None:
        dense = torch.eye(8)
        dense.to_sparse()
        dense.to_sparse_csr()
        torch._nested_tensor_from_mask(torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.bool))

    recorded = record(run, name="sparse")
    (model,) = recorded.models
    document.write(tmp_path / "sparse.json", recorded)

    assert model.left_out["writes a tensor of a special kind"] == {
        "aten._to_sparse.default": 1,
        "aten._to_sparse_csr.default": 1,
        "aten._nested_tensor_from_mask.default": 1,
    }
    assert document.read(tmp_path / "sparse.json") == recorded


@pytest.mark.parametrize(("large", "copied_in"), [(measure.LARGE, [0, 1]), (0, [])], ids=["small", "large"])
def test_repetitions_differ_by_address_only(large: int, copied_in: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one takes the call's own memory; what is large is made anew instead of copied."""
    monkeypatch.setattr(measure, "LARGE", large)
    seen: list[tuple[int, list[float]]] = []
    copies: list[int] = []
    library = torch.library.Library("fingerprint_places", "DEF")
    library.define("kernel(Tensor(a!) x) -> ()")

    def kernel(x: torch.Tensor) -> None:
        seen.append((x.data_ptr(), x.tolist()))
        x.numpy()[:] = 1.0

    library.impl("kernel", kernel, "CPU")
    rooms = measure._rooms

    def copied(call: CapturedCall, repetition: int, arena: Arena, *, last: bool) -> Any:
        copies.extend([] if last else [repetition] * len(call.memories))
        return rooms(call, repetition, arena, last=last)

    monkeypatch.setattr(measure, "_rooms", copied)
    (model,) = record(lambda: torch.ops.fingerprint_places.kernel(torch.ones(3)), name="places").models
    library._destroy()
    runs = [address for address, _ in seen[1:]]  # after that of the recording

    assert [kernel.op for kernel in model.kernels] == ["aten.ones.default", "fingerprint_places.kernel.default"]
    assert len({address % 4096 for address in runs}) == len(runs) == 3
    assert not any(address % 64 for address in runs)
    assert seen[1][1] == seen[2][1] == seen[3][1]
    assert copies == copied_in


def test_kernels_beyond_the_cpu_budget_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(measure.time, "thread_time", lambda: float(next(clock)))
    collector = KernelCollector()
    with HashDebugTrace(watcher=collector):
        torch.ones(3).sin().cos().tan()
    with measure.isolation(deterministic="on", threads=None):
        measured = measure.measure(collector, device=torch.device("cpu"), seconds=4)

    assert [kernel.op for kernel in measured.kernels] == ["aten.ones.default"]
    assert set(measured.left_out["no time left after 4 CPU s"]) == {
        f"aten.{op}.default" for op in ("sin", "cos", "tan")
    }
