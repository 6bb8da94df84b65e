"""What makes each golden file: by the command line and the public names, from ``inputs/``.

The few names of modules inside hashbench that are needed are imported here and nowhere else in this folder, so that
moving a module changes one line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import json
import os
import re
import shlex
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from hashbench.cli.sweep import Progress
from hashbench.core import records
from hashbench.core.catalog import CAUSES, EXPERIMENTS, Confidence, Origin, Status, places
from hashbench.core.devices.visibility import DeviceAssignment
from hashbench.core.diagnose.causes import decide
from hashbench.core.extensions import failure, shown
from hashbench.core.finding import document
from hashbench.core.native.build import Unavailable
from hashbench.core.processes import describe_end
from hashbench.core.records import CallFacts, Evidence
from hashbench.core.results.folder import file_key
from hashbench.core.results.load import load_sweep
from hashbench.core.results.rows import EXPECTED_ROWS, read_rows, row_to_json
from hashbench.core.run import environment
from hashbench.core.sweep import request
from hashbench.core.sweep import run as sweeping
from hashbench.core.sweep.executors import Resources, Task, TaskResult
from hashbench.core.sweep.executors.local import load_target
from hashbench.core.trace import tracer
from hashbench.extensions.ranks.replicas import check_replicas
from hashbench.extensions.ranks.text import check_finding, diff_finding
from hashbench.extensions.watch import resume
from hashbench.extensions.watch.text import finding_of as of_loops
from hashbench.integrations.dynamo import harness as dynamo_harness
from hashbench.integrations.dynamo import session as dynamo_session
from hashbench.integrations.pytest import plugin
from hashbench.tools.audit import report as audit_report
from hashbench.tools.audit.audit_table import AUDIT_ROWS, AuditVerdict
from hashbench.tools.audit.audit_table import read as read_audit
from hashbench.tools.audit.rows import rows_of_sweeps
from tests.core.divergence.rank_runs import judge_ranks, rank_traces
from tests.core.report.rows import write_rows
from tests.experiment_texts import result
from tests.extensions.ranks.rank_texts import CHECKS, DIFFS, DOCUMENTS
from tests.extensions.watch.watch_texts import LOOPS, RESUMES
from tests.golden.stage import cli, session

PRODUCERS: dict[str, Callable[[], str]] = {}
"""The name of a file in ``expected/`` → what makes its text."""


def golden(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Register what makes ``expected/<name>``."""

    def register(produce: Callable[[], str]) -> Callable[[], str]:
        assert name not in PRODUCERS, f"{name} is made twice"
        PRODUCERS[name] = produce
        return produce

    return register


def _command(name: str, *lines: str) -> None:
    """Register what a terminal shows of these command lines."""
    golden(name)(lambda: session(*lines))


def _file(name: str, line: str) -> None:
    """Register the file that a command line writes where it has ``FILE``."""

    def produce() -> str:
        out, err, code = cli(*shlex.split(line.replace("FILE", "made_here")))
        assert code in (0, 1), f"{line}: {code}\n{out}{err}"
        text = Path("made_here").read_text(encoding="utf-8")
        return without_assets(text) if name.endswith(".html") else text

    golden(name)(produce)


def without_assets(page: str) -> str:
    """``page`` with a line in place of each inlined asset and its digest, which change with every edit of them.

    ``tests/extensions/report/test_page.py`` asserts that both are inlined whole.
    """
    for tag, asset in (("style", "style.css"), ("script", "report.js")):
        page = re.sub(rf"<{tag}>.*?</{tag}>", f"<{tag}>({asset})</{tag}>", page, flags=re.DOTALL)
    return re.sub(r"sha256-[A-Za-z0-9+/=]+", "sha256-(digest)", page)


# ------------------------------------------------------------------------------------------------ the command line

COMMANDS = (
    *("sweep", "nightly", "report", "expect", "merge", "list", "diff", "compare", "replay", "env", "native"),
    *("docs", "dynamo", "pipeline", "pipeline check", "pipeline compare", "numeric", "audit"),
    *("run", "ranks", "ranks record", "ranks diff", "ranks run", "ranks check", "watch", "watch diff", "watch resume"),
    *("fingerprint", "fingerprint record", "fingerprint verify", "completion"),
)

_command("help.txt", "--help", *(f"{command} --help" for command in COMMANDS), "--version", "", "pipeline")

_SWEEP = "sweep --inference --output new"
_ZOO = f"{_SWEEP} --suite bad/zoo.py"
BAD = (
    "swep",
    "frobnicate",
    "--nonsense",
    f"{_SWEEP} --runz 3",
    f"{_SWEEP} --runz=3",
    f"{_SWEEP} -q",
    f"{_SWEEP} extra",
    "sweep --inferense",
    # sweep
    f"{_SWEEP} --suite torchvison",
    f"{_SWEEP} --only resnet81",
    f"{_SWEEP} --only nothing_like_it",
    "sweep --output new",
    f"{_SWEEP} --training",
    f"{_SWEEP} --amp --bfloat16",
    f"{_SWEEP} --models some",
    f"{_SWEEP} --total-partitions 2 --partition-id 3",
    f"{_SWEEP} --total-partitions 0",
    f"{_SWEEP} --batch-size 0",
    f"{_ZOO} --batch-size 2",
    f"{_SWEEP} --runs 1",
    f"{_SWEEP} --runs many",
    f"{_SWEEP} --threads 0",
    f"{_SWEEP} --iterations 0",
    f"{_SWEEP} --timeout -1",
    f"{_SWEEP} --timeout inf",
    f"{_SWEEP} --timeout nan",
    f"{_SWEEP} --seed 4294967296",
    f"{_SWEEP} --deterministic maybe",
    f"{_SWEEP} --cotangent zero",
    f"{_SWEEP} --replays 1",
    f"{_SWEEP} --diagnose-budget -1",
    f"{_SWEEP} --capture-limit -1",
    f"{_SWEEP} --retries -1",
    f"{_SWEEP} --jobs 0",
    f"{_SWEEP} --memory-limit 0",
    f"{_SWEEP} -k [",
    f"{_SWEEP} -x '*'",
    f"{_SWEEP} -k resnet -x .",
    f"{_SWEEP} --only resnet18 -k vit",
    f"{_SWEEP} --only resnet18 -x vit --total-partitions 2",
    "sweep --inference --resume",
    f"{_SWEEP} --suite bad/raises.py",
    f"{_SWEEP} --suite bad/none.py",
    f"{_SWEEP} --suite bad/no_models.py",
    f"{_ZOO} bad/zoo.py",
    "sweep --inference --suite bad/zoo.py --output sweep",
    "sweep --inference --suite bad/zoo.py --output bad/a_file",
    f"{_SWEEP} --address 1.2.3.4:5",
    f"{_SWEEP} --ray-resource x=0",
    f"{_SWEEP} --ray-resource GPU=1",
    f"{_SWEEP} --ray-resource x=1.5",
    f"{_SWEEP} --executor ray --memory-limit 100",
    f"{_SWEEP} --executor slurm",
    f"{_SWEEP} --ray-gpus 0",
    f"{_SWEEP} --executor ray --ray-resource CPU",
    f"{_SWEEP} --executor ray --ray-resource a=1.5",
    # list
    "list --suite timmm",
    "list --suite bad/none.py",
    "list --format xml",
    "list --format jsno",
    # compare
    "compare sweep",
    "compare bad/a_file sweep",
    "compare sweep none.csv",
    "compare sweep bad/empty",
    "compare bad/twice.csv sweep",
    "compare bad/unknown_column.csv sweep",
    "compare bad/unknown_status.csv sweep",
    "compare bad/no_number.csv sweep",
    "compare bad/since.csv sweep",
    "compare bad/link.csv sweep",
    "compare sweep bad/future",
    "compare sweep audits/base",
    "compare sweep sweep --format xml",
    "compare sweep sweep --strict",
    "compare sweep sweep sweep",
    "compare shards/0 shards/1",
    # diff
    "diff traces/first.log bad/a_file",
    "diff bad/truncated.log traces/first.log",
    "diff traces/first.log bad/damaged.log",
    "diff traces/first.log none.log",
    "diff traces/first.log traces",
    "diff traces/first.log traces/second.log --context -1",
    # replay
    "replay none",
    "replay sweep",
    "replay bad/repro --import bad/raises.py",
    "replay bad/repro --import bad/none.py",
    "replay sweep --replays 1",
    "replay sweep --budget 0",
    # nightly, report, expect, merge
    "nightly --label ../up",
    "nightly --modes both",
    "nightly --suite bad/zoo.py --only nothing --output new",
    "nightly --suite bad/zoo.py --only second -k second --output new",
    "nightly --suite bad/zoo.py --only second --output new -- --total-partitions 2",
    "nightly --suite bad/zoo.py --output new -- --output elsewhere",
    "nightly --suite bad/zoo.py --output new -- --runs 1",
    "nightly --suite bad/zoo.py --output new --runs 3",
    "nightly --suite bad/zoo.py --output new --nonsense",
    "nightly --suite bad/zoo.py --output new --expected none",
    "report",
    "report none",
    "report bad/empty",
    "report nights --expected none",
    "report nights --expected bad/a_file",
    "report nights --html traces",
    "expect sweep",
    "expect none --output new",
    "expect sweep --output new --only nothing",
    "expect sweep --output new --link javascript:alert(1)",
    "expect dynamo/accuracy.csv --output new",
    "merge new",
    "merge new none",
    "merge new shards/0",
    "merge new shards/0 shards/0",
    "merge sweep shards/0 shards/1",
    "merge new shards/0 sweep",
    "merge shards/0/new shards/0 shards/1",
    # the tools
    "dynamo",
    "dynamo none.py",
    "dynamo bad/zoo.py --accuracy",
    "dynamo --trace sometimes bad/zoo.py",
    "pipeline chek",
    "pipeline check",
    "pipeline check --config none.py --output-dir new",
    "pipeline check --config bad/a_file --output-dir new",
    "pipeline check --config bad/zoo.py --output-dir sweep",
    "pipeline compare none sweep",
    "pipeline compare sweep sweep",
    "numeric",
    "numeric none.py",
    "numeric bad/a_file",
    "numeric bad/raises.py",
    "numeric bad/no_models.py",
    "numeric bad/zoo.py --iterations 0",
    "numeric bad/zoo.py --rtol x",
    "audit --dtypes float12",
    "audit --runs 1",
    "audit --results none",
    "audit --resume",
)
"""Command lines of which each is refused on one line."""


@golden("errors.txt")
def _errors() -> str:
    """Each is one line of standard error; no command writes or warns."""
    shown, before = [], _files()
    with warnings.catch_warnings(record=True) as warned:
        for line in BAD:
            out, err, code = cli(*shlex.split(line))
            assert (out, code, err.count("\n")) == ("", 2, 1), f"{line}: exit {code}\n{out}{err}"
            shown.append(f"$ hashbench {line}\n{err}")
    assert (_files(), [str(one.message) for one in warned]) == (before, [])
    return "\n".join(shown)


def _files() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path().rglob("*.*")) if path.suffix != ".pyc"}


# -------------------------------------------------------------------------------------------------------- listing

SUITES = ("specimens", "torchvision", "timm", "huggingface")


@golden("list.txt")
def _list() -> str:
    """Without standard error, which says what is not installed here."""
    return "\n".join(cli("list", "--suite", suite)[0] for suite in SUITES)


@golden("list_tiny.txt")
def _list_tiny() -> str:
    return cli("list", "--suite", "huggingface", "--tiny")[0]


_command(
    "list_zoo.txt",
    "list --suite bad/zoo.py",
    "list --suite bad/zoo.py --tiny",
    *(f"list --suite bad/zoo.py --format {form}" for form in ("csv", "json")),
)


@golden("list_specimens.csv")
def _list_csv() -> str:
    return cli("list", "--suite", "specimens", "--format", "csv")[0]


# ------------------------------------------------------------------------------------------------- what reads results

_ENDINGS = {"text": "txt", "markdown": "md", "json": "json", "csv": "csv"}
_PAIRS = {
    "nights": "nights/2026-11-21 nights/2026-11-22",
    "small": "small_base.csv small_new.csv",
    "expected": "expected nights/2026-11-22",
    "dynamo": "dynamo/expected.csv dynamo/accuracy.csv",
    "audits": "audits/base audits/new",
}

for _form, _ending in _ENDINGS.items():
    for _name, _paths in _PAIRS.items():
        if _form != "json" or _name not in ("nights", "expected"):  # these would be very large
            _command(f"compare_{_name}.{_ending}", f"compare {_paths} --format {_form}")

_command(
    "compare_same.txt", "compare sweep sweep", "compare audits/base audits/base", "compare sweep dynamo/accuracy.csv"
)

_command("report.md", "report nights --expected expected --strict")
_command("report_first_night.md", "report nights/2026-11-20", "report shards/0", "report dynamo")
_command(
    "report_annotations.txt",
    "report nights --expected expected --annotations",
    "report nights/2026-11-20 --annotations",
    "report nights --html a.html --markdown a.md --junit a.xml",
)
_file("report.html", "report nights --expected expected --html FILE")
_file("report_one_sweep.html", "report shards/0 --html FILE")
_file("report_junit.xml", "report nights --expected expected --junit FILE")

_command(
    "diff.txt",
    "diff traces/first.log traces/second.log",
    "diff traces/first.log traces/first.log",
    "diff traces/first.log traces/second.log --context 0",
)


@golden("expect.csv")
def _expect() -> str:
    """What is expected after a night, and what the command says about it."""
    said = session(
        "expect nights/2026-11-22 --output expected --link https://github.com/example/project/issues/2",
        "expect sweep --output one.csv --only skipped dies",
    )
    files = [*sorted(Path("expected").iterdir()), Path("one.csv")]
    return said + "".join(f"\n=== {path.as_posix()}\n{path.read_text(encoding='utf-8')}" for path in files)


@golden("merge.txt")
def _merge() -> str:
    said = session("merge whole shards/0 shards/1", "merge part shards/1 --allow-missing")
    files = sorted(path for folder in ("whole", "part") for path in Path(folder).rglob("*") if path.is_file())
    return said + "".join(f"\n=== {path.as_posix()}\n{path.read_text(encoding='utf-8')}" for path in files)


@golden("pytest_messages.txt")
def _pytest_messages() -> str:
    rows = load_sweep("sweep").rows
    return "\n\n".join(f"{failure(shown(row), folder=Path('hashbench'))}\n" for row in rows)


@golden("pytest_options.txt")
def _pytest_options() -> str:
    """The options that the plugin adds to pytest's, with their help, and its marker."""
    parser, config = mock.MagicMock(), mock.MagicMock()
    plugin.pytest_addoption(parser)
    config.getini.return_value, config.getoption.return_value = "", None
    plugin.pytest_configure(config)
    calls = [*parser.mock_calls, *config.addinivalue_line.mock_calls]
    return "\n".join(str(call) for call in calls) + "\n"


# ------------------------------------------------------------------------------------------------------- a sweep


class InThisProcess:
    """An executor that runs every model at once, here, and always measures the same time and memory."""

    capacity, resources = 1, Resources(threads=1)

    def __init__(self, **_: Any) -> None:
        self._ended: list[TaskResult] = []

    def start(self, *, target: str) -> None:
        load_target(target)

    def submit(self, task: Task) -> None:
        with contextlib.redirect_stderr(io.StringIO()):  # what a worker writes into its log
            row = load_target(task.target)(task.spec, task.options)
        row = dataclasses.replace(row, seconds=2.5, peak_memory_mib=1024.0)
        Path(task.row_path).write_text(json.dumps(row_to_json(row)), encoding="utf-8")
        self._ended.append(TaskResult(task, wall_seconds=4.0, exit_code=0))

    def wait(self) -> tuple[TaskResult, ...]:
        ended, self._ended = tuple(self._ended), []
        return ended

    def phase(self, key: str) -> str:  # noqa: ARG002
        return ""

    def close(self) -> None:
        pass


NO_COMPILER = Unavailable("there is no C++ compiler (c++, g++, clang++)", "install one, or name it in $CXX")


def known_environment(*_: Any, **__: Any) -> dict[str, Any]:
    """The same machine everywhere."""
    found: dict[str, Any] = json.loads(Path("sweep/environment.json").read_text(encoding="utf-8"))
    return {**found, "tracer": "python", "tracer_reason": NO_COMPILER.reason}


@contextlib.contextmanager
def sweeps_here() -> Iterator[None]:
    """Sweeps run their models in this process, on a machine that is always the same."""
    with (
        mock.patch.object(request, "LocalExecutor", InThisProcess),
        mock.patch.object(environment, "collect_in_child", known_environment),
        mock.patch.object(tracer, "native_unavailable", return_value=NO_COMPILER),
    ):
        yield


def shown_folder(folder: str) -> str:
    """Every file of a results folder."""
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.name != ".lock")
    return "".join(f"\n=== {path.as_posix()}\n{_text_of(path)}" for path in files)


def _text_of(path: Path) -> str:
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")


_SMALL = "sweep --inference --suite zoos/small.py --diagnose-budget 0"


@golden("sweep.txt")
def _sweep() -> str:
    """A sweep, what it prints, what it leaves, and what it refuses to go on with."""
    with sweeps_here():
        said = session(
            f"{_SMALL} --output swept --keep-traces --strict",
            f"{_SMALL} --output swept",
            f"{_SMALL} --output swept --resume --seed 1",
            f"{_SMALL} --output swept --resume --only steady",
            f"{_SMALL} --output swept --resume --keep-traces",
            f"{_SMALL} --output bad/a_file",
            "merge merged swept swept",
            "merge merged swept shards/0",
        )
    return said + shown_folder("swept")


@golden("nightly.txt")
def _nightly() -> str:
    with sweeps_here():
        said = session(
            "nightly --suite zoos/small.py --only steady drifting --modes inference --output of --label 2026-11-22"
            " --annotations -- --diagnose-budget 0",
            "nightly --suite zoos/small.py --only steady drifting --modes inference --output of --label 2026-11-23"
            " --expected of/2026-11-22/small_inference -- --diagnose-budget 0 --hash-inputs",
        )
    files = ("night.json", "report.md", "junit.xml")
    shown = [f"\n=== {name}\n{Path('of/2026-11-23', name).read_text(encoding='utf-8')}" for name in files]
    return said + "".join(shown)


@golden("progress.txt")
def _progress() -> str:
    rows = read_rows(Path("sweep/accuracy.csv"))[-14:]
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress(
            sweeping.SweepOpened(total=20, done=6, unreadable=("rows/a.json.unreadable", "rows/b.json.unreadable.2"))
        )
        for memory, devices in ((None, 0), (2048.0, 0), (None, 4)):
            slots = () if devices else ((0,),) * 4
            resources = Resources(slots=slots, memory_mib=memory, devices=(DeviceAssignment(),) * devices)
            for source in ("", "results/earlier"):
                progress(sweeping.SweepPlanned(4, 2 if devices else 1, resources, 14, 9, times_from=source))
        for number, row in enumerate(rows):
            progress(sweeping.ModelStarted(row.name))
            if number == 3:
                progress(sweeping.ModelRequeued(row))
            progress(sweeping.ModelFinished(row, done=7 + number, total=20, eta_seconds=90.0 * number))
    ends = "".join(f"{code}: {describe_end(code)}\n" for code in (0, 1, -6, -9, -11, -200))
    return f"{stream.getvalue()}\n{ends}"


# ------------------------------------------------------------------------------------------- causes and audits


def evidence_of(case: dict[str, Any]) -> Evidence:
    """One entry of ``inputs/evidence.json``."""
    facts = {name: tuple(value) if isinstance(value, list) else value for name, value in case["facts"].items()}
    call = CallFacts(**case["call"]) if "call" in case else None
    return Evidence(**facts, call=call, arms=tuple(map(result, case["arms"])))


@golden("causes.txt")
def _causes() -> str:
    """What every case of evidence decides, in words."""
    shown = []
    for case in json.loads(Path("evidence.json").read_text(encoding="utf-8")):
        found = decide(evidence_of(case))
        shown.append(f"{case['name']}\n  {found.cause}, {found.confidence}\n  {found.because}\n  {found.advice}\n")
    return "\n".join(shown)


@golden("audit.txt")
def _audit() -> str:
    rows = read_audit(Path("audits/base")).rows
    from_sweeps = rows_of_sweeps([Path("sweep")], device="cpu")
    return "\n\n".join(
        [audit_report.summary(rows), audit_report.tables_as_markdown(rows), AUDIT_ROWS.text(from_sweeps)]
    )


# ----------------------------------------------------------------------------------------------------- dynamo


def harness(found: dynamo_session.Session, **_: Any) -> int:
    """In the place of PyTorch's harness: models that were seen by us, not seen, agreed, died, with a fault of ours."""
    rows = {row.name: row for row in read_rows(Path("sweep/accuracy.csv"))}
    raised = {"failure": "RuntimeError: no", "nondeterministic_op": "aten.put_.default"}
    notes = [
        dynamo_session.Note("skipped", "cpu", "inference", "pass", key="skipped"),
        dynamo_session.Note("dies", "cpu", "inference", "eager_two_runs_differ", key="dies", problem="KeyError: 'x'"),
        dynamo_session.Note("begun", "cpu", "training"),
        dynamo_session.Note("raised", "cuda", "training", "eager_1st_run_fail", **raised),
        dynamo_session.Note("unknown_word", status="fail_to_run"),
        dynamo_session.Note("infra", status="infra_error"),
        dynamo_session.Note("strange", status="something_else"),
    ]
    for number, note in enumerate(notes):
        name = file_key(suite=found.suite, mode="inference", name=note.name)
        dynamo_session.write_note(found, dataclasses.replace(note, key=note.key and name, run=found.run))
        path = found.notes / f"{file_key(suite=found.suite, mode='note', name=note.name)}.json"
        os.utime(path, (1000 + number, 1000 + number))  # the order of beginning
        if note.key:
            row = dataclasses.replace(rows[note.name], suite=found.suite, mode="inference")
            found.results.write_row(name, row)
    return 3


@golden("dynamo.txt")
def _dynamo() -> str:
    """What the command prints after the harness, and our rows beside those of the harness."""
    flags = "--accuracy --inference --retain-output --output accuracy.csv --output-directory dynamo"
    with sweeps_here(), mock.patch.object(dynamo_harness, "run_harness", harness):
        said = session(
            f"dynamo --results beside harness/small.py {flags}",
            "dynamo --results none harness/small.py --performance",
            "dynamo old_harness/small.py",
            "dynamo harness/common.py",
        )
    table = Path("beside/hashbench.csv").read_text(encoding="utf-8")
    return f"{said}\n=== hashbench.csv\n{table}"


# ------------------------------------------------------------------------------------------------------- ranks


@golden("ranks_diff.txt")
def _ranks_diff() -> str:
    """Two runs on several ranks, as ``hashbench ranks diff`` tells them."""
    return "".join(f"=== {name}\n{diff_finding(judge_ranks(lines))}\n" for name, lines in DIFFS.items())


@golden("ranks_diff.json")
def _ranks_diff_document() -> str:
    documents = {name: document(diff_finding(judge_ranks(DIFFS[name]))) for name in DOCUMENTS}
    return json.dumps(documents, indent=1) + "\n"


@golden("ranks_check.txt")
def _ranks_check() -> str:
    """Replicas of one run, as ``hashbench ranks check`` tells them."""
    verdicts = {name: check_replicas(rank_traces(lines)) for name, lines in CHECKS.items()}
    return "".join(f"=== {name}\n{check_finding(verdict)}\n" for name, verdict in verdicts.items())


@golden("watch_diff.txt")
def _watch_diff() -> str:
    """Two recordings, as ``hashbench watch diff`` reports on them."""
    return "".join(f"=== {name}\n{of_loops(loops)}\n" for name, loops in LOOPS.items())


@golden("watch_diff.json")
def _watch_diff_document() -> str:
    names = ("a difference that kernels make", "settings that differ before a kernel")
    return json.dumps({name: document(of_loops(LOOPS[name])) for name in names}, indent=1) + "\n"


@golden("watch_resume.txt")
def _watch_resume() -> str:
    """A resumed run, as ``hashbench watch resume`` reports on it."""
    return "".join(f"=== {name}\n{resume.finding_of(verdict)}\n" for name, verdict in RESUMES.items())


# ------------------------------------------------------------------------------------------------------- words


@golden("words.json")
def _words() -> str:
    """Coded words and columns, which programs of users compare with."""
    tables = {"ACCURACY_STATUSES": Status, "CAUSES": CAUSES, "CONFIDENCES": Confidence, "ORIGINS": Origin}
    content = {name: [str(word) for word in words] for name, words in tables.items()}
    content |= {name: list(getattr(records, name)) for name in ("PHASES", "MODES", "DETERMINISTIC", "DTYPES")}
    content |= {
        "VERDICTS": list(AuditVerdict),
        "ROW_COLUMNS": list(records.ROW_COLUMNS),
        "ROW_KEY": list(records.ROW_KEY),
    }
    content |= {
        "EXPECTED_COLUMNS": [name for name in EXPECTED_ROWS.types if name not in records.ROW_COLUMNS],
        "AUDIT_COLUMNS": list(AUDIT_ROWS.types),
    }
    experiments = {f"{on}/{name}": EXPERIMENTS[name].phrase for name, on in sorted(places(EXPERIMENTS.values()))}
    return json.dumps({**content, "EXPERIMENTS": experiments}, indent=1, ensure_ascii=False) + "\n"


def written_again(path: Path) -> bytes:
    """An ``accuracy.csv``, read and written by hashbench."""
    write_rows(Path("again.csv"), read_rows(path))
    return Path("again.csv").read_bytes()
