"""Shared by all tests."""

from __future__ import annotations

import atexit
import contextlib
import gc
import gzip
import importlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter
from command_helpers import ZOO, Main, Said, run
from hypothesis import HealthCheck, settings
from running_order import LONGEST_FIRST

from hashbench import cli
from hashbench.core.diagnose.fresh_process import LOADED_VARIABLE, POOL_VARIABLE, SERVER_VARIABLE
from hashbench.core.processes import variables
from hashbench.core.records import RunOptions
from hashbench.core.suites.selection import Selection
from hashbench.core.sweep.request import SweepRequest, diagnosis_servers
from tests.cli.cli_helpers import ZOO_SWEEP, trace_of

# Tests of several processes share two cores with each other; OpenMP threads that spin while they wait make that ten
# times slower. Must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# What a shell script starts in the background ignores Ctrl-C, and so would the programs that tests end with it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same cases in every run, however slow the machine; a fixture is shared by the cases of a test.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, max_examples=60, suppress_health_check=list(HealthCheck)
)
settings.load_profile("repeatable")

# What test files import stays: to search it for garbage again and again takes a sixth of the time that torch takes.
gc.disable()
# What is frozen when Python ends counts as leaked: triton's bindings would print a page about it.
atexit.register(gc.unfreeze)

_ACCELERATOR = """
import torch
from hashbench.core.run.environment import collect
current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
found = collect("cpu" if current is None else str(current))
packages = " ".join(f"{name} {found['packages'].get(name, 'missing')}" for name in ("torch", "triton"))
device = found["device"]
named = f"{device.get('count')} x {device.get('name', device['type'])}" if current else "no accelerator"
print(", ".join(filter(None, [named, f"driver {device['driver']}" if device.get("driver") else "", packages])))
"""


def _asks_for_an_accelerator(config: pytest.Config) -> bool:
    return "gpu" in config.option.markexpr and "not gpu" not in config.option.markexpr


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """On what the tests marked ``gpu`` run, where they are asked for by ``-m gpu``; all others run without one."""
    if not _asks_for_an_accelerator(config):
        return []
    # In a process of its own: CUDA that was started here could not be used in forked workers.
    done = subprocess.run([sys.executable, "-c", _ACCELERATOR], capture_output=True, text=True, check=False)
    machine = done.stdout.strip() or f"not known ({done.stderr.strip().splitlines()[-1:]})"
    marked = sum(item.get_closest_marker("gpu") is not None for item in items)
    skipped = f": {marked} tests marked gpu will be skipped" if machine.startswith("no accelerator") else ""
    return [f"accelerator: {machine}{skipped}"]


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """What probes of this machine came out as: the truth of some tests follows from that."""
    reports = (
        report for of in terminalreporter.stats.values() for report in of if isinstance(report, pytest.TestReport)
    )
    said = {str(value) for report in reports for name, value in report.user_properties if name == "probe"}
    if said:
        terminalreporter.section("probes of this machine")
        for line in sorted(said):
            terminalreporter.line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two, which the limits of time in tests allow for; none where an accelerator is to be measured."""
    return 0 if _asks_for_an_accelerator(config) else 2


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker of xdist, which gets the groups in the order in which it has collected them."""
    if hasattr(config, "workerinput"):
        rank = {name: number for number, name in enumerate(LONGEST_FIRST)}
        items.sort(key=lambda item: rank.get(_unit(item), len(rank)))


def _unit(item: pytest.Item) -> str:
    group = item.get_closest_marker("xdist_group")
    return item.nodeid.partition("::")[0] if group is None else group.args[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With ``--dist loadgroup``, tests without a group go to a worker by files, which share fixtures."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class ByGroupsAndFiles(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return super()._split_scope(nodeid).partition("::")[0]

    config.option.loadscopereorder = False
    return ByGroupsAndFiles(config, log)


@pytest.fixture(scope="module", autouse=True)
def _frozen_modules() -> None:
    """As in a worker of a sweep: what was loaded before a file's tests is not searched by the collector (0.2 s a time
    with all of torch), nor by the experiments that look at what lives in this process (10 times their time)."""
    if "hashbench.core.check.model" in sys.modules:
        importlib.import_module("torch._dynamo")  # which its first run would
    gc.collect()
    gc.freeze()


_SERVERS = {name: f"TESTS_{name}" for name in (SERVER_VARIABLE, LOADED_VARIABLE, POOL_VARIABLE)}
"""What names the servers of a run of the tests in the environment of its workers, which alone would make every process
use them: a test has them by asking for ``shared_servers``."""


@contextlib.contextmanager
def _servers() -> Iterator[None]:
    """What every sweep that diagnoses or stresses would start for itself; nothing is imported there until the first one
    asks."""
    with diagnosis_servers([SweepRequest(Selection(("specimens",)), RunOptions(stress=True), Path())]):
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Where workers of xdist are about to start: one set of servers for all of them."""
    if session.config.pluginmanager.hasplugin("dsession"):
        servers = contextlib.ExitStack()
        session.config.add_cleanup(servers.close)
        servers.enter_context(_servers())
        for name, kept in _SERVERS.items():
            if name in os.environ:
                os.environ[kept] = os.environ.pop(name)


@pytest.fixture(scope="module")
def shared_servers() -> Iterator[None]:
    """The sweeps of a file's tests need not import torch again for their diagnoses each: what they run in fresh
    processes are forks of the same few Pythons; where xdist runs the tests, of the same for all its workers."""
    ours = {name: os.environ[kept] for name, kept in _SERVERS.items() if kept in os.environ}
    with variables(ours) if ours else _servers():
        yield


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """The results folder of a test's sweep, which makes it."""
    return tmp_path / "results"


@pytest.fixture
def forked_ranks(shared_servers: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """``hashbench ranks run`` forks its ranks, which have torch then."""
    from forked_ranks import run_ranks

    monkeypatch.setattr("hashbench.extensions.ranks.launch.run_ranks", run_ranks)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Main:
    """``hashbench …`` in this process, in the folder ``cwd``. Only a sweep needs a process of its own."""

    def call(*arguments: object, cwd: Path) -> Said:
        monkeypatch.chdir(cwd)
        monkeypatch.setenv("COLUMNS", "200")
        capfd.readouterr()
        try:
            code = cli.main(list(map(str, arguments)))
        except SystemExit as ended:
            code = int(ended.code or 0)
        return Said(code, *capfd.readouterr())

    return call


@pytest.fixture(scope="session")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder with ``zoo.py``, and in ``out`` the strict sweep of its two models, one of which differs."""
    folder = tmp_path_factory.mktemp("swept")
    (folder / "zoo.py").write_text(ZOO)
    done = run(*ZOO_SWEEP, "--output", "out", "--strict", cwd=folder)
    return folder, done


@pytest.fixture
def folder(tmp_path: Path, swept: tuple[Path, subprocess.CompletedProcess[str]]) -> Path:
    """A copy of that folder, and the text of a trace."""
    here = tmp_path / "here"
    shutil.copytree(swept[0], here)
    trace = gzip.decompress(trace_of(here, "steady").read_bytes()).decode()
    (here / "whole.log").write_text(trace)
    return here
