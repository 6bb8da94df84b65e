"""Recordings of real loops: what they hold, what they leave as it was, and the first difference of planted faults."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from training.loops import FAULTS, STEPS, Net, Plan, train

import hashbench
from hashbench.errors import HashbenchError
from hashbench.run.rng import global_state_digests
from hashbench.training import file, lines, parts, text
from hashbench.training.compare import RankVerdict
from hashbench.training.recorder import EVERY_VARIABLE, FOLDER_VARIABLE, STOP_VARIABLE
from hashbench.training.traced import LoopVerdict, compare_folders
from hashbench.training.tracing import TRACE_VARIABLE

SHAPES = {
    "plain": Plan(),
    "accumulation and clipping": Plan(accumulate=3, clip=True),
    "bfloat16": Plan(amp=True),
}


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
    assert model._forward_pre_hooks
    raise ZeroDivisionError("of the program")


def test_hooks_are_gone_afterwards(tmp_path: Path) -> None:
    before = torch.autograd.backward, len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    model = Net()
    with pytest.raises(ZeroDivisionError), hashbench.watch(tmp_path, model=model):
        _fail(model)
    assert (torch.autograd.backward, len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)) == before
    assert not model._forward_pre_hooks
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


def test_generators_are_read_anew_when_they_are_drawn_from() -> None:
    """Python's and NumPy's are looked at in memory: a change of their structs must not hide a draw."""
    generators = parts.WatchedGenerators({})
    for name, draw in (("python", random.random), ("numpy", np.random.rand), ("torch", lambda: torch.rand(1))):
        before = generators.digests()
        assert generators.digests() == before
        draw()
        after = generators.digests()
        assert {one for one in after if after[one] != before[one]} == {name}
    assert after == {**after, **{name: digest for name, digest in global_state_digests().items() if name in after}}


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
    facts = dict(text.traced_facts("trace of step 10", traced.verdict.divergence))
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


def test_steps_before_that_end_are_written_where_nobody_tells_the_recording(
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
    assert (list(recording.steps), recording.ended) == ([0, 1], "cut")


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
    ended = {None: "", ValueError: "ValueError: mine"}.get(raised and type(raised), "SystemExit: 3")
    assert recording.ended == ("" if isinstance(raised, SystemExit) and not raised.code else ended)
