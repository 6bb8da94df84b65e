"""Recordings of real loops: what they hold, what they leave as it was, and the first difference of planted faults."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import json
import pickle
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extensions.watch.loops import FAULTS, STEPS, Net, Plan, race, train
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import hashbench
from hashbench.core.divergence.text import divergence_facts
from hashbench.core.errors import HashbenchError
from hashbench.core.run.rng import global_state_digests
from hashbench.core.run.settings import applied
from hashbench.extensions.watch import file, lines, parts, text
from hashbench.extensions.watch.compare import RankVerdict
from hashbench.extensions.watch.recorder import EVERY_VARIABLE, FOLDER_VARIABLE, STOP_VARIABLE
from hashbench.extensions.watch.traced import LoopVerdict, compare_folders
from hashbench.extensions.watch.tracing import TRACE_VARIABLE

SHAPES = {
    "plain": Plan(),
    "accumulation and clipping": Plan(accumulate=3, clip=True),
    "bfloat16": Plan(amp=True),
}


def test_the_page_shows_the_whole_signature() -> None:
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^hashbench\.watch\(\n.*?^\)$", page, re.MULTILINE | re.DOTALL)
    lines = [line.partition("#")[0].strip().rstrip(",") for line in shown.splitlines()[1:-1]]
    parameters = inspect.signature(hashbench.watch).parameters.values()
    have = [each.name if each.default is each.empty else f"{each.name}={each.default!r}" for each in parameters]
    assert [line for line in lines if line != "*"] == have


def judged(tmp_path: Path, plan: Plan, other: Plan, **watched: Any) -> LoopVerdict:
    train(tmp_path / "a", plan, **watched)
    train(tmp_path / "b", other, **watched)
    return compare_folders(tmp_path / "a", tmp_path / "b")


def first(verdict: LoopVerdict) -> RankVerdict:
    found = verdict.first
    assert found is not None
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_runs_agree(tmp_path: Path, shape: str) -> None:
    verdict = judged(tmp_path, SHAPES[shape], SHAPES[shape])
    assert verdict.equal
    assert verdict.ranks[0].steps == tuple(range(STEPS))
    assert verdict.ranks[0].notes == ()
    seen = {part for parts in verdict.ranks[0].seen.values() for part in parts}
    assert seen == {*file.PARTS} - {"scaler"}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_difference_is_found_at_its_step(tmp_path: Path, fault: str, shape: str) -> None:
    plan = SHAPES[shape]
    verdict = first(judged(tmp_path, plan, replace(plan, fault=fault)))
    part, later = FAULTS[fault]
    assert (verdict.step, verdict.differing[0].part) == (plan.at + later, part)
    assert verdict.since is not None
    assert plan.at <= verdict.since + 1
    assert verdict.since <= plan.at + later


def test_another_order_of_the_parameters_is_named(tmp_path: Path) -> None:
    verdict = first(judged(tmp_path, Plan(clip=True), Plan(clip=True, fault="order")))
    assert verdict.initial
    assert verdict.differing[0].part == "order"
    assert verdict.differing[0].first == "first.weight"
    assert verdict.differing[0].second == "last.bias"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "data order", "kernel"])
def test_with_workers_of_the_loader(tmp_path: Path, fault: str) -> None:
    verdict = judged(tmp_path, Plan(workers=2), Plan(workers=2, fault=fault))
    assert verdict.equal == (not fault)
    if fault:
        assert (first(verdict).step, first(verdict).differing[0].part) == (10, FAULTS[fault][0])


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "data order", "kernel", "optimizer state"])
def test_a_compiled_model_has_its_parts(tmp_path: Path, fault: str) -> None:
    verdict = judged(tmp_path, Plan(compiled=True), Plan(compiled=True, fault=fault))
    recording = file.read(tmp_path / "a" / "rank0.jsonl")
    assert recording.header.model == "Net"
    assert recording.header.parameter[0] == "first.weight"
    assert verdict.equal == (not fault)
    if fault:
        assert (first(verdict).step, first(verdict).differing[0].part) == (10, FAULTS[fault][0])


# ------------------------------------------------------------------------------------------------- nothing is changed


def _results(watched: Path | None) -> tuple[list[torch.Tensor], Any, Any, Any]:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    watch = hashbench.watch(watched, model=model) if watched is not None else None
    if watch is not None:
        watch.start()
    for _ in range(5):
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if watch is not None:
        watch.stop()
    return [*map(torch.clone, model.state_dict().values())], torch.get_rng_state(), random.getstate(), np.random.rand()


def test_looking_changes_nothing(tmp_path: Path) -> None:
    plain, watched = _results(None), _results(tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(plain[0], watched[0], strict=True))
    assert torch.equal(plain[1], watched[1])
    assert plain[2:] == watched[2:]


def _fail(model: torch.nn.Module) -> None:
    assert type(model).__call__ is not torch.nn.Module.__call__
    raise ZeroDivisionError("of the program")


def test_hooks_are_gone_afterwards(tmp_path: Path) -> None:
    before = torch.autograd.backward, len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    model = Net()
    with pytest.raises(ZeroDivisionError), hashbench.watch(tmp_path, model=model):
        _fail(model)
    assert (torch.autograd.backward, len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)) == before
    assert type(model).__call__ is torch.nn.Module.__call__
    assert file.read(tmp_path / "rank0.jsonl").ended == "ZeroDivisionError: of the program"


def test_recordings_that_overlap_end_in_any_order(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watches = [hashbench.watch(tmp_path / name, model=model) for name in ("a", "b")]

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    for one in watches:
        one.start()
        step()
    for one in watches:
        one.stop()
        step()
    read = [file.read(tmp_path / name / "rank0.jsonl") for name in ("a", "b")]
    assert [[len(step.losses) for step in one.steps.values()] for one in read] == [[1, 1], [1, 1]]


def test_tensor_backward_calls_what_we_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Tensor.backward`` looks ``torch.autograd.backward`` up when it is called: the loss is seen there."""
    called = []
    monkeypatch.setattr(torch.autograd, "backward", lambda *given, **_: called.append(given[0]))
    value = torch.ones((), requires_grad=True)
    value.backward()
    assert called == [value]


def _fail_reading(what: str, error: BaseException) -> None:
    raise AssertionError(what) from error


def test_generators_are_read_anew_when_they_are_drawn_from() -> None:
    """Python's and NumPy's are looked at in memory: a change of their structs must not hide a draw."""
    generators = parts.WatchedGenerators({})
    for name, draw in (("python", random.random), ("numpy", np.random.rand), ("torch", lambda: torch.rand(1))):
        before = generators.digests(_fail_reading)
        assert generators.digests(_fail_reading) == before
        draw()
        after = generators.digests(_fail_reading)
        assert {one for one in after if after[one] != before[one]} == {name}
    assert after == {**after, **{name: digest for name, digest in global_state_digests().items() if name in after}}


class OddError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Opaque:
    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")


class FirstOf(torch.nn.Linear):
    """A model that takes whatever a loop hands to it."""

    def forward(self, x: Any, *_: object, **__: object) -> torch.Tensor:
        return super().forward(x[0] if isinstance(x, list) else x["x"] if isinstance(x, dict) else x)


def _in_itself(x: torch.Tensor) -> list[Any]:
    made: list[Any] = [x]
    made.append(made)
    return made


def _weights(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [*model.state_dict().values(), *(value for value in states if isinstance(value, torch.Tensor))]


def _trained(call: Any, between: Any = lambda *_: None) -> Any:
    """Return a loop that calls a model in its way, and does something after each step."""

    def loop(watched: Any) -> list[torch.Tensor]:
        model = FirstOf(3, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        with watched(model, optimizer):
            for number in range(3):
                call(model, torch.randn(4, 3)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                between(model, optimizer, number)
        return _weights(model, optimizer)

    return loop


def _called_plainly(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(x)
    return result


def _functional(watched: Any) -> list[torch.Tensor]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    with watched(model, optimizer):
        for _ in range(3):
            parameters, x = dict(model.named_parameters()), torch.randn(4, 3)
            whole = torch.func.grad(loss)(parameters, x)
            each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
            for name, parameter in parameters.items():
                parameter.grad = whole[name] + each[name].mean(0)
            optimizer.step()
    return _weights(model, optimizer)


def _lazy(watched: Any) -> list[torch.Tensor]:
    model = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.ReLU(), torch.nn.LazyLinear(1))
    optimizer = None
    with watched(model, None):
        for _ in range(3):
            loss = model(torch.randn(4, 3)).square().mean()
            optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.1)
            loss.backward()
            optimizer.step()
    assert optimizer is not None
    return _weights(model, optimizer)


def _scripted(watched: Any) -> list[torch.Tensor]:
    model = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU()))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with watched(model, optimizer):
        for _ in range(3):
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
    return _weights(model, optimizer)


def _named_oddly(watched: Any) -> list[torch.Tensor]:
    model = torch.nn.Module()
    model.register_parameter("w\ud800\n\x1b[31m", torch.nn.Parameter(torch.ones(3)))
    model.forward = lambda x: (x * next(model.parameters())).sum()  # type: ignore[method-assign]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with watched(model, optimizer):
        for _ in range(3):
            model(torch.randn(3)).backward()
            optimizer.step()
    return _weights(model, optimizer)


def _ending(error: BaseException) -> Any:
    def loop(watched: Any) -> list[torch.Tensor]:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        with contextlib.suppress(type(error)), watched(model, optimizer):
            for _ in range(3):
                model(torch.randn(4, 3)).square().mean().backward()
                optimizer.step()
            raise error
        return _weights(model, optimizer)

    return loop


def _with_iterator(watched: Any) -> list[torch.Tensor]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with watched(model, optimizer):
        for _ in range(3):
            torch.autograd.backward(loss for loss in [model(torch.randn(4, 3)).square().mean()])  # type: ignore[arg-type]
            optimizer.step()
    return _weights(model, optimizer)


def _saved(model: torch.nn.Module, optimizer: torch.optim.Optimizer, _: int) -> None:
    file_like = io.BytesIO()
    torch.save(model, file_like)
    assert b"hashbench" not in file_like.getvalue()
    loaded = torch.load(io.BytesIO(file_like.getvalue()), weights_only=False)
    loaded(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(loaded.parameters(), lr=0.1).step()
    copy.deepcopy(optimizer)
    pickle.loads(pickle.dumps(optimizer))


def _averaged(model: torch.nn.Module, _: torch.optim.Optimizer, number: int) -> None:
    copy.deepcopy(model)(torch.ones(1, 3)).sum().backward()
    torch.optim.swa_utils.AveragedModel(model).update_parameters(model)
    torch.jit.trace(model, torch.ones(1, 3)) if number == 1 else None


def _odd_options(_: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.param_groups[0] |= {"table": np.arange(3) + number, "like": Opaque(), "huge": 10**5000, "nan": np.nan}
    for state in optimizer.state.values():
        state["odd"] = [Opaque(), {"in": [number]}, 10**5000]


LOOPS: dict[str, Any] = {
    "copies of the model are trained": _trained(_called_plainly, _averaged),
    "the model and the optimizer are saved": _trained(_called_plainly, _saved),
    "options and states of every kind": _trained(_called_plainly, _odd_options),
    "a batch that contains itself": _trained(lambda model, x: model(_in_itself(x))),
    "a batch of every kind": _trained(
        lambda model, x: model(
            {"x": x, "y\ud800": "\udfff", 3: 10**5000, "z": Opaque(), "g": (i for i in "ab"), "m": model}
        )
    ),
    "transforms of torch.func": _functional,
    "lazy modules": _lazy,
    "a scripted model": _scripted,
    "names that are no text": _named_oddly,
    "an error without a text": _ending(OddError()),
    "an error with a long one": _ending(ValueError("\udcff\n" + "y" * 10**6)),
    "an iterator of losses": _with_iterator,
}


def _run_loop(loop: Any, watched: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [*loop(watched), torch.get_rng_state()]


@pytest.mark.filterwarnings("ignore::FutureWarning", "error::torch.jit.TracerWarning")
@pytest.mark.parametrize("settings", [{"every": 1}, {"trace": 1}], ids=["every step", "traced"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_watched_loop_does_what_it_does_unwatched(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    plain = _run_loop(LOOPS[name], lambda *_: contextlib.nullcontext())
    watched = _run_loop(
        LOOPS[name], lambda model, optimizer: hashbench.watch(tmp_path, model=model, optimizer=optimizer, **settings)
    )
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    recording = file.read(tmp_path / "rank0.jsonl")
    assert list(recording.steps) == [0, 1, 2]
    assert recording.header.parameter
    assert set(recording.steps[2].parts["parameter"]) == set(recording.header.parameter)


def test_what_could_not_be_read_is_told(tmp_path: Path) -> None:
    _run_loop(
        LOOPS["options and states of every kind"],
        lambda model, optimizer: hashbench.watch(tmp_path, model=model, optimizer=optimizer),
    )
    opaque = f"type {__name__}.Opaque has no comparable content"
    assert file.read(tmp_path / "rank0.jsonl").missed == (
        f"option like ({opaque})",
        f"optimizer state odd of weight.0 ({opaque})",
        f"optimizer state odd of bias.0 ({opaque})",
    )


def test_a_tensor_that_cannot_be_read_is_left_out_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose device fails: all others are recorded, and its recording equals none."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    read = parts.raw_digest

    def failing(tensor: torch.Tensor, *given: Any) -> Any:
        if tensor is model.bias:
            raise RuntimeError("device lost")
        return read(tensor, *given)

    monkeypatch.setattr(parts, "raw_digest", failing)
    with hashbench.watch(tmp_path, model=model, optimizer=optimizer):
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    recording = file.read(tmp_path / "rank0.jsonl")
    assert [set(step.parts["parameter"]) for step in recording.steps.values()] == [{"weight"}, {"weight"}]
    assert recording.missed == ("parameter bias (RuntimeError: device lost)",)


def test_a_copy_of_the_recording_records_nothing(tmp_path: Path) -> None:
    """A trainer that holds it is copied and pickled with it."""
    with hashbench.watch(tmp_path, model=torch.nn.Linear(2, 1)) as watched:
        for copied in (copy.deepcopy(watched), pickle.loads(pickle.dumps(watched))):
            with copied:
                copied.batch(torch.ones(1))
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.jsonl"]


def test_a_compiled_step_is_told(tmp_path: Path) -> None:
    """Nothing can be read inside compiled code: a stand-in says where we are, for a compilation takes a second."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hashbench.watch(tmp_path, model=model, optimizer=optimizer), pytest.MonkeyPatch.context() as patched:
        model(torch.ones(1, 2)).sum().backward()
        patched.setattr(torch.compiler, "is_compiling", lambda: True)
        optimizer.step()
    assert file.read(tmp_path / "rank0.jsonl").missed == ("steps of an optimizer (its step is compiled)",)


# ----------------------------------------------------------------------------------------------------- what is recorded


def test_the_file_is_whole_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "FLUSH_SECONDS", 0.0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hashbench.watch(tmp_path, model=model, optimizer=optimizer):
        for number in range(3):
            model(torch.randn(8, 6)).sum().backward()
            optimizer.step()
            recording = file.read(tmp_path / "rank0.jsonl")
            assert list(recording.steps) == list(range(number + 1))
            assert recording.ended == "cut"
    assert file.read(tmp_path / "rank0.jsonl").ended == ""


def test_losses_and_micro_batches_are_counted(tmp_path: Path) -> None:
    train(tmp_path, Plan(accumulate=3, steps=2))
    step = file.read(tmp_path / "rank0.jsonl").steps[1]
    assert len(step.losses) == len(step.parts["batch"]) == len(step.parts["loss"]) == 3
    assert all(isinstance(value, float) for value in step.losses)


def test_a_loss_that_is_not_finite_is_valid_json(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hashbench.watch(tmp_path, model=model):
        (model(torch.ones(1, 2)) * float("inf")).sum().backward()
        optimizer.step()
    assert file.read(tmp_path / "rank0.jsonl").steps[0].losses == (None,)
    for line in (tmp_path / "rank0.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(word))


def test_evaluation_between_steps_is_no_batch(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hashbench.watch(tmp_path, model=model):
        for _ in range(2):
            model.train()
            model(torch.ones(8, 6)).sum().backward()
            optimizer.step()
            model.eval()
            model(torch.randn(8, 6))
            with torch.no_grad():
                model.train()(torch.randn(8, 6))
    steps = file.read(tmp_path / "rank0.jsonl").steps
    assert steps[0].parts["batch"] == steps[1].parts["batch"]


def test_several_models_and_optimizers_step_in_turn(tmp_path: Path) -> None:
    models = {"maker": torch.nn.Linear(2, 2), "judge": torch.nn.Linear(2, 1)}
    optimizers = [torch.optim.Adam(model.parameters()) for model in models.values()]
    with hashbench.watch(tmp_path, model=models):
        for _ in range(2):
            for optimizer in optimizers:
                models["judge"](models["maker"](torch.ones(3, 2))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    recording = file.read(tmp_path / "rank0.jsonl")
    assert recording.header.parameter == ("maker.weight", "maker.bias", "judge.weight", "judge.bias")
    assert list(recording.steps) == [0, 1, 2, 3]
    assert recording.optimizers == [[["maker.weight", "maker.bias"]], [["judge.weight", "judge.bias"]]]
    assert {name.partition(":")[0] for name in recording.steps[3].parts["state"]} == set(recording.header.parameter)


def test_gradients_are_those_that_the_optimizer_gets(tmp_path: Path) -> None:
    """The judge's loss leaves gradients in the maker, which its optimizer clears before it gets any."""
    models = {"maker": torch.nn.Linear(2, 2), "judge": torch.nn.Linear(2, 1)}
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models.values()]
    with hashbench.watch(tmp_path, model=models, optimizer=optimizers):
        for optimizer in optimizers:
            models["judge"](models["maker"](torch.ones(3, 2))).sum().backward()
            optimizer.step()
    steps = file.read(tmp_path / "rank0.jsonl").steps
    assert list(steps[0].parts["gradient"]) == ["maker.weight", "maker.bias"]
    assert list(steps[1].parts["gradient"]) == ["judge.weight", "judge.bias"]


def test_a_backward_pass_within_another_has_no_loss_of_its_own(tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hashbench.watch(tmp_path, model=model, optimizer=optimizer):
        for _ in range(2):
            checkpoint(torch.tanh, model(torch.ones(3, 2)), use_reentrant=True).sum().backward()
            optimizer.step()
    assert [list(step.parts["loss"]) for step in file.read(tmp_path / "rank0.jsonl").steps.values()] == [["0"], ["0"]]


def test_what_was_written_between_the_steps_is_in_a_trace_of_both(tmp_path: Path) -> None:
    """A parameter is changed after step 10: a trace of step 11 shows it as another one, one of both steps shows how."""
    late = judged(tmp_path / "11", Plan(), Plan(fault="parameter"), trace=11)
    (traced,) = late.traced
    assert first(late).differing[0].part == "loss"
    assert not traced.names_a_kernel
    assert "HASHBENCH_TRACE_STEP=10:12" in text.next_look(late)[0]
    both = judged(tmp_path / "10-11", Plan(), Plan(fault="parameter"), trace=range(10, 12))
    (traced,) = both.traced
    assert traced.names_a_kernel
    assert traced.verdict is not None
    assert traced.verdict.divergence is not None
    assert "aten.add_.Tensor" in traced.verdict.divergence.kernel
    assert not text.next_look(both)


def test_the_numbers_that_differ_in_a_trace_are_told(tmp_path: Path) -> None:
    (traced,) = judged(tmp_path, Plan(), Plan(fault="kernel"), trace=10).kernels
    assert traced.verdict is not None
    assert traced.verdict.divergence is not None
    facts = dict(divergence_facts(traced.verdict.divergence))
    assert (facts["first run"], facts["second run"]) == ("(1.0)", "(1.1)")


def test_buffers_are_results_of_traced_steps(tmp_path: Path) -> None:
    def calibrated(folder: Path, shift: float) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hashbench.watch(folder, model=model, optimizer=optimizer, trace=range(2, 4)):
            for step in range(4):
                if step == 3:
                    with torch.no_grad():
                        model(torch.rand(4, 2) + shift)
                model(torch.rand(4, 2)).sum().backward()
                optimizer.step()

    calibrated(tmp_path / "a", 0)
    calibrated(tmp_path / "b", 1)
    verdict = compare_folders(tmp_path / "a", tmp_path / "b")
    assert first(verdict).differing[0].part == "buffer"
    assert verdict.traced[0].names_a_kernel


def test_steps_that_were_not_traced_are_told(tmp_path: Path) -> None:
    verdict = judged(tmp_path, Plan(), Plan(), trace=STEPS)
    a, b = (f"{tmp_path / run} has no trace of step {STEPS}: it would begin with a call of the model" for run in "ab")
    assert [note.partition(" in one")[0] for note in verdict.notes] == [a, b]
    assert not verdict.equal


def test_optimizers_of_other_models_are_not_counted(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    with hashbench.watch(tmp_path, model=model):
        for optimizer in optimizers:
            (model(torch.ones(1, 2)) + other(torch.ones(1, 2))).sum().backward()
            optimizer.step()
    assert list(file.read(tmp_path / "rank0.jsonl").steps) == [0]


def test_state_restored_before_the_first_step_is_read(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for name, given in (("given", optimizer), ("found", None)):
        with hashbench.watch(tmp_path / name, model=model, optimizer=given, start=1):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        recording = file.read(tmp_path / name / "rank0.jsonl")
        assert list(recording.steps) == [1]
        assert recording.before is not None
        assert recording.before.number == 0
        assert set(recording.before.parts["state"]) >= {"weight: exp_avg", "bias: exp_avg_sq", "weight: step"}


def test_what_a_step_begins_with_is_read_where_each_reads_all(tmp_path: Path) -> None:
    """The program changes a bias after step 10: step 11 begins with another one than step 10 left."""
    train(tmp_path / "a", Plan(fault="parameter"), every=1)
    steps = file.read(tmp_path / "a" / "rank0.jsonl").steps
    left, begun = steps[10].parts["parameter"], steps[11].begin["parameter"]
    assert {name for name in left if left[name] != begun[name]} == {"last.bias"}
    assert steps[11].begin["state"] == steps[10].parts["state"]
    assert steps[11].begin["buffer"] == steps[10].parts["buffer"]
    assert not steps[0].begin, "the line of the state before it has that"
    train(tmp_path / "b", Plan())
    assert not any(step.begin for step in file.read(tmp_path / "b" / "rank0.jsonl").steps.values())


def test_a_private_generator_and_a_scaler_are_read(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    mine = torch.Generator().manual_seed(1)
    with hashbench.watch(tmp_path, model=model, scaler=scaler, generators={"loader": mine}):
        for _ in range(2):
            scaler.scale(model(torch.rand(1, 2, generator=mine)).sum()).backward()
            scaler.step(optimizer)
            scaler.update(4.0)
    steps = file.read(tmp_path / "rank0.jsonl").steps
    assert [one.parts["scaler"]["scale"] for one in steps.values()] == ["8.0", "4.0"]
    assert steps[0].parts["generator"]["loader"] != steps[1].parts["generator"]["loader"]


def test_a_gradient_that_is_none_is_told_from_one_that_is_not_read(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 1), "idle": torch.nn.Linear(2, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hashbench.watch(tmp_path, model=model):
        model["used"](torch.ones(1, 2)).sum().backward()
        optimizer.step()
    gradients = file.read(tmp_path / "rank0.jsonl").steps[0].parts["gradient"]
    assert gradients["idle.weight"] == "none"
    assert gradients["used.weight"] != "none"


def test_a_run_without_a_step_has_a_header(tmp_path: Path) -> None:
    with hashbench.watch(tmp_path, model=Net()):
        pass
    assert file.read(tmp_path / "rank0.jsonl").steps == {}


# ------------------------------------------------------------------------------------------------- the environment


def test_a_recording_is_never_overwritten(tmp_path: Path) -> None:
    train(tmp_path, Plan(steps=1))
    with pytest.raises(HashbenchError, match=r"holds a recording.*HASHBENCH_WATCH"):
        train(tmp_path, Plan(steps=1))
    assert file.read(tmp_path / "rank0.jsonl").steps


def test_the_environment_chooses_the_folder_and_how_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "chosen"))
    monkeypatch.setenv(EVERY_VARIABLE, "3")
    train(tmp_path / "named", Plan(steps=1))
    assert file.read(tmp_path / "chosen" / "rank0.jsonl").header.every == 3
    assert not (tmp_path / "named").exists()


@pytest.mark.parametrize("value", ["0", "-1", "often"])
def test_every_is_a_number_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(EVERY_VARIABLE, value)
    with pytest.raises(HashbenchError, match="every must be >= 1"):
        hashbench.watch(tmp_path, model=Net())


def test_the_program_ends_before_a_step_where_it_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STOP_VARIABLE, "4")
    with pytest.raises(SystemExit) as raised:
        train(tmp_path, Plan())
    assert raised.value.code == 0
    assert list(file.read(tmp_path / "rank0.jsonl").steps) == [0, 1, 2, 3]


def test_the_recording_ends_itself_before_a_step_where_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer of transformers tells its callbacks of no exception."""
    monkeypatch.setenv(STOP_VARIABLE, "2")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = hashbench.watch(tmp_path, model=model)
    watched.start()
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    with pytest.raises(SystemExit):
        model(torch.ones(1, 2))
    recording = file.read(tmp_path / "rank0.jsonl")
    watched.stop()
    assert (list(recording.steps), recording.ended) == ([0, 1], "")
    assert recording.final is not None


@pytest.mark.parametrize("value", ["9:3", "5:5", "last", "-1"])
def test_steps_to_trace_are_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(TRACE_VARIABLE, value)
    with pytest.raises(HashbenchError, match="names no steps to trace"):
        hashbench.watch(tmp_path, model=Net())


def test_each_rank_has_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    train(tmp_path, Plan(steps=1))
    header = file.read(tmp_path / "rank1.jsonl").header
    assert (header.rank, header.world_size) == (1, 2)


def test_ranks_of_srun_have_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "", "WORLD_SIZE": "", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}.items():
        monkeypatch.setenv(name, value)
    train(tmp_path, Plan(steps=1))
    header = file.read(tmp_path / "rank3.jsonl").header
    assert (header.rank, header.world_size) == (3, 4)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HashbenchError, match="cannot write"):
        train(tmp_path / "file" / "inside", Plan(steps=1))


@pytest.mark.parametrize("raised", [None, ValueError("mine"), SystemExit(0), SystemExit(3)])
def test_all_tensors_are_read_when_the_recording_ends(tmp_path: Path, raised: BaseException | None) -> None:
    """Also where the loop raises; what the program changed after the last step is in it."""
    model = torch.nn.Linear(2, 1)
    with contextlib.suppress(ValueError, SystemExit), hashbench.watch(tmp_path, model=model):
        model(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with torch.no_grad():
            model.bias.fill_(7)
        if raised is not None:
            raise raised
    recording = file.read(tmp_path / "rank0.jsonl")
    assert recording.final is not None
    assert recording.final.number == 0
    assert recording.final.parts["parameter"]["weight"] == recording.steps[0].parts["parameter"]["weight"]
    assert recording.final.parts["parameter"]["bias"] != recording.steps[0].parts["parameter"]["bias"]
    ended = {None: "", ValueError: "ValueError: mine"}.get(raised and type(raised), "exit code 3")
    assert recording.ended == ("" if isinstance(raised, SystemExit) and not raised.code else ended)


def test_settings_are_recorded_as_each_step_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_SCHEDULE", "static")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    threads = torch.get_num_threads()
    try:
        with hashbench.watch(tmp_path, model=model, optimizer=optimizer):
            for number in range(4):
                torch.set_num_threads(threads + (number >= 1))
                with torch.autocast("cpu", torch.bfloat16, enabled=number == 2):
                    model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
    finally:
        torch.set_num_threads(threads)
    recording = file.read(tmp_path / "rank0.jsonl")
    found = [(int(one.settings["num_threads"]), one.settings["autocast_cpu"]) for one in recording.steps.values()]
    more = threads + 1
    assert found == [(threads, "False"), (more, "False"), (more, "True"), (more, "False")]
    assert recording.header.settings["grad_enabled"] == "True"
    assert recording.header.environment["OMP_SCHEDULE"] == "static"
    assert recording.header.machine["cpu_capability"] == torch.backends.cpu.get_cpu_capability()


def test_a_setting_is_named_before_a_kernel_in_traced_steps(tmp_path: Path) -> None:
    """The planted kernel and flag stand for a sum that two threads split."""

    def trained(folder: Path, *, flag: bool) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with applied({"mkldnn.deterministic": str(flag)}), race(flag), hashbench.watch(folder, model=model, trace=0):
            torch.ops.planted_loops.racy(model(torch.rand(4, 2))).sum().backward()
            optimizer.step()

    trained(tmp_path / "a", flag=False)
    trained(tmp_path / "b", flag=True)
    verdict = compare_folders(tmp_path / "a", tmp_path / "b")
    assert [one.name for one in first(verdict).settings] == ["mkldnn.deterministic"]
    (judged_steps,) = verdict.kernels
    assert judged_steps.verdict is not None
    assert judged_steps.verdict.divergence is not None
    assert judged_steps.verdict.divergence.origin == "settings"


def test_secrets_of_the_command_line_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.orig_argv", ["/usr/bin/python", "train.py", "--token", "abc", "--name", "x"])
    train(tmp_path, Plan(steps=1))
    assert file.read(tmp_path / "rank0.jsonl").header.command == ("python", "train.py", "--token", "***", "--name", "x")
    assert "abc" not in (tmp_path / "rank0.jsonl").read_text()
