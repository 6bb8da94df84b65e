"""Whether the native tracer changes nothing, and makes the graph that the Python tracer makes where both see the same
ops: torch's op database, its ops on lists without their data, random programs, small models of torchvision, and the
models of a suite as a sweep runs them.

By hand, in full: ``python -m tests.core.trace.native.parity op_db``, ``... lists``, ``... programs``, ``... models``,
and ``... zoo`` with ``--suite``, ``--mode`` and ``--every``; ``--signals`` interrupts the native traces of ``op_db``,
``lists`` and ``programs``. Torch's test helpers freeze flags, so that tests start this as a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any
from unittest import mock

import torch

from hashbench import HashDebugTrace
from hashbench.core.check.function import fresh_copy, quiet
from hashbench.core.check.model import BenchmarkRunner
from hashbench.core.errors import named_line
from hashbench.core.native.library import decomposes, is_recorded
from hashbench.core.records import ModelSpec, OpRecord, RunOptions, TensorDigest, Trace
from hashbench.core.run.leaves import flatten
from hashbench.core.run.rng import reset_rng_state
from hashbench.core.run.settings import applied
from hashbench.core.suites import registry
from hashbench.core.trace.arguments import named_tensors
from hashbench.core.trace.digest import digest
from hashbench.core.trace.op_schema import mode_dependent
from hashbench.tools.audit import cases
from hashbench.tools.audit.audit_table import AuditOptions
from tests.core.trace.native import list_ops, programs

NATIVE: tuple[Mapping[str, Any], ...] = ({"tracer": "native"}, {"tracer": "native", "hash_inputs": True})
PYTHON: Mapping[str, Any] = {"tracer": "python"}
FILLED = {"deterministic_algorithms": "warn", "fill_uninitialized_memory": "True"}
SEED = 1337


@dataclass(frozen=True, slots=True)
class Ran:
    """What one run left: the digests of all its results by name, what it raised, and its trace where it had one."""

    contents: Mapping[str, Any]
    error: str
    trace: Trace | None = None
    leaked: bool = False
    lazy: frozenset[str] = frozenset()  # results that show the conjugate or negative of what was written


HANDLERS_OP = "aten.block_diag.default"
ANY: Any = mock.ANY
BESIDE = torch.ones(17, 17, dtype=torch.int16)
"""What the signal handler computes with: no example has such a tensor."""


class Signals:
    """A timer whose handler calls an op of its own, of a list of tensors."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.handled = seconds, 0

    def _handle(self, *_: Any) -> None:
        self.handled += 1
        torch.block_diag(BESIDE, BESIDE)

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGALRM, self._handle)
        signal.setitimer(signal.ITIMER_REAL, self.seconds, self.seconds)

    def __exit__(self, *_: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)


def is_handlers(record: OpRecord) -> bool:
    """Whether the signal handler made this record."""
    return record.op == HANDLERS_OP and record.outputs[0].shape == (34, 34)


def ran(
    compute: Callable[[], Mapping[str, Any]],
    options: Mapping[str, Any] | None = None,
    signals: AbstractContextManager[None] | None = None,
) -> Ran:
    """One run, traced with ``options`` unless there are none; ``compute`` returns tensors and plain values by name."""
    found: Mapping[str, Any] = {}
    error = ""
    reset_rng_state(SEED)
    trace = HashDebugTrace(**options) if options is not None else None
    try:
        if trace is None:
            found = compute()
        else:
            with trace, signals or nullcontext():
                found = compute()
    except Exception as raised:
        error = named_line(raised, limit=200)
    leaked = is_recorded()
    contents = {}
    for name, value in found.items():
        contents[name] = digest(value.detach()) if isinstance(value, torch.Tensor) else repr(value)
        if trace is not None and isinstance(value, torch.Tensor):
            trace.add_result(name, value)
    tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    lazy = frozenset(name for name, value in tensors.items() if value.is_conj() or value.is_neg())
    return Ran(contents, error, None if trace is None else trace.finish(), leaked, lazy)


def differences(untraced: Ran, traced: Ran) -> Iterator[str]:
    """What a trace changed, and which digests are not those of the results."""
    if traced.leaked:
        yield "the dispatch key is still in force"
    if traced.error != untraced.error:
        yield f"raises {traced.error or 'nothing'} in place of {untraced.error or 'nothing'}"
        return
    for name in untraced.contents.keys() | traced.contents.keys():
        if untraced.contents.get(name) != traced.contents.get(name):
            yield f"{name} is {traced.contents.get(name)} in place of {untraced.contents.get(name)}"
    assert traced.trace is not None
    records = {record.id: record for record in traced.trace.records}
    for result in traced.trace.results:
        writer = records.get(result.source)
        if writer is None or writer.blank or result.name in traced.lazy:
            continue
        same = [output.value for output in writer.outputs if shape_of(output) == shape_of(result.digest)]
        if same and result.digest.value not in same:
            yield f"{result.name} is {result.digest.value}, but its writer {writer.id} has {same}"


def shape_of(one: TensorDigest) -> tuple[Any, ...]:
    return one.dtype, one.shape, one.stride


@dataclass(frozen=True, slots=True)
class Step:
    """A record that wrote something or returned a number, its sources given by their place among such records."""

    op: str
    phase: str
    inputs: tuple[Any, ...]
    arguments: str
    outputs: tuple[TensorDigest, ...]
    scalar: str
    rng: str
    blank: bool
    forward_op: str


def steps_of(trace: Trace) -> list[Step]:
    """What wrote something: views differ, since under a mode torch takes other ones."""
    written = [record for record in trace.records if record.outputs or record.scalar or record.blank]
    written = [record for record in written if not is_handlers(record)]
    places: dict[str, Any] = {record.id: number for number, record in enumerate(written)}
    return [_step(record, places | {leaf.id: leaf.digest for leaf in trace.leaves}) for record in written]


def _step(record: OpRecord, places: Mapping[str, Any]) -> Step:
    inputs = tuple(ref._replace(source=str(places.get(ref.source, ref.source))) for ref in record.inputs)
    forward_op = record.forward_op.partition("#")[0]
    if forward_op.endswith(HANDLERS_OP):  # it came between a call and its record: autograd's number is that of both
        forward_op = ANY
    return Step(
        record.op,
        record.phase,
        inputs,
        record.arguments,
        record.outputs,
        record.scalar,
        record.rng,
        record.blank,
        forward_op,
    )


def each(name: str, first: Step, second: Step) -> str:
    return f"{name} {getattr(first, name)} (Python: {getattr(second, name)})"


def graph_differences(native: Trace, python: Trace, phases: tuple[str, ...]) -> tuple[int, list[str], str]:
    """So many steps are of the same ops in both traces; in what the first of these that differs does, field by field;
    and where the ops part, also where torch calls one for another purpose since a dispatch mode is active."""
    same = 0
    for first, second in zip(steps_of(native), steps_of(python), strict=False):
        if first.phase not in phases and second.phase not in phases:
            continue
        if (first.op, first.phase) != (second.op, second.phase):
            return same, [], f"{first.phase} {first.op} in place of {second.op}"
        if first != second and first.op in mode_dependent(python):
            return same, [], f"{first.phase} {first.op} of another formula"
        if first != second:
            names = [field.name for field in fields(Step) if getattr(first, field.name) != getattr(second, field.name)]
            return same, [f"{same} {first.op}: {each(name, first, second)}" for name in names], ""
        same += 1
    return same, [], ""


class Findings:
    """Counts, and each difference with the example that shows it; native traces are made under ``signals``."""

    def __init__(self, signals: Signals | None = None) -> None:
        self.signals = signals
        self.counts: Counter[str] = Counter()
        self.parted: Counter[str] = Counter()
        self.found: list[str] = []

    def add(self, where: str, said: str) -> None:
        self.found.append(f"{where}: {said}")
        print(f"DIFFERS {where}: {said:.600}", flush=True, file=sys.__stdout__)

    def compare(
        self, where: str, compute: Callable[[], Mapping[str, Any]], *, phases: tuple[str, ...] = ("forward", "backward")
    ) -> None:
        """One example: untraced twice, natively traced in two ways, and by the Python tracer, whose graph is compared
        in these phases, unless it changes results."""
        first = ran(compute)
        if ran(compute) != first:
            self.counts["differ by themselves"] += 1
            return
        self.counts["examples"] += 1
        self.counts["raise untraced"] += bool(first.error)
        plain, hashed = (ran(compute, options, self.signals) for options in NATIVE)
        for label, traced in (("", plain), (" with hashed inputs", hashed)):
            for said in differences(first, traced):
                self.add(f"{where}{label}", said)
            assert traced.trace is not None
            self.counts[f"ops of signal handlers recorded{label}"] += sum(map(is_handlers, traced.trace.records))
        if first.error:
            return
        for label, native, options in (("", plain, {}), (" with hashed inputs", hashed, {"hash_inputs": True})):
            python = ran(compute, {"tracer": "python", **options})
            assert native.trace is not None
            assert python.trace is not None
            if python.contents != first.contents:
                self.counts[f"other results under the Python tracer{label}"] += 1
                continue
            same, found, parted = graph_differences(native.trace, python.trace, phases)
            self.counts[f"graphs of the same ops{label}"] += not parted
            self.counts[f"records compared{label}"] += same
            self.parted[parted] += bool(parted)
            for said in found:
                self.add(f"graph of {where}{label}", said)


# ---------------------------------------------------------------------------------------------------- the op database


def computed(case: cases.Case) -> Callable[[], Mapping[str, Any]]:
    """The results of one case, its arguments after the call, and its gradients, by name."""

    def compute() -> Mapping[str, Any]:
        call = copies.pop()
        value = call()
        found = {f"output {name}": item for name, item in flatten(value, "")}
        found |= {f"argument {name}": tensor for name, tensor in named_tensors(call.named())}
        if case.differentiable:
            values = cases.gradients(case, call, value, seed=SEED)
            found |= {f"gradient {name}": tensor for name, tensor in (values or {}).items()}
        return found

    copies = [fresh_copy(case.call) for _ in range(6)]  # outside of every trace
    return compute


def op_database(options: argparse.Namespace, findings: Findings) -> None:
    """A few samples of every op for every dtype, forward and backward."""
    dtypes = tuple(sorted({str(kind)[6:] for kind in vars(torch).values() if isinstance(kind, torch.dtype)}))
    names = [*cases.op_database()][options.start : options.stop : options.step]
    findings.counts["ops"] = len(names)
    for op in names:
        print(op, file=sys.__stderr__, flush=True)
        for dtype, made in cases.cases_of("op_db", op, AuditOptions(dtypes=dtypes, samples=options.samples)):
            if isinstance(made, str):
                findings.counts["cannot be sampled"] += 1
                continue
            findings.counts["ops times dtypes"] += 1
            for case in made:
                where = f"{op} {dtype} {case.sample} ({case.inputs})"
                try:
                    findings.compare(where, computed(case), phases=("forward",))
                except Exception as error:
                    findings.add(where, f"cannot be compared: {named_line(error, limit=300)}")


# ---------------------------------------------------------------------------------- ops on lists, without their data


def without_data(options: argparse.Namespace, findings: Findings) -> None:
    """Ops on lists of tensors, where torch asks for shapes alone: on fake tensors, in the sharding propagation of
    DTensor, and in torch.export. Traced first, with what torch keeps of earlier calls cleared."""
    list_ops.begin()
    found = [*list_ops.calls()][options.start : options.stop : options.step]
    for name, call in found:
        for way, compute in list_ops.WAYS.items():
            findings.counts[way] += 1
            traced = [ran(functools.partial(compute, call), how, findings.signals) for how in (*NATIVE, PYTHON)]
            untraced = ran(functools.partial(compute, call))
            findings.counts[f"{way} raise untraced"] += bool(untraced.error)
            for label, one in zip(("", " with hashed inputs", " by the Python tracer"), traced, strict=True):
                for said in differences(untraced, one):
                    findings.add(f"{name} {way}{label}", said)


# ---------------------------------------------------------------------------------------- random programs, and models


def random_programs(options: argparse.Namespace, findings: Findings) -> None:
    for seed in range(options.start, 1000 if options.stop is None else options.stop, options.step):
        findings.compare(f"program {seed}", programs.made(seed))


def models(options: argparse.Namespace, findings: Findings) -> None:
    """Two training steps of small torchvision models: bits as untraced, and the ops that torch's profiler sees then."""
    for name in ("resnet18", "mobilenet_v3_small", "efficientnet_b0", "vit_b_16")[options.start : options.stop]:
        untraced = ran(training(name))
        reset_rng_state(SEED)
        seen = profiled(training(name))
        for label, how in zip(("", " with hashed inputs"), NATIVE, strict=True):
            traced = ran(training(name), how)
            findings.counts[f"tensors of {name} compared{label}"] = len(untraced.contents)
            for said in differences(untraced, traced):
                findings.add(f"{name}{label}", said)
            assert traced.trace is not None
            # What autograd makes inside of an op (`clone`) the profiler shows as that op's own: it is left out of both.
            recorded = [record.op.split(".")[1] for record in traced.trace.records]
            findings.counts[f"ops of {name} recorded{label}, the profiler saw {len(seen)}"] = len(recorded)
            if [op for op in recorded if op != "clone"] != [op for op in seen if op != "clone"]:
                missing, more = Counter(seen) - Counter(recorded), Counter(recorded) - Counter(seen)
                findings.add(f"ops of {name}{label}", f"not recorded {missing}, not seen by the profiler {more}")


def zoo(options: argparse.Namespace, findings: Findings) -> None:
    """Models of a suite, data, loss and optimizer as in a sweep: results, gradients and state as untraced.

    Counts, too, which ops the profiler sees besides: the harness's own copies of results (`clone`, `detach`,
    `as_strided`), what `torch.tensor` makes out of sight of every tracer (`empty`, `detach_`), and the names of
    overloads that are made of another op (`max` of two tensors is `maximum`)."""
    named, specs = options.only or (), registry.catalog(options.suite)
    specs = [spec for spec in specs if (spec.name in named if named else spec.default or options.every)]
    for spec in specs[options.start : options.stop : options.step]:
        runner = BenchmarkRunner(RunOptions(mode=options.mode, deterministic="warn", tracer="native"))
        if spec.skip_reason(options.mode):
            continue
        print(spec.name, file=sys.__stderr__, flush=True)
        try:
            prepare = as_swept(runner, spec)
            untraced = ran(prepare())
        except Exception as error:  # no weights, no package: nothing to compare
            findings.counts["models that cannot be run"] += 1
            print(f"{spec.name}: {named_line(error, limit=200)}", flush=True)
            continue
        if ran(prepare()) != untraced:
            findings.counts["models that differ from themselves untraced"] += 1
            print(f"{spec.name} differs from itself untraced", flush=True)
            continue
        traced = ran(prepare(), NATIVE[0])
        for said in differences(untraced, traced):
            findings.add(spec.name, said)
        assert traced.trace is not None
        compute = prepare()
        reset_rng_state(SEED)
        seen = Counter(profiled(compute))
        recorded = Counter(record.op.split(".")[1] for record in traced.trace.records if record.op.startswith("aten."))
        findings.counts["models"] += 1
        findings.counts["results, gradients and tensors of state"] += len(untraced.contents)
        findings.counts["ops"] += sum(recorded.values())
        findings.parted += Counter(
            {f"{op} was profiled and not recorded": more for op, more in (seen - recorded).items()}
        )
        findings.parted += Counter(
            {f"{op} was recorded and not profiled": more for op, more in (recorded - seen).items()}
        )


def as_swept(runner: BenchmarkRunner, spec: ModelSpec) -> Callable[[], Callable[[], Mapping[str, Any]]]:
    """What makes the copies for one run of a model, as a sweep does outside of its traces, and returns that run."""

    def prepare() -> Callable[[], Mapping[str, Any]]:
        model = runner.deepcopy_model(workload.module)
        chosen = runner.init_optimizer(workload, model, spec.optimizer)
        inputs = runner.fresh_inputs(workload)

        def compute() -> Mapping[str, Any]:
            with runner.pick_grad():
                found = runner.run_n_iterations(workload, model, inputs, chosen, None)
            return found | {f"gradient of {name}": item.grad for name, item in model.named_parameters()}

        return compute

    workload = runner.prepare(runner.load_model(spec))
    return prepare


def training(name: str) -> Callable[[], Mapping[str, Any]]:
    """Two steps of a model that is made now; state, gradients and the loss by name."""
    import torchvision

    reset_rng_state(SEED)
    small = {"image_size": 32, "patch_size": 16, "num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
    vision = torchvision.models
    model = vision.VisionTransformer(**small) if name == "vit_b_16" else vision.get_model_builder(name)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def compute() -> Mapping[str, Any]:
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.rand(2, 3, 32, 32)).square().sum()
            loss.backward()
            optimizer.step()
        found = dict(model.state_dict(), loss=loss)
        return found | {f"gradient of {name}": item.grad for name, item in model.named_parameters()}

    return compute


def profiled(compute: Callable[[], Any]) -> list[str]:
    """The kernels that torch's profiler sees in an untraced run: no composites, and nothing that a kernel calls."""
    with torch.profiler.profile() as profile:
        compute()
    events = sorted(profile.events(), key=lambda event: (event.time_range.start, -event.time_range.end))
    kernels = [event for event in events if is_kernel(event.name) and not any(map(is_kernel, outside(event)))]
    return [event.name.removeprefix("aten::") for event in kernels]


def outside(event: Any) -> Iterator[str]:
    while event.cpu_parent is not None:
        event = event.cpu_parent
        yield event.name


@functools.cache
def is_kernel(event: str) -> bool:
    """Whether an event of the profiler, which says no overload, is an op on tensors that is not made of others."""
    if not event.startswith("aten::"):
        return False
    packet = getattr(torch.ops.aten, event.removeprefix("aten::"))
    schemas = [getattr(packet, name)._schema for name in packet.overloads() if "out" not in name]
    known = torch._C._dispatch_get_all_op_names()
    names = [schema.overload_name for schema in schemas if "Tensor" in str(schema)]
    names = [name for name in names if f"{event}.{name}".rstrip(".") in known]
    return bool(names) and not all(decomposes(event, name) for name in names)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("part", choices=("op_db", "lists", "programs", "models", "zoo"))
    parser.add_argument("--signals", action="store_true", help="interrupt native traces every 0.5 ms by a handler")
    parser.add_argument("--suite", default="torchvision")
    parser.add_argument("--mode", default="training")
    parser.add_argument("--every", action="store_true", help="models that are not in the suite's default, too")
    parser.add_argument("--only", nargs="+", help="these models of the suite")
    for name, usual in (("start", 0), ("stop", None), ("step", 1), ("samples", 2)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    options = parser.parse_args()
    signals = Signals(0.0005) if options.signals else None
    findings = Findings(signals)
    torch.set_num_threads(1)
    parts = {"op_db": op_database, "lists": without_data, "programs": random_programs, "models": models, "zoo": zoo}
    part = parts[options.part]
    with quiet(), applied(FILLED):
        part(options, findings)
    if signals is not None:
        findings.counts["signals handled"] = signals.handled
    for name, count in findings.counts.items():
        print(f"{count} {name}")
    for name, count in findings.parted.most_common(20):
        print(f"{count} times {name}")
    return int(bool(findings.found))


if __name__ == "__main__":
    sys.exit(main())
