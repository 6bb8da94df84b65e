"""The subcommands ``dynamo``, ``pipeline``, ``numeric`` and ``audit``: tools built on the parts of a sweep."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import shlex
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hashbench.cli import flags
from hashbench.cli.flags import made_of, say
from hashbench.cli.parser import EXIT_INTERRUPTED, RULES, Commands, Condition, OneLineParser
from hashbench.core import extensions
from hashbench.core.errors import HashbenchError
from hashbench.core.records import DETERMINISTIC
from hashbench.core.text import count, masked

if TYPE_CHECKING:
    from hashbench.core.finding import Finding
    from hashbench.core.records import HarnessRow
    from hashbench.core.report.audits import AuditKind
    from hashbench.core.suites.user_file import UserFile
    from hashbench.integrations.dynamo.session import Session
    from hashbench.tools.audit.audit_table import AuditRow

FEWEST_THREADS = 8
"""Minimum number of threads of an audit on the CPU: threads that outnumber the cores preempt each other, which exposes
races that two threads hardly ever show."""

DTYPES = ("float32", "bfloat16", "complex64", "int64")
"""One dtype of each kind: the default, a low-precision one, a complex and an integer one."""

"""Dtypes in which models run: integer sums are exact at any batch size."""

KNOWN_DTYPES = (*DTYPES, "float64", "float16", "complex128", "complex32", "bool", "int32", "int16", "int8", "uint8")

_SIGNAL_BASE = 128


def add(commands: Commands) -> None:
    """Add the subcommands of this file."""
    _add_dynamo(commands)
    _add_pipeline(commands)
    _add_numeric(commands)
    _add_audit(commands)


# ------------------------------------------------------------------------------------------------------- dynamo


def _add_dynamo(commands: Commands) -> None:
    dynamo = commands.add_parser(
        "dynamo",
        help="Run PyTorch's benchmarks/dynamo and trace its two eager runs.",
        usage="hashbench dynamo [-h] [--trace WHEN] [--tracer WHICH] [--stress] [--fingerprints] [--results DIR] "
        "[--diagnose-budget S] SUITE.py [FLAG ...]",
        description="Run PyTorch's benchmarks/dynamo and trace its two eager runs. Everything after SUITE.py is passed "
        "to the harness, and its exit code is returned.",
    )
    text = "Trace the harness's own two runs (always), or further runs of models that differ (on-demand)."
    dynamo.add_argument("--trace", choices=("always", "on-demand"), default="always", help=text)
    flags.tracer(dynamo)
    for add in (*extensions.flags_of("run", "stress"), *extensions.flags_of("sweep", "fingerprint")):
        add(dynamo)
    text = "Write our results into DIR (default: beside --output, as <its name>.hashbench)."
    dynamo.add_argument("--results", type=Path, metavar="DIR", help=text)
    text = "Spend at most S seconds on the diagnosis of one model; 0 turns it off."
    flags.seconds(dynamo, "--diagnose-budget", text, default=120.0)
    dynamo.add_argument(
        "script", type=Path, metavar="SUITE.py", help="Run SUITE.py, as path/to/benchmarks/dynamo/huggingface.py."
    )
    theirs = dynamo.add_argument("arguments", nargs=argparse.REMAINDER, metavar="FLAG", help="Pass FLAG to SUITE.py.")
    theirs.required = False  # as Python 3.14 has it; older ones say in errors that it is
    dynamo.set_defaults(command=_dynamo)


def _dynamo(parsed: argparse.Namespace) -> int:
    from hashbench.core.run.environment import collect_in_child
    from hashbench.integrations.dynamo import harness, session

    harness.check_harness(parsed.script)
    theirs = harness.read_flags(parsed.arguments)
    if theirs.help:
        return subprocess.call([sys.executable, parsed.script, *parsed.arguments])
    if parsed.tracer == "native":  # one that cannot be used is told before anything is run
        collect_in_child(device="cpu", variables={}, tracer=parsed.tracer)
    folder = parsed.results or flags.new_folder("dynamo", parsed.script.stem, theirs.mode)
    if theirs.csv and not parsed.results:
        folder = Path(theirs.csv).with_suffix(".hashbench")
    ours = session.Session(
        folder=str(folder.absolute()),
        script=str(parsed.script.absolute()),
        arguments=tuple(parsed.arguments),
        trace=parsed.trace,
        budget=parsed.diagnose_budget,
        csv=theirs.csv,
        mode=theirs.mode,
        run=uuid.uuid4().hex,
        tracer=parsed.tracer,
        stress=getattr(parsed, "stress", False),
        fingerprints=getattr(parsed, "fingerprints", False),
        anew=theirs.begins_anew,
    )
    with ours.results.claimed(resume=True):
        try:
            ours.prepare(anew=False)
        except OSError as error:
            consequence = f"{error.strerror or error}; nothing was run"
            tip = "Choose another folder with --results."
            raise HashbenchError(f"cannot write results into {folder}", consequence=consequence, tip=tip) from error
        try:
            code = harness.run_harness(ours, meanwhile=lambda: _write_tables(ours))
        except harness.HarnessStoppedError as stopped:
            _write_tables(ours, described=True)
            ours.tidy()
            return say("stopped", _exit_code(stopped.status))
        if code and not ours.has_begun():  # its own words for that are on the screen
            ours.tidy()
            code = _exit_code(code)
            return say(f"the harness ran no model (exit code {code}): no results.", code)
        ended = harness.how_it_ended(ours, code) if theirs.accuracy else ""
        rows = session.collect(ours, ended=ended)
        if rows:
            key = _write_environment(ours)
            rows = [replace(row, env=key) for row in rows]
        _show_tables(ours, rows, session.write(ours, rows))
    return _exit_code(code)


def _exit_code(status: int) -> int:
    """Return the exit code that a shell reports for a process that ended with ``status``."""
    return status if status >= 0 else _SIGNAL_BASE - status


def _write_tables(ours: Session, *, described: bool = False) -> None:
    """Write the rows collected so far; with ``described``, also the environment that the harness's process recorded."""
    from hashbench.integrations.dynamo import session

    with contextlib.suppress(OSError):  # the end says so, if it still is so
        rows = session.collect(ours)
        if rows and described and (environment := _seen_by_the_harness(ours)):
            key = _keep_environment(ours, environment)
            rows = [replace(row, env=key) for row in rows]
        if rows:
            session.write(ours, rows)


def _write_environment(ours: Session) -> str:
    """Record the environment in our folder and return its key."""
    from hashbench.core.run.environment import collect_in_child, tracer_note
    from hashbench.integrations.dynamo.session import read_notes

    device = next((note.device for note in read_notes(ours) if note.device), "cpu")
    try:
        environment = _seen_by_the_harness(ours) or collect_in_child(device=device, variables={}, tracer=ours.tracer)
    except HashbenchError as error:
        say(str(error))
        return ""
    key = _keep_environment(ours, environment)
    if note := tracer_note(environment):
        say(note)
    return key


def _keep_environment(ours: Session, environment: dict[str, Any]) -> str:
    environment["command_line"] = [*masked(["hashbench", *sys.argv[1:]])]
    ours.results.write_environment(environment)
    return str(environment.get("key", ""))


def _seen_by_the_harness(ours: Session) -> dict[str, Any]:
    """Return the environment recorded by a process of the harness, which had torch imported; empty if none did."""
    try:
        environment: dict[str, Any] = json.loads(ours.machine.read_text(encoding="utf-8"))
        ours.machine.unlink()
    except (OSError, ValueError):
        return {}
    return environment


def _show_tables(ours: Session, rows: Sequence[HarnessRow], path: Path) -> None:
    from hashbench.core.report.table import sweep_table

    if not rows:
        say("the harness ran no accuracy check: no results.")
        return
    look = flags.look_of(sys.stdout)
    table = sweep_table(rows, folder=ours.results.path, width=look.width, colour=look.colour, more_runs=False)
    print(f"\n{table}")
    for row in rows:
        if row.harness_accuracy not in (row.accuracy, ""):
            flags.show(f"{row.name}: the harness says {row.harness_accuracy}, hashbench {row.accuracy}")
    theirs = ours.csv or "where it puts its CSV"
    if ours.csv and not Path(ours.csv).exists():  # it writes one with its first row: a model that died has none
        theirs = f"none, it wrote no {ours.csv}"
    print(f"\nResults: {path}\nThe harness's own: {theirs}")


# ----------------------------------------------------------------------------------------------------- pipeline


def _add_pipeline(commands: Commands) -> None:
    pipeline = commands.add_parser(
        "pipeline", help="Check data loading, transforms, initial weights and first predictions of a pipeline."
    )
    kinds = Commands(pipeline, "check|compare")

    check = kinds.add_parser(
        "check", help="Run a pipeline twice in fresh processes, and record what each run produced."
    )
    text = "Read the pipeline from FILE: Python with make_loader(seed), or YAML that names it."
    check.add_argument("--config", type=Path, required=True, metavar="FILE", help=text)
    check.add_argument("--output-dir", type=Path, required=True, metavar="DIR", help="Write into DIR, a new folder.")
    flags.seconds(check, "--timeout", "Stop a run after S seconds.", least=1, default=600.0)
    flags.tracer(check)
    check.add_argument("--once", action="store_true", help="Run the pipeline only once.")
    check.set_defaults(command=_pipeline_check)

    compare = kinds.add_parser("compare", help="Find the first stage at which two checks differ, and why.")
    compare.add_argument("first", type=Path, metavar="CHECK1", help="Compare with CHECK1, the output of one check.")
    compare.add_argument(
        "second", type=Path, metavar="CHECK2", help="Report what changed in CHECK2, the output of another."
    )
    compare.set_defaults(command=_pipeline_compare)
    for command in (check, compare):
        flags.report(command)


def _pipeline_check(parsed: argparse.Namespace) -> int:
    from hashbench.tools.pipeline import checking, comparing, observed

    if parsed.once and (parsed.json or parsed.html):
        raise HashbenchError(
            "--once compares nothing",
            consequence="there is no verdict for --json or --html, and nothing was run",
            tip="Leave out --once, or the other flag.",
        )
    with flags.phases_shown():
        verdict = checking.check(
            parsed.config, parsed.output_dir, timeout=parsed.timeout, repeat=not parsed.once, tracer=parsed.tracer
        )
    if verdict is None:
        print(f"Check: {parsed.output_dir}")
        return 0
    folders = parsed.output_dir, parsed.output_dir / observed.REPEAT_FOLDER
    finding = comparing.finding_of(verdict, names=("The first run", "the second"), folders=folders)
    code = flags.show_finding(finding, parsed, title="hashbench pipeline check", of=str(parsed.config))
    if not parsed.json:
        print(f"\nCheck: {parsed.output_dir}")
    return code


def _pipeline_compare(parsed: argparse.Namespace) -> int:
    from hashbench.tools.pipeline import comparing, observed

    comparison = comparing.compare(observed.read(parsed.first), observed.read(parsed.second))
    folders = parsed.first, parsed.second
    names = str(parsed.first), str(parsed.second)
    finding = comparing.finding_of(comparison, names=names, folders=folders)
    return flags.show_finding(finding, parsed, title="hashbench pipeline compare", of=" and ".join(names))


# ------------------------------------------------------------------------------------------------------ numeric


def _add_numeric(commands: Commands) -> None:
    text = "Compare a model before and after a transformation, two implementations, or a kernel and its reference."
    numeric = commands.add_parser("numeric", help=text)
    what = numeric.exclusive(required=True)
    text = "Read before(), after(model) and inputs() from FILE.py, or make_a(), make_b() and inputs()."
    what.add_argument("file", nargs="?", type=Path, metavar="FILE.py", help=text)
    for add in extensions.flags_of("numeric"):
        add(what, numeric)
    mode = numeric.exclusive()
    for name, training, text in (
        ("--training", True, "Run in train() mode."),
        ("--inference", False, "Run in eval() mode, without gradients."),
    ):
        mode.add_argument(name, action="store_const", const=training, dest="training", help=text)
    flags.whole(numeric, "--iterations", default=2, text="Run N steps.")
    for name, text in (
        ("--precision", "Set rtol and atol to X (default: those of the dtype)."),
        ("--rtol", "Set the relative tolerance to X."),
        ("--atol", "Set the absolute tolerance to X."),
    ):
        numeric.add_argument(name, type=flags.at_least(0, float), metavar="X", help=text)
    numeric.add_argument(
        "--stages", metavar="S,S", help="Compare only the stages S,S (default: all, or the file's STAGES)."
    )
    flags.several(numeric, "--ignore", metavar="FORM", text="Allow FORM to differ: dtype, device or layout.")
    numeric.add_argument("--trace", action="store_true", help="Name the first op at which the two diverge.")
    flags.tracer(numeric)
    text = "Set torch.use_deterministic_algorithms."
    numeric.add_argument("--deterministic", choices=DETERMINISTIC, default="on", help=text)
    flags.seed(numeric)
    flags.whole(numeric, "--lines", default=20, text="Print at most N lines of the table.")
    flags.report(numeric)
    numeric.set_defaults(command=functools.partial(_numeric, numeric), training=None)


def _numeric(numeric: OneLineParser, parsed: argparse.Namespace) -> int:
    answers = (answer(parsed) for answer in extensions.answers_of_numeric())
    if (code := next((code for code in answers if code is not None), None)) is not None:
        return code
    if not parsed.file.is_file():  # before torch is imported
        raise HashbenchError(f"cannot check {parsed.file}", consequence="it does not exist", tip="Check the path.")
    from hashbench.core.suites.user_file import UserFile
    from hashbench.tools.numeric.user_file import EXAMPLE

    example = f"{EXAMPLE}; or make_a(), make_b() and inputs()" if hasattr(parsed, "same_function") else EXAMPLE
    with flags.prints_aside(parsed):
        file = UserFile.read(parsed.file, example=example)
        finding, figures = _by_content(numeric, file, parsed) or _by_tolerance(file, parsed)
    return flags.show_finding(finding, parsed, title="hashbench numeric", of=str(parsed.file), **figures)


def _by_content(
    numeric: OneLineParser, file: UserFile, parsed: argparse.Namespace
) -> tuple[Finding, dict[str, Any]] | None:
    """Compare two implementations; return ``None`` where the file asks for a comparison by tolerance."""
    if not hasattr(parsed, "same_function"):  # the extension was deleted
        return None
    from hashbench.extensions.implementations.pair.file import is_pair

    if not (parsed.same_function or is_pair(file)):
        return None
    for rule in RULES:
        if rule.flag == "--same-function" and Condition.of(rule.other).holds(numeric, parsed):
            tip = "Leave it out: rounding is told without a tolerance."
            raise HashbenchError(f"{rule.other} is not for two implementations", consequence="nothing was run", tip=tip)
    return _compared(file, parsed)


def _compared(file: UserFile, parsed: argparse.Namespace) -> tuple[Finding, dict[str, Any]]:
    """Return the finding on two implementations, and what its page shows beside it."""
    from hashbench.core.processes import tell_phase
    from hashbench.extensions.implementations.pair.check import compare_implementations
    from hashbench.extensions.implementations.pair.file import SIDES, is_pair, load_sides
    from hashbench.extensions.implementations.pair.finding import finding_of
    from hashbench.extensions.implementations.pair.page import figures_of

    names = SIDES if is_pair(file) else ("before", "after")
    sides = load_sides(file, training=parsed.training)
    with flags.phases_shown():
        verdict = compare_implementations(*sides, seed=parsed.seed, progress=tell_phase)
    asked = [*(["--same-function"] if parsed.same_function else []), *(["--trace"] if parsed.trace else [])]
    page = _again(parsed, *asked, "--html", f"{parsed.file.stem}.html")
    commands = [page] if verdict.parted and parsed.html is None else []
    return finding_of(verdict, names, limit=parsed.lines, commands=commands), figures_of(verdict, names)


def _by_tolerance(file: UserFile, parsed: argparse.Namespace) -> tuple[Finding, dict[str, Any]]:
    """Compare a model before and after a transformation."""
    from hashbench.tools.numeric import run_model
    from hashbench.tools.numeric.first_difference import same_modules
    from hashbench.tools.numeric.report import finding_of
    from hashbench.tools.numeric.user_file import load_file

    arguments = load_file(file, seed=parsed.seed)
    if parsed.stages is not None:
        arguments["stages"] = tuple(word.strip() for word in parsed.stages.split(",") if word.strip())
    models = arguments["model_base"], arguments["model_control"]
    by_content = (
        parsed.trace and hasattr(parsed, "same_function") and not same_modules(*models, arguments.get("rename"))
    )
    report = run_model(
        **arguments,
        num_iterations=parsed.iterations,
        precision=parsed.precision,
        rtol=parsed.rtol,
        atol=parsed.atol,
        training=parsed.training,
        ignore=parsed.ignore,
        deterministic=parsed.deterministic,
        seed=parsed.seed,
        trace=parsed.trace and not by_content,
        tracer=parsed.tracer,
    )
    found = finding_of(report, limit=parsed.lines, command="" if parsed.trace else _traced(parsed))
    if not by_content or report.bitwise:
        return found, {}
    part, figures = _compared(file, parsed)
    return replace(found, parts=(*found.parts, part)), figures


def _traced(parsed: argparse.Namespace) -> str:
    """Return the command that finds the first difference as well."""
    named = ((name, getattr(parsed, name)) for name in ("stages", "precision", "rtol", "atol"))
    words = [
        f"--{name}={value}"
        for name, value in (*named, *(("ignore", form) for form in parsed.ignore))
        if value is not None
    ]
    return _again(parsed, *words, "--trace")


def _again(parsed: argparse.Namespace, *more: str) -> str:
    """Return the command with other flags than those of the mode."""
    mode = {None: [], True: ["--training"], False: ["--inference"]}[parsed.training]
    return shlex.join(["hashbench", "numeric", str(parsed.file), *mode, *more])


# -------------------------------------------------------------------------------------------------------- audit


def _add_audit(commands: Commands) -> None:
    audit = commands.add_parser(
        "audit", help="Compare the documented determinism of every op in torch's op database with measurements."
    )
    audit.set_defaults(command=_audit)
    which = audit.group("which ops")
    flags.words(which, "--ops", metavar="OP", text="Audit only the ops OP.")
    flags.several(
        which, "-k", "--filter", metavar="RE", text="Audit the ops whose name matches the regular expression RE."
    )
    text = f"Run on inputs of dtype T (default: {' '.join(DTYPES)})."
    which.add_argument("--dtypes", nargs="+", type=_dtype, metavar="T", help=text)
    flags.whole(which, "--samples", default=3, text="Run N inputs for each op and dtype.")
    text = "Add the kernels of the sweeps DIR."
    which.add_argument("--results", nargs="+", type=Path, default=[], metavar="DIR", help=text)
    run = audit.group("how each op runs")
    for add in extensions.flags_of("audit"):
        add(run)
    run.add_argument("-d", "--device", default="cpu", metavar="D", help="Run on device D: cpu, cuda, xpu, …")
    flags.whole(run, "--runs", least=2, default=20, text="Run each op N times under each setting.")
    flags.whole(
        run, "--threads", "-t", text="Call torch.set_num_threads(N) (default: on the CPU one a core, at least 8)."
    )
    flags.seed(run)
    flags.tracer(run)
    flags.whole(run, "--replays", least=2, default=20, text="Replay each experiment N times.")
    flags.seconds(run, "--budget", "Spend at most S seconds on the diagnosis of one op; 0 turns it off.", default=20.0)
    machinery = audit.group("the audit")
    machinery.add_argument(
        "--output", type=Path, metavar="DIR", help="Write results into DIR (default: a new folder in results/)."
    )
    machinery.add_argument("--resume", action="store_true", help="Complete the audit in --output.")
    flags.whole(machinery, "--jobs", default=1, text="Audit N ops at once.")
    flags.seconds(machinery, "--timeout", "Stop an op after S seconds.", least=1, default=120.0)
    text = "Write the rows into CSV as well, and the environment beside it."
    machinery.add_argument("--write", type=flags.file_to_write, metavar="CSV", help=text)
    flags.document(machinery)


def _dtype(text: str) -> str:
    if text not in KNOWN_DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype; it is one of: {', '.join(KNOWN_DTYPES)}")
    return text


def _audit(parsed: argparse.Namespace) -> int:
    from hashbench.core.run.environment import tracer_note
    from hashbench.core.sweep.request import local_devices
    from hashbench.tools.audit import driver
    from hashbench.tools.audit.audit_table import DETERMINISM, AuditOptions, kinds

    output = parsed.output or flags.new_folder("audit", parsed.device)
    driver.refuse_unusable(output, resume=parsed.resume)
    kind = parsed.device.partition(":")[0]
    measured = next((each for each in kinds() if getattr(parsed, each.asked_by, False)), DETERMINISM)
    sweep_rows = _rows_of_sweeps(parsed.results, kind)
    devices = local_devices(parsed.device, parsed.tracer)
    for note in devices.notes:
        say(note)
    racing = kind == "cpu" and measured.races
    threads = parsed.threads or (max(FEWEST_THREADS, os.cpu_count() or 1) if racing else None)
    dtypes = tuple(dict.fromkeys(parsed.dtypes or measured.dtypes or DTYPES))
    tracer = devices.environment.get("tracer", parsed.tracer)  # as it is resumed by
    options = made_of(AuditOptions, parsed, device=devices.device, dtypes=dtypes, threads=threads, tracer=tracer)
    try:
        rows = driver.audit(
            driver.AuditRequest(options, tuple(parsed.ops), tuple(parsed.filter), parsed.timeout, sweep_rows, measured),
            output=output,
            environment={**devices.environment, "command_line": [*masked(["hashbench", *sys.argv[1:]])]},
            resume=parsed.resume,
            executor=devices.executor(jobs=parsed.jobs),
            on_progress=_show,
        )
    except KeyboardInterrupt:
        return say(f"stopped: what is done is in {output}; go on with --resume", EXIT_INTERRUPTED)
    if note := tracer_note(devices.environment):
        say(note)
    if parsed.json:
        flags.show_document(_audited(rows, measured, output / measured.file), command="hashbench audit")
    else:
        flags.show(measured.reports().summary(rows))
        print(f"\nResults: {output / measured.file}")
    if parsed.write is not None:
        _copy(output, parsed.write, measured.file)
    return 0


def _audited(rows: Sequence[Any], measured: AuditKind, path: Path) -> Finding:
    """Return an audit as a finding, which differs where the text lists an op."""
    from hashbench.core.finding import Finding

    counts = Counter(str(row.verdict) for row in rows)
    listed = bool(measured.reports().findings(rows))
    return Finding(
        headline=f"{count(len(rows), 'row')}: {', '.join(f'{number} {word}' for word, number in counts.items())}",
        equal=bool(rows) and not listed,
        differs=listed,
        data={"results": str(path), "counts": dict(counts), "rows": [dataclasses.asdict(row) for row in rows]},
    )


def _show(done: int, total: int, note: str) -> None:
    say(f"{done} of {total} ops{'; ' if note else ''}{note}")


def _rows_of_sweeps(folders: Sequence[Path], device: str) -> tuple[AuditRow, ...]:
    if not folders:
        return ()
    from hashbench.core.results.load import csv_files

    for folder in folders:
        csv_files(folder)  # refuses what is not there before torch is imported
    from hashbench.tools.audit.rows import rows_of_sweeps

    return rows_of_sweeps(folders, device=device)


def _copy(output: Path, path: Path, file: str) -> None:
    """Copy the rows to ``path``, and their environment beside it."""
    from hashbench.core.io import read_file, replace_bytes

    beside = path.with_name(f"{path.stem}.environment.json")
    try:
        replace_bytes(path, read_file(output / file))
        replace_bytes(beside, read_file(output / "environment.json"))
    except OSError as error:
        raise HashbenchError(
            f"cannot write {path}", consequence=f"{error.strerror or error}; the rows are in {output}", tip=""
        ) from error
    print(f"Written: {path} and {beside.name}")
