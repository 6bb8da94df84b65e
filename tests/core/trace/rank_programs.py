"""Programs of ``torch.distributed`` that run twice under a trace, on ranks in processes of their own.

``python -m tests.core.trace.rank_programs --rounds 20 --ranks 2`` counts the verdicts on further runs of each.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from hashbench import HashDebugTrace, find_divergence
from hashbench.core.records import Trace, op_of
from hashbench.core.trace.digest import digest, is_distributed
from hashbench.core.trace.op_schema import plan_of
from hashbench.core.trace.tracer import native_unavailable
from tests.gloo import exchanges_lists

_COUNT = itertools.count(1)


@torch.library.custom_op("ranks::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """An op whose output is another each time it is called on rank 0."""
    return x + (next(_COUNT) if dist.get_rank() == 0 else 0)


def examples(rank: int) -> torch.Tensor:
    """A batch of eight, another on every rank."""
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))


def network(*between: nn.Module) -> nn.Sequential:
    """A small network from a fixed seed."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), *between, nn.Linear(64, 8))


def trained(model: nn.Module, x: torch.Tensor, *, hash_inputs: bool, iterations: int = 2) -> Trace:
    """The trace of a few training steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with HashDebugTrace(model=model, inputs=x, hash_inputs=hash_inputs) as trace:
        for trace.iteration in range(iterations):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for name, parameter in model.named_parameters():
            trace.add_result(name, parameter)
    return trace.finish()


def data_parallel(rank: int, hash_inputs: bool) -> Trace:
    """DDP with several buckets and with buffers; the second iteration has its buckets built anew."""
    model = DistributedDataParallel(network(nn.BatchNorm1d(64)), bucket_cap_mb=0.005)
    return trained(model, examples(rank), hash_inputs=hash_inputs)


def data_parallel_views(rank: int, hash_inputs: bool) -> Trace:
    """DDP whose gradients are views of its buckets."""
    model = DistributedDataParallel(network(nn.BatchNorm1d(64)), bucket_cap_mb=0.005, gradient_as_bucket_view=True)
    return trained(model, examples(rank), hash_inputs=hash_inputs)


def fully_sharded(rank: int, hash_inputs: bool) -> Trace:
    """FSDP2, each layer by itself."""
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return trained(fully_shard(model), examples(rank), hash_inputs=hash_inputs)


def tensor_parallel(_: int, hash_inputs: bool) -> Trace:
    """The layers split over the ranks, on a mesh that every run makes anew."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return trained(model, examples(0), hash_inputs=hash_inputs)


def distributed_tensors(_: int, hash_inputs: bool) -> Trace:
    """A product of two sharded matrices."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = distribute_tensor(examples(0), mesh, [Shard(1)])
    rows = distribute_tensor(examples(1).t().contiguous(), mesh, [Shard(0)])
    with HashDebugTrace(inputs=[columns, rows], hash_inputs=hash_inputs) as trace:
        product = (columns @ rows).relu()
        trace.add_result("local", product)
        trace.add_result("full", product.full_tensor())
    return trace.finish()


def blocking(rank: int, hash_inputs: bool) -> Trace:
    """Blocking collectives, the second into memory that nobody wrote."""
    x = examples(rank)
    with HashDebugTrace(inputs=x, hash_inputs=hash_inputs) as trace:
        doubled = x * 2
        dist.all_reduce(doubled)
        gathered = [torch.empty_like(doubled) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, doubled)
        trace.add_result("mean", torch.stack(gathered).mean())
    return trace.finish()


def asynchronous(rank: int, hash_inputs: bool) -> Trace:
    """Large collectives that go on while other ops run; nobody reads what the last one gathers."""
    x = examples(rank).repeat(2000, 4)
    with HashDebugTrace(inputs=x, hash_inputs=hash_inputs) as trace:
        doubled = x * 2
        reduced = dist.all_reduce(doubled, async_op=True)
        x.sin()
        gathered = torch.empty(dist.get_world_size() * x.numel())
        work = dist.all_gather_into_tensor(gathered, x.flatten(), async_op=True)
        reduced.wait()
        trace.add_result("mean", doubled.mean())
    finished = trace.finish()
    work.wait()
    return finished


def fault_in_front(rank: int, hash_inputs: bool) -> Trace:
    """An op that differs on rank 0, in front of the first collective."""
    x = examples(rank)
    with HashDebugTrace(inputs=x, hash_inputs=hash_inputs) as trace:
        changed = noisy(x)
        dist.all_reduce(changed)
        trace.add_result("mean", changed.relu().mean())
    return trace.finish()


def fault_behind(rank: int, hash_inputs: bool) -> Trace:
    """The same op, behind a collective."""
    x = examples(rank)
    with HashDebugTrace(inputs=x, hash_inputs=hash_inputs) as trace:
        reduced = x * 2
        dist.all_reduce(reduced)
        trace.add_result("mean", noisy(reduced.relu()).mean())
    return trace.finish()


def clipped(model: nn.Module, **how: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, **how)


LOOPS: Mapping[str, tuple[Callable[[nn.Module], None], Callable[..., torch.optim.Optimizer], Mapping[str, Any]]] = {
    "clip_grad_norm_": (clipped, torch.optim.SGD, {"foreach": False}),
    "clip_grad_norm_(foreach=False)": (
        lambda model: clipped(model, foreach=False),
        torch.optim.SGD,
        {"foreach": False},
    ),
    "AdamW(foreach=True)": (lambda _: None, torch.optim.AdamW, {"foreach": True}),
    "AdamW(fused=True)": (lambda _: None, torch.optim.AdamW, {"fused": True}),
    "SGD(foreach=True)": (lambda _: None, torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
}
"""Training loops of FSDP2 whose clipping or optimizer calls ops on lists of DTensors: what is done with the gradients,
the optimizer, and its arguments."""


def loop(name: str) -> dict[str, Any]:
    """The parameters after two steps of a loop, by name."""
    clip, optimizer_class, arguments = LOOPS[name]
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    optimizer = optimizer_class(fully_shard(model).parameters(), lr=0.1, **arguments)
    for _ in range(2):
        optimizer.zero_grad()
        model(examples(0)).square().mean().backward()
        clip(model)
        optimizer.step()
    return dict(model.named_parameters())


def run_loop(name: str, tracer: str, folder: str) -> None:
    """Check in a group of one rank that a loop has untraced the parameters that it had under a trace, which comes
    first: DTensor keeps how it sharded the ops that it has met."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
    with HashDebugTrace(tracer=tracer) as trace:
        found = loop(name)
    assert trace.finish().records
    traced = {label: digest(value) for label, value in found.items()}
    assert traced == {label: digest(value) for label, value in loop(name).items()}
    dist.destroy_process_group()


def every_kind(rank: int, hash_inputs: bool) -> Trace:
    """Asynchronous collectives of every kind that gloo has, each waited for before its output is read."""
    x, ranks, lists = examples(rank), dist.get_world_size(), exchanges_lists()
    parts = [part.contiguous() for part in x.repeat(ranks, 1).chunk(ranks)]

    def new(count: int = 1) -> list[torch.Tensor]:
        return [torch.empty_like(x) for _ in range(count)]

    with HashDebugTrace(inputs=x, hash_inputs=hash_inputs) as trace:
        (single, scattered, received, reduced), gathered, exchanged, all_of_it = new(4), new(ranks), new(ranks), x * 2
        works = [
            dist.all_reduce(all_of_it, async_op=True),
            dist.all_gather(gathered, x, async_op=True),
            dist.reduce_scatter_tensor(single, torch.cat(parts), async_op=True),
            dist.reduce_scatter(reduced, parts, async_op=True),
            dist.scatter(scattered, parts if rank == 0 else None, src=0, async_op=True),
        ]
        if lists:
            works += [dist.all_to_all(exchanged, parts, async_op=True)]
        else:
            exchanged.clear()
        at_root = new(ranks) if rank == 0 else None
        works += [dist.gather(x, at_root, dst=0, async_op=True)]
        messages = [dist.P2POp(dist.isend, x, (rank + 1) % ranks), dist.P2POp(dist.irecv, received, (rank - 1) % ranks)]
        for work in [*works, *dist.batch_isend_irecv(messages)]:
            work.wait()
        left = [all_of_it, *gathered, single, reduced, scattered, *exchanged, *(at_root or ()), received]
        named = dist.group.WORLD.group_name
        for op, more in (("all_reduce", ("sum",)), ("reduce_scatter_tensor", ("sum", ranks)), ("broadcast", (0,))):
            made = getattr(torch.ops._c10d_functional, op)(torch.cat(parts), *more, named)
            left.append(torch.ops._c10d_functional.wait_tensor(made))
        for number, tensor in enumerate(left):
            trace.add_result(f"sum.{number}", tensor.sum())
    return trace.finish()


class Noisy(nn.Module):
    """A layer whose op differs on rank 0 each time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return noisy_in_training(x)


@torch.library.custom_op("ranks::noisy_in_training", mutates_args=())
def noisy_in_training(x: torch.Tensor) -> torch.Tensor:
    """The op :func:`noisy`, with a gradient."""
    return x + (next(_COUNT) if dist.get_rank() == 0 else 0)


noisy_in_training.register_autograd(lambda _context, gradient: gradient)


def constructed(rank: int, hash_inputs: bool, *, wrap: Callable[[nn.Module], nn.Module], between: nn.Module) -> Trace:
    """A training step of a model that is built inside the trace, so that collectives come before its first op."""
    with HashDebugTrace(hash_inputs=hash_inputs) as trace:
        model = wrap(network(between))
        loss = model(examples(rank)).square().mean()
        loss.backward()
        for name, parameter in model.named_parameters():
            trace.add_result(name, parameter.grad)
    return trace.finish()


def sharded(model: nn.Module) -> nn.Module:
    """FSDP2, each layer and the whole by itself."""
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


LATE = 0.3
"""Seconds by which rank 1 joins later than rank 0 where a read on rank 0 is to be early."""


def joined(rank: int, hash_inputs: bool, *, waits: bool) -> Trace:
    """An asynchronous all-reduce that rank 1 joins late, and whose output rank 0 reads at once, or after its wait."""
    x = examples(rank)
    with HashDebugTrace(inputs=x, hash_inputs=hash_inputs) as trace:
        doubled = x * 2
        time.sleep(LATE * rank)
        work = dist.all_reduce(doubled, async_op=True)
        if waits or rank:
            work.wait()
        mean = doubled.mean()
        work.wait()
        trace.add_result("mean", mean)
    return trace.finish()


def joined_by_function(rank: int, hash_inputs: bool, *, waits: bool) -> Trace:
    """The same by an op that returns a new tensor, which is waited for by another op."""
    x = examples(rank)
    with HashDebugTrace(inputs=x, hash_inputs=hash_inputs) as trace:
        time.sleep(LATE * rank)
        reduced = torch.ops._c10d_functional.all_reduce(x * 2, "sum", dist.group.WORLD.group_name)
        if waits or rank:
            torch.ops._c10d_functional.wait_tensor(reduced)
        mean = reduced.mean()
        torch.ops._c10d_functional.wait_tensor(reduced)
        trace.add_result("mean", mean)
    return trace.finish()


def sent(rank: int, hash_inputs: bool, *, waits: bool) -> Trace:
    """A message that rank 1 sends late, and into whose buffer rank 0 looks at once, or after its wait."""
    x = examples(1)
    with HashDebugTrace(inputs=x, hash_inputs=hash_inputs) as trace:
        if rank == 1:
            time.sleep(LATE)
            dist.send(x * 2, 0)
        elif rank == 0:
            buffer = torch.zeros_like(x)
            work = dist.irecv(buffer, 1)
            assert work is not None
            if waits:
                work.wait()
            mean = buffer.mean()
            if not waits:
                work.wait()  # gloo's Work of a message waits for another one when it is waited for twice
            trace.add_result("mean", mean + buffer.sum())
    return trace.finish()


def with_waits(program: Callable[..., Trace]) -> Callable[[int, bool], Trace]:
    """A program whose rank 0 waits before it reads."""
    return functools.partial(program, waits=True)


def without_waits(program: Callable[..., Trace]) -> Callable[[int, bool], Trace]:
    """The same program whose rank 0 reads early."""
    return functools.partial(program, waits=False)


CLEAN: Mapping[str, Callable[[int, bool], Trace]] = {
    "ddp": data_parallel,
    "ddp with gradients in buckets": data_parallel_views,
    "fsdp2": fully_sharded,
    "tensor parallel": tensor_parallel,
    "dtensor": distributed_tensors,
    "blocking": blocking,
    "asynchronous": asynchronous,
    "every kind": every_kind,
    "ddp, built in the trace": functools.partial(constructed, wrap=DistributedDataParallel, between=nn.Identity()),
    "fsdp2, built in the trace": functools.partial(constructed, wrap=sharded, between=nn.Identity()),
    "joined late": with_waits(joined),
    "joined late, functional": with_waits(joined_by_function),
    "sent late": with_waits(sent),
}
EARLY = {
    "joined late, not waited for": without_waits(joined),
    "joined late, functional, not waited for": without_waits(joined_by_function),
    "sent late, not waited for": without_waits(sent),
}
FAULTY = {
    "fault in front": fault_in_front,
    "fault behind": fault_behind,
    "fault under ddp": functools.partial(constructed, wrap=DistributedDataParallel, between=Noisy()),
    "fault under fsdp2": functools.partial(constructed, wrap=sharded, between=Noisy()),
    **EARLY,
}

Said = tuple[str, str, str, int]
"""The program, the kind of trace, the verdict, and how often it was given."""


def verdict(first: Trace, second: Trace) -> str:
    """Where the first divergence of two traces is, in a word or two."""
    found = find_divergence(first, second)
    divergence = found.divergence
    if divergence is None:
        return "agree"
    early = " early" if found.early_reads else ""
    return f"{divergence.origin} {divergence.kernel or divergence.inside or op_of(divergence.node)}{early}"


def run_rank(rank: int, ranks: int, folder: str, rounds: int) -> None:
    """Write down what is said on this rank of ``rounds`` further runs of every program, each compared with the first:
    with results, without any (so that every record counts), and with inputs hashed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    said: list[Said] = []
    for name, program in {**CLEAN, **FAULTY}.items():
        for hash_inputs in (False, True):
            counts: Counter[tuple[str, str]] = Counter()
            first = program(rank, hash_inputs)
            for _ in range(rounds):
                other = program(rank, hash_inputs)
                counts["hashed inputs" if hash_inputs else "results", verdict(first, other)] += 1
                if not hash_inputs:
                    counts["records", verdict(replace(first, results=()), replace(other, results=()))] += 1
            said += [(name, *key, times) for key, times in counts.items()]
    Path(folder, f"said.{rank}.json").write_text(json.dumps(said))
    dist.barrier()  # the first to leave would take the store along
    dist.destroy_process_group()


class Untraced(TorchDispatchMode):
    """In place of a trace: notes the ops of collectives in order, and nothing else."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_distributed, types)):
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional") and plan_of(func).collective is not None:
            self.calls.append(str(func))
        return func(*args, **(kwargs or {}))

    def add_result(self, name: str, value: Any) -> None: ...

    def finish(self) -> list[str]:
        return self.calls


def looked_at(program: Callable[[int, bool], Any], rank: int) -> tuple[int, list[str], list[int]]:
    """How many collectives a run of a program makes, by torch's own count; which ops, in order; and how often each
    message that it receives is waited for."""
    before, waits, messages = _collectives_made(), Counter[int](), []
    wait, receive = dist.Work.wait, dist.ProcessGroup.recv

    def counted(work: Any, *args: Any) -> Any:
        waits[id(work)] += 1
        return wait(work, *args)

    def received(group: Any, *args: Any) -> Any:
        messages.append(receive(group, *args))
        return messages[-1]

    with patch.object(dist.Work, "wait", counted), patch.object(dist.ProcessGroup, "recv", received):
        made = program(rank, False)
    if isinstance(made, Trace):
        made = [one.op for one in made.records if one.collective is not None and not one.inside]
    return _collectives_made() - before, made, [waits[id(message)] for message in messages]


def _collectives_made() -> int:
    return sum(group._get_sequence_number_for_group() for group in c10d._world.pg_names)


LOOKED_AT = ("ddp", "fsdp2", "tensor parallel", "blocking", "every kind", "sent late")


def look(rank: int, ranks: int, folder: str) -> None:
    """Write down what programs do untraced, and under each tracer."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    seen = {}
    for kind in ("untraced", "python", "native")[: 3 if native_unavailable() is None else 2]:
        traced = functools.partial(HashDebugTrace, tracer=kind)
        with patch.dict(globals(), HashDebugTrace=Untraced if kind == "untraced" else traced):
            seen[kind] = {name: looked_at(CLEAN[name], rank) for name in LOOKED_AT}
    Path(folder, f"seen.{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


def in_processes(target: Callable[..., None], ranks: int, *args: Any) -> None:
    """Call a function on every rank, in a process of its own."""
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=target, args=(rank, ranks, *args)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * ranks


def run_looks(folder: Path, *, ranks: int = 2) -> dict[int, dict[str, dict[str, Any]]]:
    """What programs do on every rank: by rank, by tracer, by program."""
    in_processes(look, ranks, str(folder))
    return {rank: json.loads((folder / f"seen.{rank}.json").read_text()) for rank in range(ranks)}


def run_ranks(folder: Path, *, ranks: int = 2, rounds: int = 1) -> dict[int, list[Said]]:
    """What is said on every rank, by rank."""
    in_processes(run_rank, ranks, str(folder), rounds)
    return {
        rank: [tuple(line) for line in json.loads((folder / f"said.{rank}.json").read_text())] for rank in range(ranks)
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for number, lines in run_ranks(Path(temporary), ranks=asked.ranks, rounds=asked.rounds).items():
            for line in lines:
                sys.stdout.write(f"rank {number}: {line[0]}, {line[1]}: {line[2]} {line[3]} of {asked.rounds}\n")
