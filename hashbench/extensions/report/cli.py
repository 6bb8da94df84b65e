"""``hashbench nightly``, ``report``, ``expect`` and ``merge``: what changed since the last night, and which changes are
expected."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hashbench.cli import flags, sweep
from hashbench.cli.flags import made_of, say
from hashbench.cli.parser import EXIT_DIFFERENCE, Commands, OneLineParser
from hashbench.cli.reading import add_suites, suites_to_sweep
from hashbench.core import extensions
from hashbench.core.catalog import INVARIANCES
from hashbench.core.commands import replay_command
from hashbench.core.errors import HashbenchError
from hashbench.core.io import write_file
from hashbench.core.records import MODES, SWEEP_MODES, ModelSpec, Row, flags_of_mode
from hashbench.core.text import masked

if TYPE_CHECKING:
    from hashbench.core.finding import Finding
    from hashbench.core.sweep.request import SweepRequest
    from hashbench.core.sweep.run import SweepResult
    from hashbench.extensions.report.expectations import JudgedNight
    from hashbench.extensions.report.nightly import Part


_SHOWN = 20
"""Number of rows that ``hashbench expect`` lists."""


def add(commands: Commands) -> None:
    """Add the subcommands of this file."""
    _add_nightly(
        commands.add_parser("nightly", help="Sweep all suites, compare with the night before, and write a report.")
    )
    _add_report(commands.add_parser("report", help="Report on one sweep or night, or on many nights."))
    _add_expect(commands.add_parser("expect", help="Update the baseline CSVs from a sweep."))


# ---------------------------------------------------------------------------------------------------- nightly


def _add_nightly(nightly: OneLineParser) -> None:
    nightly.set_defaults(command=_nightly)
    nightly.tip_for = _flag_of_sweep
    text = "Write nights into ROOT (default: results/nightly; with --backend results/nightly_BACKEND)."
    nightly.add_argument("--output", type=flags.folder_to_fill, metavar="ROOT", help=text)
    nightly.add_argument(
        "--label", default="", metavar="NAME", help="Call the night's folder in ROOT NAME (default: today's date)."
    )
    add_suites(nightly, default=["all"], otherwise="all")
    text = "Sweep in the modes MODE; …-invariance stands for `hashbench sweep --invariance …`."
    nightly.add_argument("--modes", nargs="+", choices=SWEEP_MODES, default=list(MODES), metavar="MODE", help=text)
    flags.models(nightly)
    flags.whole(nightly, "--jobs", text="Run N models at once (default: 1; on a cluster as many as fit).")
    for add_flags in extensions.flags_of("run", "stress", "compiled"):
        add_flags(nightly)
    nightly.set_defaults(backend="", stress=False)
    nightly.add_argument("--expected", type=Path, metavar="DIR", help="Compare with the baseline CSVs in DIR.")
    nightly.add_argument("--annotations", action="store_true", help="Print GitHub's workflow commands, too.")
    flags.document(nightly)
    nightly.add_argument("flags", nargs="*", metavar="-- FLAGS", help="Pass FLAGS to every `hashbench sweep`.")


def _flag_of_sweep(flag: str) -> str:
    """Return where to put a flag of ``sweep`` that ``nightly`` lacks; empty for other flags."""
    if flag not in _parser_of_sweep().names:
        return ""
    return f": flags of `hashbench sweep` follow a --, as in `hashbench nightly … -- {flag} …`"


def _parser_of_sweep() -> OneLineParser:
    parser = OneLineParser(prog="hashbench sweep")
    sweep.add_flags(parser)
    return parser


def _nightly(parsed: argparse.Namespace) -> int:
    from hashbench.core.suites.registry import listed_once

    with listed_once():
        return _night(parsed)


def _night(parsed: argparse.Namespace) -> int:
    from hashbench.core.report.sentence import next_of
    from hashbench.core.report.table import what_passing_means
    from hashbench.core.results.load import load_sweep
    from hashbench.core.sweep.request import diagnosis_servers
    from hashbench.extensions.report import nightly
    from hashbench.extensions.report.exports import as_annotations, as_summary
    from hashbench.extensions.report.verdict import finding_of

    # Nights of compiled models are compared with each other alone.
    parsed.output = parsed.output or Path("results") / "_".join(filter(None, ("nightly", parsed.backend)))
    folder = nightly.night_folder(parsed.output, parsed.label or time.strftime("%Y-%m-%d"))
    if parsed.expected is not None:
        load_sweep(parsed.expected)  # a mistake in it should not show in the morning
    parts = _with_models(parsed, nightly.plan(suites_to_sweep(parsed), parsed.modes, folder=folder))
    requests = _sweep_requests(parsed)
    _check_device(requests.values())
    rows: list[Row] = []

    ran: list[int] = []

    def run(part: Part) -> None:
        say(f"{part.suite}, {part.mode}", 0)
        result = _sweep_part(nightly.request_of(part, requests[part.mode]))
        ran.append(result.ran)
        rows.extend(result.rows)

    with nightly.claimed(folder):
        with diagnosis_servers(requests.values()):
            nightly.sweep_all(parts, folder=folder, sweep=run, command_line=[*masked(["hashbench", *sys.argv[1:]])])
        judged = nightly.report(parsed.output, folder=folder, expected=parsed.expected)
    if len(ran) == len(parts) and not any(ran) and (since := nightly.complete_since(parts)):
        say(f"this night is complete since {since:%Y-%m-%d %H:%M}, nothing was run", 0)
    reports = [str(folder / name) for name in (nightly.HTML_FILE, nightly.MARKDOWN_FILE, nightly.JUNIT_FILE)]
    commands = (_next_command(judged, parts, folder=folder, expected=parsed.expected),)
    if _is_shown(parsed):
        meaning = what_passing_means(rows)
        _show(parsed, finding_of(judged, commands=commands, reports=reports, meaning=meaning), "nightly")
    else:
        flags.show(as_summary(judged))
        if meaning := what_passing_means(rows):
            print(f"{meaning}\n")
        for path in reports:
            print(f"Report: {path}")
        for command in next_of(judged.clauses) or commands:
            print(f"Next: {command}")
    if parsed.annotations and not parsed.json:
        flags.show(as_annotations(judged), end="")
    return EXIT_DIFFERENCE if judged.got_worse else 0


def _is_shown(parsed: argparse.Namespace) -> bool:
    """Return True for a verdict that is shown as a finding: as JSON, or on a terminal, where nobody reads Markdown."""
    return parsed.json or flags.look_of(sys.stdout).width is not None


def _show(parsed: argparse.Namespace, finding: Finding, command: str) -> None:
    flags.show_finding(finding, argparse.Namespace(json=parsed.json, html=None), title=f"hashbench {command}")


def _check_device(requests: Iterable[SweepRequest]) -> None:
    """Raise if this machine lacks a device, tracer or backend, before the night has a folder. A cluster is not
    asked."""
    from hashbench.core.run.environment import collect_in_child
    from hashbench.core.sweep import LOCAL
    from hashbench.core.workers import WORKER_VARIABLES

    local = [request.options for request in requests if request.executor == LOCAL]
    for device, tracer, backend in {(options.device, options.tracer, options.backend) for options in local}:
        if device != "cpu" or tracer == "native" or backend:
            collect_in_child(device=device, variables=WORKER_VARIABLES, tracer=tracer, backend=backend)


def _with_models(parsed: argparse.Namespace, parts: Sequence[Part]) -> list[Part]:
    """Return the parts with any selected model; a suite that cannot be listed keeps its parts, with the reason."""
    from hashbench.core.suites import registry
    from hashbench.core.suites.selection import Selection

    catalog: list[ModelSpec] = []
    broken: dict[str, str] = {}
    for name in dict.fromkeys(part.suite for part in parts):
        try:
            catalog += registry.catalog(name)
        except HashbenchError as error:
            broken[name] = str(error)
    if all(part.suite in broken for part in parts):
        raise HashbenchError("no suite can be listed", consequence=next(iter(broken.values())))
    chosen = {(spec.suite, spec.name) for spec in made_of(Selection, parsed).of(catalog)}
    kept = []
    for part in parts:
        names = {name for suite, name in chosen if suite == part.name}
        if part.suite in broken:
            kept.append(replace(part, error=broken[part.suite]))
        elif names:
            kept.append(replace(part, only=tuple(name for name in parsed.only if name in names)))
    return kept


def _sweep_requests(parsed: argparse.Namespace) -> dict[str, SweepRequest]:
    """Return the sweep request of each mode from the flags after ``--``, without suites and output, which a night sets.

    Raises:
        HashbenchError: these flags contradict each other, or set what a night sets.
    """
    parser = _parser_of_sweep()
    parser.set_defaults(suite=[], which=parsed.which, jobs=parsed.jobs)
    requests = {}
    for mode in dict.fromkeys(parsed.modes):
        parser.set_defaults(stress=parsed.stress and mode not in INVARIANCES)
        made = parser.parse_args([*flags_of_mode(mode), *_compiler_flags(parsed, mode), *parsed.flags])
        if made.output or made.only or made.tiny or made.suite:
            raise HashbenchError(
                "--output, --suite, --only and --tiny are flags of `hashbench nightly` itself",
                consequence="after -- they would redirect a sweep; nothing was run",
                tip="Put them before the --.",
            )
        if made.batch_invariant and f"{made.invariance}-invariance" != mode:
            asked = (
                f"--invariance {made.invariance}"
                if mode in INVARIANCES or made.invariance != "batch"
                else "--batch-invariant"
            )
            modes = [f"{name}-invariance" for name in flags.invariances_of(made.invariance)]
            raise HashbenchError(
                f"{asked} after -- contradicts --modes {mode}",
                consequence="its rows would go into the folder of another mode; nothing was run",
                tip=f"Leave it out, and add {' '.join(modes)} to --modes.",
            )
        made.filters, made.excludes = [*parsed.filters, *made.filters], [*parsed.excludes, *made.excludes]
        requests[mode] = sweep.request_of(made, suites=(), output=parsed.output)
        replace(requests[mode].selection, only=tuple(parsed.only)).refuse_contradictions()
    return requests


def _compiler_flags(parsed: argparse.Namespace, mode: str) -> list[str]:
    """Return the flags of ``sweep`` for compiled models in a mode.

    Raises:
        HashbenchError: invariances of compiled models are not checked.
    """
    if parsed.backend and mode in INVARIANCES:
        raise HashbenchError(
            f"--backend cannot be combined with --modes {mode}",
            consequence="nothing was run",
            tip="Sweep compiled models in a night of their own.",
        )
    return ["--backend", parsed.backend, "--compilations", str(parsed.compilations)] if parsed.backend else []


def _next_command(judged: JudgedNight, parts: Sequence[Part], *, folder: Path, expected: Path | None) -> str:
    """Return what to run after a night: the repro of the first model that differs, a new one before others, else its
    sweep alone, else the update of the baseline."""
    from hashbench.core.text import is_replayable

    suites = {(part.name, part.mode): part.suite for part in parts}
    troubled = [judgement for judgement in judged.judgements if judgement.in_trouble and judgement.new is not None]
    for judgement in judged.new_trouble or [judgement for judgement in troubled if judgement.worse] or troubled:
        row = judgement.new
        if row is None:
            continue
        where = folder / f"{row.suite}_{row.mode}"
        if is_replayable(row):
            return replay_command(where / row.repro, files=suites.values())
        suite = suites.get((row.suite, row.mode), row.suite)
        backend = ["--backend", row.backend] if row.backend else []
        words = ["hashbench", "sweep", *flags_of_mode(row.mode), *backend, "--suite", suite, "--only", row.name]
        return shlex.join(words)
    return shlex.join(["hashbench", "expect", str(folder), "--output", str(expected or "expected")])


def _sweep_part(request: SweepRequest) -> SweepResult:
    """Run one sweep and return its result; its table is printed on standard error, beside the report."""
    from hashbench.core.sweep.run import SweepInterrupted

    try:
        with contextlib.redirect_stdout(sys.stderr):
            return sweep.run(request, footer=False)
    except HashbenchError as error:
        say(str(error), 0)
        raise
    except SweepInterrupted as stopped:
        raise KeyboardInterrupt from stopped
    except Exception as error:
        traceback.print_exc()
        raise HashbenchError(
            f"a fault of hashbench ({type(error).__name__}: {error})", tip="Please report it with the trace."
        ) from error


# ----------------------------------------------------------------------------------------------------- report


def _add_report(report: OneLineParser) -> None:
    report.set_defaults(command=_report)
    report.add_argument(
        "folders", nargs="+", type=Path, metavar="DIR", help="Read DIR: a sweep, a night, a folder of nights, or a CSV."
    )
    report.add_argument(
        "--format",
        choices=("markdown", "benchmark-results"),
        default="markdown",
        help="Print Markdown, or the JSON that PyTorch's benchmark database reads.",
    )
    report.add_argument("--html", type=Path, metavar="FILE", help="Write one self-contained HTML page into FILE.")
    report.add_argument(
        "--markdown", type=Path, metavar="FILE", help="Write a Markdown summary into FILE (default: print it)."
    )
    report.add_argument(
        "--junit", type=Path, metavar="FILE", help="Write JUnit XML into FILE, with a test case for each model."
    )
    report.add_argument("--annotations", action="store_true", help="Print GitHub's workflow commands.")
    report.add_argument("--expected", type=Path, metavar="DIR", help="Compare with the baseline CSVs in DIR.")
    report.add_argument(
        "--strict",
        action="store_true",
        help="Exit with 1 if anything got worse or, in one sweep alone, differs or fails.",
    )
    flags.document(report)


def _report(parsed: argparse.Namespace) -> int:
    from hashbench.extensions.report import nightly
    from hashbench.extensions.report.benchmark_results import as_benchmark_results
    from hashbench.extensions.report.expectations import assess
    from hashbench.extensions.report.exports import as_annotations, as_markdown
    from hashbench.extensions.report.verdict import finding_of, headline

    judged = assess(parsed.folders, expected=parsed.expected)
    for path, form in (
        (parsed.html, nightly.html_of),
        (parsed.markdown, as_markdown),
        (parsed.junit, nightly.junit_of),
    ):
        if path:
            write_file(path, form(judged), tip=nightly.OTHER_FOLDER)
    if parsed.format == "benchmark-results":
        flags.show(as_benchmark_results(judged), end="")
    elif parsed.annotations:
        flags.show(as_annotations(judged), end="")
    elif parsed.json or (_is_shown(parsed) and not (parsed.html or parsed.markdown or parsed.junit)):
        _show(parsed, finding_of(judged), "report")
    elif not (parsed.html or parsed.markdown or parsed.junit):
        flags.show(as_markdown(judged), end="")
    else:
        flags.show(f"{judged.night.label}: {headline(judged)}")
    return EXIT_DIFFERENCE if parsed.strict and judged.failed else 0


# ----------------------------------------------------------------------------------------------------- expect


def _add_expect(expect: OneLineParser) -> None:
    expect.set_defaults(command=_expect)
    expect.add_argument(
        "results", nargs="+", type=Path, metavar="RESULTS", help="Read RESULTS: a sweep, a night, or a CSV."
    )
    expect.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="PATH",
        help="Write into PATH: a CSV, or a folder of one CSV for each suite, mode and device.",
    )
    expect.add_argument("--only", nargs="+", default=[], action="extend", metavar="M", help="Update only the models M.")
    expect.add_argument(
        "--link", default="", metavar="URL", help="Link new and changed rows that do not pass to the issue at URL."
    )


def _expect(parsed: argparse.Namespace) -> int:
    from hashbench.core.text import count, join_limited
    from hashbench.extensions.report.expected_rows import expect_from

    for path, written in expect_from(
        parsed.results, output=parsed.output, only=parsed.only, link=parsed.link, today=time.strftime("%Y-%m-%d")
    ):
        counts = ", ".join(f"{number} {what}" for what, number in written.what.items())
        flags.show(f"{path}: {count(len(written.rows), 'row')}: {counts}")
        if written.taken:
            left = join_limited(written.left) or "nothing"
            flags.show(f"  taken: {join_limited(written.taken)}; not named, so left as it was: {left}")
        for line in written.accepted[:_SHOWN]:
            flags.show(f"  {line}")
        if len(written.accepted) > _SHOWN:
            flags.show(f"  and {len(written.accepted) - _SHOWN} more, in {path}")
    return 0
