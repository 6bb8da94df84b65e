"""How long the report of many nights takes: ``python -m benchmarks.report_scale --nights 1000 --rows 600``.

Makes the folders of that many nights in a temporary folder, as ``hashbench nightly`` leaves them: their CSVs with all
columns, in two suites and two modes; a few rows differ, fail, move or are flaky, the environment changes now and then,
and each night takes another time. It runs ``hashbench report`` on them in a process of its own. The lines that a model
may have are made once and put together for every night, since writing them one by one would take longer than reading
them.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

from tabulate import tabulate

from hashbench.core.records import ROW_SCHEMA, Row, RowEvidence
from hashbench.core.results.rows import ROWS

PARTS = [(suite, mode) for suite in ("timm", "huggingface") for mode in ("training", "inference")]
SECONDS = "3.256"
"""What each line has as its time, until every night gets another."""

KERNELS = ("aten.index_put_.default", "aten.scatter_add_.default", "aten.convolution_backward.default")


def _passing(name: str, suite: str, mode: str) -> Row:
    return Row(
        dev="cpu", name=name, batch_size=4, accuracy="pass", suite=suite, mode=mode, dtype="float32", iterations=2,
        runs=2, threads=2, deterministic="on", ops=1234, distinct=1, trials=1, rate_of="runs", rate=0.0, rate_low=0.0,
        rate_high=0.95, benign=0, seconds=float(SECONDS), overhead_seconds=0.12345678, peak_memory_mib=906.4,
        env="ENVIRONMENT",
    )  # fmt: skip


def _differing(row: Row, kernel: str) -> Row:
    return replace(
        row, accuracy="eager_two_runs_differ", origin="kernel", kernel=kernel, module="layer1.0", phase="backward",
        op_index=77, iteration=0, cause="accumulation_order", confidence="proven", distinct=19, trials=20,
        rate_of="replays", rate=0.95, rate_low=0.75, rate_high=0.99, differing_elements=100, max_abs_diff=1e-6,
        evidence=RowEvidence("call/as_is 19/20; call/one_thread 0/20"),
        because="19 of 20 calls differ and none with one thread",
        advice="Use deterministic algorithms, or one thread for this op.", detail="outputs differ, inputs are equal",
    )  # fmt: skip


def _kinds(row: Row) -> list[str]:
    """The lines that one model may have in a night: passes, differs (in one kernel or another), crashes."""
    crashed = replace(row, accuracy="crashed", error="killed by signal 9 (SIGKILL)", distinct=None, rate=None)
    return [ROWS.line(kind) for kind in (row, *(_differing(row, kernel) for kernel in KERNELS), crashed)]


def make_nights(root: Path, *, nights: int, rows: int, seed: int = 0) -> int:
    """Fill ``root`` and return how many bytes of CSV there are. One model in fifty changes at a random night, one in a
    hundred is flaky."""
    chance, times = random.Random(seed), random.Random(seed)
    each = rows // len(PARTS)
    lines = {
        part: [_kinds(_passing(f"model_with_a_name_{number:05d}", *part)) for number in range(each)] for part in PARTS
    }
    turns = {(part, n): chance.randrange(nights) for part in PARTS for n in range(0, each, 50)}
    written = 0
    for night in range(nights):
        label = (date(2024, 1, 1) + timedelta(days=night)).isoformat()
        environment = f"machine{night // 90:06d}"
        for part in PARTS:
            kinds = [0] * each
            for number in range(0, each, 50):
                kinds[number] = 1 + number % 4 if night >= turns[part, number] else 0
            for number in range(25, each, 100):
                kinds[number] = int(chance.random() < 0.3)
            text = ROWS.header + "".join([choices[kind] for choices, kind in zip(lines[part], kinds, strict=True)])
            text = text.replace("ENVIRONMENT", environment).replace(SECONDS, f"{times.uniform(3, 5):.3f}")
            folder = root / label / "_".join(part)
            folder.mkdir(parents=True)
            (folder / "accuracy.csv").write_text(text, encoding="utf-8")
            content = {"schema": ROW_SCHEMA, "key": environment, "packages": {"torch": f"2.{night // 90}"}}
            (folder / "environment.json").write_text(json.dumps(content), encoding="utf-8")
            written += len(text)
    return written


def measure(root: Path) -> dict[str, float]:
    """Seconds of ``hashbench report`` on ``root`` (by the clock, and of processor time, which says more on a machine
    that others use), the size of its page and Markdown, and its largest memory in MiB."""
    page, summary = root.parent / "page.html", root.parent / "summary.md"
    command = [sys.executable, "-m", "hashbench", "report", str(root), "--html", str(page), "--markdown", str(summary)]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode not in (0, 1):
        raise SystemExit(f"hashbench report ended with {done.returncode}: {done.stderr[-2000:]}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": seconds,
        "processor_seconds": used.ru_utime + used.ru_stime,
        "page_mb": page.stat().st_size / 1e6 if page.exists() else float("nan"),
        "markdown_kib": summary.stat().st_size / 1024,
        "memory_mib": used.ru_maxrss / 1024,
    }


def main() -> None:
    """Make, measure, print."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description="How long the report of many nights takes.")
    parser.add_argument("--nights", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=600, help="of one night (default 600)")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hashbench_report_") as folder:
        root = Path(folder) / "nights"
        written = make_nights(root, nights=parsed.nights, rows=parsed.rows)
        found = measure(root)
    limits = {"seconds": 60.0, "page_mb": 10.0, "markdown_kib": 1024.0}
    lines = [(name, f"{value:.1f}", limits.get(name, "")) for name, value in found.items()]
    print(f"{parsed.nights} nights of {parsed.rows} rows, {written / 1e6:.0f} MB of CSV\n")
    print(tabulate(lines, headers=("what", "measured", "at most")))


if __name__ == "__main__":
    main()
