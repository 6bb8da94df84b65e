"""A rank's trace on disk: what each step leaves, whatever ends the program."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
)

import hashbench
from hashbench import HashbenchError, HashDebugTrace, record_ranks
from hashbench.core.records import Trace
from hashbench.core.trace import file
from hashbench.core.trace.groups import rank_of
from hashbench.core.trace.step_file import rank_path, run_of
from hashbench.extensions.ranks.record import run_script
from tests.extensions.ranks.pool import RankPool

TRACERS = ("native", "python")


def trained(steps: int = 3, after: Callable[[int], None] = lambda _: None, *, backward: bool = True) -> nn.Module:
    """Train a model; in a fork without backward: autograd refuses it where a test before has nested backward passes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.rand(5, 4)).square().mean()
        if backward:
            loss.backward()
        for parameter in () if backward else model.parameters():
            parameter.grad = loss.detach() * torch.ones_like(parameter)
        optimizer.step()
        after(step)
    return model


def read(folder: Path, rank: int = 0, *, cut: bool = False) -> Trace:
    return file.read(rank_path(folder, rank), cut=cut)


@pytest.mark.parametrize("tracer", TRACERS)
def test_steps_of_a_training_are_its_trace(tracer: str, tmp_path: Path) -> None:
    with HashDebugTrace(tracer=tracer) as trace:
        trained()
    expected = trace.finish()
    with record_ranks(tmp_path, tracer=tracer):
        trained()
    found = read(tmp_path)
    assert (found.records, found.leaves, found.tracer) == (expected.records, expected.leaves, tracer)
    assert (found.rank, [step.number for step in found.steps]) == (hashbench.core.records.TracedRank(0, 1), [0, 1, 2])
    for number, step in enumerate(found.steps):
        last = found.records[step.position - 1]
        assert (last.phase, last.iteration) == ("optimizer", number or None)
    assert found.steps[-1].position == len(found.records)


@pytest.mark.parametrize("tracer", TRACERS)
def test_lines_of_the_program_are_recorded_in_every_step(tracer: str, tmp_path: Path) -> None:
    with record_ranks(tmp_path, tracer=tracer, source_lines=True):
        trained()
    trace = read(tmp_path)
    lines = {record.iteration or 0: record.source for record in trace.records if record.op == "aten.addmm.default"}
    assert set(lines) == {0, 1, 2}
    assert all(Path(__file__).name in line for line in lines.values()), lines


def test_results_of_a_step_are_the_parameters_after_it(tmp_path: Path) -> None:
    left: list[dict[str, str]] = []

    def after(_: int) -> None:
        left.append(
            {name: hashbench.core.trace.digest.digest(one).value for name, one in model_of[0].named_parameters()}
        )

    model_of: list[nn.Module] = []
    with record_ranks(tmp_path):
        torch.manual_seed(0)
        model_of.append(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model_of[0].parameters(), lr=0.1)
        for step in range(2):
            model_of[0](torch.ones(3, 4)).sum().backward()
            optimizer.step()
            after(step)
    steps = read(tmp_path).steps
    assert [{one.name: one.digest.value for one in step.results} for step in steps] == [
        {f"Linear.{name}": value for name, value in found.items()} for found in left
    ]
    assert all(result.source.startswith("optimizer") for step in steps for result in step.results)


def test_parameters_of_no_known_module_have_their_place(tmp_path: Path) -> None:
    with record_ranks(tmp_path):
        weights = [torch.ones(2, requires_grad=True) for _ in range(3)]
        optimizers = [torch.optim.SGD([one], lr=0.1) for one in weights[:2]]
        optimizers[1].add_param_group({"params": [weights[2], weights[0]]})
        for optimizer in optimizers:
            sum(one.sum() for one in weights).backward()  # type: ignore[union-attr]
            optimizer.step()
    found = read(tmp_path)
    assert [[result.name for result in step.results] for step in found.steps] == [["optimizer0.0.0"]]
    assert [result.name for result in found.results] == [*("optimizer0.0.0", "optimizer1.0.0", "optimizer1.1.0")]


@pytest.mark.parametrize("tracer", TRACERS)
def test_window_has_its_steps_and_no_others(tracer: str, tmp_path: Path) -> None:
    with record_ranks(tmp_path / "all", tracer=tracer):
        trained(6)
    with record_ranks(tmp_path / "window", steps=range(2, 4), tracer=tracer):
        trained(6)
    every, window = read(tmp_path / "all"), read(tmp_path / "window")
    within = every.records[every.steps[1].position : every.steps[3].position]
    assert [(one.id, one.outputs) for one in window.records] == [(one.id, one.outputs) for one in within]
    assert [step.number for step in window.steps] == [2, 3]
    assert [[one.digest for one in step.results] for step in window.steps] == [
        [one.digest for one in step.results] for step in every.steps[2:4]
    ]
    assert window.rank == every.rank


@pytest.mark.parametrize("steps", [None, range(1, 2), range(7, 9)], ids=str)
def test_hooks_and_handlers_are_as_before(steps: range | None, tmp_path: Path) -> None:
    before = [dict(_global_optimizer_pre_hooks), dict(_global_optimizer_post_hooks)]
    handler, call = signal.getsignal(signal.SIGTERM), nn.Module._call_impl.__code__  # type: ignore[attr-defined]
    with record_ranks(tmp_path, steps=steps):
        trained()
    assert [dict(_global_optimizer_pre_hooks), dict(_global_optimizer_post_hooks)] == before
    assert signal.getsignal(signal.SIGTERM) == handler
    assert nn.Module._call_impl.__code__ is call  # type: ignore[attr-defined]


def test_other_hooks_of_optimizers_run_as_ever(tmp_path: Path) -> None:
    """The window begins and ends within torch's loop over the hooks."""
    seen: list[int] = []
    hooks = [register_optimizer_step_post_hook(lambda *_: seen.append(1))]
    try:
        with record_ranks(tmp_path, steps=range(1, 2)):
            hooks.append(register_optimizer_step_post_hook(lambda *_: seen.append(2)))
            trained()
    finally:
        for hook in hooks:
            hook.remove()
    assert seen == [1, 2] * 3


def test_window_that_was_not_reached_says_so(tmp_path: Path) -> None:
    with record_ranks(tmp_path, steps=range(7, 9)):
        trained()
    found = read(tmp_path)
    assert (found.records, found.steps) == ((), ())
    assert found.rank is not None
    assert found.rank.ended == "it ended after 3 steps, before the first recorded one"


def test_steps_are_those_of_the_most_frequent_optimizer(tmp_path: Path) -> None:
    with record_ranks(tmp_path):
        often, rarely = ([torch.ones(2, requires_grad=True)] for _ in range(2))
        optimizers = [torch.optim.SGD(one, lr=0.1) for one in (often, rarely)]
        for step in range(4):
            (often[0] * rarely[0]).sum().backward()
            optimizers[0].step()
            if step % 2:
                optimizers[1].step()
    found = read(tmp_path)
    assert [[result.name for result in step.results] for step in found.steps] == [
        ["optimizer0.0.0"],
        ["optimizer0.0.0"],
        ["optimizer0.0.0", "optimizer1.0.0"],
        ["optimizer0.0.0", "optimizer1.0.0"],
    ]


def test_program_without_optimizer_is_one_step(tmp_path: Path) -> None:
    with record_ranks(tmp_path):
        hashbench.result("mean", torch.arange(4.0).mean())
    found = read(tmp_path)
    assert [(step.number, step.position) for step in found.steps] == [(0, len(found.records))]
    assert [result.name for result in found.results] == ["mean"]


def test_what_comes_after_the_last_step_is_its_tail(tmp_path: Path) -> None:
    with record_ranks(tmp_path):
        model = trained(2)
        with torch.no_grad():
            model[0].weight.zero_()
    found = read(tmp_path)
    assert len(found.records) == found.steps[-1].position + 1
    assert [one.name for one in found.results] == [one.name for one in found.steps[-1].results]
    weights = [
        next(one.digest for one in results if one.name == "Sequential.0.weight")
        for results in (found.steps[-1].results, found.results)
    ]
    assert weights[0] != weights[1]


# ----------------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("tracer", TRACERS)
def test_results_of_the_program(tracer: str, tmp_path: Path) -> None:
    def after(step: int) -> None:
        hashbench.result("loss", torch.tensor(float(step)))
        hashbench.result("loss", step)
        hashbench.result("metrics", {"top": [0.5, None], "name": "a"})

    with record_ranks(tmp_path, tracer=tracer):
        trained(2, after)
    found = read(tmp_path)
    own = [
        [one for one in results if "Sequential" not in one.name]
        for results in (found.steps[0].results, found.steps[1].results, found.results)
    ]
    names = ["loss", "loss#1", "metrics.top.0", "metrics.top.1", "metrics.name"]
    assert [[one.name for one in results] for results in own] == [[], names, names]
    assert [one.digest.value for one in own[2][1:]] == ["1", "0.5", "None", "'a'"]


def test_result_does_nothing_untraced(tmp_path: Path) -> None:
    hashbench.result("loss", object())
    with record_ranks(tmp_path, steps=range(5, 6)):
        hashbench.result("loss", 1)
    assert read(tmp_path).results == ()


def test_result_of_another_kind_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="loss is a object"), record_ranks(tmp_path):
        hashbench.result("loss", object())


# ------------------------------------------------------------------------------------------------- how programs end


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        pytest.param(ValueError("no\nsuch"), "ValueError: no such", id="exception"),
        pytest.param(SystemExit(3), "exit code 3", id="exit code"),
        pytest.param(SystemExit("gone"), "exit code gone", id="exit with words"),
        pytest.param(SystemExit(0), "", id="exit code 0"),
        pytest.param(KeyboardInterrupt(), "KeyboardInterrupt: ", id="interrupt"),
    ],
)
def test_exception_passes_and_is_written(error: BaseException, ended: str, tmp_path: Path) -> None:
    def program() -> None:
        trained(2)
        torch.ones(1)
        raise error

    with pytest.raises(type(error)) as caught, record_ranks(tmp_path):
        program()
    assert caught.value is error
    found = read(tmp_path)
    assert found.rank is not None
    assert (found.rank.ended, len(found.steps), found.records[-1].op) == (ended, 2, "aten.ones.default")


def test_trace_within_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(HashbenchError, match="cannot nest traces"), record_ranks(tmp_path), HashDebugTrace():
        pass
    with pytest.raises(HashbenchError, match="cannot nest traces"), HashDebugTrace(), record_ranks(tmp_path):
        pass
    with record_ranks(tmp_path):
        trained(1)
    assert len(read(tmp_path).steps) == 1


@pytest.mark.parametrize("steps", [range(0), range(3, 3), range(0, 4, 2), range(-1, 2)], ids=str)
def test_steps_in_no_order_are_refused(steps: range, tmp_path: Path) -> None:
    with pytest.raises(HashbenchError, match="invalid steps"), record_ranks(tmp_path, steps=steps):
        pass


def test_folder_that_cannot_be_made_is_refused_before_the_program(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HashbenchError, match="cannot record into"), record_ranks(tmp_path / "file"):
        pytest.fail("it ran")


def test_rank_is_that_of_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_of({}) is None
    assert rank_of({"RANK": "1"}) is None
    assert rank_of({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) == (1, 2)
    assert rank_of({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}) == (3, 4)
    assert rank_of({"RANK": "4", "WORLD_SIZE": "4"}) is None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for _ in range(2):
        with record_ranks(tmp_path):
            trained(1)
    assert [path.name for path in tmp_path.iterdir()] == ["rank1.log.gz"]
    assert read(tmp_path, 1).rank == hashbench.core.records.TracedRank(1, 2)
    assert run_of(rank_path(tmp_path, 1))


def test_file_of_an_earlier_run_is_gone_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    rank_path(tmp_path, 0).write_text("earlier")
    with record_ranks(tmp_path):
        assert not rank_path(tmp_path, 0).exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forked_child_writes_nothing(tmp_path: Path) -> None:
    with record_ranks(tmp_path):
        trained(1)
        child = os.fork()
        if not child:
            hashbench.result("child", 1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        trained(1)
    found = read(tmp_path)
    assert [step.number for step in found.steps] == [0]
    assert "child" not in {result.name for result in found.results}


# ----------------------------------------------------------------------------------------------------------- scripts

SCRIPT = """
import sys, beside, torch, hashbench
assert __name__ == "__main__"
hashbench.result("arguments", sys.argv)
hashbench.result("beside", beside.VALUE)
hashbench.result("ones", torch.ones(3) + 1)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
def test_script_runs_as_python_runs_it(module: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("VALUE = 7")
    monkeypatch.chdir(tmp_path if module else tmp_path.parent)
    before = list(sys.argv), list(sys.path)
    script = "script" if module else str(tmp_path / "script.py")
    try:
        with pytest.raises(SystemExit) as caught:
            run_script(tmp_path / "out", script, ["5", "--flag"], module=module)
    finally:
        sys.modules.pop("beside", None)
    assert caught.value.code == 5
    assert (sys.argv, sys.path) == before
    found = read(tmp_path / "out")
    assert found.rank is not None
    assert found.rank.ended == "exit code 5"
    values = {result.name: result.digest.value for result in found.results}
    assert (values["arguments.0"], values["arguments.1"], values["beside"]) == (
        repr(str(tmp_path / "script.py")),
        "'5'",
        "7",
    )


def test_missing_script_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(HashbenchError, match="there is no such file"):
        run_script(tmp_path / "out", str(tmp_path / "none.py"), [])
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------------------- programs that are killed


def in_child(program: Callable[[], None]) -> int:
    """The process id of a child that runs a program and, whatever it raises, nothing of this process's."""
    child = os.fork()
    if child:
        return child
    status = 99
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # this process may have a handler, of another test
        program()
        status = 0
    except SystemExit as error:
        status = int(str(error.code))
    finally:
        os._exit(status)


def status_of(child: int) -> int:
    """The exit code of a child, or minus the number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def endless(folder: Path, *, steps: int = 10**6) -> Callable[[], None]:
    def program() -> None:
        with record_ranks(folder):
            trained(steps, backward=False)

    return program


def wait_for_bytes(path: Path, count: int) -> None:
    while not path.exists() or path.stat().st_size < count:
        time.sleep(0.001)


@pytest.mark.slow
def test_killed_at_any_moment_leaves_whole_steps(tmp_path: Path) -> None:
    """Twenty times, after so many bytes and some more microseconds."""
    rng, steps = random.Random(5), []
    with record_ranks(tmp_path / "whole"):
        trained(60, backward=False)
    true = read(tmp_path / "whole")
    size = rank_path(tmp_path / "whole", 0).stat().st_size
    for number in range(20):
        folder = tmp_path / str(number)
        child = in_child(endless(folder, steps=60))
        wait_for_bytes(rank_path(folder, 0), rng.randrange(size // 20, size - size // 4))
        time.sleep(rng.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        assert status_of(child) in (-signal.SIGKILL, 0)
        found = read(folder, cut=True)
        assert found.rank is not None
        assert found.rank.ended in ("", file.CUT)
        last = found.steps[-1]
        assert found.steps == true.steps[: len(found.steps)]
        assert found.records[: last.position] == true.records[: last.position]
        steps.append(len(found.steps))
    assert len(set(steps)) > 1


@pytest.mark.slow
def test_sigterm_is_written_and_ends_the_program_as_ever(tmp_path: Path) -> None:
    child = in_child(endless(tmp_path))
    wait_for_bytes(rank_path(tmp_path, 0), 3000)
    os.kill(child, signal.SIGTERM)
    assert status_of(child) == -signal.SIGTERM
    found = read(tmp_path, cut=True)
    assert found.rank is not None
    assert found.rank.ended in ("SIGTERM", file.CUT)  # it came while a step was written
    assert len(found.steps) > 0


def test_sigterm_between_steps_is_written(tmp_path: Path) -> None:
    def program() -> None:
        with record_ranks(tmp_path):
            trained(2, backward=False)
            os.kill(os.getpid(), signal.SIGTERM)

    assert status_of(in_child(program)) == -signal.SIGTERM
    found = read(tmp_path)
    assert found.rank is not None
    assert (found.rank.ended, len(found.steps)) == ("SIGTERM", 2)


@pytest.mark.parametrize("within", [False, True], ids=["before", "within"])
def test_own_handler_of_sigterm_is_kept(within: bool, tmp_path: Path) -> None:
    def exits(*_: object) -> None:
        sys.exit(7)

    def program() -> None:
        if not within:
            signal.signal(signal.SIGTERM, exits)
        with record_ranks(tmp_path):
            if within:
                signal.signal(signal.SIGTERM, exits)
            trained(2, backward=False)
            os.kill(os.getpid(), signal.SIGTERM)

    assert status_of(in_child(program)) == 7
    found = read(tmp_path)
    assert found.rank is not None
    assert (found.rank.ended, len(found.steps)) == ("exit code 7", 2)


@pytest.mark.parametrize("room", [0, 40, 2000, 3500, 6000])
def test_full_disk_ends_the_file_and_not_the_program(room: int, tmp_path: Path) -> None:
    """No file of the child may be longer than ``room``."""

    def program() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        steps: list[int] = []
        with record_ranks(tmp_path):
            trained(5, steps.append, backward=False)
        sys.exit(len(steps))

    assert status_of(in_child(program)) == 5
    with record_ranks(tmp_path / "whole"):
        trained(5, backward=False)
    true, path = read(tmp_path / "whole"), rank_path(tmp_path, 0)
    assert path.stat().st_size <= room
    try:
        found = read(tmp_path, cut=True)
    except HashbenchError:
        assert room < 3500
        return
    assert found.rank is not None
    assert found.rank.ended in (file.CUT, "the trace could not be written: File too large")
    assert found.steps == true.steps[: len(found.steps)]
    assert len(found.steps) < 5


def test_full_disk_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def write(descriptor: int, content: bytes) -> int:
        if os.path.realpath(f"/proc/self/fd/{descriptor}").endswith(".log.gz") and len(found) > 1:
            raise OSError(28, "No space left on device")
        return real(descriptor, content)

    found: list[int] = []
    monkeypatch.setattr(os, "write", write)
    with record_ranks(tmp_path):
        trained(5, found.append)
    monkeypatch.undo()
    words = capsys.readouterr().err
    assert words.splitlines() == [
        f"hashbench: cannot write {rank_path(tmp_path, 0)}: No space left on device; steps from 2 on are not recorded"
    ]
    trace = read(tmp_path, cut=True)
    assert [step.number for step in trace.steps] == [0, 1]
    assert len(trace.records) == trace.steps[-1].position


def ends_in_its_own_way(rank: int, _ranks: int, folder: Path) -> None:
    """Train with a peer for two steps; then one raises and one is killed."""
    with record_ranks(folder):
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("the other rank is gone")


@pytest.mark.slow
@pytest.mark.xdist_group("ranks 0")
def test_each_rank_is_recorded_to_its_own_end(rank_pool: RankPool, tmp_path: Path) -> None:
    target = f"tests.extensions.ranks.test_record:{ends_in_its_own_way.__name__}"
    ends = rank_pool.call(target, tmp_path / "out", ranks=2, folder=tmp_path / "meeting")
    assert ("the other rank is gone" in ends[0].error, ends[1].status) == (True, -signal.SIGKILL)
    ranks = [read(tmp_path / "out", rank, cut=True) for rank in range(2)]
    assert [trace.rank for trace in ranks] == [
        hashbench.core.records.TracedRank(0, 2, "RuntimeError: the other rank is gone"),
        hashbench.core.records.TracedRank(1, 2, file.CUT),
    ]
    assert [len(trace.steps) for trace in ranks] == [2, 2]
    assert any(record.collective is not None for record in ranks[0].records)
