"""The subcommand ``run``: run an unchanged program twice, and compare the runs."""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from hashbench.cli import flags
from hashbench.cli.parser import Commands
from hashbench.core.errors import HashbenchError
from hashbench.core.run.script import refuse_missing

_TIP = "Give the path of a script and its arguments, or -m and the name of a module."


def add(commands: Commands) -> None:
    """Add the subcommand."""
    text = "Run an unchanged program twice and name the first kernel, or printed line, that differs."
    run = commands.add_parser("run", help=text)
    flags.whole(run, "--runs", least=2, default=2, text="Run the program N times.")
    text = "Seed all random generators with N before the program begins (default: as the program does)."
    run.add_argument("--seed", type=flags.at_least(0, most=flags.LARGEST_SEED), default=None, metavar="N", help=text)
    text = "Compare the file F that the program writes, too."
    flags.several(run, "--compare-file", dest="files", metavar="F", text=text)
    text = "Trace the first N optimizer steps; of all steps, digests are compared."
    flags.whole(run, "--first-steps", least=1, default=3, text=text)
    run.add_argument("--why", action="store_true", help="Replay the kernel's call, for cause and advice.")
    flags.seconds(run, "--timeout", "Stop a run after S seconds (default: never).", least=1)
    text = "Keep traces and printed output in DIR, a new folder (default: nothing is kept)."
    run.add_argument("-o", "--output", type=Path, metavar="DIR", help=text)
    flags.report(run)
    run.add_argument("-m", "--module", action="store_true", help="Run SCRIPT as a module, as `python -m` does.")
    text = "Run SCRIPT; all that follows it are its arguments."
    run.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help=text)
    run.set_defaults(command=_run)


def _run(parsed: argparse.Namespace) -> int:
    words = parsed.script[1:] if parsed.script[:1] == ["--"] else list(parsed.script)
    if words[:1] == ["-m"]:
        parsed.module, words = True, words[1:]
    if not words:
        raise HashbenchError("no program to run", consequence="nothing was run", tip=_TIP)
    script, *arguments = words
    _refuse(script, parsed)
    from hashbench.extensions.watch.program.looks import ProgramLooks, RunRequest
    from hashbench.extensions.watch.program.task import Program
    from hashbench.extensions.watch.program.text import finding_of

    program = Program(script, tuple(arguments), parsed.module, parsed.seed)
    request = RunRequest(
        program,
        runs=parsed.runs,
        first_steps=parsed.first_steps,
        seconds=parsed.timeout,
        files=tuple(parsed.files),
        why=parsed.why,
    )
    with ExitStack() as stack:
        folder = parsed.output
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hashbench-")))
        else:
            _make(folder)
        with flags.phases_shown():
            verdict = ProgramLooks(request, folder.absolute()).verdict()
        found = finding_of(verdict, kept=parsed.output is not None)
        code = flags.show_finding(found, parsed, title="hashbench run", of=script)
    if parsed.output is not None and not parsed.json:
        print(f"\nWritten: {parsed.output}")
    return code


def _refuse(script: str, parsed: argparse.Namespace) -> None:
    """Refuse what cannot be run, before anything is imported."""
    refuse_missing(script, module=parsed.module, tip=_TIP)
    if parsed.output is not None and parsed.output.exists():
        raise HashbenchError(
            f"{parsed.output} exists",
            consequence="two recordings would be mixed, so nothing was run",
            tip="Name another --output.",
        )
    if "WORLD_SIZE" in os.environ and os.environ["WORLD_SIZE"] != "1":
        raise HashbenchError(
            "this is one rank of several",
            consequence="each would start runs of its own, so nothing was run",
            tip="Run `hashbench ranks run -n N -- SCRIPT` without torchrun.",
        )
    if not parsed.module:
        _refuse_recorder(Path(script))


def _refuse_recorder(script: Path) -> None:
    try:
        text = script.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise HashbenchError(f"cannot run {script}", consequence=f"{error.strerror or error}", tip=_TIP) from error
    for name, tip in (
        ("HashDebugTrace(", "Save its traces of two runs, and compare them: hashbench diff A.log B.log"),
        ("hashbench.watch(", "Run it twice, and compare the recordings: hashbench watch diff A B"),
        ("WatchCallback(", "Run it twice, and compare the recordings: hashbench watch diff A B"),
    ):
        if name in text:
            raise HashbenchError(
                f"{script} uses {name.removesuffix('(')} itself",
                consequence="a process holds one recording, so nothing was run",
                tip=tip,
            )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise HashbenchError(
            f"cannot make the folder {folder}", consequence=error.strerror or str(error), tip="Name another --output."
        ) from error
