"""Damaged and forged files of every format, read by the commands that read them: ``python -m benchmarks fuzz``.

A mutation changes one thing in one sound file; every second one is sealed, which means that whatever checksum the
format has is computed again, as a sender would. Then the file's command runs in this process. It must refuse the file
in one line, or go on; it may never crash, hang, take much memory, or find nothing where what it read is worse than what
was there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any

import xxhash

from benchmarks.table import Table
from hashbench import cli
from hashbench.core.errors import HashbenchError
from hashbench.core.io import file_digest
from hashbench.core.sealed import Sealed, seal

SAMPLES = Path(__file__).parents[1] / "tests" / "golden" / "inputs"
"""Sound files of most formats, which the golden tests read as well."""

MUTATIONS = 1000
SECONDS, MIB = 20.0, 300.0
"""What one file may take at most."""

# ------------------------------------------------------------------------------------------------------ mutations

HUGE = "9" * 400
NUMBERS = ("0", "-1", "1", "2", HUGE, "-" + HUGE, "1e400", "1e-400", "NaN", "-Infinity", "9223372036854775808", "0x1F")
TEXTS = ("", "\x00", "../../outside", "/etc/passwd", "=1+1", "\x1b[31m", "é\u2028\u202e", "pass", "x" * 5000, "null")
VALUES: tuple[Any, ...] = (None, True, 0, -1, 2**63, 10**400, 1.5, float("nan"), float("inf"), *TEXTS, "\ud800",
                           [], {}, [[]], [None], {"": None}, [0] * 300)  # fmt: skip
DEPTH = 100_000
"""Brackets within each other: more than Python's recursion allows."""

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_FIELD = re.compile(rb"[^,\t\n]+")


def mutated(content: bytes, rng: random.Random) -> tuple[str, bytes]:
    """One change of ``content``, and its name. The result differs from it."""
    while True:
        change = rng.choice((*_OF_JSON, *_OF_BYTES) if content[:1] in (b"{", b"[") else _OF_BYTES)
        try:
            of_lines = change in _OF_JSON and content.partition(b"\n")[0].endswith(b"}") and content.count(b"\n") > 1
            changed = _in_a_line(change, content, rng) if of_lines else change(content, rng)
        except (IndexError, ValueError):  # nothing of the kind is in there
            continue
        if changed != content:
            return change.__name__.strip("_"), changed


def _in_a_line(change: Callable[[bytes, random.Random], bytes], content: bytes, rng: random.Random) -> bytes:
    """A change of one of several JSON documents, each of which is a line."""
    lines = content.splitlines()
    place = rng.randrange(len(lines))
    lines[place] = b"".join(change(lines[place], rng).splitlines())
    return b"\n".join([*lines, b""])


def _bit(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


def _truncated(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def _range(content: bytes, rng: random.Random) -> bytes:
    """A range of bytes is doubled, dropped, zeroed or becomes what is not UTF-8."""
    start, end = sorted(rng.sample(range(len(content) + 1), 2))
    part = content[start:end]
    return content[:start] + rng.choice((part * 2, b"", bytes(end - start), b"\xff\xfe\x80")) + content[end:]


def _lines(content: bytes, rng: random.Random) -> bytes:
    """A line is doubled, dropped, moved, or gets another line end."""
    lines = content.splitlines(keepends=True)
    place, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            lines.insert(other, lines[place])
        case 1:
            del lines[place]
        case 2:
            lines[place], lines[other] = lines[other], lines[place]
        case _:
            lines[place] = lines[place].rstrip(b"\n") + rng.choice((b"\r\n", b"\r", b"\n\n", b"\x0c\n", b""))
    return b"".join(lines)


def _fields(content: bytes, rng: random.Random) -> bytes:
    """Two fields change places, or one becomes another or an odd text."""
    first, second = (rng.choice([*_FIELD.finditer(content)]) for _ in range(2))
    if rng.random() < 0.5:
        texts = (second[0], rng.choice(TEXTS).encode())
        return content[: first.start()] + rng.choice(texts) + content[first.end() :]
    first, second = sorted((first, second), key=lambda found: found.start())
    if first.end() > second.start():
        raise ValueError("one field")
    between = content[first.end() : second.start()]
    return content[: first.start()] + second[0] + between + first[0] + content[second.end() :]


def _number(content: bytes, rng: random.Random) -> bytes:
    found = rng.choice([*_NUMBER.finditer(content)])
    return content[: found.start()] + rng.choice(NUMBERS).encode() + content[found.end() :]


def _value(content: bytes, rng: random.Random) -> bytes:
    """A value of a JSON document is another, or of another type, or gone, twice, or under another name."""
    document = json.loads(content)
    holder, key = rng.choice([*_places(document)])
    match rng.randrange(5):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, list):
            holder.insert(key, holder[key])
        case 1:
            holder[f"{key}_"] = holder.pop(key)
        case 2:
            other, place = rng.choice([*_places(document)])
            holder[key] = json.loads(json.dumps(other[place]))
        case _:
            holder[key] = rng.choice(VALUES)
    return json.dumps(document, indent=1).encode()


def _schema(content: bytes, rng: random.Random) -> bytes:
    """A version is another."""
    document = json.loads(content)
    names = [(holder, key) for holder, key in _places(document) if key in ("schema", "rows", "kind", "version")]
    holder, key = rng.choice(names)
    holder[key] = rng.choice((0, 2, -1, 99, "1", 1.0, True, None, 10**30))
    return json.dumps(document, indent=1).encode()


def _deep(content: bytes, rng: random.Random) -> bytes:
    """A value is nested deeper: a little, or more than can be read."""
    found = rng.choice([*_NUMBER.finditer(content)])
    depth = rng.choice((1, 5, 50, 500, DEPTH))
    return content[: found.start()] + b"[" * depth + found[0] + b"]" * depth + content[found.end() :]


_OF_BYTES = (_bit, _truncated, _range, _lines, _fields, _number)
_OF_JSON = (_value, _value, _value, _schema, _deep)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)


# -------------------------------------------------------------------------------------------------------- formats


def _never(sound: Any, bad: Any) -> bool:
    """Nothing that the commands say of two contents could be wrong: they do not compare them."""
    del sound, bad
    return False


@dataclass(frozen=True)
class Format:
    """One format: what lies where, who reads it, and what its content means.

    ``make`` fills a new folder with sound files; ``files`` are globs of those that are mutated. ``read`` is what is in
    such a folder, as it is compared with ``==``; it raises :class:`HashbenchError` where the files are refused.
    ``worse`` tells of two contents, the sound one and another, whether a command that says 0 (nothing differs, nothing
    got worse) would be wrong. ``commands`` run in a folder with ``sound`` and ``bad``; the first compares them.
    """

    name: str
    make: Callable[[Path], object]
    files: tuple[str, ...]
    read: Callable[[Path], Any]
    worse: Callable[[Any, Any], bool] = _never
    commands: tuple[str, ...] = ()
    seal: Callable[[Path, Path], object] | None = None


def _copied(*names: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for name in names:
            source = SAMPLES / name
            if source.is_dir():
                shutil.copytree(source, folder, dirs_exist_ok=True)
            else:
                shutil.copy(source, folder / source.name)

    return make


# ------------------------------------------------------------------------------------------------- traces


def _read_trace(folder: Path) -> Any:
    from hashbench.core.trace import file

    return file.read(folder / "first.log")


def _computed(trace: Any) -> Any:
    """What a comparison of two traces goes by."""
    records = [(record.op, record.arguments, record.scalar, record.rng, record.outputs) for record in trace.records]
    leaves = [(leaf.kind, leaf.digest, leaf.initial) for leaf in trace.leaves]
    return records, leaves, [(result.name, result.digest) for result in trace.results]


def _seal_trace(_: Path, path: Path) -> None:
    body = path.read_bytes().rpartition(b"end\t")[0]
    if body:
        end = f"end\t{body.count(bytes([10]))}\t{xxhash.xxh3_64_hexdigest(body)}\n"
        path.write_bytes(body + end.encode())


# ------------------------------------------------------------------------------------------------- tables

_FINE = ("pass", "pass_due_to_skip")


def _read_sweep(folder: Path) -> Any:
    from hashbench.core.results.load import load_sweep

    sweep = load_sweep(folder)
    return sweep.rows, sweep.environments, sweep.selections, sweep.parts


def _rows_lost(sound: Any, bad: Any) -> bool:
    """Whether a model that passes here does not pass there."""
    kept = {(row.suite, row.mode, row.name) for row in bad[0] if row.accuracy in _FINE}
    return any((row.suite, row.mode, row.name) not in kept for row in sound[0] if row.accuracy in _FINE)


def _read_kept_rows(folder: Path) -> Any:
    """What ``--resume`` takes from the row files: it refuses those of another version and sets aside damaged ones."""
    from hashbench.core.records import ModelSpec
    from hashbench.core.results.folder import NOT_A_ROW, row_in

    names = ("skipped", "dies", "elsewhere", "too_slow", *(path.stem.split(".")[-1] for path in _row_files(folder)))
    rows = {}
    for path in _row_files(folder):
        suite, mode, name = path.stem.split(".", 2)
        try:
            rows[name] = row_in(path, ModelSpec(suite=suite, name=name), mode)
        except (OSError, *NOT_A_ROW) as error:
            raise HashbenchError(f"{path.name} is not a row", consequence=type(error).__name__) from error
    return rows, names


def _row_files(folder: Path) -> list[Path]:
    return sorted((folder / "rows").glob("*.json"))


def _believed(sound: Any, bad: Any) -> bool:
    """Whether a row says that a model passes that did not, and still has what was found of the difference."""
    return any(
        row.accuracy == "pass" and sound[0][name].accuracy != "pass" and (row.kernel or row.origin or row.cause)
        for name, row in bad[0].items()
    )


def _read_manifest(folder: Path) -> Any:
    from hashbench.core.results.folder import ResultsFolder, describe_differences

    results = ResultsFolder(folder)
    found, now = results.read_manifest(), json.loads((SAMPLES / "shards" / "0" / "sweep.json").read_bytes())
    return found, describe_differences(found, now), _read_sweep(folder)


def _manifest_ignored(sound: Any, bad: Any) -> bool:
    """Whether a sweep would go on although another one was asked for."""
    from hashbench.core.records import SWEEP_SCHEMA, RunOptions

    def asked(manifest: Mapping[str, Any]) -> Any:
        """What is asked for: what is missing has its default."""
        options = {**dataclasses.asdict(RunOptions()), **(manifest.get("options") or {})}
        return (
            manifest.get("schema", SWEEP_SCHEMA),
            options,
            [manifest.get(key) for key in ("suites", "models", "partition")],
        )

    return not bad[1] and asked(sound[0]) != asked(bad[0])


def _read_audit(folder: Path) -> Any:
    from hashbench.tools.audit import audit_table

    audit = audit_table.read(folder)
    return audit.rows, audit.environments, audit.asked


def _samples_lost(sound: Any, bad: Any) -> bool:
    from hashbench.tools.audit.audit_table import AUDIT_ROWS

    kept = {AUDIT_ROWS.key_of(row): row.off for row in bad[0]}
    fine = [row for row in sound[0] if row.off == "identical"]
    return any(kept.get(AUDIT_ROWS.key_of(row)) != "identical" for row in fine)


# ------------------------------------------------------------------------------------------------- repros, recordings


def _make_repro(folder: Path) -> None:
    import torch

    from hashbench.core.diagnose.calls.capture import capture
    from hashbench.core.diagnose.repro import write_repro
    from hashbench.core.records import Decision, Diagnosis, Evidence

    x = torch.arange(8.0)
    args = (x[:2], torch.ones(2, 3), x[2:5])
    call = capture(torch.ops.aten.addmv.default, args, {"beta": 2.0}, limit_bytes=2**20)
    decision = Decision("accumulation_order", "likely", "20 of 20 replays differ", "Add in one order.")
    write_repro(folder, call, Diagnosis(decision, Evidence("kernel")))


def _read_repro(folder: Path) -> Any:
    from hashbench.core.diagnose.repro import call_file

    saved = call_file.read(folder)
    tensors = [str(tensor) for tensor in saved.call.tensors]
    memories = [(memory.content.tolist(), memory.alignment) for memory in saved.call.memories]
    call = saved.call
    states = {name: sha256(state.numpy().tobytes()).hexdigest() for name, state in call.random_states.items()}
    about = (call.node, call.phase, call.module, call.settings, call.threads, call.grad_enabled, states)
    return call.op, str(call.args), str(call.kwargs), tensors, memories, about, dict(saved.recorded)


def _seal_repro(folder: Path, _: Path) -> None:
    _sealed(folder / "call.json", tensors_sha256=file_digest(folder / "tensors.pt"))


def _sealed(path: Path, **more: str) -> None:
    """Write a document's own checksum again, where it still is one."""
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(path.read_bytes())
        if isinstance(document, dict):
            document.update(more)
            path.write_text(json.dumps(seal(document), indent=1))


def _make_recording(folder: Path) -> None:
    import torch

    from hashbench.core.records import OpRecord, TensorDigest
    from hashbench.tools.observer import files
    from hashbench.tools.observer.recording import Observation, Recording, Saved

    digest = TensorDigest("float32", (2, 3), (3, 1), "0123456789abcdef")
    observations = [
        Observation(
            f"x_{number}",
            OpRecord(f"forward/0/net/observe x#{number}", "forward", 0, "net", "observe x", outputs=(digest,)),
            (Saved(number, "float32", (2, 3), "cpu"),) if number < 2 else (),
        )
        for number in range(4)
    ]
    path = files.path_of(folder, "run")
    files.write(path, Recording("run", tuple(observations), {"threads": 1}), [torch.ones(2, 3), torch.zeros(2, 3)])


def _read_recording(folder: Path) -> Any:
    from hashbench.tools.observer import files

    recording, tensors = files.read_reference(folder / "run.json")
    return recording, {number: tensor.tolist() for number, tensor in tensors.items()}


def _recordings_differ(sound: Any, bad: Any) -> bool:
    """Whether a check against the bad recording would say that all matches although outputs are others."""
    from hashbench.tools.observer.recording import mismatches

    found = mismatches(bad[0].observations, sound[0].observations, finished=True)
    outputs = [[(each.record.outputs, each.record.scalar) for each in side[0].observations] for side in (sound, bad)]
    return not found and outputs[0] != outputs[1]


def _seal_recording(folder: Path, path: Path) -> None:
    digest = file_digest(next(iter(folder.glob("*.safetensors"))))
    for tensors in folder.glob("*.safetensors"):
        tensors.rename(folder / f"run.{digest[:16]}.safetensors")
    _sealed(folder / "run.json", **({"tensors": digest} if path.suffix == ".safetensors" else {}))


# ------------------------------------------------------------------------------------------------- fingerprints

_RECORDED = "fingerprints/zoo.inference.net.jsonl.gz"


def _make_fingerprints(folder: Path) -> None:
    """Two sweeps with the fingerprint of one model each, whose row became another one in between."""
    import torch

    from hashbench.extensions.fingerprint import document
    from hashbench.extensions.fingerprint.document import Fingerprints
    from hashbench.extensions.fingerprint.measure import record

    weight = torch.tensor([[1.0, -1.0, 2.0]] * 4, requires_grad=True)
    parameters = [torch.ones(3, requires_grad=True) for _ in range(7)]

    def step() -> None:
        picked = torch.relu(torch.ones(2, 4) @ weight)[torch.tensor([1, 0, 1])]
        (picked.sum() + sum(parameters).sum()).backward()
        torch.optim.Adam([weight, *parameters], foreach=True).step()

    made = replace(record(step, name="net").models[0], suite="zoo", mode="inference", dtype="float32")
    header = "dev,name,batch_size,accuracy,suite,mode,dtype\n"
    for name, status, version in (("before", "pass", "2.15.0"), ("after", "eager_two_runs_differ", "2.15.1")):
        (folder / name).mkdir()
        (folder / name / "accuracy.csv").write_text(f"{header}cpu,net,1,{status},zoo,inference,float32\n")
        document.write(folder / name / _RECORDED, Fingerprints({"packages": {"torch": version}}, (made,)))
    path = folder / "after" / _RECORDED  # which may as well hold plain text, of which more can be changed
    path.write_bytes(gzip.decompress(path.read_bytes()))


def _read_fingerprints(folder: Path) -> Any:
    from hashbench.extensions.fingerprint import document

    return [document.read(folder / name / _RECORDED) for name in ("before", "after")]


def _seal_fingerprints(_: Path, path: Path) -> None:
    with contextlib.suppress(ValueError, RecursionError):
        first, *lines = path.read_text().splitlines()
        header = json.loads(first)
        if isinstance(header, dict):
            header = seal({**header, "lines": lines})
            del header["lines"]
            path.write_text("\n".join([json.dumps(header), *lines, ""]))


# ------------------------------------------------------------------------------------------------- pipelines


def _read_check(folder: Path) -> Any:
    from hashbench.tools.pipeline import observed

    check = observed.read(folder)
    return check.seen, check.repetition


def _checks_differ(sound: Any, bad: Any) -> bool:
    def digests(seen: Any) -> Any:
        made = [batch.digest for batch in seen.batches.batches]
        return made, seen.weights.by_name, seen.outputs.predictions, seen.outputs.losses

    return bool(digests(sound[0]) != digests(bad[0]))


def _seal_check(folder: Path, _: Path) -> None:
    path = folder / "check.json"
    with contextlib.suppress(ValueError, RecursionError, AttributeError, LookupError, TypeError):
        document = json.loads(path.read_bytes())
        document["files"] = {name: file_digest(folder / name) for name in document["files"]}
        path.write_text(json.dumps(document, indent=1))


# ------------------------------------------------------------------------------------------------- training loops


def _make_steps(folder: Path) -> None:
    import torch

    import hashbench

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with hashbench.watch(folder, model=model):
        for number in range(4):
            optimizer.zero_grad()
            model(torch.full((2, 4), float(number))).square().sum().backward()
            optimizer.step()


def _read_steps(folder: Path) -> Any:
    from hashbench.extensions.watch import file

    return file.read(file.ranks(folder)[0])


def _steps_differ(sound: Any, bad: Any) -> bool:
    """Whether something that both recordings hold differs, but for a generator: where nothing draws from it, that is
    told and is no difference. A line that a forger took out is not there to be compared."""

    def held(recording: Any) -> dict[Any, str]:
        steps = [step for step in (recording.before, *recording.steps.values()) if step is not None]
        parts = [(step.number, part, values) for step in steps for part, values in step.parts.items()]
        return {(*place, name): value for *place, values in parts for name, value in values.items()}

    first, second = held(sound), held(bad)
    return any(first[place] != second[place] for place in first.keys() & second.keys() if place[1] != "generator")


def _seal_steps(_: Path, path: Path) -> None:
    """Every line, then the sum that the last one holds."""
    from hashbench.extensions.watch.file import sum_of

    with contextlib.suppress(ValueError, RecursionError, AttributeError, TypeError):
        lines = []
        for line in path.read_text().splitlines():
            document = json.loads(line)
            document.pop("checksum", None)
            if document.get("line") == "end":
                document |= {"lines": len(lines), "sum": sum_of(sha256("".join(lines).encode()))}
            lines.append(Sealed(0, "").line(document))
        path.write_text("".join(lines))


# ------------------------------------------------------------------------------------------------- ranks, DebugMode


def _make_ranks(folder: Path) -> None:
    """Two ranks that multiply, reduce and add, in two steps."""
    from hashbench.core.records import (
        Collective,
        Leaf,
        OpRecord,
        Ref,
        Result,
        TensorDigest,
        Trace,
        TracedRank,
        TracedStep,
    )
    from hashbench.core.trace import file

    def digest(*of: object) -> TensorDigest:
        return TensorDigest("float32", (2, 3), (3, 1), xxhash.xxh3_64_hexdigest(repr(of).encode()))

    for rank in range(2):
        records: list[OpRecord] = []
        steps = []
        last = "parameter/w"
        for step in range(2):
            for op, of in (("aten.mul.Tensor", rank), ("c10d.allreduce_.default", "both"), ("aten.add.Tensor", rank)):
                met = Collective("all_reduce", (0, 1), 0, ("0.0",)) if op.startswith("c10d") else None
                name = f"forward.{step}/Net/{op}#0"
                out, read = digest(op, of, step), (Ref("0.0" if met else "0", last),)
                record = OpRecord(name, "forward", step, "Net", op, read, "(<Tensor>)", (out,), collective=met)
                records.append(record)
                last = name
            steps.append(TracedStep(step, len(records), (Result("w", records[-1].outputs[0], last),)))
        leaf = Leaf("parameter/w", "parameter", digest("w"), 0)
        trace = Trace(
            (*records,), (leaf,), steps[-1].results, tracer="native", rank=TracedRank(rank, 2), steps=(*steps,)
        )
        file.write(trace, folder / f"rank{rank}.log")


def _read_ranks(folder: Path) -> Any:
    from hashbench.extensions.ranks.folder import read_ranks

    found = read_ranks(folder)
    results = {
        rank: [(result.name, result.digest) for step in trace.steps for result in step.results]
        for rank, trace in found.traces.items()
    }
    return results, found.missing, found.notes, found.traces


def _make_debug_log(folder: Path) -> None:
    def value(given: Any) -> Any:
        if isinstance(given, (list, tuple)):
            return {"type": "tuple", "items": [value(one) for one in given]}
        if isinstance(given, dict):
            return {"type": "dict", "items": [[name, value(one)] for name, one in given.items()]}
        return {"type": "scalar", "value": given}

    def op(name: str, *read: float, left: float, depth: int = 1) -> Any:
        log = {"input_hash": ([*read], {}), "hash": left}
        texts = {"args_str": ", ".join(["t: f32[2]"] * len(read)), "kwargs_str": "", "output_str": "  ->  t: f32[2]"}
        more = {"type": "op", "op_name": name, "call_depth": depth, "stack_trace": None, "fwd_stack_trace": None}
        return {**more, "log": value(log), **texts}

    from hashbench.extensions.debugmode.log import FORMAT, VERSION

    logs = [op("aten::mul", 1.0, 2.0, left=3.0), op("aten::add", 3.0, 1.5, left=4.5), op("aten::relu", 4.5, left=4.5)]
    (folder / "log.json").write_text(json.dumps({"format": FORMAT, "version": VERSION, "logs": logs}))


def _read_debug_log(folder: Path) -> Any:
    from hashbench.core.io import read_text
    from hashbench.extensions.debugmode import log as debug_log

    try:
        text = read_text(folder / "log.json")
    except (OSError, ValueError) as error:
        raise HashbenchError("cannot read log.json", consequence=str(error)) from error
    return debug_log.loads(text)


def _logs_differ(sound: Any, bad: Any) -> bool:
    return [call.outputs for call in sound.calls] != [call.outputs for call in bad.calls]


_REPORT = "report bad --html page.html --junit tests.xml --markdown summary.md --annotations"
FORMATS = (
    Format("trace", _copied("traces"), ("first.log",), _read_trace, lambda a, b: _computed(a) != _computed(b),
           ("diff sound/first.log bad/first.log",), _seal_trace),
    Format("accuracy.csv", _copied("shards/0"), ("accuracy.csv",), _read_sweep, _rows_lost,
           ("compare sound bad", "compare bad sound --format json", _REPORT, "expect bad --output new",
            "merge merged bad other")),
    Format("CSV of dynamo", _copied("dynamo/accuracy.csv"), ("accuracy.csv",), _read_sweep, _rows_lost,
           ("compare sound/accuracy.csv bad/accuracy.csv", "report bad")),
    Format("rows/*.json", _copied("shards/0"), ("rows/*.json",), _read_kept_rows, _believed,
           ("compare sound bad", _REPORT)),
    Format("sweep.json", _copied("shards/0"), ("sweep.json",), _read_manifest, _manifest_ignored,
           ("compare sound bad", _REPORT, "merge merged bad other")),
    Format("environment.json", _copied("shards/0"), ("environment.json",), _read_sweep, _rows_lost,
           ("compare sound bad", "compare bad sound --format markdown", _REPORT, "merge merged bad other")),
    Format("a night", _copied("nights/2026-11-20"), ("night.json", "huggingface_inference/*"), _read_sweep, _rows_lost,
           ("compare sound bad", "report bad")),
    Format("baselines", _copied("expected/huggingface_inference_cpu.csv",
                                "expected/huggingface_inference_cpu.environment.json"),
           ("*.csv", "*.json"), _read_sweep, _rows_lost,
           ("compare sound bad", "expect night --output bad", "report night --expected bad")),
    Format("audit", _copied("audits/base"), ("audit.csv", "audit.csv", "environment.json"), _read_audit, _samples_lost,
           ("compare sound bad", "compare bad sound --format json")),
    Format("recording", _make_recording, ("run.json", "*.safetensors"), _read_recording, _recordings_differ, (),
           _seal_recording),
    Format("pipeline check", _copied("checks/kernel"), ("*",), _read_check, _checks_differ,
           ("pipeline compare sound bad", "pipeline compare bad sound --json"), _seal_check),
    Format("fingerprints", _make_fingerprints, (*[f"after/{_RECORDED}"] * 3, f"before/{_RECORDED}"),
           _read_fingerprints, _never,
           ("compare bad/before bad/after", f"fingerprint verify bad/after/{_RECORDED} --only nobody"),
           _seal_fingerprints),
    Format("steps of a loop", _make_steps, ("rank0.jsonl",), _read_steps, _steps_differ,
           ("watch diff sound bad", "watch diff bad sound --format json"), _seal_steps),
    Format("ranks", _make_ranks, ("rank*.log",), _read_ranks, lambda a, b: a[0] != b[0],
           ("ranks diff sound bad", "ranks check bad"), _seal_trace),
    Format("log of DebugMode", _make_debug_log, ("log.json",), _read_debug_log, _logs_differ,
           ("diff sound/log.json bad/log.json",)),
    Format("repro", _make_repro, ("call.json", "call.json", "tensors.pt"), _read_repro, _never,
           ("replay bad --replays 2 --budget 0.1",), _seal_repro),
)  # fmt: skip
"""Every format that commands read, in the order of the table."""

# ---------------------------------------------------------------------------------------------------------- a run

REFUSED, CHANGED, HARMLESS = "refused", "read as changed", "harmless"
FAULT, FALSE, SLOW, LARGE = "crashed", "false equal", "too slow", "too large"
OUTCOMES = (REFUSED, CHANGED, HARMLESS, FAULT, FALSE, SLOW, LARGE)
BAD = (FAULT, FALSE, SLOW, LARGE)


@dataclass(slots=True)
class Tried:
    """What became of the mutations of one format: counts by outcome, and for the bad ones what was done."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    mib: float = 0.0


class _TooSlowError(BaseException):
    """The alarm."""


def _alarm(_signal: int, _frame: FrameType | None) -> None:
    raise _TooSlowError


def fuzz(form: Format, *, mutations: int = MUTATIONS, seed: int = 0, commands: int | None = None) -> Tried:
    """Try so many mutations of a format, the same for the same seed; only the first ``commands`` commands are run
    (``None``: all)."""
    tried = Tried()
    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        here = Path(temporary)
        for name in ("sound", "bad"):
            (here / name).mkdir()
        form.make(here / "sound")
        shutil.copytree(SAMPLES / "shards" / "1", here / "other")
        shutil.copytree(SAMPLES / "nights" / "2026-11-21", here / "night")
        sound = form.read(here / "sound")
        for number in range(mutations):
            rng = random.Random(f"{form.name} {seed} {number}")
            _restore(here)
            paths = [path for pattern in form.files for path in sorted((here / "bad").glob(pattern)) if path.is_file()]
            path = rng.choice(paths)
            kind, content = mutated(path.read_bytes(), rng)
            path.write_bytes(content)
            sealed = bool(number % 2) and form.seal is not None
            if sealed and form.seal is not None:
                form.seal(here / "bad", path)
            outcome, detail = _tried(form, here, sound, tried, commands)
            tried.counts[outcome] += 1
            if outcome in BAD:
                what = f"{form.name} seed {seed} number {number}: {kind} of {path.name}{', sealed' if sealed else ''}"
                tried.problems.append(f"{what}: {outcome}: {detail}")
    return tried


def _restore(here: Path) -> None:
    for name in ("bad", "new", "merged"):
        shutil.rmtree(here / name, ignore_errors=True)
    shutil.copytree(here / "sound", here / "bad", symlinks=True)


def _tried(form: Format, here: Path, sound: Any, tried: Tried, most: int | None) -> tuple[str, str]:
    before, started = _memory(reset=True), time.perf_counter()
    signal.signal(signal.SIGALRM, _alarm)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        outcome, detail = _outcome(form, here, sound, most)
    except _TooSlowError:
        return SLOW, f"more than {SECONDS:g} s"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    took, taken = time.perf_counter() - started, _memory() - before
    tried.seconds, tried.mib = max(tried.seconds, took), max(tried.mib, taken)
    return (LARGE, f"{taken:.0f} MiB") if taken > MIB and outcome not in BAD else (outcome, detail)


def _outcome(form: Format, here: Path, sound: Any, most: int | None) -> tuple[str, str]:
    try:
        found = form.read(here / "bad")
        refused = ""
    except HashbenchError as error:
        refused = str(error)
        if "\n" in refused:
            return FAULT, f"refused in more than one line: {refused!r:.300}"
    except Exception as error:  # which a user would see as a traceback
        return FAULT, f"{type(error).__name__}: {error!s:.300}"
    codes = []
    for command in form.commands[:most]:
        code, said = _run(command)
        if code not in (0, 1, 2) or "Traceback" in said:
            return FAULT, f"hashbench {command} ended with {code}: {said[-400:]!r}"
        codes.append(code)
    if refused:
        return REFUSED, refused
    if form.worse(sound, found) and (not codes or codes[0] == 0):
        return FALSE, f"exit codes {codes}"
    if found == sound:
        return HARMLESS, ""
    return (REFUSED, "by the command") if codes and codes[0] == 2 else (CHANGED, "")


def _run(command: str) -> tuple[int, str]:
    """The exit code of a command in this process, and what it printed to standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(command.split())
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, err.getvalue()


def _memory(*, reset: bool = False) -> float:
    """MiB that this process has held at most since the last reset; 0 where the system does not tell."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0.0
    found = re.search(r"VmHWM:\s+(\d+)", status)
    return int(found[1]) / 1024 if found else 0.0


def measure(*, mutations: int = MUTATIONS, only: Sequence[str] = (), seed: int = 0) -> list[Table]:
    """The counts of every format, and what was wrong."""
    rows, notes = [], []
    for form in FORMATS:
        if only and form.name not in only:
            continue
        tried = fuzz(form, mutations=mutations, seed=seed)
        counts: Mapping[str, int] = tried.counts
        rows.append((form.name, mutations, *(counts.get(word, 0) for word in OUTCOMES[:3]),
                     sum(counts.get(word, 0) for word in BAD), f"{tried.seconds:.2g}", f"{tried.mib:.0f}"))  # fmt: skip
        notes += tried.problems
        print(f"{form.name}: {dict(counts)}", *tried.problems, sep="\n  ", file=sys.stderr, flush=True)
    headers = ("format", "mutations", *OUTCOMES[:3], "wrong", "slowest s", "most MiB")
    return [Table("Damaged and forged files", headers, tuple(rows), tuple(notes))]
