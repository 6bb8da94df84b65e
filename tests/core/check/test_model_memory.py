"""What is left of a model that ran out of memory when the next one begins, and what its row says of a device's memory.

Nothing here calls the garbage collector: the runner has to.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from runner_helpers import FunctionRunner

from hashbench.core.records import ModelSpec, Row, RunOptions
from hashbench.core.run.workload import Workload

TRAINING = RunOptions(mode="training", diagnose_budget=0, threads=1)
NO_MEMORY = "CUDA out of memory. Tried to allocate 20.00 GiB."


class Remembering(torch.nn.Module):
    """Notes its own tensors and those of its runs, and asks ``act`` at three places."""

    def __init__(self, act: Callable[[str], None]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.act = act
        self.references: list[weakref.ref[torch.Tensor]] = []
        self.note(self.layer.weight)

    def note(self, tensor: torch.Tensor) -> None:
        REFERENCES.append(weakref.ref(tensor))

    def __deepcopy__(self, memo: dict[int, Any]) -> Remembering:
        self.act("copy")
        made = Remembering(self.act)
        made.layer.load_state_dict(self.layer.state_dict())
        return made

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        moved = super()._apply(fn, recurse)
        self.act("move")
        return moved

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        self.note(hidden)
        self.__dict__["itself"] = self  # reference counts alone do not free it
        self.act("forward")
        return hidden


REFERENCES: list[weakref.ref[torch.Tensor]] = []
"""To every tensor that a model of these tests has noted."""


@pytest.fixture(autouse=True)
def _from_the_start() -> Iterator[None]:
    REFERENCES.clear()
    gc.disable()  # what is freed, the runner has freed
    yield
    gc.enable()


def row_of(build: Callable[[], Workload], options: RunOptions = TRAINING) -> Row:
    runner = FunctionRunner(options)
    runner.build = build
    return runner.run_model(ModelSpec(suite="here", name="model"))


def model(act: Callable[[str], None]) -> Workload:
    return Workload(module=Remembering(act), inputs=(torch.ones(4, 64),))


def failing(place: str, *, time: int = 1) -> Callable[[str], None]:
    """Runs out of memory at ``place``, when it comes there for the ``time``-th time."""
    seen: list[str] = []

    def act(here: str) -> None:
        seen.append(here)
        if here == place and seen.count(here) == time:
            raise torch.OutOfMemoryError(NO_MEMORY)

    return act


def alive() -> int:
    return sum(reference() is not None for reference in REFERENCES)


FAILING = {
    "putting it on its device": ("move", 1, "eager_1st_run_OOM", None),
    "copying it": ("copy", 1, "eager_1st_run_OOM", None),
    "the first run": ("forward", 1, "eager_1st_run_OOM", None),
    "the second iteration": ("forward", 2, "eager_1st_run_OOM", None),
    "the second run": ("forward", 3, "eager_2nd_run_OOM", 2),
}


@pytest.mark.parametrize("name", FAILING)
def test_oom_leaves_no_memory_to_the_next_model(name: str) -> None:
    place, time, status, runs = FAILING[name]
    row = row_of(lambda: model(failing(place, time=time)))
    assert (row.accuracy, row.runs) == (status, runs)
    assert row.error == f"OutOfMemoryError: {NO_MEMORY}"
    assert REFERENCES
    assert alive() == 0

    def next_one() -> Workload:
        assert alive() == 0
        return model(lambda _here: None)

    assert row_of(next_one).accuracy == "pass"
    assert alive() == 0


def test_loading_that_runs_out_of_memory_says_so() -> None:
    def build() -> Workload:
        made = model(lambda _here: None)
        made.module.act = made.module  # a cycle
        raise MemoryError

    assert row_of(build).accuracy == "eager_1st_run_OOM"
    assert alive() == 0


def test_a_comparison_that_runs_out_of_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError(NO_MEMORY)

    monkeypatch.setattr("hashbench.core.run.outputs.compare", compare)
    row = row_of(lambda: model(lambda _here: None))
    assert (row.accuracy, row.runs) == ("eager_2nd_run_OOM", 2)
    assert alive() == 0


def test_nothing_holds_on_to_a_traceback_even_where_the_log_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        row_of(lambda: model(failing("forward")))
    assert alive() == 0
    (record,) = caplog.records
    assert record.getMessage().startswith("a run failed\nTraceback")
    assert NO_MEMORY in record.getMessage()


def test_a_model_that_is_built_again_finds_the_first_one_gone() -> None:
    alive_when_built = []

    def build() -> Workload:
        alive_when_built.append(alive())

        def act(here: str) -> None:
            if here == "move":
                torch.zeros(4).put_(torch.tensor([0, 1]), torch.ones(2), accumulate=False)  # refused

        return model(act)

    row = row_of(build)
    assert (row.accuracy, row.deterministic) == ("pass", "warn")
    assert alive_when_built == [0, 0, 0]  # for each level, and a second time


# ------------------------------------------------------------------------------------------------ a device's memory


class Allocator:
    """torch's allocator of an accelerator, as ``torch.accelerator`` tells of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, peak_mib: int | None) -> None:
        self.calls: list[str] = []
        self.stats = {} if peak_mib is None else {"allocated_bytes.all.peak": peak_mib * 2**20}
        for name in ("reset_peak_memory_stats", "memory_stats", "empty_cache"):
            monkeypatch.setattr(torch.accelerator, name, getattr(self, name))

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.calls.append(f"reset {device}")

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        self.calls.append(f"look at {device}")
        return self.stats

    def empty_cache(self) -> None:
        self.calls.append("empty")


def on_device(build: Callable[[], Workload], device: str = "xpu:1") -> Row:
    """``build`` fails, so that no device is needed."""
    return row_of(build, RunOptions(device=device, diagnose_budget=0, threads=1))


def refuse() -> Workload:
    raise MemoryError


@pytest.mark.parametrize(
    ("peak", "told"), [(5, 5.0), (0, 0.0), (None, None)], ids=["counted", "none", "nothing was allocated"]
)
def test_the_row_has_the_peak_of_the_models_device_since_its_start(
    peak: int | None, told: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = Allocator(monkeypatch, peak_mib=peak)
    row = on_device(refuse)
    assert row.device_memory_mib == told
    assert row.peak_memory_mib
    assert row.peak_memory_mib > 50, "of the process, which has torch loaded"
    assert allocator.calls == ["reset xpu:1", "empty", "look at xpu:1"]


def test_on_the_cpu_there_is_no_memory_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch, peak_mib=5)
    row = row_of(lambda: model(lambda _here: None))
    assert (row.accuracy, row.device_memory_mib, allocator.calls) == ("pass", None, [])


def test_a_device_that_refuses_everything_costs_no_row(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    allocator = Allocator(monkeypatch, peak_mib=5)

    def broken(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with …")

    for name in ("reset_peak_memory_stats", "memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.accelerator, name, broken)
    row = on_device(refuse)
    assert (row.accuracy, row.device_memory_mib) == ("eager_1st_run_OOM", None)
    assert caplog.messages[-1] == ("the memory of xpu:1 cannot be given back: CUDA error: device-side assert triggered")
    assert allocator.calls == []
