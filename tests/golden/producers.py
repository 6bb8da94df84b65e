"""What makes each golden file: by the command line and the public names, from ``inputs/``.

The few names of modules inside hashbench that are needed are imported here and nowhere else in this folder, so that
moving a module changes one line.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from hashbench.integrations.pytest.message import five_lines
from hashbench.results.rows import read_rows

from .stage import cli, session

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
        return Path("made_here").read_text(encoding="utf-8")

    golden(name)(produce)


# ------------------------------------------------------------------------------------------------ the command line

COMMANDS = (
    *("sweep", "nightly", "report", "expect", "merge", "list", "diff", "compare", "replay", "env", "dynamo"),
    *("pipeline", "pipeline check", "pipeline compare", "numeric", "audit"),
)

_command("help.txt", "--help", *(f"{command} --help" for command in COMMANDS), "--version")

_SWEEP = "sweep --inference --output new"
_ZOO = f"{_SWEEP} --suite bad/zoo.py"
BAD = (
    "",
    "swep",
    "--nonsense",
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
    f"{_SWEEP} --suite bad/raises.py",
    f"{_SWEEP} --suite bad/none.py",
    f"{_SWEEP} --suite bad/no_models.py",
    f"{_SWEEP} --address 1.2.3.4:5",
    f"{_SWEEP} --ray-resource x=0",
    f"{_SWEEP} --ray-resource GPU=1",
    f"{_SWEEP} --ray-resource x=1.5",
    f"{_SWEEP} --executor ray --memory-limit 100",
    f"{_SWEEP} --executor slurm",
    # list
    "list --suite timmm",
    "list --suite bad/none.py",
    "list --format xml",
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
    "replay sweep --import bad/raises.py",
    "replay sweep --import bad/none.py",
    "replay sweep --replays 1",
    "replay sweep --budget 0",
    # nightly, report, expect, merge
    "nightly --label ../up",
    "nightly --modes both",
    "nightly --suite bad/zoo.py --only nothing --output new",
    "nightly --suite bad/zoo.py --output new -- --output elsewhere",
    "nightly --suite bad/zoo.py --output new -- --runs 1",
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
    "pipeline",
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
)
"""Command lines of which each is refused on one line."""


@golden("errors.txt")
def _errors() -> str:
    shown = []
    for line in BAD:
        out, err, code = cli(*shlex.split(line))
        assert (out, code, err.count("\n")) == ("", 2, 1), f"{line}: exit {code}\n{out}{err}"
        shown.append(f"$ hashbench {line}\n{err}")
    return "\n".join(shown)


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
    "expected": "expected nights/2026-11-22",
    "dynamo": "dynamo/expected.csv dynamo/accuracy.csv",
    "audits": "audits/base audits/new",
}

for _form, _ending in _ENDINGS.items():
    for _name, _paths in _PAIRS.items():
        if (_form, _name) != ("json", "expected"):  # as large as all others together
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
    rows = read_rows(Path("sweep/accuracy.csv"))
    return "\n".join(f"{five_lines(row, folder=Path('hashbench'))}\n" for row in rows)
