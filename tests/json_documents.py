"""Real documents of ``--json``: every command that has a verdict, on small inputs, run once in this process.

``python -m tests.json_documents`` rewrites ``docs/json.schema.json`` from them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import hashbench
from hashbench import HashDebugTrace
from hashbench.core.diagnose.repro import write_repro
from hashbench.core.finding import Finding, as_json
from hashbench.core.results.rows import ROWS
from hashbench.extensions.fingerprint import document as fingerprints
from hashbench.extensions.fingerprint import measure
from hashbench.extensions.implementations.pair.finding import finding_of as of_implementations
from hashbench.extensions.kernels.finding import finding_by_dtype
from hashbench.extensions.kernels.finding import finding_of as of_kernel
from hashbench.extensions.ranks.notes import Repro
from hashbench.extensions.ranks.replicas import check_replicas
from hashbench.extensions.ranks.text import check_finding, diff_finding
from hashbench.extensions.watch import resume
from hashbench.extensions.watch.text import finding_of as of_loops
from tests.core.divergence.rank_runs import judge_ranks, rank_traces
from tests.extensions.implementations.pair.verdicts import VERDICTS
from tests.extensions.kernels.verdicts import VERDICTS as KERNELS
from tests.extensions.ranks import rank_traces as recorded_ranks
from tests.extensions.ranks.rank_texts import CHECKS, DIFFS
from tests.extensions.watch.watch_texts import LOOPS, RESUMES
from tests.golden.producers import sweeps_here
from tests.golden.stage import cli, stage
from tests.repro_helpers import captured, said_of

SCHEMA_FILE = Path(hashbench.__file__).parents[1] / "docs" / "json.schema.json"
COMMAND = "python -m tests.json_documents"

CALLS: Mapping[str, str] = {
    "a zoo": "sweep --suite zoos/small.py --only drifting steady --inference --diagnose-budget 0 --output swept --json",
    "a zoo that passes": "sweep --suite zoos/small.py --only steady --inference --output passed --json",
    "a night": "nightly --suite zoos/small.py --only steady drifting --modes inference --output of --label 2026-11-22"
    " --json -- --diagnose-budget 0",
    "a program": "run --json varies.py",
    "a program that repeats": "run --json repeats.py",
    "two nights": "compare nights/2026-11-21 nights/2026-11-22 --json",
    "the same sweep": "compare nights/2026-11-21 nights/2026-11-21 --json",
    "two audits": "compare audits/base audits/new --json",
    "a folder of nights": "report nights --expected expected --json",
    "an audit": "audit --ops index_add --dtypes float32 --samples 1 --runs 2 --budget 0 --output audited --json",
    "two traces": "diff one.log other.log --json",
    "the same trace": "diff one.log one.log --json",
    "a trace that is not there": "diff one.log absent.log --json",
    "two loops": "watch diff loop_a loop_b --json",
    "the same loop": "watch diff loop_a loop_c --json",
    "a loop that was killed": "watch diff loop_a loop_killed --json",
    "a resumed loop": "watch resume loop_a loop_b --at 2 --json",
    "two runs of ranks": "ranks diff ranks_a ranks_b --json",
    "the same ranks": "ranks diff ranks_a ranks_c --json",
    "one run of ranks": "ranks check ranks_a --json",
    "a captured call": "replay steady --replays 2 --budget 5 --json",
    "a transformation": "numeric numeric/same.py --inference --iterations 1 --json",
    "another model": "numeric numeric/other_weight.py --inference --iterations 1 --trace --json",
    "two checkpoints": "numeric --weights hub.safetensors engine.safetensors --json",
    "the same checkpoint": "numeric --weights hub.safetensors hub.safetensors --json",
    "two implementations": "numeric numeric/pair.py --json",
    "a kernel": "numeric --kernel numeric/kernel.py:mean --reference numeric/kernel.py:plain --json",
    "a kernel in several dtypes": "numeric --kernel numeric/kernel.py:mean --reference numeric/kernel.py:plain"
    " --dtypes float32,bfloat16 --without sizes --json",
    "two dumps": "numeric --dumps hub_dump engine_dump --json",
    "the same dump": "numeric --dumps hub_dump hub_dump --json",
    "two checks of a pipeline": "pipeline compare checks/base checks/transform --json",
    "recorded kernels": "fingerprint verify base.json --json",
    "recorded kernels of another machine": "fingerprint verify changed.json --json",
}
"""What a reader of the page would call its input -> the command line."""


PROGRAM = """
from pathlib import Path

import torch

counted = Path("runs.txt")
runs = len(counted.read_text()) + 1 if counted.exists() else 1
counted.write_text("x" * runs)

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = (model(torch.randn(3, 4)) * {factor}).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {{loss:.6f}}")
"""
"""A program that counts how often it ran, and may compute with that."""

OF_CHILDREN = ("replay", "audit", "run")
"""Commands whose children print, or need the file behind standard error."""


def _apart(*words: str) -> tuple[str, str, int]:
    """The same as ``cli``, in a process of its own."""
    command = [sys.executable, "-m", "hashbench", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    return done.stdout, done.stderr, done.returncode


@dataclass(frozen=True, slots=True)
class Call:
    """A command that ran.

    Attributes:
        line: behind ``hashbench``.
        document: from standard output, which held nothing else.
        errors: standard error.
        code: exit code.
    """

    line: str
    document: dict[str, Any]
    errors: str
    code: int


def _write_inputs() -> None:
    """Everything that is not among the golden inputs."""
    for name, factor in (("one", 1.0), ("other", 1.5)):
        with HashDebugTrace() as trace:
            torch.arange(4.0).add(1).mul(factor)
        trace.save(f"{name}.log")
    for name, faulty in (("loop_a", -1), ("loop_b", 3), ("loop_c", -1)):
        _train(Path(name), faulty)
    for name, factor in (("repeats", "1.0"), ("varies", "float(runs)")):
        Path(f"{name}.py").write_text(PROGRAM.format(factor=factor), encoding="utf-8")
    lines = Path("loop_a/rank0.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    Path("loop_killed").mkdir()
    Path("loop_killed/rank0.jsonl").write_text("".join(lines[:-3]), encoding="utf-8")
    recorded_ranks.write(Path("ranks_a"), recorded_ranks.traces(2))
    recorded_ranks.write(Path("ranks_b"), recorded_ranks.traces(2, guilty=1, run=1))
    recorded_ranks.write(Path("ranks_c"), recorded_ranks.traces(2))
    q, k, v = (torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2, 3))
    safetensors.torch.save_file({"q": q, "k": k, "v": v, "i": torch.arange(9), "n": torch.ones(3)}, "hub.safetensors")
    engine = {"qkv": torch.cat([q, k, v + torch.eye(8, 16)]), "one": torch.ones(3), "i": torch.rand(9)}
    safetensors.torch.save_file(engine, "engine.safetensors")
    for name, last in (("hub", v), ("engine", v + q)):
        Path(f"{name}_dump").mkdir()
        for number, tensor in enumerate((q, k, last)):
            safetensors.torch.save_file({"x": tensor}, f"{name}_dump/{number}_x.safetensors")
    write_repro(Path("steady"), captured(torch.ops.aten.sort.default, torch.arange(100.0)), said_of())
    weight = torch.tensor([[1.0, -1.0, 2.0]] * 4)
    base = measure.record(lambda: torch.relu(torch.ones(2, 4) @ weight).sum(), name="step")
    fingerprints.write(Path("base.json"), base)
    with contextlib.ExitStack() as other:
        library = torch.library.Library("aten", "IMPL")
        other.callback(library._destroy)
        library.impl("relu", lambda x: 2 * x.clamp(min=0), "CPU")
        fingerprints.write(
            Path("changed.json"), measure.record(lambda: torch.relu(torch.ones(2, 4) @ weight).sum(), name="step")
        )


def _train(folder: Path, faulty: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hashbench.watch(str(folder), model=model, optimizer=optimizer):
        for step in range(6):
            model(torch.rand(2, 4)).square().mean().backward()
            model[0].weight.grad *= 1.5 if step == faulty else 1
            optimizer.step()
            optimizer.zero_grad()


@functools.cache
def calls() -> Mapping[str, Call]:
    """Every call of :data:`CALLS`, run once in this process."""
    found = {}
    with stage(), sweeps_here():
        _write_inputs()
        for name, line in CALLS.items():
            out, errors, code = (_apart if line.split()[0] in OF_CHILDREN else cli)(*shlex.split(line))
            found[name] = Call(line, json.loads(out), errors, code)
    return found


def documents() -> Iterator[dict[str, Any]]:
    """Documents of all calls, and of the verdicts that the tests of texts render."""
    yield from (call.document for call in calls().values())
    yield {**calls()["two checks of a pipeline"].document, "command": "hashbench pipeline check"}
    for command, findings in (
        ("ranks diff", [diff_finding(judge_ranks(lines)) for lines in DIFFS.values()]),
        ("ranks run", _of_ranks_run()),
        ("ranks check", [check_finding(check_replicas(rank_traces(lines))) for lines in CHECKS.values()]),
        ("watch diff", [of_loops(loops) for loops in LOOPS.values()]),
        ("numeric", map(of_implementations, VERDICTS.values())),
        ("numeric", [*map(of_kernel, KERNELS.values()), finding_by_dtype(KERNELS)]),
        ("watch resume", [resume.finding_of(verdict) for verdict in RESUMES.values()]),
    ):
        yield from (json.loads(as_json(finding, command=f"hashbench {command}")) for finding in findings)


def _of_ranks_run() -> Iterator[Finding]:
    """Runs that differ, with the call that was captured, and equal ones, with their replicas."""
    differs, equal = (judge_ranks(DIFFS[name]) for name in ("a kernel in front of an all-reduce", "nothing differs"))
    yield diff_finding(differs, repro=Repro("out/repro", "20 of 20 calls differ", "python out/repro/repro.py"))
    for lines in CHECKS.values():
        yield diff_finding(equal, replicas=check_replicas(rank_traces(lines)))


# -------------------------------------------------------------------------------------------------------- schema

OF_ALL = ("schema", "command", "headline", "equal", "differs", "facts", "notes", "next", "table", "parts")
"""Names of every verdict."""

_MAPS = frozenset(
    {
        "counts",
        "agreed",
        "benign",
        "settings",
        "environment",
        "not_run",
        "left_out",
        "kwargs",
        "fallbacks",
        "seconds",
        "dtypes",
    }
)
"""Names of objects whose names are data."""

_ANYTHING = frozenset({"args", "kwargs"})
"""Names of values that a program chose."""


def schema_of(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON Schema that all these documents fulfil: names, and the types that were seen."""
    by_command: dict[str, list[Mapping[str, Any]]] = {}
    for document in found:
        if "error" not in document:
            by_command.setdefault(str(document["command"]), []).append(document)
    verdicts = {def_of(command): _verdict(command, by_command[command]) for command in sorted(by_command)}
    error = {name: {"type": "string"} for name in ("what", "consequence", "tip")}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Verdicts of hashbench, schema 1 (docs/json.md)",
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in ("error", *verdicts)],
        "$defs": {
            "error": {
                "type": "object",
                "required": ["schema", "command", "error"],
                "properties": {
                    "schema": {"const": 1},
                    "command": {"type": "string"},
                    "error": {"type": "object", "required": [*error], "properties": error},
                },
            },
            "finding": {
                "type": "object",
                "required": ["headline", "equal", "differs", "facts", "notes", "next"],
                "properties": {
                    "headline": {"type": "string"},
                    "equal": {"type": "boolean"},
                    "differs": {"type": "boolean"},
                    "facts": {"type": "object", "additionalProperties": {"type": "string"}},
                    "notes": {"type": "array", "items": {"type": "string"}},
                    "next": {"type": "array", "items": {"type": "string"}},
                    "table": {
                        "type": "object",
                        "required": ["headers", "rows"],
                        "properties": {
                            "headers": {"type": "array", "items": {"type": "string"}},
                            "rows": {"type": "array", "items": {"type": "array", "items": {"type": "string"}}},
                        },
                    },
                    "parts": {"type": "array", "items": {"$ref": "#/$defs/finding"}},
                },
                "additionalProperties": {},
            },
            "row": {"type": "object", "properties": {name: {} for name in sorted(ROWS.columns)}},
            **verdicts,
        },
    }


def def_of(command: str) -> str:
    """The name under ``$defs`` of a command: ``fingerprint_verify``."""
    return "_".join(command.split()[1:])


def _verdict(command: str, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = sorted({name for document in found for name in document} - set(OF_ALL))
    values = {name: [document[name] for document in found if name in document] for name in names}
    return {
        "allOf": [{"$ref": "#/$defs/finding"}],
        "required": ["schema", "command", *(name for name in names if len(values[name]) == len(found))],
        "properties": {
            "schema": {"const": 1},
            "command": {"const": command},
            **{name: _type(name, values[name]) for name in names},
        },
    }


def _type(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """What these values have in common; ``name`` is that of their field."""
    objects = [value for value in values if isinstance(value, dict)]
    arrays = [value for value in values if isinstance(value, list)]
    if name in _ANYTHING:
        return {}
    if any("accuracy" in value for value in objects):  # a row of a sweep, whose empty columns are left out
        return {"anyOf": [{"$ref": "#/$defs/row"}, {"type": ["string", "null"]}]}
    kinds = {_kind(value) for value in values}
    if "number" in kinds:
        kinds.discard("integer")
    made: dict[str, Any] = {"type": sorted(kinds | {"null"})} if kinds != {"null"} else {}
    if arrays:
        items = [item for value in arrays for item in value]
        made["items"] = _type(f"{name}[]", items) if items else {}
    if objects:
        keys = sorted({key for value in objects for key in value})
        inside = {key: _type(key, [value[key] for value in objects if key in value]) for key in keys}
        if name in _MAPS:
            made["additionalProperties"] = _type("", [each for value in objects for each in value.values()])
        else:
            made["properties"] = inside
    return made


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return "null" if value is None else kinds[type(value)]


def schema_text() -> str:
    """The content of ``docs/json.schema.json``."""
    return json.dumps(schema_of([*documents()]), indent=1) + "\n"


# ------------------------------------------------------------------------------------------------------- checking


def problems(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], at: str = "") -> list[str]:
    """What a value lacks of a schema, of the few words that ours uses. A name that the schema does not have counts."""
    if "anyOf" in schema:
        return min((problems(value, each, root, at) for each in schema["anyOf"]), key=len)
    if "$ref" in schema:
        return problems(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, at)
    found = [f"{at}: {value!r} is not {schema['const']!r}"] if "const" in schema and value != schema["const"] else []
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    allowed = {*kinds, *(["integer"] if "number" in kinds else [])}
    if kinds and _kind(value) not in allowed:
        return [*found, f"{at}: {_kind(value)}, not {' or '.join(sorted(allowed))}"]
    if isinstance(value, list) and "items" in schema:
        for number, item in enumerate(value):
            found += problems(item, schema["items"], root, f"{at}[{number}]")
    if isinstance(value, dict):
        found += _problems_of_names(value, schema, root, at)
    return found


def _problems_of_names(
    value: Mapping[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any], at: str
) -> list[str]:
    found = [f"{at}.{name}: missing" for name in schema.get("required", ()) if name not in value]
    known = dict(schema.get("properties", {}))
    for other in schema.get("allOf", ()):
        of_other = root["$defs"][other["$ref"].rpartition("/")[2]]
        found += [f"{at}.{name}: missing" for name in of_other["required"] if name not in value]
        known = {**of_other["properties"], **known}
    for name, inner in value.items():
        if name in known:
            found += problems(inner, known[name], root, f"{at}.{name}")
        elif "additionalProperties" in schema:
            found += problems(inner, schema["additionalProperties"], root, f"{at}.{name}")
        elif known:
            found.append(f"{at}.{name}: not in the schema")
    return found


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
    sys.stdout.write(f"{SCHEMA_FILE}\n")
