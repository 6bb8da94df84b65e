"""Write, run and replay the repro of one difference: a folder that runs with torch alone.

``repro.py`` makes the captured call again and says how often it differs; ``tensors.pt`` holds its inputs; ``call.json``
describes the call exactly, with the evidence; ``REPORT.md`` is a text for a bug report; ``kernel.cpp`` or ``kernel.py``
is the source of a generated kernel. ``uv run repro.py`` is the whole instruction: the script's PEP 723 header names the
torch that it was written with.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hashbench
from hashbench.core import io
from hashbench.core.catalog import CAUSES, EXPERIMENTS, REPEATED, Confidence
from hashbench.core.commands import CALL_FILE, IMPORTS
from hashbench.core.diagnose import causes, replay
from hashbench.core.diagnose.calls.call import LINE, CapturedCall, TensorForm, compiled_kernel
from hashbench.core.diagnose.calls.ops import Definition, definition_of, needs_definition
from hashbench.core.diagnose.causes import evidence
from hashbench.core.diagnose.repro import call_file, script, writer
from hashbench.core.diagnose.repro.writer import SCRIPT_FILE, TENSORS_FILE, RunsPython, new_folder
from hashbench.core.errors import HashbenchError
from hashbench.core.finding import Finding, Table
from hashbench.core.processes import Budget, new_python
from hashbench.core.records import Decision, Diagnosis, Evidence, ExperimentResult
from hashbench.core.run import environment
from hashbench.core.run.distance import Difference
from hashbench.core.text import printable

REPORT_FILE = "REPORT.md"
REPRO_SECONDS = 300.0
"""Time limit of a repro's own run: it is made to take a few seconds, many times as long on a busy machine."""
OUTPUT_HEADING, NOT_RUN = "## Last output of repro.py", "It was not run yet."

_COUNTS = re.compile(r"^(\d+) of (\d+) calls differ", re.MULTILINE)
"""In what a script prints."""
_SHOWN_INPUTS = 40


def write_repro(
    folder: Path, call: CapturedCall, diagnosis: Diagnosis, *, difference: Difference | None = None, seen_in: str = ""
) -> None:
    """Write the repro of a captured call to ``folder``, atomically; an old one is replaced.

    Args:
        diagnosis: the findings about the call.
        difference: two of its outcomes that differ, in numbers.
        seen_in: in which model, in words.

    Raises:
        HashbenchError: the call has an argument that cannot be written to a file, or the source of its kernel is gone.
        OSError: the folder cannot be written.
    """
    definition = definition_of(call.func)
    word = definition.word() if definition is not None else ""
    here = _environment(call)
    recorded = {
        "evidence": dataclasses.asdict(diagnosis.evidence),
        "decision": dataclasses.asdict(diagnosis.decision),
        "environment": here,
        "definition": word,
        IMPORTS: "" if definition is None else Path(definition.argument).name,
    }
    with new_folder(folder) as new:
        try:
            text = script.source(
                call,
                script.plan(diagnosis.evidence),
                heading=_heading(call, diagnosis, seen_in=seen_in),
                definition=word,
                requirements=_requirements(definition),
            )
            _write_call(new, call, text, recorded)
        except (ValueError, pickle.PicklingError, RuntimeError, TypeError, AttributeError) as error:
            raise HashbenchError(f"the call of {call.op} cannot be written to a file", consequence=str(error)) from None
        about = report(call, diagnosis, here=here, difference=difference, seen_in=seen_in, definition=definition)
        (new / REPORT_FILE).write_text(about, encoding="utf-8")


def _write_call(folder: Path, call: CapturedCall, text: str, recorded: Mapping[str, Any]) -> None:
    """Write the script and the files of the call, and read them back: a tensor subclass is written without an error."""
    kernel = compiled_kernel(call.func)
    if kernel is not None and not (kernel.source and kernel.types):
        raise ValueError("the source of its kernel is gone")
    writer.write(folder, text, call_file.payload(call), kernel=kernel)
    described = call_file.document(call, tensors=folder / TENSORS_FILE, recorded=recorded)
    (folder / CALL_FILE).write_text(described, encoding="utf-8")
    call_file.read_checked(folder)


# ------------------------------------------------------------------------------------------------------- its texts


def _heading(call: CapturedCall, diagnosis: Diagnosis, *, seen_in: str) -> str:
    """Return the first lines of the script's docstring: the observation, the cause, and the requirements."""
    seen = " ".join(filter(None, (writer.place_words(call, seen_in=seen_in), how_often(diagnosis))))
    claim = f"{call.op} gives different results from equal inputs."
    return writer.heading(claim, seen, writer.cause_words(diagnosis.decision), needs=_needs(call))


def _requirements(definition: Definition | None) -> str:
    package = writer.distribution_of(definition.module) if definition is not None and definition.module else ""
    return writer.metadata(packages=[package] * bool(package))


def _needs(call: CapturedCall) -> str:
    if (kernel := compiled_kernel(call.func)) is not None:
        return writer.needs_of(kernel, call.device.type)
    return "It needs torch and the definition of the op." if needs_definition(call.func) else writer.TORCH_ALONE


def report(
    call: CapturedCall,
    diagnosis: Diagnosis,
    *,
    here: Mapping[str, str],
    difference: Difference | None = None,
    seen_in: str = "",
    definition: Definition | None = None,
) -> str:
    """Return ``REPORT.md``: everything about one difference, to paste into a bug report. ``here`` describes this
    machine."""
    custom, decision, price = needs_definition(call.func), diagnosis.decision, diagnosis.deterministic_price
    kernel = compiled_kernel(call.func)
    files = f"`{TENSORS_FILE}`" + ("" if kernel is None else f" and `{writer.kernel_file(kernel.types)}`")
    inputs = [f"# t[{index}]: {_described(call, tensor)}" for index, tensor in enumerate(call.tensors)]
    more = [f"# and {len(inputs) - _SHOWN_INPUTS} more"] if len(inputs) > _SHOWN_INPUTS else []
    documented = [
        ("torch documents", diagnosis.deterministic_doc),
        ("it did here", diagnosis.deterministic_here),
        ("time with the flag / without", "" if price is None else f"{price:.2g}"),
    ]
    facts = [
        ("op", f"`{call.op}`"),
        ("phase", call.phase),
        ("module", f"`{call.module}`" if call.module else ""),
        ("in the backward of", f"`{call.forward_op}`" if call.forward_op else ""),
        ("source line", f"`{call.source}`" if call.source else ""),
        ("defined in", definition.word() if definition is not None else "unknown" if custom else ""),
        *_numbers(difference),
    ]
    text = writer.render(
        "REPORT.md.jinja",
        op=call.op,
        place=writer.place_words(call, seen_in=seen_in),
        how_often=how_often(diagnosis),
        facts=facts,
        inputs=[*inputs[:_SHOWN_INPUTS], *more, script.expression(call)],
        cause=CAUSES[decision.cause].words,
        decision=decision,
        confidence=Confidence(decision.confidence).meaning,
        evidence=[(result.name, REPEATED[result.on].short, *described(result)) for result in diagnosis.evidence.arms],
        documented=documented if any(value for _, value in documented) else [],
        environment=here.items(),
        usage=(
            f"`uv run {SCRIPT_FILE}{' DEFINITION' if custom else ''}` beside {files} installs the torch that "
            f"it was written with; `python {SCRIPT_FILE}` takes the torch at hand. {_needs(call)}"
        ),
        replayed=kernel is None,
        output_heading=OUTPUT_HEADING,
        not_run=NOT_RUN,
    )
    return printable(text)


def with_output(text: str, output: str) -> str:
    """Replace the last output in a report."""
    head, heading, _ = text.partition(OUTPUT_HEADING)
    fence = "```"
    while fence in output:
        fence += "`"
    return f"{head}{heading}\n\n{fence}\n{output.strip()}\n{fence}\n"


def how_often(diagnosis: Diagnosis) -> str:
    """Format the rate: ``20 of 20 replays differed from the first (83 % to 100 %, 95 % interval); 21 distinct.``"""
    rate = diagnosis.rate
    if rate is None:
        return ""
    interval = f"{100 * rate.low:.3g} % to {100 * rate.high:.3g} %, 95 % interval"
    count = f"{rate.differing} of {rate.trials} {rate.of} differed from the first"
    return f"{count} ({interval}); {rate.distinct} distinct."


def described(result: ExperimentResult) -> tuple[str, str, object, str]:
    """Return the cells of an experiment in a table: the change, the count, distinct outcomes, and what it singled out
    or why it has fewer trials than others."""
    remarks = "; ".join(filter(None, (result.found, result.note)))
    return EXPERIMENTS[result.name].phrase, count(result), result.distinct if result.ran else "", remarks


def count(result: ExperimentResult) -> str:
    """Format a count as ``3 of 20``, or ``not run``."""
    return evidence.count(result) if result.ran else "not run"


def _numbers(difference: Difference | None) -> list[tuple[str, str]]:
    if difference is None:
        return []
    total = f" of {difference.total}" if difference.total else ""
    named = [
        ("elements that differ", None if difference.elements is None else f"{difference.elements}{total}"),
        ("largest absolute difference", None if difference.max_abs is None else f"{difference.max_abs:.6g}"),
        ("largest difference in ULP", None if difference.max_ulp is None else str(difference.max_ulp)),
        ("differs only in", difference.representation or None),
    ]
    return [(name, value) for name, value in named if value is not None]


def _described(call: CapturedCall, tensor: TensorForm | torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    if isinstance(tensor, torch.Tensor):
        return f"{kind} {list(tensor.shape)}, {str(tensor.layout).removeprefix('torch.')}, on {tensor.device}"
    memory = call.memories[tensor.storage]
    address = (memory.alignment + tensor.offset * tensor.dtype.itemsize) % LINE
    where = f"memory {tensor.storage}, address {address} modulo {LINE}, on {memory.content.device}"
    return f"{kind} {list(tensor.shape)}, strides {list(tensor.stride)}, {where}"


def _environment(call: CapturedCall) -> dict[str, str]:
    """Collect what a reader of the report must know of this machine, without its name."""
    known: dict[str, Any] = environment.collect(str(call.device))
    device, build = known["device"], known["torch"]
    return {
        "hashbench": hashbench.__version__,
        "torch": torch.__version__,
        "torch git": str(build["git"]),
        "python": known["python"],
        "system": f"{known['platform']['system']} {known['cpu']['machine']}, {known['platform']['libc']}".rstrip(", "),
        "cpu": known["cpu"]["model"],
        "cpu capability": build["cpu_capability"],
        "cores": str(known["cpu"]["cores"]),
        "threads": str(call.threads),
        "device": " ".join(str(device[key]) for key in ("type", "name", "driver") if device.get(key)),
        **({"cuda": str(build["cuda_build"])} if device["type"] == "cuda" else {}),
    }


# -------------------------------------------------------------------------------------------------------- running it


def run_in_fresh_process(
    folder: Path, *, timeout: float, definition: Path | str | None = None, by: RunsPython = new_python
) -> str:
    """Run ``repro.py`` in a new process, keep its output in ``REPORT.md``, and return the outcome.

    Args:
        timeout: seconds.
        definition: what defines a custom op, as ``repro.py`` takes it; see
            :class:`~hashbench.core.diagnose.calls.ops.Definition`.
        by: runs the program.

    Returns:
        ``in a fresh process 20 of 20 calls differ``, ``failed: …`` or ``timeout after 300 s``.
    """
    ran = writer.run(folder, _COUNTS, *([str(definition)] if definition else []), timeout=timeout, by=by)
    if ran.output is not None:
        _keep_output(folder / REPORT_FILE, ran.output)
    return ran.problem or "in a fresh process {} of {} calls differ".format(*ran.shows)


def _keep_output(path: Path, output: str) -> None:
    try:
        text = io.read_file(path).decode("utf-8")
    except OSError:  # somebody took the report away; the repro runs without
        return
    for private in (str(path.parent.resolve()), str(Path(sys.prefix).resolve())):
        output = output.replace(private, "…")
    io.replace_file(path, with_output(text, output))


# ------------------------------------------------------------------------------------------- the experiments made again


@dataclass(frozen=True, slots=True)
class Recorded:
    """The experiments and environment recorded in a repro."""

    arms: tuple[ExperimentResult, ...]
    decision: Decision
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Rerun:
    """Repeated experiments: the decision now, the recorded one, and the differences between the environments."""

    op: str
    evidence: Evidence
    decision: Decision
    recorded: Recorded
    elsewhere: tuple[str, ...]

    @property
    def reproduced(self) -> bool:
        """True if any outcome differed."""
        return any(result.differing for result in self.evidence.arms)


def rerun(folder: Path, *, replays: int, budget: float) -> Rerun:
    """Repeat the experiments on the call of a repro.

    Args:
        replays: the least comparisons in each experiment.
        budget: seconds for all of them together.

    Raises:
        HashbenchError: the folder is not a repro, or needs an op or device that is not here.
    """
    saved = call_file.read(folder)
    try:
        recorded = _recorded(saved.recorded)
    except ValueError as error:
        raise call_file.unusable(folder, error) from None
    replays_made = replay.experiments(saved.call, replays=replays, budget=Budget(budget))
    evidence = Evidence(origin="kernel", call=replays_made.facts, arms=replays_made.arms)
    elsewhere = _elsewhere(saved.call, recorded.environment, saved.moved)
    return Rerun(saved.call.op, evidence, causes.decide(evidence), recorded, elsewhere)


def _recorded(content: Mapping[str, Any]) -> Recorded:
    evidence = io.from_json(Evidence, content.get("evidence"), where="evidence")
    decision = io.from_json(Decision, content.get("decision"), where="decision")
    there = io.from_json(Mapping[str, str], content.get("environment"), where="environment")
    return Recorded(evidence.arms, decision, there)


def _elsewhere(call: CapturedCall, there: Mapping[str, str], moved: Mapping[str, str]) -> tuple[str, ...]:
    """Describe how this process's environment differs from the recorded one."""
    here = {
        "torch": torch.__version__,
        "torch git": str(torch.version.git_version),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "cores": str(os.cpu_count()),
    }
    lines = [
        f"{key}: {there[key]} there, {value} here" for key, value in here.items() if there.get(key, value) != value
    ]
    threads = torch.get_num_threads()
    if threads != call.threads:
        lines.append(f"threads: {call.threads} there, {threads} here; the call was replayed with {call.threads}")
    for before, now in moved.items():
        lines.append(f"device: {before}, which is not here; the call was replayed on {now}, the first of its kind")
    return tuple(lines)


def rerun_finding(made: Rerun, *, commands: Iterable[str] = ()) -> Finding:
    """Return the report of repeated experiments. ``commands`` are what to run next."""
    before, now = made.recorded.decision, made.decision
    recorded = {result.name: result for result in made.recorded.arms if result.on == "call"}
    rows = []
    for result in made.evidence.arms:
        phrase, differ, distinct, remarks = map(str, described(result))
        then = count(recorded[result.name]) if result.name in recorded else ""
        rows.append((result.name, phrase, differ, distinct, then, remarks))
    limited = evidence.cut_short(made.evidence.arms, now.confidence)
    agrees = before.cause == now.cause
    elsewhere = ("The environment differs from the recorded one:",) if made.elsewhere else ()
    return Finding(
        headline=f"{made.op}: {'replays differ' if made.reproduced else 'all replays are equal'}",
        facts=(
            ("cause", f"{now.cause}, {now.confidence}"),
            ("because", now.because),
            ("advice", evidence.with_more_time(now.advice, limited, flag="--budget")),
            ("recorded cause", "" if agrees else f"{before.cause}, {before.confidence}: {before.because}"),
        ),
        table=Table(headers=("arm", "what is changed", "differ", "distinct", "recorded", "found"), rows=tuple(rows)),
        notes=(*elsewhere, *made.elsewhere),
        next=tuple(commands),
        equal=not made.reproduced,
        differs=made.reproduced,
        data={**dataclasses.asdict(made), "reproduced": made.reproduced},
    )
