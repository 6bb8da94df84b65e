"""Threads, and work for pools, that a traced program starts: every call is recorded, in an order that no schedule
changes."""

from __future__ import annotations

import os
import queue
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame
from torch.optim import optimizer

from hashbench import HashDebugTrace
from hashbench.core.divergence import find
from hashbench.core.errors import HashbenchError
from hashbench.core.native.library import is_recorded
from hashbench.core.records import OpRecord, Trace
from hashbench.core.trace import file, nodes
from hashbench.core.trace import threads as starting
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.digest import digest, untraced
from hashbench.core.trace.native import tracer as native_tracer
from hashbench.core.trace.nodes import is_parameter
from hashbench.core.trace.tracer import native_unavailable
from tests.core.trace.native import programs

pytestmark = pytest.mark.skipif(bool(native_unavailable()), reason="the native tracer cannot be built here")

NOTED: tuple[Mapping[str, Any], ...] = ({}, {"hash_inputs": True, "source_lines": True})
either = pytest.mark.parametrize("options", NOTED, ids=["plain", "all noted"])


def traced(compute: Callable[[], Any], **options: Any) -> tuple[Trace, Any]:
    with HashDebugTrace(tracer="native", **options) as trace:
        found = compute()
    return trace.finish(), found


def names(records: Sequence[OpRecord]) -> list[str]:
    return [record.op.split(".")[1] for record in records]


def in_threads(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each of the tasks returns, each in a thread that begins when all are there."""
    found: list[Any] = [None] * len(tasks)
    ready = threading.Barrier(len(tasks))

    def run(number: int) -> None:
        ready.wait()
        found[number] = tasks[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


X = torch.arange(6.0).reshape(2, 3)
TASKS = [lambda: (X * 2).sin(), lambda: X.cos() @ X.t(), lambda: X.sum()]


def by_executor() -> list[Any]:
    with ThreadPoolExecutor(3) as pool:
        return [future.result() for future in [pool.submit(task) for task in TASKS]]


def by_pool() -> list[Any]:
    with ThreadPool(3) as pool:
        return [result.get() for result in [pool.apply_async(task) for task in TASKS]]


def by_map() -> list[Any]:
    with ThreadPool(3) as pool:
        return pool.map(lambda task: task(), TASKS, chunksize=1)


def by_starmap() -> list[Any]:
    with ThreadPool(3) as pool:
        return pool.starmap(lambda task: task(), [(task,) for task in TASKS])


def by_imap() -> list[Any]:
    with ThreadPool(3) as pool:
        return list(pool.imap(lambda task: task(), TASKS))


WAYS = [lambda: in_threads(TASKS), by_executor, by_pool, by_map, by_starmap, by_imap]


@pytest.mark.parametrize("way", WAYS, ids=["threads", "executor", "pool", "map", "starmap", "imap"])
@either
def test_threads_and_pools_recorded_in_start_order(way: Callable[[], list[Any]], options: Mapping[str, Any]) -> None:
    expected = [digest(tensor) for tensor in way()]
    trace, found = traced(way, **options)
    assert [digest(tensor) for tensor in found] == expected
    assert names(trace.records) == ["mul", "sin", "cos", "t", "mm", "sum"]
    assert [record.id.rpartition("#")[2] for record in trace.records] == [
        "t0.0",
        "t0.0",
        "t1.0",
        "t1.0",
        "t1.0",
        "t2.0",
    ]
    assert trace.records[-1].outputs == (expected[-1],)
    assert [leaf.id for leaf in trace.leaves] == ["other/#0"]
    assert file.loads(file.dumps(trace)) == trace
    assert all(traced(way, **options)[0].records == trace.records for _ in range(3) if not options.get("source_lines"))


def test_a_pool_that_is_older_than_the_trace_is_seen_while_it_lasts() -> None:
    with ThreadPoolExecutor(2) as pool:
        pool.submit(torch.neg, X).result()
        trace, _ = traced(lambda: pool.submit(torch.sin, X).result())
        assert not pool.submit(is_recorded).result()
    assert names(trace.records) == ["sin"]


@torch.library.custom_op("hashbench_tests::in_parallel", mutates_args=())
def in_parallel(x: torch.Tensor) -> torch.Tensor:
    with ThreadPoolExecutor(3) as pool:
        return torch.stack(list(pool.map(torch.sin, x.unbind())))


@torch.library.custom_op("hashbench_tests::handed_back", mutates_args=())
def handed_back(x: torch.Tensor) -> torch.Tensor:
    (made,) = in_threads([lambda: in_threads([lambda: x.sin()])[0]])
    return made


@either
def test_what_threads_compute_inside_of_an_op_is_inside_of_it(options: Mapping[str, Any]) -> None:
    trace, _ = traced(lambda: in_parallel(X), **options)
    assert names(trace.records) == ["unbind", "sin", "sin", "stack", "in_parallel"]
    assert [record.inside for record in trace.records] == [trace.records[-1].id] * 4 + [""]
    trace, _ = traced(lambda: handed_back(X).cos(), **options)
    sine, outer, cosine = trace.records
    assert (sine.id, sine.inside) == ("forward//aten.sin.default#t0.0.0", outer.id)
    assert cosine.inputs[0].source == (outer.id if options else sine.id)


def test_thread_comes_after_what_it_reads() -> None:
    def handed_over() -> torch.Tensor:
        way: queue.Queue[torch.Tensor] = queue.Queue()
        found: list[torch.Tensor] = []
        reader = threading.Thread(target=lambda: found.append(way.get().cos()))
        reader.start()
        writer = threading.Thread(target=lambda: way.put(X.sin()))
        writer.start()
        writer.join()
        reader.join()
        return found[0]

    trace, _ = traced(handed_over)
    sine, cosine = trace.records
    assert (sine.op, cosine.op) == ("aten.sin.default", "aten.cos.default")
    assert cosine.inputs[0].source == sine.id


def arrives(order: Sequence[int]) -> Trace:
    """Threads add to one tensor, one after the other as ``order`` says."""
    turns = [threading.Event() for _ in range(len(order) + 1)]
    total = torch.ones(1)

    def add(number: int) -> None:
        turns[order.index(number)].wait()
        total.add_(0.1 * 3**number)
        turns[order.index(number) + 1].set()

    def compute() -> torch.Tensor:
        threads = [threading.Thread(target=add, args=(number,)) for number in range(len(order))]
        for thread in threads:
            thread.start()
        turns[0].set()
        for thread in threads:
            thread.join()
        return total * 2

    with HashDebugTrace(tracer="native") as trace:
        result = compute()
    trace.add_result("output", result)
    return trace.finish()


def test_reordered_threads_differ_in_sequence() -> None:
    first, second = arrives([0, 1, 2, 3]), arrives([0, 3, 2, 1])
    assert first.results != second.results
    verdict = find(first, second).divergence
    assert verdict is not None
    assert (verdict.origin, verdict.kernel) == ("sequence", "aten.add_.Tensor")
    assert find(first, arrives([0, 1, 2, 3])).divergence is None


class Branches(nn.Module):
    """Two layers at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = in_threads([lambda: self.first(x), lambda: self.second(x).tanh()])
        return first * second


@either
def test_the_backward_of_what_a_thread_computed_belongs_to_its_op(options: Mapping[str, Any]) -> None:
    torch.manual_seed(0)
    model = Branches()
    model(X).sum().backward()
    expected = [digest(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    trace, _ = traced(lambda: model(X).sum().backward(), model=model, **options)
    assert [digest(parameter.grad) for parameter in model.parameters() if parameter.grad is not None] == expected
    (tanh,) = (record for record in trace.records if record.op == "aten.tanh.default")
    (backward,) = (record for record in trace.records if record.op == "aten.tanh_backward.default")
    assert backward.forward_op == tanh.id == "forward/Branches/aten.tanh.default#t1.0"
    assert {leaf.kind for leaf in trace.leaves} == {"parameter", "other"}


@either
def test_an_error_in_a_thread_leaves_the_trace_as_it_was(options: Mapping[str, Any]) -> None:
    def fail() -> None:
        X.sin()
        X.mm(X)

    def compute() -> None:
        with ThreadPoolExecutor(1) as pool:
            with pytest.raises(RuntimeError):
                pool.submit(fail).result()
            pool.submit(X.cos).result()

    trace, _ = traced(compute, **options)
    assert names(trace.records) == ["sin", "cos"]


@either
def test_a_thread_that_outlives_the_trace_is_not_recorded_further(options: Mapping[str, Any]) -> None:
    begun, over = threading.Event(), threading.Event()
    found: list[torch.Tensor] = []

    def work() -> None:
        found.append(X.sin())
        begun.set()
        over.wait()
        found.append(X.cos())
        found.append(found[0] + 1)

    thread = threading.Thread(target=work)
    with HashDebugTrace(tracer="native", **options) as trace:
        thread.start()
        begun.wait()
    assert names(trace.finish().records) == ["sin"]
    with HashDebugTrace(tracer="native", **options) as other:
        over.set()
        thread.join()
        X.neg()
    assert names(other.finish().records) == ["neg"]
    assert digest(found[1]) == digest(X.cos())


@torch.library.custom_op("hashbench_tests::waiting", mutates_args=())
def waiting(x: torch.Tensor) -> torch.Tensor:
    EVENTS["begun"].set()
    EVENTS["over"].wait()
    return x.sin()


EVENTS = {"begun": threading.Event(), "over": threading.Event()}


@either
def test_a_call_that_outlives_the_trace_is_not_recorded(options: Mapping[str, Any]) -> None:
    EVENTS.update(begun=threading.Event(), over=threading.Event())
    thread = threading.Thread(target=waiting, args=(X,))
    trace = HashDebugTrace(tracer="native", **options)
    with trace:
        X.neg()
        thread.start()
        EVENTS["begun"].wait()
    finished = trace.finish()
    del trace
    EVENTS["over"].set()
    thread.join()
    assert names(finished.records) == ["neg"]
    assert names(traced(lambda: X.cos(), **options)[0].records) == ["cos"]


def test_threads_of_ours_and_those_after_the_trace_are_left_alone() -> None:
    before = threading._start_new_thread if hasattr(threading, "_start_new_thread") else None  # type: ignore[attr-defined]
    submit = ThreadPoolExecutor.submit

    def compute() -> None:
        with untraced():
            in_threads(TASKS)
            by_executor()

    trace, _ = traced(compute)
    assert not trace.records
    assert ThreadPoolExecutor.submit is submit
    assert before is None or threading._start_new_thread is before  # type: ignore[attr-defined]
    assert "apply_async" not in vars(ThreadPool)


class Watching(TraceCallback):
    """Keeps the id and the op of every call."""

    wants_records = True

    def __init__(self) -> None:
        self.called: set[tuple[str, str]] = set()
        self.made: dict[str, OpRecord] = {}

    def before(self, node: str, _func: Any, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> None:
        self.called.add((node, digest(args[0]).value))

    def recorded(self, record: OpRecord) -> None:
        self.made[record.id] = record


def test_a_watcher_is_told_the_ids_and_records_of_the_finished_trace() -> None:
    watcher = Watching()
    model = Branches()
    trace, _ = traced(lambda: model(X), watcher=watcher, hash_inputs=True, model=model)
    assert watcher.called == {
        (record.id, next(ref.digest for ref in record.inputs if ref.argument == "0")) for record in trace.records
    }
    assert {record.id for record in trace.records} == watcher.made.keys()
    assert all(watcher.made[record.id].outputs == record.outputs for record in trace.records)


def test_concurrent_first_reads_make_one_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    x, sparse = torch.rand(3, 2), torch.eye(3).to_sparse()
    begun, over = threading.Event(), threading.Event()

    def held_up(tensor: torch.Tensor) -> bool:
        if tensor.layout is torch.strided and tensor.data_ptr() == x.data_ptr():
            begun.set()
            assert over.wait(60)
        return is_parameter(tensor)

    def read_in_cpp() -> None:
        assert begun.wait(60)
        x.sin()
        over.set()

    monkeypatch.setattr(nodes, "is_parameter", held_up)
    trace, _ = traced(lambda: in_threads([lambda: torch.sparse.mm(sparse, x), read_in_cpp]))
    (leaf,) = (leaf for leaf in trace.leaves if leaf.digest == digest(x))
    reads = [record.op for record in trace.records if leaf.id in [ref.source for ref in record.inputs]]
    assert reads == ["aten._sparse_addmm.default", "aten.sin.default"]


@torch.library.custom_op("hashbench_tests::between", mutates_args=())
def between(_x: torch.Tensor, _recorded_in_python: torch.Tensor) -> torch.Tensor:
    EVENTS["begun"].set()
    assert EVENTS["over"].wait(60)
    return torch.ones(1)


@pytest.mark.parametrize("options", [{}, {"source_lines": True}], ids=["plain", "source lines"])
def test_concurrent_write_keeps_its_writer(
    options: Mapping[str, Any],
) -> None:
    EVENTS.update(begun=threading.Event(), over=threading.Event())
    x, sparse = torch.rand(3), torch.eye(3).to_sparse()

    def write() -> None:
        assert EVENTS["begun"].wait(60)
        x.add_(1)
        EVENTS["over"].set()

    def compute() -> None:
        in_threads([lambda: between(x, sparse), write])
        x.sin()

    trace, _ = traced(compute, **options)
    assert trace.records[-1].inputs[0].source == "forward//aten.add_.Tensor#t1.0"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_goes_on_without_the_trace() -> None:
    with HashDebugTrace(tracer="native") as trace:
        X.sin()
        child = os.fork()
        if not child:
            X.cos()
            in_threads([X.neg])
            fine = not is_recorded() and names(trace.finish().records) == ["sin"]
            os._exit(0 if fine else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        X.neg()
    assert names(trace.finish().records) == ["sin", "neg"]


def left_by(trace: Trace) -> list[Any]:
    """What the records read and wrote, without what is in memory before anything is written there."""
    return [
        (
            *(record.id, record.arguments, record.outputs, record.inside, record.forward_op),
            *((ref.argument, ref.source, ref.offset) for ref in record.inputs),
        )
        for record in trace.records
    ]


@pytest.mark.parametrize("options", [{}, {"hash_inputs": True}], ids=["plain", "hashed inputs"])
@pytest.mark.parametrize("seed", range(8))
def test_random_threaded_programs_match_untraced(seed: int, options: Mapping[str, Any]) -> None:
    def run() -> Mapping[str, Any]:
        torch.manual_seed(seed)
        return programs.made(seed, threads=True)()

    expected = run()
    (first, found), (second, _) = traced(run, **options), traced(run, **options)
    assert {name: digest(tensor.detach()) for name, tensor in found.items()} == {
        name: digest(tensor.detach()) for name, tensor in expected.items()
    }
    assert any("#t" in record.id for record in first.records)
    assert left_by(first) == left_by(second)


def chain(number: int) -> torch.Tensor:
    value = torch.full((8,), float(number))
    for step in range(100):
        value = (value * 0.5).add_(step)
        value = value[1:].sin().repeat(2)[:8]
    return value


@pytest.mark.slow
def test_24_threads_at_once_have_every_record_in_the_same_order() -> None:
    tasks = [lambda number=number: chain(number) for number in range(24)]
    expected = [digest(tensor) for tensor in in_threads(tasks)]

    def results() -> Iterator[tuple[Trace, Any]]:
        for _ in range(2):
            yield traced(lambda: in_threads(tasks))

    (first, found), (second, again) = results()
    assert [digest(tensor) for tensor in found] == [digest(tensor) for tensor in again] == expected
    assert len(first.records) == 24 * (1 + 6 * 100)
    assert first.records == second.records
    alone, _ = traced(lambda: [task() for task in tasks])
    assert names(first.records) == names(alone.records)
    assert [record.outputs for record in first.records] == [record.outputs for record in alone.records]


def replaced() -> list[Any]:
    """All that a trace puts its own in place of, or adds to."""
    modules = torch.nn.modules.module
    hooks = (modules._global_forward_pre_hooks, modules._global_forward_hooks, optimizer._global_optimizer_pre_hooks)
    starts = (threading.Thread.start.__globals__.get(name) for name in starting._STARTS)
    return [
        *(getattr(owner, name) for owner, name, _ in starting._PLACES),
        *("imap" in vars(ThreadPool), "apply_async" in vars(ThreadPool), *starts),
        *(dict(one) for one in hooks),
        *(nn.Module._call_impl.__code__, nn.Module._call_impl.__kwdefaults__),
        *(eval_frame._callback_from_stance, eval_frame._maybe_set_eval_frame),
        *(list(sys.meta_path), list(warnings.filters), is_recorded()),
    ]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", range(len(starting._PLACES)))
def test_nothing_stays_replaced_by_a_trace_that_could_not_be_entered(
    error: type[BaseException], where: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    before, places = replaced(), list(starting._PLACES)
    failing = [*places[:where], (*places[where][:2], fails), *places[where + 1 :]]
    with monkeypatch.context() as patched:
        patched.setattr(starting, "_PLACES", tuple(failing))
        trace = HashDebugTrace(tracer="native")
        with pytest.raises(error):
            trace.__enter__()
        assert not trace.is_active()
    assert replaced() == before
    after, _ = traced(by_executor)
    assert names(after.records) == ["mul", "sin", "cos", "t", "mm", "sum"]
    assert replaced() == before


def test_consecutive_traces_share_no_threads_or_modules() -> None:
    model, before = nn.Sequential(nn.Tanh()), replaced()
    seen = []
    for _ in range(2):
        trace = HashDebugTrace(tracer="native")
        with trace:
            inside = replaced()
            with pytest.raises(HashbenchError, match="cannot nest traces"):
                HashDebugTrace(tracer="native").__enter__()
            assert replaced() == inside
            in_threads([lambda: model(X).sum(), lambda: X.exp()])
            model(X)
        assert replaced() == before
        in_threads([lambda: model(X).sum()])
        seen.append([(record.id, record.module) for record in trace.finish().records])
    assert seen[0] == seen[1]
    assert sorted(name.split("aten.")[1].split(".")[0] for name, _ in seen[0]) == ["exp", "sum", "tanh", "tanh"]
    assert seen[0][-1][1] == "Sequential.0"


def test_task_started_after_the_trace_is_not_recorded() -> None:
    release = threading.Event()
    with ThreadPoolExecutor(1) as workers:
        with HashDebugTrace(tracer="native") as trace:
            workers.submit(release.wait)
            late = workers.submit(lambda: (X.exp(), is_recorded()))
            X.sin()
        release.set()
        assert not late.result()[1]
    assert names(trace.finish().records) == ["sin"]


@torch.library.custom_op("hashbench_lanes::waits", mutates_args=())
def waits(x: torch.Tensor) -> torch.Tensor:
    found = x + 1
    INNER.set()
    OUTER.wait(60)
    return found


INNER, OUTER = threading.Event(), threading.Event()


@either
@pytest.mark.parametrize("before", [True, False], ids=["before it is read", "once it is read"])
def test_queries_during_recording_see_finished_calls(
    before: bool, options: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of the thread ends while the main thread reads what the recorder kept: the calls inside are known, and it
    is not."""
    INNER.clear()
    OUTER.clear()
    with HashDebugTrace(tracer="native", **options) as trace:
        thread = threading.Thread(target=lambda: waits(torch.ones(2)).mul(2))
        thread.start()
        assert INNER.wait(60)

        class Meanwhile(native_tracer.DecodedTrace):
            def __init__(self, *arguments: Any) -> None:
                if not before:
                    super().__init__(*arguments)
                OUTER.set()
                thread.join()
                if before:
                    super().__init__(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(native_tracer, "DecodedTrace", Meanwhile)
            assert {"aten.ones.default", "aten.add.Tensor"} <= set(trace.stats["operation_types"])
    assert names(trace.finish().records) == ["ones", "add", "waits", "mul"]
