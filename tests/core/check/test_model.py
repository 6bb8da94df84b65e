"""``BenchmarkRunner``: the steps of a run, what is compared, the statuses, the flags, on models of a few numbers."""

from __future__ import annotations

import collections
import copy
import gc
import itertools
import random
import re
import types
import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from hashbench.core.check.model import BenchmarkRunner
from hashbench.core.processes import phases_told_to
from hashbench.core.records import RunCounts, RunOptions
from hashbench.core.run.outcome import Outcome
from hashbench.core.run.settings import settings
from hashbench.core.run.workload import Workload, call, clone_inputs
from tests.core.check.model_helpers import (
    INFERENCE,
    RUNS,
    TRAINING,
    Linear,
    _in_second_run,
    _put,
    check,
    no_optimizer,
    row_of,
    workload,
)


def differing(outcome: Outcome) -> tuple[str, ...]:
    assert outcome.difference is not None, outcome
    return outcome.difference.names


# ------------------------------------------------------------------------------------------------ order of steps


class _Watched(BenchmarkRunner):
    def __init__(self, options: RunOptions) -> None:
        super().__init__(options)
        self.steps: list[str] = []

    def deepcopy_model(self, module):
        self.steps.append(f"copy under {torch._dynamo.eval_frame._stance.stance} with {drawn()}")
        return super().deepcopy_model(module)

    def init_optimizer(self, workload, model, name=""):
        made = super().init_optimizer(workload, model, name)
        self.steps.append(f"optimizer {type(made).__name__}")
        return made

    def forward_and_backward_pass(self, *arguments):
        self.steps.append("step")
        return super().forward_and_backward_pass(*arguments)


def drawn() -> tuple[float, float, float]:
    """A number of each global generator."""
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def test_each_run_resets_copies_makes_an_optimizer_and_steps() -> None:
    runner = _Watched(RunOptions(mode="training", runs=3))
    runner.check_accuracy(workload(iterations=2))
    seed_all(1337)
    assert runner.steps == [f"copy under force_eager with {drawn()}", "optimizer Adam", "step", "step"] * 3


@pytest.mark.slow
def test_whoever_listens_is_told_what_is_being_done() -> None:
    told: list[str] = []
    numbers = itertools.count()
    with phases_told_to(told.append):
        check(workload(lambda _, out: out + next(numbers)), replace(INFERENCE, diagnose_budget=60.0, replays=2))
    stages = list(dict.fromkeys(re.sub(r" \d+.*", "", phase) for phase in told))
    controlled = ["generators", "entropy", "clocks", "one_worker", "no_collector", "poison"]
    assert told[:3] == ["run 1 of 2", "run 2 of 2", "confirming pair 1"]
    assert stages == ["run", "confirming pair", *(f"{name}: run" for name in ("pair", *controlled))]
    assert {"pair: run 1", "pair: run 2", "pair: run 3"} <= set(told)


def test_dropout_is_the_same_in_both_runs_and_without_tracing() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 64), torch.nn.Dropout(), torch.nn.Linear(64, 1))
    made = Workload(module=module, inputs=torch.randn(4, 3), iterations=2)
    outcome = check(made, replace(TRAINING, untraced_pair=True))
    assert (outcome.accuracy, outcome.untraced, outcome.perturbed_ops) == ("pass", "agree", "")


def test_weights_move_on_the_cpu_and_those_of_the_model_itself_never() -> None:
    seen = []

    def note(model, _out):
        seen.append(model.layer.weight.tolist())
        model.count.add_(1)

    made = workload(note, iterations=3)
    before = copy.deepcopy(made.module.state_dict())
    check(made, TRAINING)
    assert len(seen) == 6
    assert seen[:3] == seen[3:]
    assert seen[0] != seen[1] != seen[2]
    assert made.module.run == 0
    assert all(torch.equal(before[name], value) for name, value in made.module.state_dict().items())


def test_example_inputs_are_cloned_for_every_run() -> None:
    class Spoils(torch.nn.Module):
        def forward(self, batch):
            return batch["x"].add_(1) + batch["sizes"][0]

    made = Workload(module=Spoils(), inputs=({"x": torch.zeros(2), "sizes": [torch.ones(1)]},))
    assert check(made).accuracy == "pass"
    assert torch.equal(made.inputs[0]["x"], torch.zeros(2))


# ------------------------------------------------------------------------------------------- what is compared


def _buffer(model, _out):
    model.count.add_(_in_second_run(model))


def _gradient(model, _out):
    # Adds the difference to the gradient of the bias alone: a gradient that the optimizer below does not use.
    model.layer.bias.register_hook(lambda grad: grad + _in_second_run(model))


def _output_only(model, out):
    return out, torch.full((1,), _in_second_run(model))


def first_of(output) -> torch.Tensor:
    return (output[0] if isinstance(output, tuple) else output).mean()


class _InputGradient(Linear):
    def forward(self, x):
        x = x.clone()
        x.register_hook(lambda grad: grad + _in_second_run(self))
        return self.layer(x)


class _OddOptimizer(torch.optim.SGD):
    """Adds a number to its state, or to the first parameter: by default another one in each second run."""

    def __init__(self, parameters, *, which: str, odd: float | None = None) -> None:
        super().__init__(parameters, lr=0.0)
        self.which, self.odd = which, float(RUNS[0] % 2) if odd is None else odd

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        parameter = self.param_groups[0]["params"][0]
        if self.which == "state":
            self.state[parameter]["odd"] = torch.full((1,), self.odd)
        else:
            parameter.add_(self.odd)


def moving(parameters) -> torch.optim.Optimizer:
    return _OddOptimizer(parameters, which="parameter", odd=1.0)


def with_odd_optimizer(which: str) -> Workload:
    return workload(make_optimizer=lambda parameters: _OddOptimizer(parameters, which=which))


def with_input_gradient() -> Workload:
    inputs = (torch.ones(4, 3, requires_grad=True),)
    return Workload(module=_InputGradient(), inputs=inputs, make_optimizer=no_optimizer)


PLANTED = {
    "an output": (lambda: workload(_output_only, loss=first_of), ["output.0.1"]),
    "a gradient": (lambda: workload(_gradient, make_optimizer=no_optimizer), ["grad.layer.bias"]),
    "a buffer": (lambda: workload(_buffer), ["buffer.count"]),
    "an input gradient": (with_input_gradient, ["input_grad.0.0"]),
    "the loss": (lambda: workload(loss=lambda out: out.mean() + float(RUNS[0] % 2)), ["loss.0"]),
    "the optimizer state": (lambda: with_odd_optimizer("state"), ["optimizer.layer.weight.odd"]),
    "a parameter": (lambda: with_odd_optimizer("parameter"), ["parameter.layer.weight"]),
}


@pytest.mark.parametrize(("build", "names"), PLANTED.values(), ids=PLANTED)
def test_a_difference_in_one_result_alone_is_found_and_named(build, names: list[str]) -> None:
    row = row_of(build, replace(TRAINING, iterations=1))
    assert (row.accuracy, row.error) == ("eager_two_runs_differ", "")
    assert row.differing_results.split(", ") == names


@pytest.mark.parametrize(
    ("options", "iteration", "names"),
    [(INFERENCE, 2, ("output.1",)), (TRAINING, 1, ("output.0", "loss.0"))],
    ids=["inference", "training"],
)
def test_results_of_each_iteration_are_compared(options: RunOptions, iteration: int, names: tuple[str, ...]) -> None:
    def once(model, out):
        model.count.add_(1)
        return out + _in_second_run(model) if model.count.item() == iteration else out

    assert differing(check(workload(once, iterations=3, make_optimizer=no_optimizer), options)) == names


def test_results_survive_a_model_without_real_copies() -> None:
    class Same(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def __deepcopy__(self, memo):
            return self

        def forward(self, _x):
            return self.weight.sum() * 0

    outcome = check(Workload(module=Same(), inputs=torch.ones(3), make_optimizer=moving), TRAINING)
    assert differing(outcome) == ("parameter.weight",)
    assert (outcome.difference.elements, outcome.difference.max_abs) == (3, 1.0)


def test_output_that_a_later_step_overwrites_is_compared_as_it_was() -> None:
    def count(model, _out):
        model.count.add_(_in_second_run(model) if not model.count else -model.count)
        return model.count

    outcome = check(workload(count, iterations=2), INFERENCE)
    assert differing(outcome) == ("output.0",)
    assert outcome.difference.max_abs == 1.0


def test_outputs_of_equal_names_are_both_compared() -> None:
    def two(model, out):
        return {"1": torch.full((1,), _in_second_run(model)), 1: out}

    assert check(workload(two)).accuracy == "eager_two_runs_differ"


def test_other_strides_are_no_difference_and_no_other_outcome() -> None:
    def strided(model, out):
        return out.t().contiguous().t() if model.run % 2 else out.contiguous()

    outcome = check(workload(strided), replace(INFERENCE, runs=4))
    assert (outcome.accuracy, outcome.run_counts) == ("pass", RunCounts(compared=3, differing=0, distinct=1))


# ---------------------------------------------------------------------------------------------------- statuses


def raising(error: BaseException) -> Callable[..., Workload]:
    def build(*_arguments):
        raise error

    return build


class _CannotMove(torch.nn.Linear):
    def train(self, _mode=True):
        raise RuntimeError("cannot be switched")


def failing_in_run(number: int, error: Exception) -> Callable[[], Workload]:
    def change(model, _out):
        if model.run == number:
            raise error

    return lambda: workload(change)


FULL = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"
STATUSES = {
    "it is not there": (raising(ImportError("no flash")), "model_fail_to_load", "ImportError: no flash"),
    "it is not implemented": (raising(NotImplementedError("CPU")), "model_fail_to_load", "NotImplementedError: CPU"),
    "it is not prepared": (lambda: Workload(_CannotMove(1, 1), torch.ones(1)), "eager_fail_to_run", "be switched"),
    "the first run fails": (failing_in_run(1, ValueError("bad")), "eager_1st_run_fail", "ValueError: bad"),
    "the second run fails": (failing_in_run(2, ValueError("bad")), "eager_2nd_run_fail", "ValueError: bad"),
    "the first run has no memory": (failing_in_run(1, MemoryError()), "eager_1st_run_OOM", "MemoryError"),
    "the second run has none": (failing_in_run(2, torch.OutOfMemoryError("CUDA")), "eager_2nd_run_OOM", "CUDA"),
    "the allocator has no memory": (failing_in_run(1, RuntimeError(FULL)), "eager_1st_run_OOM", FULL),
    "nothing in the output can be compared": (
        lambda: workload(lambda *_: {"boxes": [object()]}),
        "results_not_comparable",
        "output.boxes.0: type builtins.object has no comparable content",
    ),
    "the runs have other structures": (
        lambda: workload(lambda model, out: [out] * model.run),
        "results_not_comparable",
        "only the second run has output.0.1",
    ),
    "there is no gradient": (lambda: workload(lambda _, out: out.detach()), "eager_1st_run_fail", "has a gradient"),
    "all is well": (workload, "pass", ""),
}


@pytest.mark.parametrize(("build", "accuracy", "error"), STATUSES.values(), ids=STATUSES)
def test_status_when(build, accuracy: str, error: str) -> None:
    row = row_of(build, TRAINING if "gradient" in error else INFERENCE)
    assert row.accuracy == accuracy
    assert error in row.error
    assert bool(row.error) == (accuracy != "pass")


@pytest.mark.parametrize("options", [INFERENCE, TRAINING], ids=["inference", "training"])
@pytest.mark.parametrize(("added", "accuracy"), [(0.0, "pass"), (1.0, "eager_two_runs_differ")])
def test_what_cannot_be_compared_is_named_and_the_rest_decides(
    options: RunOptions, added: float, accuracy: str
) -> None:
    def change(model, out):
        return types.SimpleNamespace(logits=out + added * model.run, aux={"made_by": lambda: None}, left=iter([1]))

    row = row_of(lambda: workload(change), options)
    assert (row.accuracy, row.error) == (accuracy, "")
    assert row.not_compared == (
        "output.aux.made_by: type builtins.function has no comparable content, "
        "output.left: type builtins.list_iterator has no comparable content"
    )
    assert row.differing_results.startswith("output.0.logits" if added else "")


@pytest.mark.parametrize(("grows", "accuracy"), [(0, "pass"), (1, "eager_two_runs_differ")], ids=["equal", "other"])
def test_shapes_of_tensors_without_data_are_compared(grows: int, accuracy: str) -> None:
    def change(model, out):
        return out, torch.empty(1000 + grows * model.run, device="meta")

    row = row_of(lambda: workload(change))
    assert row.accuracy == accuracy
    assert row.differing_results == ("output.0.1, output.1.1" if grows else "")
    assert "output.1: a tensor without data, float32[1" in row.not_compared


def test_level_of_the_zoo_counts_unless_the_flag_says_otherwise() -> None:
    seen = []

    def build() -> Workload:
        seen.append(torch.get_deterministic_debug_mode())
        return workload(lambda *_: seen.append(torch.get_deterministic_debug_mode()))

    assert row_of(build, deterministic="off").deterministic == "off"
    assert row_of(build, replace(INFERENCE, deterministic="on"), deterministic="off").deterministic == "on"
    assert seen == [0] * 6 + [2] * 6  # two builds, and two runs of two iterations


# ------------------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("dtype", "layer", "output"),
    [
        ("float32", torch.float32, torch.float32),
        ("bfloat16", torch.bfloat16, torch.bfloat16),
        ("float16", torch.float16, torch.float16),
        ("amp", torch.float32, torch.bfloat16),
    ],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_dtype_flag_casts_model_and_inputs(dtype: str, layer: torch.dtype, output: torch.dtype, mode: str) -> None:
    seen = set()
    made = workload(lambda model, out: seen.add((model.layer.weight.dtype, out.dtype)))
    row = row_of(lambda: made, RunOptions(mode=mode, dtype=dtype, iterations=1))
    assert (row.accuracy, row.dtype, row.error) == ("pass", dtype, "")
    assert seen == {(layer, output)}


def test_cast_inputs_keep_their_gradients() -> None:
    row = row_of(with_input_gradient, replace(TRAINING, dtype="bfloat16"))
    assert "input_grad.0.0" in row.differing_results


@pytest.mark.parametrize(
    ("flag", "own", "data", "expected"),
    [(None, None, None, 2), (None, None, 3, 3), (None, 4, 3, 4), (5, 4, 3, 5)],
    ids=["the default", "the zoo's data", "the workload's own", "the flag"],
)
def test_iterations_come_from(flag, own, data, expected: int) -> None:
    steps = []
    made = workload(lambda *_: steps.append(1), iterations=own)
    row = row_of(lambda: made, replace(INFERENCE, iterations=flag), iterations=data)
    assert (row.iterations, len(steps)) == (expected, 2 * expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_are_in_force_while_it_runs(threads: int) -> None:
    seen, before = [], torch.get_num_threads()
    row_of(lambda: workload(lambda *_: seen.append(torch.get_num_threads())), replace(INFERENCE, threads=threads))
    assert set(seen) == {threads}
    assert torch.get_num_threads() == before


def test_seed_decides_weights_and_draws() -> None:
    def draw(seed: int) -> tuple[float, ...]:
        seen = []

        def note(model, _out):
            seen.append((model.layer.weight[0, 0].item(), *drawn()))

        row_of(lambda: workload(note), replace(INFERENCE, seed=seed, iterations=1))
        assert seen[0] == seen[1]
        return seen[0]

    first = draw(1)
    assert first == draw(1)
    assert not set(first) & set(draw(2))


class _HiddenByOnes(Linear):
    """Its backward swaps the gradients of two outputs in each second run: invisible where both are equal."""

    def forward(self, x):
        out = self.layer(x)
        swap = bool(_in_second_run(self))
        out.register_hook(lambda grad: grad.flip(1) if swap else grad)
        return out


@pytest.mark.parametrize(
    ("cotangent", "accuracy"), [("ones", "pass"), ("random", "eager_two_runs_differ")], ids=["ones", "random"]
)
def test_random_cotangent_shows_what_a_constant_gradient_hides(cotangent: str, accuracy: str) -> None:
    assert check(workload(module=_HiddenByOnes()), replace(TRAINING, cotangent=cotangent)).accuracy == accuracy


def test_random_cotangent_uses_no_global_generator() -> None:
    seen = []
    made = workload(lambda *_: seen.append(torch.rand(()).item()), iterations=2)
    assert check(made, replace(TRAINING, cotangent="random")).accuracy == "pass"
    check(made, TRAINING)
    assert seen[:4] == seen[4:]


# ----------------------------------------------------------------------------------------- the parts of a Workload


def test_make_inputs_is_called_for_every_run_inside_the_reset_state() -> None:
    made = []

    def inputs():
        made.append(torch.rand(4, 3))
        return (made[-1],)

    row = row_of(lambda: workload(make_inputs=inputs, inputs=None), replace(INFERENCE, runs=3))
    assert row.accuracy == "pass"
    assert len(made) == 3
    assert torch.equal(made[0], made[1])
    assert made[0].data_ptr() != made[1].data_ptr()


def test_make_inputs_that_differ_are_blamed_on_the_input() -> None:
    row = row_of(lambda: workload(make_inputs=lambda: (torch.full((4, 3), float(RUNS[0])),), inputs=None))
    assert (row.accuracy, row.origin) == ("eager_two_runs_differ", "input")


def test_optimizer_excludes_frozen_parameters() -> None:
    runner = BenchmarkRunner(TRAINING)
    made = workload(make_optimizer=lambda p: torch.optim.Adagrad(p))
    assert isinstance(runner.init_optimizer(made, made.module), torch.optim.Adagrad)
    assert BenchmarkRunner(INFERENCE).init_optimizer(made, made.module) is None
    made.module.layer.weight.requires_grad_(False)
    optimizer = runner.init_optimizer(workload(), made.module, "sgd")
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["params"] == [made.module.layer.bias]


def test_loss_of_the_workload_is_used() -> None:
    seen = []

    def loss(out):
        seen.append(out.shape)
        return out.square().sum()

    assert check(workload(loss=loss), TRAINING).accuracy == "pass"
    assert seen == [(4, 2)] * 2


INPUTS = {"a tensor": torch.ones(2), "a tuple": (torch.ones(2), 3), "keywords": {"x": torch.ones(2)}}


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_model_is_called_with(inputs) -> None:
    class Adds(torch.nn.Module):
        def forward(self, x, more=0):
            return x + more

    assert call(Adds(), inputs).shape == (2,)


TENSORS = {
    "a transposed one": torch.arange(6.0).reshape(2, 3).t(),
    "one with holes": torch.arange(12.0)[::3],
    "an expanded one": torch.ones(3).expand(4, 3),
    "overlapping windows": torch.arange(6.0).unfold(0, 3, 1),
    "a conjugate": torch.tensor([1 + 1j]).conj(),
    "an empty one": torch.empty(0, 3),
    "a sparse one": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_clone_of_input_keeps_values_and_strides(tensor: torch.Tensor) -> None:
    made = clone_inputs([tensor])[0]
    assert torch.equal(made.to_dense(), tensor.to_dense())
    if tensor.layout is torch.strided:
        assert made.stride() == tensor.stride()
        assert not tensor.numel() or made.data_ptr() != tensor.data_ptr()


def test_clone_of_inputs_keeps_containers_and_requires_grad() -> None:
    batch = collections.defaultdict(list, {"x": (torch.ones(1), "name"), "more": [{"y": torch.ones(1)}]})
    made = clone_inputs(batch)
    made["x"][0].add_(1)
    made["more"][0]["y"].add_(1)
    made["new"].append(1)
    assert type(made) is collections.defaultdict
    assert (batch["x"][0].item(), batch["more"][0]["y"].item(), list(batch)) == (1.0, 1.0, ["x", "more"])
    made = clone_inputs((torch.ones(2, requires_grad=True), torch.ones(2)))
    assert [tensor.requires_grad for tensor in made] == [True, False]
    assert made[0].is_leaf


# --------------------------------------------------------------------------------------------- what is left behind

SETTINGS = {
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), "default_dtype: torch.float32 to torch.float64"),
    "default device": (lambda: torch.set_default_device("cpu"), "default_device: None to cpu"),
    "denormals": (lambda: torch.set_flush_denormal(True), "flush_denormal: False to True"),
    "autocast dtype": (lambda: torch.set_autocast_dtype("cpu", torch.half), "dtype: torch.bfloat16 to torch.float16"),
    "determinism": (lambda: torch.use_deterministic_algorithms(False), "deterministic_algorithms: on to off"),
    "a backend flag": (lambda: setattr(torch.backends.mkldnn, "enabled", False), "mkldnn.enabled: True to False"),
    "threads": (lambda: torch.set_num_threads(3), "num_threads: 2 to 3"),
    "grad mode": (lambda: torch._C._set_grad_enabled(True), "grad_enabled: False to True"),
}


@pytest.mark.parametrize(("change", "text"), SETTINGS.values(), ids=SETTINGS)
def test_setting_that_a_run_changes_is_reported_and_put_back(change, text: str) -> None:
    before, seen = settings(), []

    def spoil(_model, out):
        seen.append(settings())
        change()
        return out.detach() * 1

    row = row_of(lambda: workload(spoil), replace(INFERENCE, iterations=1, threads=2))
    assert text in row.settings_changed
    assert row.accuracy == "pass"
    assert seen[0] == seen[1]
    assert settings() == before


@pytest.mark.parametrize(
    "build",
    [workload, raising(ValueError("load")), failing_in_run(1, ValueError("run")), lambda: workload(_put)],
    ids=["a run that ends well", "a model that does not load", "a run that fails", "a run that is repeated"],
)
def test_settings_and_generators_of_the_caller_survive(build) -> None:
    seed_all(99)
    before, expected = settings(), drawn()
    seed_all(99)
    row_of(build, replace(TRAINING, threads=1))
    assert (settings(), drawn()) == (before, expected)


def test_nothing_is_kept_alive() -> None:
    references = []

    def build() -> Workload:
        made = workload(_output_only, loss=first_of)
        references.append(weakref.ref(made.module))
        references.append(weakref.ref(made.inputs[0]))
        return made

    row = row_of(build, TRAINING)
    assert row.accuracy == "eager_two_runs_differ"
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_copy_of_one_run_is_gone_before_the_next() -> None:
    copies: list[weakref.ref[torch.nn.Module]] = []
    alive = []

    def look(model, _out):
        model.__dict__["itself"] = model  # reference counts alone do not free it
        alive.append([reference() is not None for reference in copies])
        copies.append(weakref.ref(model))

    assert row_of(lambda: workload(look), replace(TRAINING, iterations=1, runs=3)).accuracy == "pass"
    assert alive == [[], [False], [False, False]]


# ------------------------------------------------------------------------------------------------ the diagnosis
