"""A model that leaves its worker unable to write files has a row, and so have all others."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from sweep_helpers import NoExecutor, names_in_csv, sweep
from sweep_targets import ran, spec

from hashbench.core.errors import HashbenchError
from hashbench.core.io import PACKAGE_PARENT
from hashbench.core.records import ModelSpec
from hashbench.core.results.folder import sent_row
from hashbench.core.results.rows import read_rows, row_to_json
from hashbench.core.sweep.executors import local


def assert_resumed_without_a_run(models, output: Path, rows) -> None:
    assert sweep(models, output, resume=True, executor=NoExecutor()).rows == rows


@pytest.mark.parametrize(
    ("do", "error"),
    [
        ("leak_descriptors", "its worker could not write its row: Too many open files"),
        ("fill_quota", "its worker could not write its row: File too large"),
        ("mask_files", ""),
        ("pass", ""),
    ],
)
def test_a_row_that_its_worker_cannot_write_is_written_by_the_sweep(output, do, error):
    models = [spec("a"), spec("b", do), spec("c")]
    rows = sweep(models, output).rows
    assert [(row.name, row.accuracy, row.error) for row in rows] == [
        ("a", "pass", ""),
        ("b", "pass", error),
        ("c", "pass", ""),
    ]
    assert all(path.stat().st_mode & stat.S_IRUSR for path in (output / "rows").iterdir())
    assert_resumed_without_a_run(models, output, rows)


def test_a_draft_that_its_worker_cannot_write_is_kept(output):
    (row,) = sweep([spec("a", "send_draft_and_segfault")], output).rows
    assert (row.accuracy, row.kernel) == ("eager_two_runs_differ", "aten.index_put.default")
    assert row.error.startswith("the diagnosis did not end: killed by SIGSEGV")


def test_a_full_disk_under_a_model_is_a_row_while_the_results_folder_takes_one(output):
    models = [spec("a"), spec("b", "disk_full"), spec("c")]
    rows = sweep(models, output).rows
    assert [(row.name, row.accuracy) for row in rows] == [("a", "pass"), ("b", "crashed"), ("c", "pass")]
    assert "No space left on device" in rows[1].error
    assert_resumed_without_a_run(models, output, rows)


def test_rows_that_are_safe_are_counted_on_disk(output):
    models = [spec("a"), spec("b"), spec("c")]
    sweep(models, output)
    (output / "rows" / "fake.inference.a.json").unlink()
    (output / "accuracy.csv").unlink()
    (output / "accuracy.csv").mkdir()
    with pytest.raises(HashbenchError, match="Is a directory; 2 of 3 rows are safe"):
        sweep(models, output, resume=True)
    assert ran(output) == ["a", "b", "c"]


def test_what_is_sent_is_a_row_of_the_model_or_nothing(output):
    (row,) = sweep([spec("a")], output).rows
    text = json.dumps(row_to_json(row))
    model = ModelSpec(suite="fake", name="a")
    assert sent_row(text, model, row.mode) == row
    for other in (text[:-9], "", "[]", "[" * 100_000, text.replace('"name": "a"', '"name": "b"')):
        assert sent_row(other, model, row.mode) is None


def test_what_is_too_long_to_be_shared_is_cut_off():
    shared = local._Shared()
    local._share(shared, "row", "ä" * local._ROW_BYTES)
    local._share(shared, "phase", "run 2")
    assert (len(shared.row), shared.phase, shared.draft) == (local._ROW_BYTES - 1, b"run 2", b"")


# ------------------------------------------------------------------------------------------------ real models

ZOO = '''
import os, resource
import torch

OPEN, RUNS = [], []


def leak():
    """As a data set that never closes its files."""
    try:
        while True:
            OPEN.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass


def limit():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def mask():
    os.umask(0o777)


class Net(torch.nn.Module):
    def __init__(self, act=None, *, drifts=False):
        super().__init__()
        self.act, self.drifts, self.linear = act, drifts, torch.nn.Linear(2, 2)

    def forward(self, x):
        if self.act:
            globals()[self.act]()
        RUNS.append(1)
        return self.linear(x) + len(RUNS) * self.drifts


def made(act, drifts):
    return lambda: (Net(act, drifts=drifts), torch.ones(1, 2))


MODELS = {
    f"{act}_{'drifts' if drifts else 'steady'}": made(act, drifts)
    for act in ("leak", "limit", "mask")
    for drifts in (False, True)
}
MODELS |= {"a_twin": made(None, False), "m_twin": made(None, True), "z_twin": made(None, False)}
'''


def as_any_user() -> None:
    """Let files be protected from this process by their mode, also where it runs as root, and limit its descriptors."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None)
        for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP: in force from the next exec on
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


def hashbench_sweep(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hashbench", "sweep", "--suite", "zoo.py", "--inference", "--output", "out"]
    return subprocess.run(
        [*command, "--diagnose-budget", "0", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": PACKAGE_PARENT},
        preexec_fn=as_any_user,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs capabilities")
def test_models_that_use_up_what_files_need_have_rows_beside_their_twins(tmp_path):
    (tmp_path / "zoo.py").write_text(ZOO)
    done = hashbench_sweep(tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {row.name: row for row in read_rows(tmp_path / "out" / "accuracy.csv")}
    assert {name: row.accuracy for name, row in rows.items()} == {
        **dict.fromkeys(("a_twin", "leak_steady", "limit_steady", "mask_steady", "z_twin"), "pass"),
        **dict.fromkeys(("leak_drifts", "limit_drifts", "m_twin", "mask_drifts"), "eager_two_runs_differ"),
    }
    assert {row.kernel for row in rows.values() if row.accuracy != "pass"} == {"aten.add.Tensor"}
    unwritten = "its worker could not write its row: "
    no_descriptor, no_size = f"{unwritten}Too many open files", f"{unwritten}File too large"
    first_trace = "its worker could not write traces/zoo.inference.{}_drifts.run1.log.gz: {}; "
    assert {name: row.error for name, row in rows.items() if row.error} == {
        "leak_steady": no_descriptor,
        "leak_drifts": first_trace.format("leak", "Too many open files") + no_descriptor,
        "limit_steady": no_size,
        "limit_drifts": first_trace.format("limit", "File too large") + no_size,
    }
    for name in ("m_twin", "mask_drifts"):
        traces = [tmp_path / "out" / trace for trace in rows[name].traces.split()]
        assert [stat.S_IMODE(trace.stat().st_mode) & 0o400 for trace in traces] == [0o400] * 2
    again = hashbench_sweep(tmp_path, "--resume")
    assert (again.returncode, "9 of 9 rows are there already" in again.stderr) == (0, True)
    assert names_in_csv(tmp_path / "out") == sorted(rows)
