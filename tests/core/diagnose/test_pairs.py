"""Experiments on the whole model: what counts as the same difference, pairs of runs, processes, sources replaced."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hashbench.core.diagnose import driver
from hashbench.core.diagnose.driver import Recorder, Replacer
from hashbench.core.diagnose.fresh_process import FreshRuns
from hashbench.core.diagnose.pairs import CLEAR, Pairs, of_same_weights, process_results, still_there
from hashbench.core.diagnose.replay import controls
from hashbench.core.diagnose.replay.controls import memory as poison
from hashbench.core.divergence import find as find_divergence
from hashbench.core.processes import Budget
from hashbench.core.records import OTHER_WEIGHTS, Divergence, ExperimentResult, Failure, RunCounts, RunOptions, Trace
from hashbench.core.run import outputs
from hashbench.core.run.outcome import Outcome, Run
from hashbench.core.trace.api import HashDebugTrace
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.mode import is_tracing

ONE = torch.Generator().manual_seed(1)
TWO = torch.Generator().manual_seed(2)
STEADY = np.random.default_rng(3)


def place(node: str, op_index: int | None, origin: str = "kernel") -> Divergence:
    return Divergence(origin, node, "aten.mm.default", op_index, "forward", 0, "", "", "")


@pytest.mark.parametrize(
    ("original", "found", "there"),
    [
        pytest.param(place("a", 5), None, False, id="runs that agree"),
        pytest.param(place("a", 5), place("a", 5), True, id="the same record"),
        pytest.param(place("a", 5), place("b", 9), False, id="another record later"),
        pytest.param(place("a", 5), place("b", 2), True, id="another record before, which may hide it"),
        pytest.param(place("a", 5, "sequence"), place("b", 9, "sequence"), True, id="runs that part at another op"),
        pytest.param(place("a", 5, "sequence"), place("b", 9), False, id="runs that no longer part"),
        pytest.param(place("a", None, "settings"), place("b", 9), True, id="a place that has no position"),
        pytest.param(None, place("b", 9), True, id="any difference where none was examined"),
    ],
)
def test_whether_the_difference_is_still_there(
    original: Divergence | None, found: Divergence | None, there: bool
) -> None:
    assert still_there(original, found) is there


def run_of(compute: Callable[[], torch.Tensor]) -> Callable[..., Run]:
    def attempt(*, traced: bool = True) -> Run:
        torch.manual_seed(0)
        with HashDebugTrace() if traced else contextlib.nullcontext() as trace:
            found = compute()
        if trace is not None:
            trace.add_result("output", found)
        return Run(trace.finish() if trace is not None else None, {"output": found})

    return attempt


def pairs(compute: Callable[[], torch.Tensor], *, replays: int = 5, seconds: float = 60.0) -> Pairs:
    return Pairs(run_of(compute), None, replays=replays, budget=Budget(seconds))


def test_pairs_are_compared_with_the_first_run() -> None:
    counter = iter(range(100))
    arm = pairs(lambda: torch.ones(3) * (next(counter) % 2)).plain()
    assert (arm.trials, arm.differing, arm.distinct) == (5, 3, 2)
    assert arm.seconds is not None


def test_how_far_the_runs_of_pairs_differ_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "measure", None)
    counter = itertools.count()
    assert pairs(lambda: torch.ones(3) * next(counter)).plain().differing == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("odd", "counts", "expected"),
    [
        pytest.param(range(40, 2000, 40), None, (120, 3), id="seen once, looked at until it is known how rare it is"),
        pytest.param((), None, (50, 0), id="never seen"),
        pytest.param((), RunCounts(300, 15, 2), (200, 0), id="never seen, and the sweep says that it is rare"),
        pytest.param((), RunCounts(300, 285, 2), (187, 0), id="the first run of the sweep was a rare one"),
        pytest.param((), RunCounts(1, 1, 2), (50, 0), id="two runs do not tell"),
    ],
)
def test_a_rare_difference_is_looked_for_longer(
    odd: Sequence[int], counts: RunCounts | None, expected: tuple[int, int]
) -> None:
    numbers = itertools.count()
    attempt = run_of(lambda: torch.ones(3) * (next(numbers) in odd))
    arm = Pairs(attempt, None, replays=5, budget=Budget(600.0), counts=counts).plain()
    assert (arm.trials, arm.differing) == expected


def test_an_arm_ends_with_the_budget_and_says_so() -> None:
    arm = pairs(lambda: torch.ones(3), seconds=-1.0).plain()
    assert (arm.ran, arm.note) == (False, "budget")


def test_an_arm_out_of_time_keeps_its_trials() -> None:
    def compute() -> torch.Tensor:
        time.sleep(0.01)
        return torch.ones(3)

    arm = pairs(compute, replays=50, seconds=2.0).plain()
    assert 0 < arm.trials < 500
    assert (arm.note, arm.is_cut_short, arm.lacked_time) == ("budget", True, False)


def test_a_run_that_fails_ends_the_arm_and_is_told() -> None:
    def attempt(*, traced: bool = True) -> Failure:  # noqa: ARG001
        return Failure("RuntimeError: no\nmore")

    arm = Pairs(attempt, None, replays=5, budget=Budget(60.0)).plain()
    assert (arm.ran, arm.note) == (False, "a run failed: RuntimeError: no")


def test_untraced_runs_are_compared_by_their_results() -> None:
    def compute() -> torch.Tensor:
        return torch.ones(3) if is_tracing() else torch.rand(3, generator=ONE)

    found = pairs(compute)
    assert found.plain().differing == 0
    assert found.untraced().differing == 5


def test_the_generator_that_matters_is_named_among_those_that_move() -> None:
    def compute() -> torch.Tensor:
        TWO.get_state()
        torch.rand(3, generator=TWO)
        STEADY.random()
        return torch.rand(3, generator=ONE)

    arm = pairs(compute).generators()
    assert (arm.differing, arm.found) == (0, "tests.core.diagnose.test_pairs.ONE")


def test_results_that_follow_the_content_of_fresh_memory_are_counted() -> None:
    counter = iter(range(1000))

    def compute() -> torch.Tensor:
        return torch.cat((torch.empty(500), torch.ones(500) * next(counter) * 0))

    arm = pairs(compute).poison()
    assert (arm.trials, arm.differing, arm.distinct) == (5, 5, 2)
    assert arm.found == "1 of 1 results follow the value"


@pytest.mark.slow
@pytest.mark.parametrize(
    "compute",
    [lambda: torch.empty(500).fill_(1.0), lambda: torch.rand(500, generator=ONE)],
    ids=["memory that is written", "results that differ anyway"],
)
def test_results_that_do_not_follow_fresh_memory_are_not_counted(compute: Callable[[], torch.Tensor]) -> None:
    arm = pairs(compute).poison()
    assert (arm.trials, arm.differing) == (5, 0)


@pytest.mark.slow
def test_before_each_run_the_free_blocks_of_the_device_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[object] = []
    reserve = poison.Reserve(300, 20)
    monkeypatch.setattr(poison, "_fill_free_blocks", lambda *asked: happened.append(asked))
    monkeypatch.setattr(controls, "reserve_for_a_run", lambda device: reserve if device.type == "xpu" else None)

    def compute() -> torch.Tensor:
        happened.append("run")
        return torch.ones(3)

    arm = Pairs(run_of(compute), None, replays=3, budget=Budget(60.0), device="xpu:1").poison()
    assert arm.trials == 3
    one, two = ((value, torch.device("xpu:1"), reserve) for value in controls.POISONS)
    assert happened == [one, "run", two, "run", two, "run", one, "run", two, "run", one, "run"]


@pytest.mark.slow
@pytest.mark.parametrize("period", [2, 3, 4, 6])
def test_periodic_results_do_not_follow_the_poison(period: int) -> None:
    runs = itertools.count()

    def compute() -> torch.Tensor:
        return torch.tensor(float(next(runs) % period < period / 2))

    arm = Pairs(run_of(compute), None, replays=8, budget=Budget(60.0)).poison()
    assert (arm.trials, arm.differing) == (8, 0)


def test_poison_ends_early_where_none_asked_for_follows() -> None:
    pairs = Pairs(run_of(lambda: torch.ones(3)), None, replays=20, budget=Budget(60.0))
    assert pairs.poison(among=("output",)).trials == CLEAR


def test_the_pairs_of_a_diagnosis_know_where_the_model_runs() -> None:
    case = driver.DiagnosisCase(run_of(lambda: torch.ones(3)), RunOptions(device="cuda:1"), Outcome("pass", "on"))
    assert case.pairs.device == torch.device("cuda:1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_workspace_of_a_gpu_kernel_follows_the_poison() -> None:
    """Taken past the dispatcher, as a kernel does; after each run the allocator gives everything back."""
    device = torch.device("cuda", torch.cuda.current_device())

    def compute() -> torch.Tensor:
        address = torch.cuda.caching_allocator_alloc(200_000_000, device)
        memory = {"data": (address, False), "shape": (200_000_000,), "typestr": "|u1", "version": 2}
        found = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=memory), device=device).clone()
        torch.cuda.caching_allocator_delete(address)
        return found

    attempt = run_of(compute)

    def releasing(*, traced: bool = True) -> Run:
        found = attempt(traced=traced)
        found = Run(found.trace, {})
        torch.accelerator.empty_cache()
        return found

    releasing()
    arm = Pairs(releasing, None, replays=3, budget=Budget(60.0), device="cuda").poison()
    assert (arm.trials, arm.differing) == (3, 3)


def traces(*contents: float) -> Iterator[Trace]:
    for content in contents:
        with HashDebugTrace() as trace:
            found = torch.full((3,), content) * 2
        trace.add_result("output", found)
        yield trace.finish()


def test_processes_are_compared_by_their_first_runs_and_in_themselves() -> None:
    fresh = FreshRuns(tuple(tuple(traces(1.0, 2.0)) for _ in range(3)))
    across, within = process_results(fresh, None, name="fresh_process")
    assert (across.name, across.trials, across.differing) == ("fresh_process", 2, 0)
    assert (within.name, within.trials, within.differing) == ("within_process", 3, 3)


def test_processes_with_one_run_each_have_no_pair() -> None:
    fresh = FreshRuns((tuple(traces(1.0)), tuple(traces(2.0))))
    (across,) = process_results(fresh, None, name="fixed_order")
    assert (across.trials, across.differing) == (1, 1)


@pytest.mark.parametrize(
    ("failures", "note"), [(("it was out of time",) * 2, "it was out of time"), ((), "nothing came back")]
)
def test_one_process_has_none_to_be_compared_with_and_that_is_told(failures: tuple[str, ...], note: str) -> None:
    across, within = process_results(FreshRuns((tuple(traces(1.0, 1.0)),), failures), None, name="fresh_process")
    assert (across.ran, across.word()) == (False, f"process/fresh_process not run ({note})")
    assert (within.trials, within.differing) == (1, 0)


def test_no_experiment_is_without_its_reason() -> None:
    assert ExperimentResult("one_thread", "call").word() == "call/one_thread not run (nothing to compare)"


def test_processes_that_failed_are_told() -> None:
    (arm,) = process_results(FreshRuns((), ("timeout after 3 s",)), None, name="fresh_process")
    assert (arm.ran, arm.note) == (False, "timeout after 3 s")


class Scaled(torch.nn.Module):
    """Its buffer is what differs between the runs of a process."""

    def __init__(self, weight: float, scale: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([weight, 2.0]))
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x[0] * self.weight[0]
        return self.scale * (first + x[1] * self.weight[1])


def runs_of_model(*scales: float, weight: float = 1.0, given: float = 3.0) -> tuple[Trace, ...]:
    made = []
    for scale in scales:
        model, x = Scaled(weight, scale), torch.tensor([given, 4.0])
        with torch.no_grad(), HashDebugTrace(model=model, inputs=(x,)) as trace:
            trace.add_result("output", model(x))
        made.append(trace.finish())
    return tuple(made)


@pytest.mark.parametrize(
    ("process", "counts"),
    [
        pytest.param(runs_of_model(1.0, 2.0), True, id="the same model"),
        pytest.param(runs_of_model(5.0, 6.0), True, id="what differs between runs is the difference looked for"),
        pytest.param(runs_of_model(7.0), True, id="the same in a process that makes one run"),
        pytest.param(runs_of_model(1.0, 2.0, weight=9.0), False, id="other weights"),
        pytest.param(runs_of_model(1.0, 2.0, given=9.0), False, id="other inputs"),
        pytest.param(runs_of_model(1.0, weight=9.0) + runs_of_model(2.0), True, id="weights that its runs differ in"),
    ],
)
def test_a_process_whose_model_has_other_weights_does_not_count(process: tuple[Trace, ...], counts: bool) -> None:
    ours = runs_of_model(1.0, 2.0)
    found = of_same_weights(FreshRuns((ours, process), ("timeout after 3 s",)), ours)
    assert found.processes == ((ours, process) if counts else (ours,))
    assert found.failures == ("timeout after 3 s", *(() if counts else (OTHER_WEIGHTS,)))


def test_other_weights_in_all_processes_is_not_run() -> None:
    fresh = FreshRuns(tuple(runs_of_model(1.0, 2.0, weight=9.0 + number) for number in range(4)))
    (arm,) = process_results(of_same_weights(fresh, runs_of_model(1.0, 2.0)), None, name="fresh_process")
    assert (arm.ran, arm.word()) == (False, "process/fresh_process not run (its model has other weights)")


# ------------------------------------------------------------------------------------------ known sources replaced

Program = Callable[[int], dict[str, torch.Tensor]]


def traced(program: Program, run: int, watcher: TraceCallback | None = None) -> Trace:
    with HashDebugTrace(watcher=watcher) as trace:
        found = program(run)
    for name, tensor in found.items():
        trace.add_result(name, tensor)
    return trace.finish()


def source(first: Trace, second: Trace) -> str:
    found = find_divergence(first, second).divergence
    return "" if found is None else found.node


def next_source(program: Program, known: list[str]) -> str:
    recorder = Recorder(known)
    first = traced(program, 1, recorder)
    return source(first, traced(program, 2, Replacer(recorder.contents)))


@torch.library.custom_op("patching::noise", mutates_args=())
def noise(like: torch.Tensor, run: int) -> torch.Tensor:
    return like + run


@torch.library.custom_op("patching::noise_in_place", mutates_args=("target",))
def noise_in_place(target: torch.Tensor, run: int) -> None:
    target.add_(run)


@torch.library.custom_op("patching::noise_undeclared", mutates_args=())
def noise_undeclared(target: torch.Tensor, run: int) -> torch.Tensor:
    target.add_(run)
    return torch.zeros(1)


START = torch.arange(6.0)


def two_ops(run: int) -> dict[str, torch.Tensor]:
    one = noise(START, run).exp()
    two = noise(one.sum()[None], run)
    return {"one": one, "two": two}


def in_place(run: int) -> dict[str, torch.Tensor]:
    target = START.clone()
    noise_in_place(target, run)
    return {"target": target * 2}


def drawn(run: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(run)
    return {"drawn": START + torch.rand(6, generator=generator)}


def from_outside(run: int) -> dict[str, torch.Tensor]:
    return {"made": torch.tensor([float(run)]) * 2}


@pytest.mark.parametrize("program", [in_place, drawn, from_outside], ids=lambda program: program.__name__)
def test_a_source_that_is_replaced_differs_no_more(program: Program) -> None:
    found = source(traced(program, 1), traced(program, 2))
    assert found
    assert next_source(program, [found]) == ""


def test_the_next_source_is_found_behind_the_first() -> None:
    first = source(traced(two_ops, 1), traced(two_ops, 2))
    second = next_source(two_ops, [first])
    assert second not in ("", first)
    assert next_source(two_ops, [first, second]) == ""


def test_an_undeclared_write_is_replaced_too() -> None:
    target = START.clone()
    recorder = Recorder({"forward//patching.noise_undeclared.default#0"})
    traced(lambda run: {"x": noise_undeclared(target, run)}, 1, recorder)
    other = START.clone()
    traced(lambda run: {"x": noise_undeclared(other, run)}, 2, Replacer(recorder.contents))
    assert torch.equal(target, other)


def test_an_expanded_argument_that_was_only_read_is_left_alone() -> None:
    def program(run: int) -> dict[str, torch.Tensor]:
        return {"sum": noise(START[:1].expand(6), run)}

    found = source(traced(program, 1), traced(program, 2))
    assert next_source(program, [found]) == ""


def test_ids_told_to_a_watcher_are_those_of_the_records() -> None:
    class Listener(TraceCallback):
        def __init__(self) -> None:
            self.nodes: list[str] = []
            self.leaves: list[str] = []

        def before(self, node: str, *_: object) -> None:
            self.nodes.append(node)

        def leaf(self, node: str, tensor: torch.Tensor) -> None:  # noqa: ARG002 – as a watcher has it
            self.leaves.append(node)

    listener = Listener()
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(), torch.nn.BatchNorm1d(6))
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)

    def program(_: int) -> dict[str, torch.Tensor]:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 6)).square().mean().backward()
            optimizer.step()
        return {"weight": model[0].weight}

    with HashDebugTrace(model=model, watcher=listener) as trace:
        program(1)
    finished = trace.finish()
    assert listener.nodes == [record.id for record in finished.records]
    assert {leaf.id for leaf in finished.leaves} <= set(listener.leaves)
