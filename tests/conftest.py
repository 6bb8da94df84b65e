"""Shared by all tests."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from _pytest.terminal import TerminalReporter

# Tests of several processes share two cores with each other; OpenMP threads that spin while they wait make that ten
# times slower. Must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_ACCELERATOR = """
import torch
from hashbench.run.environment import collect
current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
found = collect("cpu" if current is None else str(current))
packages = " ".join(f"{name} {found['packages'].get(name, 'missing')}" for name in ("torch", "triton"))
device = found["device"]
named = f"{device.get('count')} x {device.get('name', device['type'])}" if current else "no accelerator"
print(", ".join(filter(None, [named, f"driver {device['driver']}" if device.get("driver") else "", packages])))
"""


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """On what the tests marked ``gpu`` run, where they are asked for by ``-m gpu``; all others run without one."""
    if "gpu" not in config.option.markexpr or "not gpu" in config.option.markexpr:
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
