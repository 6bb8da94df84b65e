"""Runs tests as on other machines: other vector units and libraries' kernels, one thread, one core, busy cores, and no
compiler, so that the Python tracer traces.

``python tests/machines.py [--as WORDS] [arguments of pytest]``; without arguments, the tests that run kernels or race.
The machines are made of this one, by what torch, MKL, oneDNN and OpenMP read from the environment.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PREFIXES: Mapping[str, Sequence[str]] = {
    "no vector units": ("env", "ATEN_CPU_CAPABILITY=default"),
    "AVX2": ("env", "ATEN_CPU_CAPABILITY=avx2"),
    "MKL's kernels for any processor": ("env", "MKL_CBWR=COMPATIBLE"),
    "oneDNN's kernels for SSE4.1": ("env", "ONEDNN_MAX_CPU_ISA=SSE41"),
    "one thread": ("env", "OMP_NUM_THREADS=1"),
    "one core": ("taskset", "-c", "0"),
    "busy cores": (),
    "no C++ compiler": ("env", "CXX=no-such-compiler", "HASHBENCH_CACHE=/dev/null"),
}
"""What stands before the command, for each machine."""
CONCERNED = (
    *("core/check", "core/devices", "core/diagnose", "core/divergence", "core/trace", "integrations", "tools"),
    *("extensions/compiled", "extensions/invariance", "extensions/ranks", "extensions/stress"),
    *("test_ancestors.py", "test_specimens.py"),
)
"""The tests whose outcome could depend on the processor, below ``tests``."""


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    loads = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for load in loads:
            load.kill()
            load.wait()


def passes(machine: str, arguments: Sequence[str]) -> bool:
    """Whether the tests pass as on ``machine``."""
    print(f"=== {machine}", flush=True)
    with busy_cores(os.cpu_count() or 2) if machine == "busy cores" else contextlib.nullcontext():
        command = [*PREFIXES[machine], sys.executable, "-m", "pytest", *arguments]
        return subprocess.run(command, check=False).returncode == 0


def main() -> int:
    """The exit code: 1 where tests fail as on one of the machines."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--as", dest="machines", action="append", choices=PREFIXES, help="this machine alone")
    options, arguments = parser.parse_known_args()
    folder = Path(__file__).parent
    arguments = arguments or ["-q", *(str(folder / name) for name in CONCERNED)]
    machines = options.machines or list(PREFIXES)
    outcomes = {machine: passes(machine, arguments) for machine in machines}
    print("\n".join(f"{'pass' if fine else 'FAIL'}  {machine}" for machine, fine in outcomes.items()))
    return 0 if all(outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
