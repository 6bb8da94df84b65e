"""``hashbench sweep``: its flags, the request that they make, and its progress on the screen.

The ``dest`` of a flag is the name of the field of ``Selection``, ``RunOptions``, ``SweepRequest`` or ``RayCluster``
that it sets; nothing else connects them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import shlex
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from hashbench.cli import flags
from hashbench.cli.flags import at_least, made_of, say
from hashbench.cli.parser import EXIT_DIFFERENCE, EXIT_INTERRUPTED, Commands, Flags, OneLineParser
from hashbench.cli.reading import add_suites, suites_to_sweep
from hashbench.core import extensions
from hashbench.core.catalog import Status, kind_of
from hashbench.core.commands import replay_command
from hashbench.core.errors import HashbenchError
from hashbench.core.extensions import shown
from hashbench.core.records import Row, RunOptions
from hashbench.core.results.folder import refuse_links
from hashbench.core.sweep import EXECUTORS, LOCAL
from hashbench.core.sweep.executors import RayCluster
from hashbench.core.sweep.run import (
    Event,
    ModelFinished,
    ModelLost,
    ModelRequeued,
    ModelStarted,
    SweepInterrupted,
    SweepOpened,
    SweepPlanned,
    SweepResult,
)
from hashbench.core.text import count, duration, is_replayable, join_limited, masked, mebibytes, one_line

if TYPE_CHECKING:
    from hashbench.core.sweep.request import SweepRequest

USAGE = """\
hashbench sweep (--training | --inference) [--suite S ...] [FLAG ...]

example: hashbench sweep --training --suite zoo.py --output results/mine"""

_OF_RAY = ("address", "resources", "gpus", "patience")
"""Fields of ``RayCluster`` that flags set."""

_SHOWN = 6
"""Number of running models that are named: a cluster runs more than fit into a line."""

_LONGEST_ERROR = 400
"""Characters of an error in a line of progress."""

TICK_SECONDS = 1.0
SPARSE_SECONDS = 30.0
"""Off a terminal: seconds that a model must run, and seconds of silence, before a line reports progress."""

_WORTH_SAYING = 2
"""Seconds after which a running model is shown with its time."""

_NO_COUNTS = str.maketrans("", "", "0123456789/")


def add(commands: Commands) -> None:
    """Add the subcommand of this file."""
    text = "Run the models of a suite twice and write accuracy.csv."
    add_flags(commands.add_parser("sweep", help=text, usage=USAGE))


def _sweep(parsed: argparse.Namespace) -> int:
    names = [*(Path(suite).stem for suite in parsed.suite), *(["tiny"] if parsed.tiny else [])]
    if _invariant(parsed) and parsed.mode == "training":
        say("--batch-invariant always runs forward only, in eval mode, also with --training")
    invariances = flags.invariances_of(parsed.invariance) if _invariant(parsed) else ("",)
    mode = parsed.mode if not _invariant(parsed) else "-".join((*invariances, "invariance"))
    output = parsed.output or flags.new_folder("+".join(names), mode)
    swept: list[tuple[SweepRequest, SweepResult]] = []
    for invariance in invariances:  # several: a folder each, which reports and comparisons read as one sweep
        if invariance:
            parsed.invariance = invariance
        folder = output if len(invariances) == 1 else output / f"{invariance}-invariance"
        if folder != output:  # which the user did not name
            refuse_links([folder])
        try:
            request = request_of(parsed, suites=suites_to_sweep(parsed), output=folder)
            result = run(request, table=not parsed.json, footer=invariance == invariances[-1])
        except SweepInterrupted as stopped:
            message = f"stopped: {stopped.done} of {stopped.total} rows are in {stopped.output}; go on with --resume"
            return say(message, EXIT_INTERRUPTED)
        swept.append((request, result))
    if parsed.json:
        _show_document(swept)
    worse = any(not kind_of(shown(row).accuracy).is_fine for _, result in swept for row in result.rows)
    return EXIT_DIFFERENCE if parsed.strict and worse else 0


def _show_document(swept: Sequence[tuple[SweepRequest, SweepResult]]) -> None:
    """Print all rows of some sweeps as one JSON document."""
    from hashbench.core.report.document import sweep_finding

    asked = {id(row): request for request, result in swept for row in result.rows}
    rows = [row for _, result in swept for row in result.rows]
    commands = {shown(row): command_for(asked[id(row)], row) for row in rows}
    found = sweep_finding(rows, folders=[result.output for _, result in swept], command=lambda row: commands[row])
    flags.show_document(found, command="hashbench sweep")


def run(request: SweepRequest, *, table: bool = True, footer: bool = True) -> SweepResult:
    """Run a sweep and show its progress on standard error; ``table``: print the table, ``footer``: also what passing
    means."""
    from hashbench.core.report.table import sweep_table
    from hashbench.core.sweep import request as requests

    with Progress() as progress:
        result = requests.run(request, on_event=progress, on_note=say)
    if not table:
        return result
    look = flags.look_of(sys.stdout)
    command = functools.partial(command_for, request)
    more: dict[str, Any] = {"width": look.width, "colour": look.colour, "footer": footer}
    print(sweep_table(result.rows, folder=result.output, command=command, **more))
    print(f"\nResults: {result.output / 'accuracy.csv'}")
    return result


def command_for(request: SweepRequest, row: Row) -> str:
    """Return the command that reruns a row: its repro, else the sweep of its model alone under the same flags."""
    if is_replayable(row):
        return replay_command(request.output / row.repro, files=request.selection.suites)
    if row.repro:
        return shlex.join(["python", str(request.output / row.repro / "repro.py")])
    suite = next((suite for suite in request.selection.suites if Path(suite).stem == row.suite), row.suite)
    options = request.options
    if request.jobs not in (None, 1) and options.threads is None:
        options = replace(options, threads=row.threads)  # several at once have fewer than one alone
    if not options.diagnose_budget:
        options = replace(options, diagnose_budget=RunOptions().diagnose_budget)  # one model alone has the time
    parser = OneLineParser()
    add_flags(parser)
    words = ["hashbench", "sweep", "--suite", suite, "--only", row.name]
    for action in parser.flags:
        value = options.model_mode if action.dest == "mode" else getattr(options, action.dest, None)
        if action.const is not None and (value == action.const or (isinstance(value, tuple) and action.const in value)):
            words.append(action.option_strings[0])
        elif action.const is None and value not in (None, "", action.default):
            words += [action.option_strings[0], f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def request_of(parsed: argparse.Namespace, *, suites: Sequence[str], output: Path) -> SweepRequest:
    """Return the sweep request that the flags describe.

    Raises:
        HashbenchError: the flags contradict each other.
    """
    from hashbench.core.suites.selection import Selection
    from hashbench.core.sweep.request import SweepRequest

    return made_of(
        SweepRequest,
        parsed,
        selection=made_of(Selection, parsed, suites=tuple(suites)),
        options=_options(parsed),
        output=output,
        command_line=masked(["hashbench", *sys.argv[1:]]),
        cluster=_cluster(parsed),
    )


def _options(parsed: argparse.Namespace) -> RunOptions:
    options = made_of(RunOptions, parsed, output="")
    if not _invariant(parsed):
        return options
    invariance, *further = flags.invariances_of(parsed.invariance)
    if further:
        raise HashbenchError(
            f"--invariance {parsed.invariance} asks for several sweeps here",
            consequence="nothing was run",
            tip="Name one invariance, or let --modes name several.",
        )
    return replace(options, mode=f"{invariance}-invariance")


def _invariant(parsed: argparse.Namespace) -> bool:
    """Return whether an invariance was asked for."""
    return getattr(parsed, "batch_invariant", False)


def _cluster(parsed: argparse.Namespace) -> RayCluster:
    given = {name: value for name in _OF_RAY if (value := getattr(parsed, name, None)) is not None}
    return RayCluster(**{**given, "resources": dict(given.get("resources", ()))})


# ------------------------------------------------------------------------------------------------------ flags


def add_flags(sweep: OneLineParser) -> None:
    """Add all flags of the subcommand."""
    sweep.set_defaults(command=_sweep)
    modes = sweep.exclusive(required=True)
    for mode, text in (
        ("training", "Run forward, loss, backward and optimizer step."),
        ("inference", "Run forward only."),
    ):
        modes.add_argument(f"--{mode}", dest="mode", action="store_const", const=mode, help=text)
    _add_selection(sweep.group("which models"))
    _add_run(sweep.group("how each model runs"))
    _add_diagnosis(sweep.group("why runs differ"))
    _add_machinery(sweep.group("the sweep"))


def _add_selection(which: Flags) -> None:
    add_suites(which, default=["torchvision"], otherwise="torchvision")
    flags.models(which)
    flags.several(which, "--exclude-exact", metavar="M", text="Exclude the model M.")
    flags.whole(which, "--total-partitions", default=1, text="Split the models into N partitions.")
    which.add_argument(
        "--partition-id", type=at_least(0), default=0, metavar="I", help="Run partition I, counted from 0."
    )


def _add_run(run: Flags) -> None:
    text = (
        "Run on device D: cpu, cuda, xpu, …; with cuda, workers share all devices of one kind, with cuda:1 only that."
    )
    run.add_argument("-d", "--device", "--devices", default="cpu", metavar="D", help=text)
    flags.dtype(run)
    flags.whole(run, "--batch-size", text="Override the batch size of every model with N.")
    flags.whole(run, "--iterations", text="Run N iterations of each model (default: 2).")
    flags.whole(
        run,
        "--runs",
        least=2,
        text="Run each model N times and compare with the first run (default: 2, or as the model asks).",
    )
    flags.whole(run, "--threads", "-t", text="Call torch.set_num_threads(N).")
    flags.seed(run)
    flags.deterministic(run)
    text = "Train on the model's own loss, or on a random projection of its outputs."
    run.add_argument("--cotangent", choices=("ones", "random"), default="ones", help=text)
    flags.tracer(run)
    run.add_argument("--hash-inputs", action="store_true", help="Hash the inputs of ops as well as their outputs.")
    run.add_argument(
        "--untraced-pair",
        action="store_true",
        help="Compare two runs without tracing, too: the Python tracer may hide a difference.",
    )
    for add in extensions.flags_of("run"):
        add(run)
    run.add_argument("--keep-traces", action="store_true", help="Keep the traces of passing models, too.")


def _add_diagnosis(why: Flags) -> None:
    flags.whole(why, "--replays", least=2, default=20, text="Replay each experiment at least N times.")
    text = "Spend at most S seconds on the diagnosis of one model; 0 turns it off."
    flags.seconds(why, "--diagnose-budget", text, default=120.0)
    text = "Capture calls of at most MIB mebibytes for the diagnosis."
    kind = at_least(0, float)
    why.add_argument("--capture-limit", dest="capture_mib", type=kind, default=2048.0, metavar="MIB", help=text)
    why.add_argument(
        "--all-sources", action="store_true", help="Name every independent source of differences, not only the first."
    )


def _add_machinery(machinery: Flags) -> None:
    machinery.add_argument(
        "--output", type=Path, metavar="DIR", help="Write results into DIR (default: a new folder in results/)."
    )
    machinery.add_argument("--resume", action="store_true", help="Complete the sweep in --output.")
    text = "Run N models at once, each on its own cores (default: 1; on a cluster as many as fit)."
    flags.whole(machinery, "--jobs", text=text)
    text = "Run models here or on a cluster."
    machinery.add_argument("--executor", choices=tuple(EXECUTORS), default=LOCAL, help=text)
    text = "Limit the memory of concurrent models to MIB mebibytes (default: 90 %% of what is free)."
    kind = at_least(1, float)
    machinery.add_argument("--memory-limit", dest="memory_mib", type=kind, metavar="MIB", help=text)
    text = "Schedule longest first by the timings of the sweep DIR|CSV (default: the newest of this kind nearby)."
    machinery.add_argument("--times-from", type=Path, metavar="DIR|CSV", help=text)
    text = "Retry models that crashed or ran out of memory up to N times, in isolation."
    flags.whole(machinery, "--retries", least=0, default=1, text=text)
    flags.seconds(machinery, "--timeout", "Stop a model after S seconds.", least=0.1, default=2000.0)
    for add in extensions.flags_of("sweep"):
        add(machinery)
    machinery.add_argument("--strict", action="store_true", help="Exit with 1 if any model does not pass.")
    flags.document(machinery)


# --------------------------------------------------------------------------------------------------- while it runs


@dataclass(slots=True)
class _RunningModel:
    """A running model.

    Attributes:
        name: of the model.
        phase: returns the current phase.
        started: time of its start, by the clock of :class:`Progress`.
    """

    name: str
    phase: Callable[[], str]
    started: float

    def words(self, now: float) -> str:
        """Return ``resnet18 (clocks: run 2, 45 s)``."""
        seconds = now - self.started
        known = ", ".join(filter(None, [self.phase(), duration(round(seconds)) if seconds >= _WORTH_SAYING else ""]))
        return f"{self.name} ({known})" if known else self.name

    def stage(self) -> str:
        """Return the phase without the numbers that count runs."""
        return self.phase().translate(_NO_COUNTS)


class Progress:
    """Shows the events of :func:`hashbench.core.sweep.run.run_sweep` on ``stream`` (default: standard error).

    A terminal gets a progress bar with the running models, their phases and the time left, redrawn every second, and
    above it a line for each row that is not ``pass``. Other streams get one line for each finished model and, while
    models take long, one on the progress every half minute and at changes of phase. A closed stream does not stop the
    sweep.

    ``clock`` returns seconds. Inside its context, a thread calls :meth:`tick` every second.
    """

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stderr or io.StringIO()  # Python has none where file descriptor 2 is closed
        self._on_terminal = self._stream.isatty()
        self._bar: Any = None  # of tqdm
        self._clock = clock
        self._running: list[_RunningModel] = []
        self._done = self._total = 0
        self._finished_at = self._said_at = clock()
        self._seconds_left = 0.0
        self._stages: list[str] = []
        self._before_the_first = "starting workers"
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._ticking = threading.Thread(target=self._tick_on, name="hashbench progress", daemon=True)

    def __enter__(self) -> Self:
        self._ticking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._ticking.join()
        if self._bar is not None:
            self._bar.close()

    def __call__(self, event: Event) -> None:
        """Show ``event``."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            match event:
                case SweepOpened():
                    self._open(event)
                case SweepPlanned():
                    self._print(_plan(event))
                case ModelStarted():
                    self._before_the_first = ""
                    self._running.append(_RunningModel(event.name, event.phase, self._clock()))
                    self._show_running()
                case ModelRequeued():
                    self._forget(event.row.name)
                    self._print(f"{_summary(event.row)}: runs again alone, after all others")
                case ModelLost():
                    self._forget(event.name)
                    then = "runs again" if event.again else "left without a row"
                    self._print(one_line(f"{event.name}: {event.reason}; {then}"))
                case ModelFinished():
                    self._finish(event)

    def tick(self) -> None:
        """Show the current progress."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._bar is not None:
                self._show_running()
            elif self._on_terminal:  # before the sweep opens; whatever is written next begins in the same place
                seconds = self._clock() - self._said_at
                print(f"looking at this machine ({seconds:.0f} s)", end="\r", file=self._stream, flush=True)
            elif self._is_due():
                self._said_at, self._stages = self._clock(), [model.stage() for model in self._running]
                left = self._time_left()
                self._print(f"[{self._done}/{self._total}] running: {self._words()}{f'; {left}' if left else ''}")

    def _tick_on(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            self.tick()

    def _is_due(self) -> bool:
        """Return True off a terminal if a model has been running for long and no line was written for long."""
        now = self._clock()
        if not any(now - model.started >= SPARSE_SECONDS for model in self._running):
            return False
        changed = [model.stage() for model in self._running] != self._stages
        return now - self._said_at >= (SPARSE_SECONDS / 3 if changed else SPARSE_SECONDS)

    def _open(self, event: SweepOpened) -> None:
        self._done, self._total = event.done, event.total
        for suite, rows in event.outdated.items():
            rerun = f"{count(rows, 'row')} of an earlier version {'runs' if rows == 1 else 'run'} again"
            self._print(f"the file of {suite} has changed: {rerun}")
        if event.done or event.unreadable:
            number, names = len(event.unreadable), join_limited(event.unreadable, 3)
            aside = f"; {count(number, 'file')} cannot be read, set aside as {names}" if number else ""
            self._print(f"{event.done} of {event.total} rows are there already{aside}")
        if self._on_terminal:
            from tqdm import tqdm

            self._bar = tqdm(
                total=event.total,
                initial=event.done,
                file=self._stream,
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} [{elapsed}{postfix}] {desc}",
            )

    def _finish(self, event: ModelFinished) -> None:
        self._forget(event.row.name)
        self._before_the_first = ""
        self._done, self._seconds_left = event.done, event.eta_seconds
        self._finished_at = self._clock()
        if self._bar is None:
            self._print(f"[{event.done}/{event.total}] {_summary(event.row)}")
            return
        if event.row.accuracy != Status.PASS:
            self._print(_summary(event.row))
        self._bar.update(event.done - self._bar.n)
        self._show_running()

    def _forget(self, name: str) -> None:
        self._running = [model for model in self._running if model.name != name]

    def _time_left(self) -> str:
        """Extrapolate the time left from the pace until the last model ended; empty once running models have exceeded
        it."""
        waiting = self._total - self._done
        since = self._clock() - self._finished_at
        pace = self._seconds_left / waiting if waiting else 0.0
        seconds = max(self._seconds_left - since, pace * (waiting - len(self._running)))
        return _time_left(seconds) if seconds >= 1 else ""

    def _words(self) -> str:
        now = self._clock()
        return one_line(join_limited([model.words(now) for model in self._running], _SHOWN)) or self._before_the_first

    def _show_running(self) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(self._time_left(), refresh=False)
            self._bar.set_description_str(self._words())

    def _print(self, line: str) -> None:
        self._said_at = self._clock()
        if self._bar is None:
            print(line, file=self._stream, flush=True)
        else:
            self._bar.write(line, file=self._stream)


def _plan(event: SweepPlanned) -> str:
    """Return ``4 models at once on 2 devices, 2 threads each on cores of its own, together up to 21.2 GiB; longest
    first as in …``."""
    resources = event.resources
    how = f", {count(event.threads, 'thread')} each" if event.threads else ""
    cores = " on cores of its own" if event.threads and resources.slots else ""
    memory = "" if resources.memory_mib is None else f", together up to {mebibytes(resources.memory_mib)}"
    known = f"{event.known} of {event.waiting} models"
    order = f"longest first as {known} were in {event.times_from}" if event.times_from else "no earlier times"
    devices = f" on {len(resources.devices)} devices" if len(resources.devices) > 1 else ""
    return f"{count(event.workers, 'model')} at once{devices}{how}{cores}{memory}; {order}"


def _summary(row: Row) -> str:
    """Return ``resnet18  eager_two_runs_differ  aten.index_put_.default  zoo.py:18 forward  3.2 s``; of a failure its
    error."""
    seconds = "" if row.seconds is None else duration(row.seconds)
    reason = row.kernel or textwrap.shorten(row.error, _LONGEST_ERROR, placeholder=" …")  # the table has it all
    # A line end in a name would begin a line of its own, which CI services may take for a command.
    return one_line("  ".join(filter(None, [row.name, row.accuracy, reason, row.source, seconds])))


def _time_left(seconds: float) -> str:
    return f"{duration(round(seconds))} left"
