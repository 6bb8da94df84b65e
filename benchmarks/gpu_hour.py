"""``make gpu``: all that is worth measuring on an accelerator, in at most eight minutes, the most valuable first.

Each step is commands of its own processes, with a time limit; what it has found is written when it ends, however it
ends. ``-d cpu`` runs every step on the CPU in a small size, to see that the commands work: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_page import page
from hashbench.core.io import write_file
from hashbench.core.processes import Child, last_words

TOTAL_SECONDS = 480.0
DRY_RUN_PATIENCE = 8.0
"""Limits are longer by so much on the CPU, where a busy machine is no reason to stop."""

LAST_WORDS_SECONDS = 4.0
"""What an interrupted command has to write what it knows."""

CHECKOUT = Path(__file__).parents[1]
STEPS_FILE, PAGE_FILE = "steps.csv", "figures.md"
HASHBENCH = (sys.executable, "-m", "hashbench")

OPS = (
    *("index_add", "index_put", "index_copy", "index_reduce.mean", "scatter_add", "scatter_reduce.sum", "scatter"),
    *("scatter_reduce.amax", "put", "take", "gather", "masked_scatter", "cumsum", "cumprod", "logcumsumexp"),
    *("bincount", "histc", "median", "kthvalue", "mode", "sort", "renorm", "nn.functional.embedding"),
    *("nn.functional.embedding_bag", "nn.functional.interpolate.bilinear", "nn.functional.interpolate.bicubic"),
    *(
        "nn.functional.interpolate.area",
        "nn.functional.grid_sample",
        "nn.functional.ctc_loss",
        "nn.functional.nll_loss",
    ),
    *("nn.functional.adaptive_avg_pool2d", "nn.functional.adaptive_max_pool2d", "nn.functional.avg_pool3d"),
    *("nn.functional.max_unpool2d", "nn.functional.fractional_max_pool2d", "nn.functional.pad.reflect"),
    *("nn.functional.pad.replicate", "nn.functional.scaled_dot_product_attention", "nn.functional.conv_transpose2d"),
    "baddbmm",
)
"""Forty ops that torch documents for CUDA, or whose kernels add, select or pick an algorithm there."""

MODELS = (
    *("DistillGPT2", "GPTNeoForCausalLM", "OPTForCausalLM", "BartForCausalLM", "Qwen/Qwen3-0.6B"),
    *("meta-llama/Llama-3.2-1B", "mistralai/Mistral-7B-Instruct-v0.3", "OlmoeForCausalLM"),
)
"""Eight tiny models that decode."""

OPEN = {"inference": ("late_prefetch", "host_statistics"), "training": ("long_context",)}
"""Specimens whose cause or kernel was not as written on an H100 (docs/devices.md)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to measure.

    Attributes:
        name: of the step and its CSV.
        what: it says, in a few words.
        seconds: limit of all its commands together.
        commands: run one behind the other; ``{raw}`` stands for the step's folder of raw results.
        found: returns the rows of the CSV from that folder.
        fine: exit codes with which a command has done its work.
    """

    name: str
    what: str
    seconds: float
    commands: tuple[tuple[str, ...], ...]
    found: Callable[[Path], list[dict[str, str]]]
    fine: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a step: a row of ``steps.csv``.

    Attributes:
        step: its name.
        what: it measured.
        outcome: ``done``, or what went wrong.
        seconds: it took.
        rows: it found.
        commands: as a shell takes them.
    """

    step: str
    what: str
    outcome: str
    seconds: str
    rows: str
    commands: str


def steps_for(device: str) -> tuple[Step, ...]:
    """The steps on a device, the most valuable first; on the CPU each with less to do."""
    small = device == "cpu"
    python, jobs = sys.executable, str(max(1, min(4, (os.cpu_count() or 1) // 2)))

    def sweep(*words: str, output: str = "{raw}") -> tuple[str, ...]:
        return (*HASHBENCH, "sweep", "-d", device, "--jobs", jobs, *words, "--output", output)

    models = MODELS[:1] if small else MODELS
    compiled = ("relu_injected", "relu_injected_twin") if small else triton_specimens()
    workload = "GPT, small, bf16" if small else "GPT, 350M parameters, bf16"
    steps = (
        Step(
            "tests",
            "tests marked `gpu`",
            100,
            (
                (
                    *(python, "-m", "pytest", "-m", "gpu", "-q", "-p", "benchmarks.gpu_tests"),
                    *("--outcomes", "{raw}/tests.csv", *_tests(small=small)),
                ),
            ),
            lambda raw: _csv_rows([raw / "tests.csv"]),
            fine=(0, 1),
        ),
        Step(
            "audit",
            "ops: documented against measured determinism",
            60,
            (
                (
                    *(*HASHBENCH, "audit", "-d", device, "--jobs", jobs, "--dtypes", "float32", "--samples", "1"),
                    *("--runs", "2" if small else "10", "--budget", "0" if small else "5"),
                    *("--timeout", "100" if small else "20", "--output", "{raw}"),
                    *("--ops", *(OPS[:1] if small else OPS)),
                ),
            ),
            lambda raw: _csv_rows([raw / "audit.csv"]),
        ),
        Step(
            "compiled",
            "suite `compiled` with inductor: faults in Triton code, and their twins",
            95,
            (
                sweep(
                    *("--suite", "compiled", "--inference", "--backend", "inductor", "--diagnose-budget", "20"),
                    *("--only", *compiled),
                ),
            ),
            lambda raw: _csv_rows([raw / "accuracy.csv"]),
        ),
        Step(
            "invariance",
            "batch and decode invariance of tiny models in bfloat16",
            60,
            (
                sweep(
                    *("--suite", "huggingface_tiny", "--inference", "--invariance", "batch,decode", "--bfloat16"),
                    *("--diagnose-budget", "0" if small else "10", "--only", *models),
                ),
            ),
            lambda raw: _csv_rows(sorted(raw.glob("*-invariance/accuracy.csv"))),
        ),
        Step(
            "fingerprints",
            "kernels that TF32 and cuDNN's benchmark mode change",
            50,
            (
                (
                    *(
                        *HASHBENCH,
                        "fingerprint",
                        "record",
                        "--inference" if small else "--training",
                        "-d",
                        device,
                        "--output",
                        "{raw}/base.json",
                    ),
                    *(
                        "--suite",
                        "torchvision",
                        "--only",
                        "squeezenet1_1",
                        *(() if small else ("resnet18", "vit_b_16")),
                    ),
                ),
                (python, "-m", "benchmarks.gpu_fingerprints", "{raw}/base.json", "{raw}/fingerprints.csv"),
            ),
            lambda raw: _csv_rows([raw / "fingerprints.csv"]),
        ),
        Step(
            "overhead",
            "a training step under tracing, as a multiple of the same step without",
            50,
            (
                (
                    *(python, "-m", "benchmarks.gpu", "--device", device, "--only", "steps", "--workloads", workload),
                    *("--arms", "no-op mode", "hashbench", "hashbench + finish", "DebugMode"),
                    *("--seconds", "0" if small else "8", "--json", "{raw}/overhead.json"),
                    *(("--small",) if small else ()),
                ),
            ),
            lambda raw: _rows_of_tables(raw / "overhead.json"),
        ),
        Step(
            "specimens",
            "the specimens that are open",
            60,
            tuple(
                sweep(
                    *("--suite", "specimens", f"--{mode}", "--diagnose-budget", "20", "--only", *names),
                    *(f"{name}_twin" for name in names),
                    output=f"{{raw}}/{mode}",
                )
                for mode, names in OPEN.items()
            ),
            lambda raw: _with_truth(_csv_rows([raw / mode / "accuracy.csv" for mode in OPEN])),
        ),
    )
    assert sum(step.seconds for step in steps) <= TOTAL_SECONDS
    return steps


def triton_specimens() -> tuple[str, ...]:
    """The models of the suite `compiled` that only a GPU runs, in the order of its CSV."""
    with (CHECKOUT / "models" / "compiled.csv").open(newline="", encoding="utf-8") as lines:
        return tuple(row["name"] for row in csv.DictReader(lines) if row["devices"] == "cuda")


def _tests(*, small: bool) -> tuple[str, ...]:
    """The files with tests marked ``gpu``: collecting all takes longer. On the CPU two, where all are skipped."""
    if small:
        return ("tests/core/devices/test_on_gpu.py", "tests/test_accelerator_specimens.py")
    files = sorted(Path("tests").rglob("test_*.py"))
    return tuple(str(path) for path in files if "mark.gpu" in path.read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------------------------- results


def _csv_rows(files: Iterable[Path]) -> list[dict[str, str]]:
    """The rows of all these files that are there."""
    rows: list[dict[str, str]] = []
    for path in files:
        if path.exists():
            with path.open(newline="", encoding="utf-8") as lines:
                rows += csv.DictReader(lines)
    return rows


def _with_truth(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Rows of specimens, with what is written of each in ``models/specimens.csv``."""
    written = {row["name"]: row for row in _csv_rows([Path("models/specimens.csv")])}
    known = ("truth_accuracy", "truth_kernel", "truth_cause", "truth_confidence")
    return [{**row, **{name: written[row["name"]][name] for name in known}} for row in rows]


def _rows_of_tables(path: Path) -> list[dict[str, str]]:
    """The rows of the tables of a benchmark's JSON document, a figure a row."""
    if not path.exists():
        return []
    tables = json.loads(path.read_text(encoding="utf-8"))["tables"]
    rows = []
    for table in tables:
        for workload, *cells in table["rows"]:
            named = itertools.zip_longest(table["headers"][1:], cells, fillvalue="")
            rows += [
                {"table": table["title"], "workload": workload, "what": what, "figure": str(cell)}
                for what, cell in named
                if cell != ""
            ]
    return rows


def write_rows(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Write rows as a CSV; the columns are those of all of them."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


# ----------------------------------------------------------------------------------------------------- the run


def run_step(step: Step, raw: Path, *, seconds: float) -> tuple[Outcome, list[dict[str, str]]]:
    """Run the commands of a step for at most ``seconds`` and return what became of it, and its rows. The commands and
    all that they started are gone afterwards."""
    (raw / step.name).mkdir(parents=True)
    began = time.monotonic()
    problem = ""
    for number, command in enumerate(step.commands, 1):
        words = [word.replace("{raw}", str(raw / step.name)) for word in command]
        problem = _run(words, raw / f"{step.name}.{number}.log", until=began + seconds, fine=step.fine)
        if problem:
            break
    rows: list[dict[str, str]] = []
    try:
        rows = step.found(raw / step.name)
    except (OSError, ValueError, LookupError) as error:  # whoever wrote them was killed, or another version
        problem = problem or f"failed: its results cannot be read ({type(error).__name__}: {error})"
    if not rows and not problem:
        problem = "failed: its commands ended well and wrote no rows"
    outcome = Outcome(
        step=step.name,
        what=step.what,
        outcome=problem or "done",
        seconds=f"{time.monotonic() - began:.0f}",
        rows=str(len(rows)),
        commands="; ".join(_shown(command) for command in step.commands),
    )
    return outcome, rows


def _run(command: Sequence[str], log: Path, *, until: float, fine: Sequence[int]) -> str:
    """Run one command into a log until a time of the monotonic clock. Returns what went wrong, empty where nothing."""
    seconds = until - time.monotonic()
    with log.open("wb") as output:
        try:
            with Child(command, stdout=output, stderr=output, guarded=True) as child:
                status = child.wait(max(0.0, seconds))
                if status is None:
                    child.interrupt()
                    child.wait(LAST_WORDS_SECONDS)
        except OSError as error:
            return f"failed: cannot start {command[0]} ({error.strerror})"
    if status is None:
        return f"stopped after {seconds:.0f} s"
    if status in fine:
        return ""
    said = last_words(log, lines=1)
    return f"failed: exit code {status}{f' ({said[0][:200]})' if said else ''}"


def _shown(command: Sequence[str]) -> str:
    words = [re.sub(r"^\{raw\}/?", "", word) or "." for word in command]
    return " ".join(f"'{word}'" if re.search(r"[^\w./:=,+-]", word) else word for word in words).replace(
        sys.executable, "python"
    )


def run_all(
    steps: Sequence[Step],
    output: Path,
    machine: Mapping[str, str],
    *,
    say: Callable[[str], object],
    patience: float = 1.0,
) -> bool:
    """Run steps one behind the other, and write CSV and page after each. Returns whether all were done.

    Args:
        steps: the most valuable first.
        output: gets a CSV for each step, those of all steps, and the page; raw results into a new folder in ``raw``.
        machine: what the figures were measured on.
        say: takes a line for each step.
        patience: factor of all limits.
    """
    began = time.monotonic()
    raw = output / "raw" / time.strftime("%Y-%m-%d_%H%M%S")
    all_done = True
    for step in steps:
        left = TOTAL_SECONDS * patience - LAST_WORDS_SECONDS - (time.monotonic() - began)
        outcome, rows = run_step(step, raw, seconds=min(step.seconds * patience, left))
        all_done = all_done and outcome.outcome == "done"
        if rows:
            write_rows(output / f"{step.name}.csv", rows)
        known = {row["step"]: row for row in _csv_rows([output / STEPS_FILE])}
        known[step.name] = {name: str(value) for name, value in dataclasses.asdict(outcome).items()}
        write_rows(output / STEPS_FILE, list(known.values()))
        write_page(output, machine)
        say(f"{step.name}: {outcome.outcome}, {outcome.rows} rows, {outcome.seconds} s")
    return all_done


def write_page(output: Path, machine: Mapping[str, str]) -> None:
    """Write the page of figures from the CSVs of a folder."""
    outcomes = _csv_rows([output / STEPS_FILE])
    found = {row["step"]: _csv_rows([output / f"{row['step']}.csv"]) for row in outcomes}
    text = page(machine, outcomes, found)
    write_file(output / PAGE_FILE, text, tip="Choose another folder with --output.")


# -------------------------------------------------------------------------------------------------- command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the steps; returns the exit code."""
    names = [step.name for step in steps_for("cpu")]
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks.gpu_hour", description=__doc__)
    parser.add_argument("-d", "--device", metavar="D", help="cuda, xpu, cpu for a dry run (default: what is here)")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="which steps (default: all)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: results/gpu/<name of the card>")
    parsed = parser.parse_args(arguments)
    device = parsed.device or _here()
    if device is None or not _exists(device):
        print(_nothing(parsed.device or "accelerator"), file=sys.stderr)
        return 2
    machine = machine_of(device)
    name = "dry_run" if device == "cpu" else re.sub(r"\W+", "_", machine["card"].lower()).strip("_")
    output = (parsed.output or CHECKOUT / "results" / "gpu" / name).absolute()
    output.mkdir(parents=True, exist_ok=True)
    print("\n".join(f"{label}: {value}" for label, value in machine.items()), flush=True)
    os.chdir(CHECKOUT)
    steps = [step for step in steps_for(device) if step.name in parsed.only]
    patience = DRY_RUN_PATIENCE if device == "cpu" else 1.0
    done = run_all(steps, output, machine, say=lambda line: print(line, flush=True), patience=patience)
    print(f"Written: {output / PAGE_FILE}")
    if device != "cpu":
        print(f"Next: git add {output}")
    return 0 if done else 1


def _here() -> str | None:
    import torch

    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if current is None else current.type


def _exists(device: str) -> bool:
    return device == "cpu" or device.partition(":")[0] == _here()


def _nothing(wanted: str) -> str:
    return (
        f"make gpu: there is no {wanted} here, so nothing was measured. Run it where `hashbench env -d cuda` works; "
        "`python -m benchmarks.gpu_hour -d cpu` shows that its commands do."
    )


def machine_of(device: str) -> dict[str, str]:
    """What the figures are measured on, as ``hashbench env`` says in a process of its own."""
    from hashbench.core.processes import run

    done = run([*HASHBENCH, "env", "-d", device], seconds=60)
    try:
        known = json.loads(done.stdout) if done.status == 0 else {}
    except ValueError:
        known = {}
    return dict(_facts(known, device)) | {"date": time.strftime("%Y-%m-%d")}


def _facts(known: Mapping[str, Any], device: str) -> Iterator[tuple[str, str]]:
    card, packages, build = (known.get(name, {}) for name in ("device", "packages", "torch"))
    yield (
        "card",
        str(card.get("name") or ("none: a dry run on the CPU" if device == "cpu" else f"not known ({device})")),
    )
    yield "driver", str(card.get("driver") or "none")
    yield (
        "torch",
        f"{packages.get('torch', 'not known')} (CUDA {build.get('cuda_build')}, HIP {build.get('hip_build')})",
    )
    yield "Triton", str(packages.get("triton", "not installed"))
    yield "digests", str(known.get("digests", {}).get("name", "not known"))
    yield (
        "processor",
        f"{known.get('cpu', {}).get('model', 'not known')}, {known.get('cpu', {}).get('cores', '?')} cores",
    )


if __name__ == "__main__":
    sys.exit(main())
