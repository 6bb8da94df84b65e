"""What torch's own ``CompilerBisector`` says of the planted faults of the suite ``compiled``, and for how many
compilations: each in a process of its own.

Its predicate is that of ``benchmarks/dynamo``: ``same()`` of eager and compiled, with a float64 reference.
``python -m benchmarks.compiler_bisector [NAME ...]`` runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.compiled_truths import SECONDS, SUITE, TOLERANCE, UNCACHED, load, run
from benchmarks.table import Table
from hashbench.core.errors import last_line
from hashbench.core.suites import registry


def bisect(name: str, mode: str) -> dict[str, Any]:
    """Bisect one model in this process; standard output is left alone but for what the bisector prints."""
    from torch._dynamo.utils import same
    from torch._inductor import config
    from torch._inductor.compiler_bisector import CompilerBisector

    config.fallback_random = True
    workload = load(name, mode)
    exact, reference = (run(workload, mode, dtype=dtype) for dtype in (torch.float64, None))
    runs = 0

    def is_right() -> bool:
        nonlocal runs
        runs += 1
        torch._dynamo.reset()
        backend = CompilerBisector.get_backend() or "inductor"
        try:
            compiled = run(workload, mode, backend=backend)
        except Exception:  # what does not run is not right
            return False
        tolerance = TOLERANCE[mode]
        return all(same(reference[key], value, exact[key], tol=tolerance) for key, value in compiled.items())

    before = time.monotonic()
    try:
        result = CompilerBisector.do_bisect(is_right)
    except Exception as error:  # the row says so
        said = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        parts = (result.backend, result.subsystem, result.debug_info) if result else ()
        said = ", ".join(str(part) for part in parts if part) or "nothing"
    return {"name": name, "runs": runs, "seconds": time.monotonic() - before, "said": said}


def child(name: str, mode: str) -> dict[str, Any]:
    """Bisect one model in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.compiler_bisector", "--one", name, mode]
    variables = {**os.environ, **UNCACHED, "OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "0"}
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=4 * SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"name": name, "runs": "", "seconds": 4 * SECONDS, "said": "no answer"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"name": name, "runs": "", "seconds": 0.0, "said": last_line(done.stderr)}
    return answer


def main() -> None:
    """Print the table, or what one model of it gives in this process."""
    about = __doc__ or ""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m benchmarks.compiler_bisector", description=about
    )
    parser.add_argument("only", nargs="*", metavar="NAME", help="models (default: all that are planted)")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "MODE"), help="print one model's line as JSON")
    parsed = parser.parse_args()
    if parsed.one:
        with contextlib.redirect_stdout(sys.stderr):
            line = bisect(*parsed.one)
        print(json.dumps(line))
        return
    rows: list[tuple[object, ...]] = []
    for spec in registry.catalog(SUITE):
        planted = spec.task == "planted" and not spec.name.endswith("_twin")
        if spec.name in parsed.only or (planted and not parsed.only):
            line = child(spec.name, "training" if spec.skip_inference else "inference")
            rows.append((line["name"], line["runs"], f"{line['seconds']:.0f}", line["said"]))
            print(*rows[-1], sep="\t", flush=True)
    print(Table("CompilerBisector", ("model", "runs", "seconds", "says"), tuple(rows)).text())


if __name__ == "__main__":
    main()
