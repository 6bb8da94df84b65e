"""The subcommands ``run`` and ``watch``: compare runs of a program, and recordings of training loops."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hashbench.cli import flags
from hashbench.cli.parser import Commands, OneLineParser
from hashbench.core.errors import HashbenchError
from hashbench.extensions.watch.program import cli as program

if TYPE_CHECKING:
    from hashbench.extensions.watch.resume import ResumeVerdict


def add(commands: Commands) -> None:
    """Add the subcommands ``run`` and ``watch``."""
    program.add(commands)
    text = "Find the first training step that differs between two runs, and what differs in it."
    watch = commands.add_parser("watch", help=text)
    kinds = Commands(watch, "diff|resume")
    _add_diff(kinds.add_parser("diff", help="Compare the recordings of two runs, and their traces of steps."))
    _add_resume(kinds.add_parser("resume", help="Find what a resumed training did not restore."))


def _add_diff(diff: OneLineParser) -> None:
    diff.add_argument("first", type=Path, metavar="A", help="Read the recording of one run from the folder A.")
    diff.add_argument("second", type=Path, metavar="B", help="Read the recording of the second run from B.")
    text = "Compare further runs C with the first as well, for the rate."
    diff.add_argument("further", type=Path, nargs="*", metavar="C", help=text)
    flags.report(diff)
    diff.set_defaults(command=_diff)


def _diff(parsed: argparse.Namespace) -> int:
    from hashbench.extensions.watch.text import finding_of
    from hashbench.extensions.watch.traced import compare_folders

    verdict = compare_folders(parsed.first, parsed.second, further=parsed.further)
    page: dict[str, Any] = {}
    if parsed.html is not None:
        from hashbench.extensions.watch.page import figures_of

        page = {"of": f"{parsed.first} and {parsed.second}", **figures_of(verdict)}
    return flags.show_finding(finding_of(verdict), parsed, title="hashbench watch diff", **page)


def _add_resume(resume: OneLineParser) -> None:
    text = "Read the recording of the uninterrupted run from A; or run the script A.py whole, stopped and resumed."
    resume.add_argument("first", type=Path, metavar="A", help=text)
    text = "Read the recording of the resumed run from B; or pass B to the script, with {run} for the folder of a run."
    resume.add_argument("rest", nargs="*", metavar="B", help=text)
    resume.after_dashes = "rest"
    flags.whole(resume, "--at", least=0, text="Take step N as the first of the resumed run.")
    text = "Run the script for N steps after that one, and compare them (default: 8)."
    flags.whole(resume, "--steps", least=1, text=text)
    text = "Write runs and recordings into DIR, a new folder (default: results/<date>_<time>_resume)."
    resume.add_argument("--output", type=Path, metavar="DIR", help=text)
    flags.report(resume)
    resume.set_defaults(command=_resume)


def _resume(parsed: argparse.Namespace) -> int:
    from hashbench.extensions.watch import resume

    if parsed.steps is not None and parsed.first.suffix != ".py":
        raise HashbenchError(
            "--steps N is for scripts",
            consequence="nothing was compared",
            tip="Of two recordings, all steps are compared that both have.",
        )
    if parsed.first.suffix == ".py":
        verdict = _resume_script(parsed)
    elif len(parsed.rest) == 1:
        verdict = resume.judge_folders(parsed.first, Path(parsed.rest[0]), at=parsed.at)
    else:
        raise HashbenchError(
            f"watch resume needs the folders of two recordings, got {1 + len(parsed.rest)}",
            consequence="nothing was compared",
            tip="Name the uninterrupted run and the resumed one, or a Python script.",
        )
    return flags.show_finding(resume.finding_of(verdict), parsed, title="hashbench watch resume")


def _resume_script(parsed: argparse.Namespace) -> ResumeVerdict:
    from hashbench.extensions.watch.rerun import STEPS, resume

    if parsed.at is None:
        raise HashbenchError(
            "watch resume needs --at N", consequence="nothing was run", tip="N is the step at which the run is stopped."
        )
    output = parsed.output or flags.new_folder("resume", parsed.first.stem)
    with flags.phases_shown():
        return resume(parsed.first, parsed.rest, at=parsed.at, output=output, steps=parsed.steps or STEPS)
