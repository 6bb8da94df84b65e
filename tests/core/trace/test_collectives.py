"""Collectives in a trace: when their outputs are hashed, what a record says, what a difference behind one is called.

Two ranks share this process where that is enough: only the first is traced. ``tests/core/trace/rank_programs.py`` has
    processes.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the old form
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from hashbench import HashDebugTrace, find_divergence
from hashbench.core.check.function import FunctionCall, check_function
from hashbench.core.records import Collective, OpRecord, RunOptions, Trace
from hashbench.core.trace import collectives, file
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.digest import digest, untraced
from hashbench.core.trace.tracer import native_unavailable


@pytest.fixture(scope="module")
def ranks() -> Sequence[Any]:
    """The process groups of two ranks in this process."""
    store = dist.HashStore()

    def group(rank: int) -> Any:
        made = dist.ProcessGroup(store, rank, 2)
        gloo = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        made._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        return made

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(group, range(2)))


@pytest.fixture
def alone() -> Iterator[None]:
    """A default group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def elsewhere(call: Callable[[], Any]) -> Any:
    """What a call returns that is made in another thread, where nothing is traced."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(unseen, call).result()


def unseen(call: Callable[[], Any]) -> Any:
    """What a call returns that no trace sees."""
    with untraced():
        return call()


def of(trace: Trace, op: str) -> OpRecord:
    """The one record of an op."""
    (record,) = (record for record in trace.records if record.op == op)
    return record


def reduced(group: Any, tensor: torch.Tensor) -> Any:
    return group.allreduce([tensor], c10d.AllreduceOptions())


# ------------------------------------------------------------------------------------------------- when it is hashed


def test_output_hashed_at_read_once_work_is_done(ranks: Sequence[Any]) -> None:
    with HashDebugTrace() as trace:
        x = torch.ones(4) * 2
        work = reduced(ranks[0], x)
        torch.ones(4).sin()  # reads nothing of it
        view = x[1:]
        begun = of(trace._tracer.built()[0], "c10d.allreduce_.default")
        joined = elsewhere(lambda: reduced(ranks[1], torch.ones(4)))
        work.wait()
        view.sum()
        read = of(trace._tracer.built()[0], "c10d.allreduce_.default")
        x.zero_()
    joined.wait()

    assert [output.value for output in begun.outputs] == ["pending"]
    assert read.outputs == (digest(torch.full((4,), 3.0)),)
    assert of(trace.finish(), "c10d.allreduce_.default") == read


@pytest.mark.parametrize("tracer", ["python", "auto"])
def test_components_that_a_collective_gives_a_sparse_tensor_are_its_output(ranks: Sequence[Any], tracer: str) -> None:
    with HashDebugTrace(tracer=tracer) as trace:
        x = torch.eye(2).to_sparse().coalesce()
        work = reduced(ranks[0], x)
        joined = elsewhere(lambda: reduced(ranks[1], torch.eye(2).flip(0).to_sparse().coalesce()))
        work.wait()
        x.to_dense()
    joined.wait()
    done = trace.finish()

    call, reader = of(done, "c10d.allreduce_.default"), done.records[-1]
    assert call.outputs == (digest(torch.ones(2, 2).to_sparse().coalesce()),)
    assert {ref.source for ref in reader.inputs} == {call.id}
    assert not [leaf.id for leaf in done.leaves if leaf.position > done.records.index(call)]


def test_an_output_that_nobody_reads_is_hashed_at_the_end(ranks: Sequence[Any]) -> None:
    with HashDebugTrace() as trace:
        x = torch.ones(4) * 2
        work = reduced(ranks[0], x)
        joined = threading.Thread(target=unseen, args=(lambda: reduced(ranks[1], torch.ones(4)),))
        joined.start()

    assert of(trace.finish(), "c10d.allreduce_.default").outputs == (digest(torch.full((4,), 3.0)),)
    work.wait()
    joined.join()


def test_outputs_that_share_a_storage_are_all_hashed(ranks: Sequence[Any]) -> None:
    def gathered(group: Any, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        into = torch.empty(2, 4)
        return into, group.allgather([list(into.unbind())], [x], c10d.AllgatherOptions())

    with HashDebugTrace() as trace:
        into, work = gathered(ranks[0], torch.zeros(4))
        elsewhere(lambda: gathered(ranks[1], torch.ones(4))[1].wait())
        work.wait()
        into.sum()
    assert of(trace.finish(), "c10d.allgather_.default").outputs == (digest(torch.zeros(4)), digest(torch.ones(4)))


@pytest.mark.skipif(bool(native_unavailable()), reason="the dispatch mode sees one thread")
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "in the backend's thread"])
def test_callbacks_of_futures_are_recorded_in_either_thread(ranks: Sequence[Any], at_once: bool) -> None:
    threads, joined = [], []

    def join() -> None:
        joined.append(reduced(ranks[1], torch.ones(4)))

    def halved(future: Any) -> torch.Tensor:
        threads.append(threading.get_ident())
        half: torch.Tensor = future.value()[0] / 2
        return half

    with HashDebugTrace(tracer="native") as trace:
        work = reduced(ranks[0], torch.ones(4))
        if at_once:
            unseen(join)
            work.wait()
        future = work.get_future().then(halved)
        if not at_once:
            unseen(join)
        future.wait().sin()
    joined[0].wait()
    found = {record.op: record for record in trace.finish().records}
    half, sin = found["aten.div.Tensor"], found["aten.sin.default"]
    assert (threads == [threading.get_ident()]) is at_once
    assert half.id == "forward//aten.div.Tensor#t0.0"
    assert half.outputs == (digest(torch.ones(4)),)
    assert [ref.source for ref in sin.inputs] == [half.id]
    assert found["c10d.allreduce_.default"].outputs == (digest(torch.full((4,), 2.0)),)


@pytest.mark.skipif(bool(native_unavailable()), reason="the dispatch mode sees one thread")
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "in the backend's thread"])
def test_a_callback_that_a_backward_pass_waits_for_is_no_part_of_it(ranks: Sequence[Any], at_once: bool) -> None:
    """As DDP's hooks are called: by the pass, whose thread runs the callback where the collective is done by then."""
    joined: list[Any] = []

    def reduce_gradient(gradient: torch.Tensor) -> torch.Tensor:
        work = reduced(ranks[0], gradient.clone())
        joined.append(functools.partial(reduced, ranks[1], torch.ones(4)))
        if at_once:
            unseen(lambda: joined.append(joined[0]()))
            work.wait()
        future = work.get_future().then(lambda future: future.value()[0] / 2)
        if not at_once:
            unseen(lambda: joined.append(joined[0]()))
        mean: torch.Tensor = future.wait()
        return mean

    x = torch.zeros(4, requires_grad=True)
    x.register_hook(reduce_gradient)
    with HashDebugTrace(tracer="native") as trace:
        x.sum().backward()
    joined[1].wait()
    assert torch.equal(x.grad, torch.ones(4))  # type: ignore[arg-type]
    (half,) = (record for record in trace.finish().records if record.op == "aten.div.Tensor")
    assert (half.id, half.forward_op) == ("forward//aten.div.Tensor#t0.0", "")


def test_what_is_done_behind_the_trace_is_neither_hashed_nor_undone(ranks: Sequence[Any]) -> None:
    """Gloo's ``Work`` of a reduce-scatter writes its output in every wait."""

    def scattered(group: Any, into: torch.Tensor) -> Any:
        return group._reduce_scatter_base(into, torch.ones(8), c10d.ReduceScatterOptions())

    out = torch.zeros(4)
    with HashDebugTrace() as trace:
        work = scattered(ranks[0], out)
        elsewhere(lambda: scattered(ranks[1], torch.zeros(4)).wait())
        work.wait()
    out.fill_(7.0)

    assert of(trace.finish(), "c10d._reduce_scatter_base_.default").outputs == (digest(torch.full((4,), 2.0)),)
    assert out.tolist() == [7.0] * 4


def test_a_result_is_hashed_when_it_is_there(ranks: Sequence[Any]) -> None:
    with HashDebugTrace() as trace:
        x = torch.ones(4) * 2
        reduced(ranks[0], x)
        elsewhere(lambda: reduced(ranks[1], torch.ones(4)))
        trace.add_result("x", x)

    (result,) = trace.finish().results
    assert result.digest == digest(torch.full((4,), 3.0))
    assert result.source == of(trace.finish(), "c10d.allreduce_.default").id


def test_what_never_comes_is_waited_for_no_longer_than_the_limit(
    ranks: Sequence[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "LIMIT", 0.01)
    with HashDebugTrace() as trace:
        x = torch.ones(4) * 2
        work = reduced(ranks[0], x)
    trace.finish()
    elsewhere(lambda: reduced(ranks[1], torch.ones(4))).wait()
    work.wait()

    assert of(trace.finish(), "c10d.allreduce_.default").outputs[0].value == "pending"


def test_a_message_is_waited_for_by_the_program_alone(ranks: Sequence[Any]) -> None:
    """Gloo's ``Work`` of a message waits for another one when it is waited for twice."""
    buffer = torch.zeros(8)
    with HashDebugTrace(hash_inputs=True) as trace:
        first = ranks[0].recv([buffer[:4]], 1, 0)
        buffer[4:].sum()  # another part, while the message is under way
        elsewhere(lambda: ranks[1].send([torch.ones(4)], 0, 0).wait())
        first.wait()
        buffer.sum()
        late = ranks[0].recv([torch.zeros(4)], 1, 0)
    records = [record for record in trace.finish().records if record.op == "c10d.recv_.default"]
    elsewhere(lambda: ranks[1].send([torch.ones(4)], 0, 0).wait())
    late.wait()

    assert records[0].outputs == (digest(torch.ones(4)),)
    assert records[1].outputs[0].value == "pending"


@pytest.mark.skipif(
    torch.__version__.startswith("2.11."), reason="torch 2.11 waits without a call that is seen natively"
)
@pytest.mark.usefixtures("alone")
def test_functional_collectives_are_waited_for_when_they_are_read() -> None:
    from torch.distributed import _functional_collectives as functional

    def run() -> Trace:
        with HashDebugTrace() as trace:
            y = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
            (y + 1).sum()
        return trace.finish()

    trace = run()
    assert of(trace, "_c10d_functional.all_reduce.default").outputs == (digest(torch.ones(4)),)
    assert of(trace, "_c10d_functional.wait_tensor.default").outputs == ()
    assert of(trace, "aten.add.Tensor").inputs[0].source == of(trace, "_c10d_functional.all_reduce.default").id
    assert run() == trace


# ------------------------------------------------------------------------------------------------ reads before the wait


def joining_late(group: Any, seconds: float = 0.2) -> threading.Thread:
    """A thread that joins an all-reduce later, as a rank that is slower."""

    def join() -> None:
        time.sleep(seconds)
        reduced(group, torch.ones(4)).wait()

    thread = threading.Thread(target=unseen, args=(join,))
    thread.start()
    return thread


USES: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "reads": (lambda x: x * 3, "aten.mul.Tensor#1"),
    "reads a part": (lambda x: x[1:].sum(), "aten.sum.default#0"),
    "adds to it": (lambda x: x.add_(1), "aten.add_.Tensor#0"),
    "overwrites it": (lambda x: x.zero_(), "aten.zero_.default#0"),
    "asks for a number": (lambda x: x[0].item(), "aten._local_scalar_dense.default#0"),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("tracer", ["python", "auto"])
@pytest.mark.parametrize("hash_inputs", [False, True], ids=["plain", "hashed inputs"])
def test_a_use_before_the_wait_is_recorded_and_one_after_it_is_not(
    ranks: Sequence[Any], use: str, tracer: str, hash_inputs: bool
) -> None:
    function, reader = USES[use]

    def run(*, waits: bool) -> Trace:
        with HashDebugTrace(tracer=tracer, hash_inputs=hash_inputs) as trace:
            x = torch.ones(4) * 2
            work = reduced(ranks[0], x)
            late = joining_late(ranks[1])
            if waits:
                work.wait()
            function(x)
            work.wait()
            late.join()
        return trace.finish()

    early, again, waited = run(waits=False), run(waits=False), run(waits=True)
    (read,) = early.early_reads
    assert (read.collective, read.is_result) == ("forward//c10d.allreduce_.default#0", False)
    assert read.reader.endswith(reader)
    assert read.source.startswith("test_collectives.py:")
    assert read.source.endswith("<lambda>")
    assert early == again == file.loads(file.dumps(early))
    assert waited.early_reads == ()
    assert early.records == waited.records
    assert early != waited
    verdict, other, clean = (find_divergence(*pair) for pair in ((early, again), (waited, early), (waited, waited)))
    assert clean.equal
    for found in (verdict, other):
        assert found.divergence is not None
        assert (found.divergence.origin, found.divergence.kernel) == ("ranks", "")
        assert (found.divergence.node, found.divergence.source) == (read.reader, read.source)
        assert "c10d.allreduce_.default#0 receives before its Work is done" in found.divergence.detail
        assert not found.equal
        assert f"{read.reader} reads {read.collective} at {read.source}" in " ".join(str(found).split())


def test_unwritten_part_may_be_read_before_the_wait(ranks: Sequence[Any]) -> None:
    with HashDebugTrace() as trace:
        x = torch.ones(8) * 2
        work = reduced(ranks[0], x[:4])
        late = joining_late(ranks[1])
        x[4:].sum()
        work.wait()
        x.sum()
        late.join()
    assert trace.finish().early_reads == ()


def test_a_result_may_be_read_early_too(ranks: Sequence[Any]) -> None:
    with HashDebugTrace() as trace:
        x = torch.ones(4) * 2
        work = reduced(ranks[0], x)
        late = joining_late(ranks[1])
        trace.add_result("x", x)
        work.wait()
        late.join()
    (read,) = trace.finish().early_reads
    assert (read.reader, read.is_result) == ("x", True)
    verdict = find_divergence(trace.finish(), trace.finish())
    assert verdict.divergence is not None
    assert verdict.divergence.node == read.collective == "forward//c10d.allreduce_.default#0"
    assert "result x reads" in str(verdict)


@pytest.mark.parametrize("waits", [False, True], ids=["early", "waited for"])
def test_a_row_never_passes_where_the_trace_waited_for_the_program(ranks: Sequence[Any], waits: bool) -> None:
    def mean(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        work = reduced(ranks[0], x)
        late = joining_late(ranks[1])
        if waits:
            work.wait()
        found = x.mean()
        work.wait()
        late.join()
        return found

    call = FunctionCall.of(mean, (torch.ones(4),), {})
    row, _ = check_function(call, "mean", RunOptions(diagnose_budget=0))
    if waits:
        assert (row.accuracy, row.error, row.origin) == ("pass", "", "")
    else:
        assert (row.accuracy, row.origin, row.kernel) == ("results_not_comparable", "ranks", "")
        assert row.error.startswith("the results are not those of an untraced run: aten.mean.default reads what ")
        assert row.source.startswith("test_collectives.py:")
        assert "c10d.allreduce_.default#0 receives before its Work is done" in row.detail


# ---------------------------------------------------------------------------------------------------- what is recorded


@pytest.fixture
def third_of_four() -> Iterator[Any]:
    """A group of the ranks 2, 0 and 3 of four, in which this is rank 2; nothing is exchanged."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    yield dist.new_group([0, 2, 3])
    dist.destroy_process_group()


X = torch.arange(3.0)


def parts(count: int = 3) -> list[torch.Tensor]:
    return [torch.full((1,), float(at)) for at in range(count)]


THREE = {"process_group": (0, 2, 3)}
EXCHANGES: dict[str, tuple[Callable[[Any], Any], Collective]] = {
    "all_reduce": (
        lambda group: dist.all_reduce(X.clone(), group=group),
        Collective("combine", contributed=("0.0",), **THREE),
    ),
    "all_reduce of the world": (
        lambda _: dist.all_reduce(X.clone()),
        Collective("combine", (0, 1, 2, 3), contributed=("0.0",)),
    ),
    "broadcast by this rank": (
        lambda group: dist.broadcast(X.clone(), 2, group=group),
        Collective("broadcast", contributed=("0.0",), root=2, **THREE),
    ),
    "broadcast by another": (
        lambda group: dist.broadcast(X.clone(), 3, group=group),
        Collective("broadcast", root=3, **THREE),
    ),
    "reduce for another": (
        lambda group: dist.reduce(X.clone(), 3, group=group),
        Collective("combine", contributed=("0.0",), root=3, **THREE),
    ),
    "scatter by this rank": (
        lambda group: dist.scatter(torch.empty(1), parts(), 2, group=group),
        Collective("scatter", contributed=("1.0.0", "1.0.1", "1.0.2"), root=2, **THREE),
    ),
    "scatter by another": (
        lambda group: dist.scatter(torch.empty(1), None, 0, group=group),
        Collective("scatter", root=0, **THREE),
    ),
    "gather": (
        lambda group: dist.gather(X.clone(), [torch.empty(3) for _ in range(3)], 2, group=group),
        Collective("gather", contributed=("1.0",), root=2, **THREE),
    ),
    "all_gather": (
        lambda group: dist.all_gather([torch.empty(3) for _ in range(3)], X.clone(), group=group),
        Collective("gather", contributed=("1.0",), **THREE),
    ),
    "all_gather_into_tensor": (
        lambda group: dist.all_gather_into_tensor(torch.empty(9), X.clone(), group=group),
        Collective("gather", contributed=("1",), **THREE),
    ),
    "reduce_scatter": (
        lambda group: dist.reduce_scatter(torch.empty(1), parts(), group=group),
        Collective("reduce_scatter", contributed=("1.0.0", "1.0.1", "1.0.2"), **THREE),
    ),
    "reduce_scatter_tensor": (
        lambda group: dist.reduce_scatter_tensor(torch.empty(1), X.clone(), group=group),
        Collective("reduce_scatter", contributed=("1",), **THREE),
    ),
    "all_to_all_single": (
        lambda group: dist.all_to_all_single(torch.empty(3), X.clone(), group=group),
        Collective("all_to_all", contributed=("1",), **THREE),
    ),
    "send": (
        lambda group: dist.send(X.clone(), 3, group=group, tag=7),
        Collective("send", contributed=("0.0",), peer=3, tag=7, **THREE),
    ),
    "recv": (
        lambda group: dist.recv(torch.empty(3), 0, group=group, tag=7),
        Collective("receive", peer=0, tag=7, **THREE),
    ),
    "barrier": (lambda group: dist.barrier(group=group), Collective("barrier", **THREE)),
    "functional all_reduce": (
        lambda group: torch.ops._c10d_functional.all_reduce(X, "sum", group.group_name),
        Collective("combine", contributed=("0",), **THREE),
    ),
    "functional broadcast by another": (
        lambda group: torch.ops._c10d_functional.broadcast(X, 2, group.group_name),
        Collective("broadcast", root=3, **THREE),
    ),
    "functional all_gather with an output": (
        lambda group: torch.ops._c10d_functional.all_gather_into_tensor_out(X, 3, group.group_name, out=torch.empty(9)),
        Collective("gather", contributed=("0",), **THREE),
    ),
    "functional collective of the old form": (
        lambda group: torch.ops.c10d_functional.all_reduce(X, "sum", c10d._get_group_tag(group), [0, 2, 3], 3),
        Collective("combine", contributed=("0",), **THREE),
    ),
}
if hasattr(torch.ops._c10d_functional, "isend"):
    EXCHANGES["functional isend"] = (
        lambda group: torch.ops._c10d_functional.isend(X, 2, 5, group.group_name),
        Collective("send", contributed=("0",), peer=3, tag=5, **THREE),
    )


@pytest.mark.parametrize("hash_inputs", [False, True], ids=["plain", "hashed inputs"])
@pytest.mark.parametrize("tracer", ["python", "auto"])
@pytest.mark.parametrize("name", EXCHANGES)
def test_what_a_call_exchanges(third_of_four: Any, name: str, tracer: str, hash_inputs: bool) -> None:
    call, expected = EXCHANGES[name]
    with HashDebugTrace(tracer=tracer, hash_inputs=hash_inputs) as trace:
        call(third_of_four)
    made = file.loads(file.dumps(trace.finish()))
    assert made == trace.finish()
    (record,) = (record for record in made.records if record.collective and not record.inside)
    assert record.collective == expected
    whole = {digest(X).value}, {digest(part).value for part in parts()}
    assert {ref.digest for ref in record.inputs if ref.argument in expected.contributed} in (*whole, set())
    assert hash_inputs or {ref.argument for ref in record.inputs if ref.digest} == {*expected.contributed}
    for inner in made.records:
        if inner.inside == record.id and inner.collective is not None:
            assert inner.collective.process_group == expected.process_group
            assert hash_inputs or not any(ref.digest for ref in inner.inputs)


@pytest.mark.parametrize("tracer", ["python", "auto"])
def test_groups_of_the_same_ranks_are_told_apart(third_of_four: Any, tracer: str) -> None:
    second = dist.new_group([0, 2, 3])
    with HashDebugTrace(tracer=tracer) as trace:
        for group in (second, third_of_four, second):
            dist.all_reduce(X.clone(), group=group)
    collectives = [record.collective for record in trace.finish().records if record.collective is not None]
    assert [(one.process_group, one.ordinal) for one in collectives] == [((0, 2, 3), at) for at in (1, 0, 1)]


@pytest.mark.parametrize("tracer", ["python", "auto"])
def test_what_is_given_is_hashed_where_no_recorded_op_wrote_it(ranks: Sequence[Any], tracer: str) -> None:
    with HashDebugTrace(tracer=tracer) as trace:
        x = torch.ones(4) * 2
        x.numpy()[:] = 5
        work = reduced(ranks[0], x)
        elsewhere(lambda: reduced(ranks[1], torch.ones(4)))
        work.wait()
    record = of(trace.finish(), "c10d.allreduce_.default")
    (given,) = (ref for ref in record.inputs if ref.argument == "0.0")
    assert given.source == "forward//aten.mul.Tensor#0"
    assert given.digest == digest(torch.full((4,), 5.0)).value
    assert record.outputs == (digest(torch.full((4,), 6.0)),)


@pytest.mark.parametrize("tracer", ["python", "auto"])
def test_what_a_callback_sees_is_the_record_of_the_trace(ranks: Sequence[Any], tracer: str) -> None:
    class Seen(TraceCallback):
        wants_records = True

        def __init__(self) -> None:
            self.records: list[OpRecord] = []

        def recorded(self, record: OpRecord) -> None:
            self.records.append(record)

    seen = Seen()
    with HashDebugTrace(tracer=tracer, watcher=seen) as trace:
        work = reduced(ranks[0], torch.ones(4))
        elsewhere(lambda: reduced(ranks[1], torch.ones(4)))
        work.wait()
    record = of(trace.finish(), "c10d.allreduce_.default")
    (told,) = (one for one in seen.records if one.id == record.id)
    assert (told.collective, told.inputs) == (record.collective, record.inputs)
    assert told.collective == Collective("combine", contributed=("0.0",))


@pytest.mark.usefixtures("alone")
def test_the_name_of_a_group_is_no_argument() -> None:
    from torch.distributed import _functional_collectives as functional

    def run() -> tuple[str, Trace]:
        group = dist.new_group([0])
        with HashDebugTrace() as trace:
            functional.all_reduce(torch.ones(4), "sum", group).sum()
        name = group.group_name
        dist.destroy_process_group(group)
        return name, trace.finish()

    (name, trace), (other, again) = run(), run()
    assert name != other
    assert trace == again


def test_lists_of_lists_of_tensors_are_read(ranks: Sequence[Any]) -> None:
    def gathered(group: Any, into: list[torch.Tensor], x: torch.Tensor) -> Any:
        return group.allgather([into], [x], c10d.AllgatherOptions())

    with HashDebugTrace() as trace:
        x, into = torch.ones(4) * 2, [torch.empty(4), torch.zeros(4)]
        work = gathered(ranks[0], into, x)
        elsewhere(lambda: gathered(ranks[1], [torch.empty(4) for _ in range(2)], torch.ones(4)).wait())
        work.wait()
        torch.stack(into)
    record = of(trace.finish(), "c10d.allgather_.default")
    read = {ref.argument: (ref.source, ref.written) for ref in record.inputs if ref.argument != "inside"}
    assert read == {
        "0.0.0": ("forward//aten.empty.memory_format#0", True),
        "0.0.1": ("forward//aten.zeros.default#0", True),
        "1.0": ("forward//aten.mul.Tensor#0", False),
    }
    assert "Tensor" not in record.arguments
    assert record.outputs == (digest(torch.full((4,), 2.0)), digest(torch.ones(4)))


def test_the_text_form_keeps_what_is_a_collective(ranks: Sequence[Any], tmp_path: Path) -> None:
    with HashDebugTrace(tmp_path / "trace.log") as trace:
        x = torch.ones(4) * 2
        reduced(ranks[0], x)
        elsewhere(lambda: reduced(ranks[1], torch.ones(4)))
        x.sum()
        late = ranks[0].recv([torch.zeros(4)], 1, 0)
    read = file.read(tmp_path / "trace.log")
    elsewhere(lambda: ranks[1].send([torch.ones(4)], 0, 0).wait())
    late.wait()

    assert read == trace.finish()
    assert [record.op for record in read.records if record.collective] == [
        "c10d.allreduce_.default",
        "c10d.recv_.default",
    ]


@pytest.mark.usefixtures("alone")
def test_ops_on_a_dtensor_are_recorded_on_its_local_tensors() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    model = distribute_module(torch.nn.Linear(3, 2), init_device_mesh("cpu", (1,)))
    local = torch.arange(12.0).reshape(4, 3)

    def run() -> Trace:
        x = distribute_tensor(local, init_device_mesh("cpu", (1,)), [Shard(0)])
        with HashDebugTrace(model=model, inputs=[x], hash_inputs=True) as trace:
            y = model(x)
            trace.add_result("local", y)
            trace.add_result("full", y.full_tensor())
        assert digest(y) == digest(y.to_local())
        return trace.finish()

    trace = run()
    assert {leaf.id: leaf.digest for leaf in trace.leaves} == {
        "input/0": digest(local),
        "parameter/Linear.weight": digest(model.weight.to_local()),
        "parameter/Linear.bias": digest(model.bias.to_local()),
    }
    linear = torch.nn.functional.linear(local, model.weight.to_local(), model.bias.to_local())
    assert [result.digest for result in trace.results] == [digest(linear)] * 2
    assert not any(record.blank for record in trace.records)  # DTensor computes shapes on fake tensors
    assert run() == trace


# ----------------------------------------------------------------------------------------------------- the programs


PROGRAMS = [
    "ddp",
    "ddp with gradients in buckets",
    "fsdp2",
    "tensor parallel",
    "dtensor",
    "blocking",
    "asynchronous",
    "every kind",
    "ddp, built in the trace",
    "fsdp2, built in the trace",
    "joined late",
    "joined late, functional",
    "sent late",
]
KINDS = ["results", "records", "hashed inputs"]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[tuple[str, str], set[str]]]:
    """The verdicts on every program, by rank, and by the program and the kind of trace."""
    from tests.core.trace.rank_programs import CLEAN, run_ranks

    assert list(CLEAN) == PROGRAMS
    everything: dict[int, dict[tuple[str, str], set[str]]] = {}
    for rank, lines in run_ranks(tmp_path_factory.mktemp("ranks")).items():
        verdicts = everything.setdefault(rank, {})
        for program, kind, verdict, _ in lines:
            verdicts.setdefault((program, kind), set()).add(verdict)
    return everything


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What programs do, untraced and under each tracer, by rank."""
    from tests.core.trace.rank_programs import run_looks

    return run_looks(tmp_path_factory.mktemp("looks"))


@pytest.mark.slow
@pytest.mark.parametrize("tracer", ["native", "python"])
@pytest.mark.parametrize("program", ["ddp", "fsdp2", "tensor parallel", "blocking", "every kind", "sent late"])
def test_a_trace_adds_no_collective_changes_no_order_and_waits_for_no_message(
    seen: Any, program: str, tracer: str
) -> None:
    if tracer == "native" and native_unavailable() is not None:
        pytest.skip("the native tracer cannot be built here")
    for rank in (0, 1):
        made, calls, waits = seen[rank]["untraced"][program]
        assert calls
        assert seen[rank][tracer][program] == [made, calls, waits]
        assert {*waits} <= {1}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_clean_programs_of_two_ranks_agree(said: Any, program: str, kind: str) -> None:
    assert [said[rank][program, kind] for rank in (0, 1)] == [{"agree"}, {"agree"}]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_before_first_collective_named_on_its_rank(said: Any, kind: str) -> None:
    assert [said[rank]["fault in front", kind] for rank in (0, 1)] == [
        {"kernel ranks.noisy.default"},
        {"ranks c10d.allreduce_.default"},
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_kernel_behind_a_collective_is_named(said: Any, kind: str) -> None:
    assert [said[rank]["fault behind", kind] for rank in (0, 1)] == [{"ranks ranks.noisy.default"}, {"agree"}]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["results", "hashed inputs"])
@pytest.mark.parametrize(
    ("program", "received"),
    [
        pytest.param("fault under ddp", "c10d.allreduce_.default", id="ddp"),
        pytest.param("fault under fsdp2", "c10d._reduce_scatter_base_.default", id="fsdp2"),
    ],
)
def test_only_rank_at_fault_names_an_op_after_constructor(said: Any, program: str, received: str, kind: str) -> None:
    assert [said[rank][program, kind] for rank in (0, 1)] == [
        {"ranks ranks.noisy_in_training.default"},
        {f"ranks {received}"},
    ]


LOOPS = [
    "clip_grad_norm_",
    *(
        pytest.param(name, marks=pytest.mark.exhaustive)
        for name in ("clip_grad_norm_(foreach=False)", "AdamW(foreach=True)", "AdamW(fused=True)", "SGD(foreach=True)")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("tracer", ["native", "python"])
@pytest.mark.parametrize("name", LOOPS)
def test_fsdp2_loop_has_untraced_parameters(name: str, tracer: str, tmp_path: Path) -> None:
    if tracer == "native" and native_unavailable() is not None:
        pytest.skip("the native tracer cannot be built here")
    code = f"from tests.core.trace.rank_programs import run_loop; run_loop({name!r}, {tracer!r}, {str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", ["joined late", "joined late, functional", "sent late"])
def test_a_read_before_the_wait_is_told_on_its_rank_alone(said: Any, program: str, kind: str) -> None:
    program = f"{program}, not waited for"
    assert [said[rank][program, kind] for rank in (0, 1)] == [{"ranks aten.mean.default early"}, {"agree"}]


def test_difference_from_another_rank_has_origin_ranks(ranks: Sequence[Any]) -> None:
    def run(sent: float) -> Trace:
        with HashDebugTrace() as trace:
            x = torch.ones(4) * 2
            work = reduced(ranks[0], x)
            elsewhere(lambda: reduced(ranks[1], torch.full((4,), sent))).wait()
            work.wait()
            trace.add_result("sum", x.sum())
        return trace.finish()

    assert run(1.0) == run(1.0)
    divergence = find_divergence(run(1.0), run(2.0)).divergence
    assert divergence is not None
    assert (divergence.origin, divergence.kernel) == ("ranks", "")
    assert "not traceable across ranks" in divergence.detail
