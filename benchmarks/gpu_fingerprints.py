"""``python -m benchmarks.gpu_fingerprints BASE.json OUT.csv``: which recorded kernels change under settings of a GPU.

Every setting has a process of its own, and its row is written when that has ended.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from hashbench.core.processes import run
from hashbench.extensions.fingerprint import checking, document, verify

COLUMNS = ("setting", "kernels", "same", "changed", "not_compared", "changed_kernels", "error")
SECONDS = 30.0


def _tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True


def _benchmark() -> None:
    torch.backends.cudnn.benchmark = True


SETTINGS: Mapping[str, Callable[[], None]] = {"none": lambda: None, "TF32": _tf32, "cuDNN benchmark": _benchmark}
"""What is put in force before each kernel, over the settings of a sweep. ``none`` must change nothing."""


def main(base: str, output: str) -> int:
    """Check all settings, a row each; returns the exit code."""
    with Path(output).open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        for setting in SETTINGS:
            command = [sys.executable, "-m", "benchmarks.gpu_fingerprints", base, "--setting", setting]
            done = run(command, seconds=SECONDS, own_session=False)
            if done.status == 0:
                rows.writerows(csv.reader(done.stdout.splitlines()[-1:]))
            else:
                ended = "took too long" if done.status is None else done.last_line
                rows.writerow((setting, "", "", "", "", "", ended))
            file.flush()
    return 0


def check(base: str, setting: str) -> int:
    """Check one setting here and print its row; returns the exit code."""
    recorded = document.read(Path(base))
    put = SETTINGS[setting]
    found = verify.summary(recorded, list(checking.check(recorded, begin=lambda _: put())))
    ops = sorted(each.kernel.op for each in found.changed)
    named = " ".join(f"{op}:{ops.count(op)}" for op in dict.fromkeys(ops))
    missing = sum(map(len, found.not_run.values()))
    row = (setting, found.kernels, found.same, len(found.changed), missing, named, "")
    csv.writer(sys.stdout, lineterminator="\n").writerow(row)
    return 0


if __name__ == "__main__":
    sys.exit(check(sys.argv[1], sys.argv[3]) if sys.argv[2] == "--setting" else main(*sys.argv[1:]))
