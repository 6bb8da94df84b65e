"""The process that records a model: its memory, its steps, and what it keeps."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_helpers import FunctionRunner

from hashbench.core.check.function import FunctionCall
from hashbench.core.errors import HashbenchError
from hashbench.core.finding import Finding
from hashbench.core.records import ModelSpec, RunOptions
from hashbench.core.run.workload import Workload
from hashbench.extensions.fingerprint import check as fingerprint
from hashbench.extensions.fingerprint.check import changed_kernels, collected_kernels, fingerprint_from, record_function

FAULTS = """
import resource, sys, torch
from hashbench.extensions.fingerprint.check import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(2**26, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = len(sys.argv) > 1 and keep_freed_memory()
print(int(kept), min(faults() for _ in range(5)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_freed_memory_is_kept() -> None:
    def faults(*arguments: str) -> tuple[int, int]:
        told = subprocess.run([sys.executable, "-c", FAULTS, *arguments], capture_output=True, text=True, check=True)
        kept, number = told.stdout.split()
        return int(kept), int(number)

    assert faults("kept") < (1, 100)
    assert faults() > (0, 1000)  # 64 MiB come from the system each time, page by page


ASKED = """
import pathlib, sys
import psutil
from hashbench.extensions.fingerprint import check as fingerprint
from hashbench.extensions.fingerprint.check import changed_kernels, fingerprint_from, record_function
from hashbench.extensions.fingerprint.check import collected_kernels
from hashbench.core.check.function import FunctionCall
from hashbench.core.errors import HashbenchError

fingerprint.OVERCOMMIT = pathlib.Path(sys.argv[1])
before = psutil.Process().memory_info()
assert fingerprint.keep_freed_memory()
after = psutil.Process().memory_info()
print(after.vms - before.vms, after.rss - before.rss)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
@pytest.mark.parametrize(("mode", "asks"), [("0", True), ("2", False)])
def test_memory_is_reserved_where_overcommit_allows(mode: str, asks: bool, tmp_path: Path) -> None:
    (tmp_path / "overcommit_memory").write_text(f"{mode}\n")
    command = [sys.executable, "-c", ASKED, str(tmp_path / "overcommit_memory")]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    asked, touched = map(int, told.stdout.split())
    assert (asked >= 2**28) == asks
    assert touched < 2**26


def test_model_is_freed_once_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of one that refers to itself. It is not copied: nobody runs it again."""
    ran: list[weakref.ref[torch.nn.Module]] = []
    collections: list[None] = []

    class Cyclic(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.__dict__["me"] = self
            ran.append(weakref.ref(self))
            return super().forward(x)

    def build() -> Workload:
        model = Cyclic(3, 3)
        model(torch.ones(1, 3))
        return Workload(model, (torch.ones(2, 3),))

    def collect() -> int:
        collections.append(None)
        return really()

    really = gc.collect
    monkeypatch.setattr(gc, "collect", collect)
    runner = FunctionRunner(RunOptions(mode="inference"))
    runner.build = build
    collected = fingerprint._collected(runner, ModelSpec("zoo", "net"), "on")
    assert [kernel.op for kernel in collected.kernels.kernels] == ["aten.addmm.default"]
    assert len(ran) > 1
    assert [one() for one in ran] == [None] * len(ran)
    assert len(collections) == 1


@pytest.mark.parametrize(("iterations", "forwards"), [(None, 1), (3, 3)])
def test_model_steps_once_and_optimizer_twice(iterations: int | None, forwards: int) -> None:
    """The second one of an optimizer with momentum has other kernels than the first."""
    ran: list[None] = []

    class Counted(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ran.append(None)
            return super().forward(x)

    def momentum(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)

    runner = FunctionRunner(RunOptions(mode="training", iterations=iterations))
    runner.build = lambda: Workload(Counted(3, 3), (torch.ones(2, 3),), make_optimizer=momentum)
    collected = fingerprint._collected(runner, ModelSpec("zoo", "net"), "on")
    assert len(ran) == forwards
    ops = {kernel.op for kernel in collected.kernels.kernels if kernel.place.startswith("optimizer")}
    assert {"aten.clone.default", "aten.mul_.Tensor"} <= ops


# -------------------------------------------------------------------------------------------- functions

OPTIONS = RunOptions(threads=1)
CALL = FunctionCall(lambda x: x.exp().relu(), (torch.ones(2, 3),))
OTHER = FunctionCall(lambda x: x.exp().tan(), (torch.ones(2, 3),))


def changed(call: FunctionCall, name: str, path: Path) -> Finding | None:
    kept = path.with_name("kernels.txt")
    return changed_kernels(call, name, OPTIONS, path, keep=kept, how_to_record="record(it)")


def test_a_recorded_function_is_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    assert record_function(CALL, "it", OPTIONS, path).startswith("2 kernels")
    assert changed(CALL, "it", path) is None


def test_other_kernels_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    record_function(CALL, "it", OPTIONS, path)
    found = changed(OTHER, "it", path)
    assert found is not None
    facts = dict(found.facts)
    assert found.headline == "it: 0 of 2 kernels changed since base.json was recorded"
    assert facts["each kernel"] == str(path.with_name("kernels.txt"))
    assert "the same" in Path(facts["each kernel"]).read_text(encoding="utf-8")
    assert found.next == ("record(it)",)
    assert facts["not recorded"] == "aten.tan.default"
    assert facts["no longer called"] == "aten.relu.default"


def test_file_of_another_function_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    record_function(CALL, "it", OPTIONS, path)
    with pytest.raises(HashbenchError, match="other"):
        changed(CALL, "other", path)


def test_function_without_kernels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HashbenchError):
        record_function(FunctionCall(lambda: None, ()), "it", OPTIONS, tmp_path / "base.json")
    assert not (tmp_path / "base.json").exists()


def test_kernels_beyond_the_time_limit_are_left_out() -> None:
    collector, spec = collected_kernels(CALL, OPTIONS), ModelSpec("zoo", "model")
    whole = fingerprint_from(collector, spec, OPTIONS, level="off")
    none = fingerprint_from(collector, spec, OPTIONS, level="off", seconds=-1.0)
    assert (len(whole.kernels), len(none.kernels)) == (2, 0)
