"""The subcommand ``ranks``: record every rank of a distributed program, compare two such runs, and check one for
replicas that differ."""

from __future__ import annotations

import argparse
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hashbench.cli import flags
from hashbench.cli.flags import say
from hashbench.cli.parser import EXIT_USAGE, Commands, Flags
from hashbench.core.errors import HashbenchError
from hashbench.core.processes import python_calling, uncollected
from hashbench.core.text import count

if TYPE_CHECKING:
    from hashbench.core.records import Trace
    from hashbench.extensions.ranks.notes import NamedCall, Repro
    from hashbench.extensions.ranks.verdict import RanksVerdict

FIRST, SECOND, THIRD = "first", "second", "third"
"""Folders of the two runs, in the output of ``run``, and of the one in which a call is captured."""


def add(commands: Commands) -> None:
    """Add the subcommand of this file."""
    text = "Find the first rank and kernel, or collective, of two distributed runs that differ."
    kinds = Commands(commands.add_parser("ranks", help=text), "record|diff|run|check")

    text = "Run a script and write the trace of this rank; start it on every rank with torchrun."
    record = kinds.add_parser("record", help=text)
    record.add_argument("-o", "--output", type=Path, required=True, metavar="A", help="Write A/rank0.log.gz and so on.")
    _add_recording(record)
    text = "Keep the call of the record ID, on rank R alone if given, and write its repro into A/repro."
    flags.several(record, "--capture", metavar="ID[@R]", text=text)
    _add_script(record)
    record.set_defaults(command=_record)

    diff = kinds.add_parser("diff", help="Compare two recorded runs: the first rank and kernel, and how it spread.")
    diff.add_argument("first", type=Path, metavar="A", help="Read the traces of one run from the folder A.")
    diff.add_argument("second", type=Path, metavar="B", help="Read the traces of the second run from the folder B.")
    flags.report(diff)
    diff.set_defaults(command=_diff)

    run = kinds.add_parser("run", help="Record a script twice on N ranks of this machine and compare the runs.")
    flags.whole(run, "-n", "--ranks", text="Run N ranks.", default=2)
    text = "Write the traces into DIR/first and DIR/second (default: a new folder in results)."
    run.add_argument("-o", "--output", type=flags.folder_to_fill, metavar="DIR", help=text)
    _add_recording(run)
    flags.seconds(run, "--timeout", "Stop a run after S seconds (default: never).", least=1)
    flags.report(run)
    _add_script(run)
    run.set_defaults(command=_run)

    text = "Check one recorded run for replicas, such as parameters under DDP, that differ between ranks."
    check = kinds.add_parser("check", help=text)
    check.add_argument("folder", type=Path, metavar="A", help="Read the traces of the run from the folder A.")
    flags.report(check)
    check.set_defaults(command=_check)


def _add_recording(parser: Flags) -> None:
    text = "Trace only steps A to B - 1 of the optimizer, counted from 0."
    parser.add_argument("--steps", type=steps_of, metavar="A:B", help=text)
    text = "Record the line of the script behind every op; slower."
    parser.add_argument("--source-lines", action="store_true", help=text)


def _add_script(parser: Flags) -> None:
    parser.add_argument("-m", "--module", action="store_true", help="Run SCRIPT as a module, as `python -m` does.")
    text = "Run SCRIPT; all that follows it are its arguments."
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help=text)


def steps_of(text: str) -> range:
    """Return the steps in a value of ``--steps``: ``2:4``, ``2:`` (and all later ones), ``:4`` or ``3``.

    Raises:
        argparse.ArgumentTypeError: it is no such value, or no step.
    """
    first, colon, last = text.partition(":")
    try:
        start = int(first or 0) if colon else int(first)
        steps = range(start, int(last) if last else sys.maxsize if colon else start + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 2:4") from None
    if start < 0 or not steps:
        raise argparse.ArgumentTypeError(f"{text} has no steps")
    return steps


def _script(parsed: argparse.Namespace) -> tuple[str, list[str]]:
    """Return the script or module and its arguments.

    Raises:
        HashbenchError: none is named.
    """
    words = parsed.script[1:] if parsed.script[:1] == ["--"] else list(parsed.script)
    if words[:1] == ["-m"]:
        parsed.module, words = True, words[1:]
    if not words:
        tip = "Name it last: hashbench ranks … -- train.py --epochs 1"
        raise HashbenchError("no script to run", consequence="nothing was recorded", tip=tip)
    return words[0], words[1:]


def _record(parsed: argparse.Namespace) -> int:
    from hashbench.extensions.ranks.record import run_script

    script, arguments = _script(parsed)
    try:
        run_script(
            parsed.output,
            script,
            arguments,
            steps=parsed.steps,
            module=parsed.module,
            source_lines=parsed.source_lines,
            capture=parsed.capture,
        )
    except (HashbenchError, KeyboardInterrupt):
        raise
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()  # of the script, as Python does
        return 1
    return 0


def _diff(parsed: argparse.Namespace) -> int:
    from hashbench.extensions.ranks.text import diff_finding

    verdict, _ = _compared(parsed.first, parsed.second)
    of = f"{parsed.first} and {parsed.second}"
    return flags.show_finding(diff_finding(verdict), parsed, title="hashbench ranks diff", of=of)


def _compared(first: Path, second: Path) -> tuple[RanksVerdict, Mapping[int, Trace]]:
    """Return the verdict on two recordings, and the traces of the first."""
    from hashbench.extensions.ranks.find import find_across_ranks
    from hashbench.extensions.ranks.folder import read_both
    from hashbench.extensions.ranks.printing import compare_prints

    with uncollected():  # of 320,000 records nothing is garbage
        runs = read_both(first, second)
        for note in (note for run in runs for note in run.notes):
            say(note)
        printed = compare_prints(first, second, sorted({*runs[0].traces} & {*runs[1].traces}))
        verdict = find_across_ranks(runs[0].traces, runs[1].traces, world_size=runs[0].world_size, printed=printed)
    return verdict, runs[0].traces


def _say_each(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        say(sentence)


def _check(parsed: argparse.Namespace) -> int:
    from hashbench.extensions.ranks.folder import read_ranks
    from hashbench.extensions.ranks.replicas import check_replicas
    from hashbench.extensions.ranks.text import check_finding

    run = read_ranks(parsed.folder)
    for note in run.notes:
        say(note)
    found = check_finding(check_replicas(run.traces))
    return flags.show_finding(found, parsed, title="hashbench ranks check", of=str(parsed.folder))


def _run(parsed: argparse.Namespace) -> int:
    from hashbench.core.run.script import refuse_missing
    from hashbench.extensions.ranks.notes import REPRO, calls_to_capture, guilty_of
    from hashbench.extensions.ranks.replicas import check_replicas
    from hashbench.extensions.ranks.text import diff_finding

    script, _ = _script(parsed)
    refuse_missing(script, module=parsed.module)
    output = parsed.output or flags.new_folder("ranks")
    folders = output / FIRST, output / SECOND
    _refuse_used([*folders, output / THIRD, output / REPRO])
    problems = [_run_once(parsed, folder, number) for number, folder in enumerate(folders, 1)]
    verdict, traces = _compared(*folders)
    guilty = guilty_of(verdict)
    repro = None if guilty is None else _captured(parsed, output, calls_to_capture(guilty, traces))
    replicas = check_replicas(traces) if verdict.equal and len(traces) > 1 else None
    found = diff_finding(verdict, repro=repro, replicas=replicas, with_lines=_with_lines(parsed))
    code = flags.show_finding(found, parsed, title="hashbench ranks run", of=script)
    if not parsed.json:
        print(f"\nWritten: {output}")
    return code or (EXIT_USAGE if any(problems) else 0)


def _run_once(parsed: argparse.Namespace, folder: Path, number: int, calls: Sequence[NamedCall] = ()) -> str:
    """Record the script once; say what went wrong, and return it.

    Raises:
        HashbenchError: it is the first run, and the second would not say more.
    """
    from hashbench.extensions.ranks.launch import run_ranks

    script, arguments = _script(parsed)
    command = _rank_command(folder, parsed, script, arguments, capture=calls)
    say(f"run {number} of {script} on {count(parsed.ranks, 'rank')}: recording into {folder}")
    end = run_ranks(command, ranks=parsed.ranks, seconds=parsed.timeout, folder=folder)
    what, is_there = f"run {number} of {script}: {end.problem}", any(folder.glob("rank*.log.gz"))
    if number == 1 and end.waiting:
        _say_each(end.waiting)
        tip = f"Give more with --timeout. Its whole steps: hashbench ranks check {folder}" if is_there else ""
        raise HashbenchError(what, consequence="a second run would take as long, so nothing was compared", tip=tip)
    if number == 1 and end.problem and not is_there:
        consequence = "no rank recorded anything, so nothing was compared"
        raise HashbenchError(what, consequence=consequence, tip="See what the ranks printed, above.")
    if end.problem:
        say(what)
        _say_each(end.waiting)
    return end.problem


def _with_lines(parsed: argparse.Namespace) -> str:
    """Return the command of both runs with source lines; empty where they have them."""
    script, arguments = _script(parsed)
    steps = () if parsed.steps is None else ("--steps", _steps_word(parsed.steps))
    seconds = () if parsed.timeout is None else ("--timeout", f"{parsed.timeout:g}")
    module = ("-m",) if parsed.module else ()
    words = ["-n", str(parsed.ranks), "--source-lines", *steps, *seconds, *module, "--", script, *arguments]
    return "" if parsed.source_lines else shlex.join(["hashbench", "ranks", "run", *words])


def _steps_word(steps: range) -> str:
    """Return the value of ``--steps``."""
    return f"{steps.start}:{'' if steps.stop == sys.maxsize else steps.stop}"


def _captured(parsed: argparse.Namespace, output: Path, calls: Sequence[NamedCall]) -> Repro:
    """Run the script once more and capture these calls, on the rank of a kernel or on all ranks of a collective."""
    from hashbench.extensions.ranks.notes import REPRO, Repro, read_notes

    if not calls:
        return Repro(reproduced="none: a message is not repeated")
    third = output / THIRD
    say(f"once more, to capture {calls[0].word()}")
    _run_once(parsed, third, 3, calls)
    notes = read_notes(third, calls)
    if len(notes) < len(calls) or not all(note.written for note in notes):
        return Repro(
            reproduced=next((note.words for note in notes if not note.written), "not captured: no rank says why")
        )
    repro = (third / REPRO).rename(output / REPRO)
    note = notes[0]
    words = _repeated(repro, note.members) if note.members else note.words
    return Repro(str(repro), words, note.command(repro))


def _repeated(repro: Path, members: int) -> str:
    """Repeat a collective with the contributions of the ranks; say how often it differs."""
    from hashbench.extensions.ranks.contributions import repeated_alone

    repeated = repeated_alone("contributions", repro, members=members)
    return f"{repeated.differing} of {repeated.trials} repetitions differ" if repeated.ran else repeated.note


def _rank_command(
    folder: Path,
    parsed: argparse.Namespace,
    script: str,
    arguments: Sequence[str],
    *,
    capture: Sequence[NamedCall] = (),
) -> list[str]:
    """Return what each rank runs."""
    given = [] if parsed.steps is None else ["--steps", _steps_word(parsed.steps)]
    given += ["--source-lines"] if parsed.source_lines else []
    given += [word for call in capture for word in ("--capture", call.word())]
    given += ["--module"] if parsed.module else []
    words = ["ranks", "record", "--output", str(folder.absolute()), *given, "--", script, *arguments]
    return python_calling("hashbench.cli:main_with", *words, safe_path=False)


def _refuse_used(folders: Sequence[Path]) -> None:
    if used := [folder for folder in folders if folder.exists()]:
        raise HashbenchError(
            f"{used[0]} exists",
            consequence="traces of two recordings would be mixed, so nothing was run",
            tip="Name another --output.",
        )
