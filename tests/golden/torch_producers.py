"""What makes the golden files of traces, repros and the tools that run models; numbers are whole, so that sums are
exact on every processor. As in ``producers``, names of modules inside hashbench are imported at the top alone."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import inspect
import io
import json
import re
import runpy
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch

import hashbench
from hashbench import HashbenchError, HashDebugTrace, Trace, find_divergence
from hashbench.core.catalog import CAUSES
from hashbench.core.diagnose.calls.call import CapturedCall, Memory, TensorForm
from hashbench.core.diagnose.calls.capture import capture
from hashbench.core.diagnose.repro import Recorded, Rerun, rerun_finding, script, write_repro
from hashbench.core.finding import as_json
from hashbench.core.records import CallFacts, Decision, Diagnosis, Evidence, ExperimentResult, Rate
from hashbench.core.run import environment
from hashbench.core.run.distance import Difference
from hashbench.extensions.implementations.finding import finding_of as of_weights
from hashbench.extensions.implementations.pair.finding import finding_of as of_implementations
from hashbench.extensions.implementations.weights import compare_models
from hashbench.extensions.kernels.finding import finding_by_dtype
from hashbench.extensions.kernels.finding import finding_of as of_kernel
from hashbench.tools import bitwise, numeric, observer, pipeline
from hashbench.tools.bitwise import BitwiseEquivalenceMode, BitwiseMismatchError
from hashbench.tools.observer import ObserverContext
from hashbench.tools.observer import observer as observing
from hashbench.tools.pipeline.reasons import DIFFERENCES
from tests.extensions.implementations.layouts import LAYOUTS, PLANTED, decoder
from tests.extensions.implementations.pair.verdicts import VERDICTS
from tests.extensions.kernels.verdicts import VERDICTS as KERNELS
from tests.golden.producers import _command, golden, known_environment
from tests.golden.stage import INPUTS, session

aten: Any = torch.ops.aten


# ------------------------------------------------------------------------------------------------ the public names


def _parameters(value: Any) -> list[str]:
    """Names, kinds and defaults, without annotations: these name types, which may move."""
    try:
        found = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    texts = [str(one.replace(annotation=inspect.Parameter.empty)) for one in found]
    return [re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", text) for text in texts]


def _shape(value: Any) -> Any:
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return [f"{one.name} = {one.value!r}" for one in value]
    if not isinstance(value, type):
        return _parameters(value)
    members = {name: member for name, member in inspect.getmembers_static(value) if not name.startswith("_")}
    defined = {name for parent in value.__mro__ if parent.__module__.startswith("hashbench") for name in vars(parent)}
    shown = {
        name: _parameters(inspect.unwrap(getattr(member, "__func__", member))) if callable(getattr(value, name)) else ""
        for name, member in members.items()
        if name in defined
    }
    return {"(call)": _parameters(value), **shown}


@golden("public.json")
def _public() -> str:
    """Every public name with its parameters; of a class also its methods and attributes."""
    parts = {"hashbench": hashbench, "observer": observer, "bitwise": bitwise, "numeric": numeric, "pipeline": pipeline}
    content = {name: {public: _shape(getattr(part, public)) for public in part.__all__} for name, part in parts.items()}
    return json.dumps(content, indent=1) + "\n"


@golden("environment_keys.json")
def _environment_keys() -> str:
    """What ``environment.json`` tells of a machine, without what it tells; packages and libraries are those found."""
    found = environment.collect("cpu")
    parts = ("platform", "torch", "cpu", "threads", "device")
    return json.dumps({"": list(found), **{part: list(found[part]) for part in parts}}, indent=1) + "\n"


def _refusal(misuse: Callable[[], Any]) -> str:
    try:
        misuse()
    except (HashbenchError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def _nested() -> None:
    with HashDebugTrace(), HashDebugTrace():
        pass


def _entered_again() -> None:
    trace = HashDebugTrace()
    with trace:
        torch.ones(1)
    trace.finish()
    with trace:
        pass


@golden("misuse.txt")
def _misuse() -> str:
    """What the Python interface says where it is used in a way that cannot work."""
    empty = Trace(())
    misuses: dict[str, Callable[[], Any]] = {
        "a trace inside another": _nested,
        "a trace that is finished": _entered_again,
        "empty traces": lambda: find_divergence(empty, empty),
        "an error of hashbench": lambda: (_ for _ in ()).throw(
            HashbenchError("what", consequence="its consequence", tip="What to do.")
        ),
        "a check against itself": lambda: ObserverContext("observed", "a", "observed/a.json").__enter__(),
        "a reference that is missing": lambda: ObserverContext("observed", "a", "observed/b.json").__enter__(),
        "no name of a file": lambda: ObserverContext("observed", "a/b").__enter__(),
        "one run": lambda: BitwiseEquivalenceMode(runs=1),
        "an unknown equality": lambda: BitwiseEquivalenceMode(equal="roughly"),
    }
    return "".join(f"{name}\n  {_refusal(misuse)}\n" for name, misuse in misuses.items())


# ---------------------------------------------------------------------------------------------------------- traces


PROGRAMS = runpy.run_path(str(INPUTS / "programs.py"))
OWN_OP = runpy.run_path(str(INPUTS / "own_op.py"))


def trained(path: str, *, weight: float = 0.0, x: float = 1.0, **options: Any) -> HashDebugTrace:
    """The trace of one step of training, also written to ``path``."""
    model, inputs = PROGRAMS["Net"](weight), torch.tensor([[x, 2.0], [3.0, -4.0]])
    of_model = {name: options.pop(name) for name in ("shift", "hook") if name in options}
    trace = HashDebugTrace(path, model=model, inputs=(inputs,), tracer="python", **options)
    PROGRAMS["train"](trace, model, inputs, **of_model)
    return trace


@golden("trace_plain.log")
def _trace_plain() -> str:
    trained("plain.log")
    return Path("plain.log").read_text(encoding="utf-8")


@golden("trace_inputs.log")
def _trace_inputs() -> str:
    trained("hashed.log", hash_inputs=True, digests="device")
    return Path("hashed.log").read_text(encoding="utf-8")


@golden("trace.json")
def _trace_json() -> str:
    """The JSON form, and what the questions to a trace answer."""
    trace = trained("plain.log")
    trace.export_to_json("trace.json")
    content = {
        "export_to_json": json.loads(Path("trace.json").read_text(encoding="utf-8")),
        "get_tensor_flow_graph": trace.get_tensor_flow_graph(),
        "stack_log": trace.stack_log,
        "stats": {name: sorted(value) if isinstance(value, set) else value for name, value in trace.stats.items()},
        "find_tensor_by_hash": trace.find_tensor_by_hash(trace.finish().leaves[0].digest.value[:6]),
    }
    return json.dumps(content, indent=None, default=str).replace('}, {"', '},\n {"') + "\n"


def _printed(function: Callable[[], Any]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        function()
    return out.getvalue()


@golden("trace_printed.txt")
def _trace_printed() -> str:
    """What a verbose trace prints, and its summary."""
    made: list[HashDebugTrace] = []
    verbose = _printed(lambda: made.append(trained("plain.log", verbose=True, max_ops_logged=5)))
    return f"{verbose}\n{_printed(lambda: made[0].print_summary(top=4))}"


@golden("diff_traces.txt")
def _diff_traces() -> str:
    """A first divergence of each origin."""
    own, drawing, branching = (PROGRAMS[name] for name in ("own", "drawing", "branching"))
    trained("base.log")
    trained("hashed.log", hash_inputs=True, source_lines=True)
    trained("input.log", x=2.0)
    trained("state.log", weight=1.0)
    trained("outside.log", shift=1.0)
    trained("sequence.log", hook=torch.tanh)
    for number in (0, 1):
        with torch.random.fork_rng(devices=[]), mock.patch.dict(OWN_OP["LEVEL"], shift=9.0 * number):
            torch.manual_seed(number)
            trained(f"kernel{number}.log", hook=own)
            trained(f"settings{number}.log", hook=own, settings=lambda value=str(number): {"allow_tf32": value})
            trained(f"rng{number}.log", hook=drawing, source_lines=True)
            trained(f"steered{number}.log", hook=branching)
    others = [f"diff base.log {other}.log" for other in ("hashed", "input", "state", "outside", "sequence")]
    pairs = [f"{name}0.log {name}1.log" for name in ("settings", "kernel", "rng", "steered")]
    return session(*others, *(f"diff {pair} --context 1" for pair in pairs))


# ----------------------------------------------------------------------------------------------------------- repros

PLACE = {
    "node": "backward/0/Net.pick/aten.index_put_.default#0",
    "phase": "backward",
    "module": "Net.pick",
    "forward_op": "forward/0/Net.pick/aten.index.Tensor#0",
    "source": "net.py:12 forward",
}
SETTINGS = {"deterministic_algorithms": "off", "fill_uninitialized_memory": "True", "mkldnn.enabled": "True"}


def captured(func: Any, *args: Any, place: bool = True, threads: int = 1, **kwargs: Any) -> CapturedCall:
    """A call as it is captured on any machine: settings, addresses and their order are always the same."""
    call = capture(func, args, kwargs, limit_bytes=2**20)
    order = list(dict.fromkeys(form.storage for form in call.tensors if isinstance(form, TensorForm)))
    memories = [dataclasses.replace(call.memories[old], alignment=8 * new) for new, old in enumerate(order)]
    tensors = [
        dataclasses.replace(form, storage=order.index(form.storage)) if isinstance(form, TensorForm) else form
        for form in call.tensors
    ]
    return dataclasses.replace(
        call,
        tensors=tuple(tensors),
        memories=tuple(memories),
        settings={**SETTINGS, "num_threads": str(threads)},
        threads=threads,
        **(PLACE if place else {}),
    )


def adding() -> CapturedCall:
    """An addition of many rows to few."""
    rows = torch.arange(12.0).reshape(6, 2)
    return captured(
        aten.index_put_.default, torch.zeros(3, 2), [torch.tensor([0, 1, 2, 0, 1, 2])], rows, True, threads=8
    )


def said_of(*arms: ExperimentResult, op: str = "aten.index_put_.default") -> Diagnosis:
    decision = Decision("accumulation_order", "likely", "20 of 20 replays differ", "Add in one order.")
    rate = Rate(20, 20, of="replays", low=0.861, high=1.0, distinct=21)
    return Diagnosis(decision, Evidence("kernel", call=CallFacts(op), arms=arms), rate=rate)


MOVES = ((None, 4), (None, 16), (1, 8))
MOVED = "all by 4, 16 bytes; memory 1 by 8 bytes"
REPEAT = ExperimentResult("repeat", "call", trials=20, differing=20, distinct=21, seconds=0.002)
ARMS = (
    REPEAT,
    ExperimentResult("one_thread", "call", trials=20, differing=0, distinct=1, seconds=0.004),
    ExperimentResult("exact_values", "call", trials=20, differing=0, distinct=1),
    ExperimentResult("deterministic", "call", note="raises: aten has no deterministic | implementation", raised=True),
    ExperimentResult("moved", "call", trials=15, differing=3, distinct=4, found=MOVED, moves=MOVES),
    ExperimentResult("busy", "call", note="budget"),
    ExperimentResult("pair", "pair", trials=4, differing=2, distinct=3),
    ExperimentResult("within_process", "process", trials=3, differing=1, distinct=2),
)


@contextlib.contextmanager
def known_machine() -> Iterator[None]:
    """The same machine, torch and hashbench everywhere."""
    with (
        mock.patch.object(environment, "collect", known_environment),
        mock.patch("torch.__version__", "2.15.0"),
        mock.patch.object(hashbench, "__version__", "0.0.0"),
    ):
        yield


def written(call: CapturedCall, diagnosis: Diagnosis, **more: Any) -> str:
    """Every text of a repro."""
    with known_machine(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates some of what it saves
        write_repro(Path("repro"), call, diagnosis, **more)
    return "\n".join(
        f"=== {name}\n{Path('repro', name).read_text(encoding='utf-8')}"
        for name in ("REPORT.md", "call.json", "repro.py")
    )


@golden("repro.txt")
def _repro() -> str:
    """With all that can be said."""
    diagnosis = dataclasses.replace(
        said_of(*ARMS),
        deterministic_doc="deterministic under the flag",
        deterministic_here="identical (0 of 20 replays differ)",
        deterministic_price=1.5,
        other_sources=("aten.sum.default in Net.loss",),
    )
    difference = Difference(("output.0",), elements=7, max_abs=0.5, max_ulp=3, total=160, representation="")
    return written(adding(), diagnosis, difference=difference, seen_in="in the model net")


@golden("repro_custom.txt")
def _repro_custom() -> str:
    """Of an op that torch does not define, where nothing is known of the place."""
    call = captured(torch.ops.hashbench_golden.twice.default, torch.ones(3), place=False)
    diagnosis = dataclasses.replace(said_of(op=call.op), rate=None)
    return written(call, diagnosis, difference=Difference(("output.0",), representation="signed zeros"))


def on_device(call: CapturedCall, *devices: str, **settings: str) -> CapturedCall:
    """The call as if its memories lay on these devices in turn: its text needs no more of them than their names."""
    memories = []
    for place, memory in enumerate(call.memories):
        content = SimpleNamespace(device=torch.device(devices[place % len(devices)]), nbytes=memory.content.nbytes)
        memories.append(Memory(cast(torch.Tensor, content), memory.alignment))
    return dataclasses.replace(call, memories=tuple(memories), settings={**call.settings, **settings})


def script_of(call: CapturedCall, arm: str = "repeat", moves: tuple[tuple[int | None, int], ...] = ()) -> str:
    how = script.plan(said_of(ExperimentResult(arm, "call", 20, 20, 2, moves=moves)).evidence)
    text = script.source(call, how, heading=f"A call, shown by {arm}.")
    compile(text, "repro.py", "exec")
    return text


def _calls() -> Iterator[tuple[str, str]]:
    """Calls of each kind, and ways of showing them."""
    add = captured(aten.add.Tensor, torch.ones(3), torch.ones(3))
    yield from ((f"on the CPU, {arm}", script_of(add, arm)) for arm in sorted(script.SHOWING))
    yield "moved as was found", script_of(add, "moved", MOVES)
    own = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "cudnn.allow_tf32": "False", "cuda.matmul.allow_tf32": "True"}
    yield from (
        (f"on cuda:1, {arm}", script_of(on_device(add, "cuda:1", **own), arm)) for arm in ("poison", "busy_stream")
    )
    yield "on mps, poison", script_of(on_device(add, "mps:0"), "poison")
    yield "on two devices", script_of(on_device(add, "xpu:1", "xpu:0"))
    settings = {
        "deterministic_algorithms": "warn",
        "flush_denormal": "True",
        "default_dtype": "torch.float64",
        "mkldnn.enabled": "False",
        "float32_matmul_precision": "medium",
        "inference_mode": "True",
    }
    yield "other settings", script_of(dataclasses.replace(add, settings={**add.settings, **settings}))
    generator = torch.Generator().manual_seed(7)
    yield "a generator", script_of(captured(aten.normal_.default, torch.zeros(4), 1.0, 2.0, generator=generator))
    yield "the default generator", script_of(captured(aten.native_dropout.default, torch.ones(4), 0.5, True))
    yield "a sparse tensor", script_of(captured(aten.mm.default, torch.eye(3).to_sparse(), torch.ones(3, 3)))
    full = captured(aten.full.default, [2, 3], 7.5, dtype=torch.float64, device=torch.device("cpu"))
    yield "no tensors", script_of(full)
    yield "memory that grows", script_of(captured(aten.add.out, torch.ones(9), torch.ones(9), out=torch.zeros(0)))


EXPRESSIONS: tuple[Callable[[], CapturedCall], ...] = (
    lambda: captured(aten.add_.Tensor, (x := torch.ones(6, 12)[:, ::2]), x.t(), alpha=2),
    lambda: captured(aten.random_.__getattr__("from"), torch.zeros(9), 2, 50),
    lambda: captured(aten.index.Tensor, torch.ones(3, 4), [None, torch.tensor([1, 3])]),
    lambda: captured(aten._foreach_add_.List, [torch.ones(3)], [torch.ones(3)], alpha=0.5),
    lambda: captured(aten.clone.default, torch.ones(4, dtype=torch.complex64).conj().imag),
    lambda: captured(aten.clamp.default, torch.ones(9), float("-inf"), float("nan")),
    lambda: captured(aten.clone.default, torch.ones(1, 2, 3, 3), memory_format=torch.channels_last),
    lambda: captured(aten.div.Tensor_mode, torch.ones(4), torch.ones(4), rounding_mode="floor"),
    lambda: captured(aten.mul.Tensor, torch.ones(5, 3).bfloat16(), complex(1.0, -2.5)),
)


@golden("repro_scripts.txt")
def _repro_scripts() -> str:
    """Scripts of every kind; of those after the first, what is not in the first."""
    shown, seen = [], set()
    for name, text in _calls():
        lines = text.splitlines()
        shown.append(
            f"=== {name}\n" + "\n".join(line if line not in seen else f"⋮{index}" for index, line in enumerate(lines))
        )
        seen.update(lines)
    calls = "\n".join(script.expression(make()) for make in EXPRESSIONS)
    return "\n\n".join([*shown, "=== calls as Python", calls]) + "\n"


@golden("replay.txt")
def _replay() -> str:
    """What ``hashbench replay`` prints, of experiments whose outcome is known."""
    recorded = Recorded(ARMS, Decision("write_race", "proven", "20 of 20", "Use one thread."), {})
    now = (
        dataclasses.replace(REPEAT, differing=5, distinct=3),
        *ARMS[1:5],
        ExperimentResult("fresh_memory", "call", 20, 4, 5),
    )
    decision = Decision("accumulation_order", "likely", "5 of 20 replays differ", "Add in one order.")
    elsewhere = ("torch: 2.15.0 there, 2.16.0 here", "threads: 8 there, 2 here; the call was replayed with 8")
    made = Rerun("aten.add.Tensor", Evidence("kernel", arms=now), decision, recorded, elsewhere)
    same = dataclasses.replace(
        made, evidence=Evidence("kernel", arms=ARMS[1:3]), decision=recorded.decision, elsewhere=()
    )
    return "\n\n".join([*map(str, map(rerun_finding, (made, same))), as_json(rerun_finding(same))]) + "\n"


# ------------------------------------------------------------------------------------------------------ the tools

_command(
    "numeric.txt",
    "numeric numeric/same.py",
    "numeric numeric/same.py --inference --iterations 1 --trace",
    "numeric numeric/other_weight.py --inference --trace",
    "numeric numeric/other_weight.py --training --lines 3",
    "numeric numeric/other_weight.py --stages parameters,outputs --atol 100",
    "numeric numeric/lone.py --inference --ignore dtype --trace",
    "numeric numeric/lone.py --training",
    "numeric numeric/fails.py",
    "numeric numeric/same.py --stages nothing",
    "numeric numeric/same.py --ignore colour",
)


_command("numeric.json", "numeric numeric/other_weight.py --inference --iterations 1 --trace --json")


@golden("weights.txt")
def _weights() -> str:
    """The same weights in two layouts, and one mistake of most kinds."""
    said = []
    mistakes = {each.kind: name for name, each in PLANTED.items()}
    for name in ("a padded vocabulary, cast", "experts stacked and transposed", *mistakes.values()):
        planted = PLANTED.get(name)
        other = LAYOUTS[planted.layout if planted else name].make(decoder())
        if planted is not None:
            planted.spoil(other)
        said.append(f"=== {name}\n{of_weights(compare_models(decoder(), other), limit=5)}\n")
    return "\n".join(said)


@golden("implementations.txt")
def _implementations() -> str:
    """Two implementations, by outcome."""
    return "\n".join(f"=== {name}\n{of_implementations(verdict)}\n" for name, verdict in VERDICTS.items())


@golden("kernels.txt")
def _kernels() -> str:
    """A kernel and its reference, by outcome and by dtype."""
    dtypes = {"float32": KERNELS["equal"], "bfloat16": KERNELS["lost elements"], "float16": KERNELS["not known"]}
    findings = {**{name: of_kernel(verdict) for name, verdict in KERNELS.items()}, "dtypes": finding_by_dtype(dtypes)}
    return "\n".join(f"=== {name}\n{finding}\n" for name, finding in findings.items())


_PAIRS = ("order", "file_list", "transform", "environment", "unseen", "asked", "kernel")
_command(
    "pipeline.txt",
    "pipeline compare checks/base checks/base",
    *(f"pipeline compare checks/base checks/{other}" for other in _PAIRS),
    "pipeline compare checks/flipped checks/random_transform",
    "pipeline compare checks/flipped checks/worker_seeds",
    "pipeline compare checks/hashed checks/listing",
)
_command("pipeline.json", "pipeline compare checks/base checks/asked --json")


@golden("pipeline_fixes.txt")
def _pipeline_fixes() -> str:
    fixes = {name: cause.code for name, cause in CAUSES.items() if cause.code} | dict(DIFFERENCES)
    return "\n".join(f"{name}\n{textwrap.indent(fix, '    ')}" for name, fix in fixes.items()) + "\n"


@golden("observer.txt")
def _observer() -> str:
    """A reference, a check that agrees and one that does not: tables, and the reference's file."""
    with known_machine(), mock.patch.object(observing, "collect", known_environment):
        with mock.patch.object(observing, "settings", return_value={"allow_tf32": "False"}):
            PROGRAMS["observed"]("reference")
            same = PROGRAMS["observed"]("same", "observed/reference.json")
        with mock.patch.object(observing, "settings", return_value={"allow_tf32": "True"}):
            other = PROGRAMS["observed"]("other", "observed/reference.json", x=3.0, more=True)
        mismatches = [dataclasses.asdict(one) for one in other.mismatches.values()]
    text = Path("observed/reference.json").read_text(encoding="utf-8")
    return "\n".join([same.mismatch_table(), "", other.mismatch_table(), "", json.dumps(mismatches, indent=1), text])


@golden("bitwise.txt")
def _bitwise() -> str:
    """A report, a warning and an error of the mode that runs every op again."""
    shown = []
    for options in ({}, {"runs": 3}, {"raise_on_mismatch": True}):
        mode = BitwiseEquivalenceMode(**options)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                PROGRAMS["run_again"](mode)
            except BitwiseMismatchError as error:
                shown.append(f"{type(error).__name__}: {error}")
        shown += [f"{one.category.__name__}: {one.message}" for one in told]
        shown += [mode.report(), json.dumps([dict(one) for one in mode.get_mismatches()])]
    return "\n".join(shown) + "\n"
