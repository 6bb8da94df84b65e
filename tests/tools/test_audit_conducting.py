"""An audit in worker processes: what one op does to its process, the others do not feel; nothing is run twice."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from hashbench.devices.visibility import DeviceAssignment
from hashbench.errors import HashbenchError
from hashbench.results import audit_table
from hashbench.results.audit_table import AuditRow
from hashbench.sweep.executors.local import LocalExecutor
from hashbench.tools.audit import driver
from hashbench.tools.audit.driver import Asked
from hashbench.tools.audit.task import catalog_file, op_file

OPTIONS = {"device": "cpu", "dtypes": ["float32"], "samples": 1, "runs": 2, "seed": 1, "threads": None}
GOOD = ["first", "second", "third", "fourth"]


@pytest.fixture(autouse=True)
def _targets_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(Path(__file__).parent)
    monkeypatch.setattr(sys, "path", [*sys.path, folder])


def audit(output: Path, names: list[str], *, resume: bool = False, seconds: float = 60.0, rows=(), **options):
    output.mkdir(exist_ok=True)
    catalog_file(output).write_text(json.dumps([["op_db", name] for name in names]))
    asked = Asked({**OPTIONS, **options}, lambda known: known, seconds, tuple(rows))
    return driver.audit(
        asked,
        output=output,
        environment={"key": "e1"},
        resume=resume,
        executor=LocalExecutor(jobs=2, preload=()),
        target="audit_targets:run_group",
    )


def ran(output: Path) -> list[str]:
    return (output / "ran.txt").read_text().split()


def test_an_op_that_kills_its_process_is_a_row_and_the_others_have_theirs(tmp_path: Path) -> None:
    rows = audit(tmp_path / "out", ["first", "aborts", *GOOD[1:], "aborts_beside_others"])

    verdicts = {row.op: row.verdict for row in rows}
    assert verdicts == {
        **dict.fromkeys(GOOD, "as documented"),
        "aborts": "crashed",
        "aborts_beside_others": "as documented",
    }
    assert "SIGABRT" in next(row.error for row in rows if row.op == "aborts")
    assert audit_table.read(tmp_path / "out").rows == rows
    assert sorted(set(ran(tmp_path / "out")) - {"aborts", "aborts_beside_others"}) == sorted(GOOD)
    assert all(ran(tmp_path / "out").count(name) == 1 for name in GOOD)


def test_an_op_that_hangs_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "STARTING_SECONDS", 1.0)

    [row] = audit(tmp_path / "out", ["hangs"], seconds=0.5)

    assert (row.verdict, row.error) == ("timeout", "no result after 0.5 s")


def test_what_is_done_is_not_run_again_and_what_is_damaged_is(tmp_path: Path) -> None:
    output = tmp_path / "out"
    audit(output, GOOD)
    (output / "ran.txt").unlink()
    op_file(output, "op_db", "second").write_text("[{")

    rows = audit(output, [*GOOD, "fifth"], resume=True)

    assert sorted(ran(output)) == ["fifth", "second"]
    assert [row.op for row in rows] == [*GOOD, "fifth"]


def test_the_rows_of_sweeps_stand_behind_those_of_ops(tmp_path: Path) -> None:
    seen = AuditRow("cpu", "sweep", "aten.put_.default", "float32", "zoo/net training", "backward", "raises")

    rows = audit(tmp_path / "out", ["first"], rows=[seen, seen])

    assert [(row.source, row.op) for row in rows] == [("op_db", "first"), ("sweep", "aten.put_.default")]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"resume": False}, "already holds an audit"),
        ({"resume": True, "runs": 9}, "asked for otherwise"),
    ],
)
def test_another_audits_folder_is_left_as_it_is(tmp_path: Path, change, said: str) -> None:
    output = tmp_path / "out"
    audit(output, ["first"])
    before = (output / "audit.csv").read_bytes()

    with pytest.raises(HashbenchError, match=said):
        audit(output, ["second"], **change)

    assert (output / "audit.csv").read_bytes() == before


FIRST, SECOND = (
    DeviceAssignment({"CUDA_VISIBLE_DEVICES": "3"}),
    DeviceAssignment({"CUDA_VISIBLE_DEVICES": "GPU-1c5e9a02"}),
)


@pytest.mark.parametrize(
    ("jobs", "devices", "seen"),
    [
        pytest.param(2, (FIRST, SECOND), {"3": 1, "GPU-1c5e9a02": 1}, id="a device each"),
        pytest.param(4, (FIRST, SECOND), {"3": 2, "GPU-1c5e9a02": 2}, id="two workers a device"),
        pytest.param(2, (), {"": 2}, id="on the CPU"),
    ],
)
def test_workers_that_run_at_once_see_a_device_each(
    tmp_path: Path,
    jobs: int,
    devices: tuple[DeviceAssignment, ...],
    seen: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    catalog_file(tmp_path).write_text(json.dumps([["op_db", str(number)] for number in range(jobs)]))

    rows = driver.audit(
        Asked({**OPTIONS, "device": "cuda", "seed": jobs}, lambda known: known, 60.0),
        output=tmp_path,
        environment={"key": "e1"},
        executor=LocalExecutor(jobs=jobs, preload=(), devices=devices),
        target="audit_targets:tell_devices",
    )

    assert Counter(row.error for row in rows) == seen


def test_a_device_that_became_free_is_given_again(tmp_path: Path) -> None:
    names = [str(number) for number in range(5)]
    catalog_file(tmp_path).write_text(json.dumps([["op_db", name] for name in names]))

    rows = driver.audit(
        Asked({**OPTIONS, "device": "cuda", "seed": 1}, lambda known: known, 60.0),
        output=tmp_path,
        environment={"key": "e1"},
        executor=LocalExecutor(preload=(), devices=(SECOND, FIRST)),
        target="audit_targets:tell_devices",
    )

    assert [row.error for row in rows] == ["GPU-1c5e9a02"] * 5


def test_a_sweeps_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{}")

    with pytest.raises(HashbenchError, match="holds a sweep"):
        audit(tmp_path, ["first"])

    assert not (tmp_path / "ops").exists()
