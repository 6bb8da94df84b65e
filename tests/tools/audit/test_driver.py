"""An audit in worker processes: what one op does to its process, the others do not feel; nothing is run twice."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from hashbench.core.devices.visibility import DeviceAssignment
from hashbench.core.diagnose import fresh_process
from hashbench.core.errors import HashbenchError
from hashbench.core.sweep.executors.local import LocalExecutor
from hashbench.extensions.invariance.ops.table import INVARIANCE
from hashbench.tools.audit import audit_table, driver
from hashbench.tools.audit.audit_table import CATALOG_FILE, DETERMINISM, AuditOptions, AuditRow, op_file
from hashbench.tools.audit.driver import AuditRequest, chosen_ops, groups_of

OPTIONS = AuditOptions(dtypes=("float32",), samples=1, runs=2, seed=1)
GOOD = ["first", "second", "third", "fourth"]


@pytest.fixture(autouse=True)
def _targets_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent)])


def audit(
    output: Path,
    names: list[str],
    *,
    options: AuditOptions = OPTIONS,
    seconds: float = 60.0,
    rows=(),
    resume: bool = False,
    target: str = "run_group",
    **workers,
) -> tuple[AuditRow, ...]:
    output.mkdir(exist_ok=True)
    (output / CATALOG_FILE).write_text(json.dumps([["op_db", name] for name in names]))
    return driver.audit(
        AuditRequest(options, seconds=seconds, sweep_rows=tuple(rows)),
        output=output,
        environment={"key": "e1"},
        resume=resume,
        executor=LocalExecutor(**{"jobs": 2, "preload": (), **workers}),
        target=f"audit_targets:{target}",
    )


def ran(output: Path) -> list[str]:
    return (output / "ran.txt").read_text().split()


@pytest.mark.slow
def test_an_op_that_kills_its_process_is_a_row_and_the_others_have_theirs(tmp_path: Path) -> None:
    seen = AuditRow("cpu", "sweep", "aten.put_.default", "float32", "zoo/net training", "backward", "raises")

    rows = audit(tmp_path / "out", ["first", "aborts", *GOOD[1:], "aborts_beside_others"], rows=[seen, seen])

    assert {row.op: row.verdict for row in rows[:-1]} == {
        **dict.fromkeys(GOOD, "as documented"),
        "aborts": "crashed",
        "aborts_beside_others": "as documented",
    }
    assert rows[-1] == seen  # of a sweep that was named twice
    assert "SIGABRT" in next(row.error for row in rows if row.op == "aborts")
    assert audit_table.read(tmp_path / "out").rows == rows
    assert all(ran(tmp_path / "out").count(name) == 1 for name in GOOD)


def test_a_worker_that_cannot_write_ends_the_audit_and_no_op_is_blamed(tmp_path: Path) -> None:
    with pytest.raises(HashbenchError, match="No space left on device"):
        audit(tmp_path / "out", GOOD, target="cannot_write")
    assert not list((tmp_path / "out" / "ops").iterdir())
    assert [row.op for row in audit(tmp_path / "out", GOOD, resume=True)] == GOOD


@pytest.mark.slow
def test_an_op_that_hangs_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "STARTING_SECONDS", 1.0)

    [row] = audit(tmp_path / "out", ["hangs"], seconds=0.5)

    assert (row.verdict, row.error) == ("timeout", "no result after 0.5 s")


def test_what_is_done_is_not_run_again_and_what_is_damaged_is(tmp_path: Path) -> None:
    output = tmp_path / "out"
    audit(output, GOOD)
    (output / "ran.txt").unlink()
    op_file(output, ("op_db", "second")).write_text("[{")

    rows = audit(output, [*GOOD, "fifth"], resume=True)

    assert sorted(ran(output)) == ["fifth", "second"]
    assert [row.op for row in rows] == [*GOOD, "fifth"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "already holds an audit"),
        ({"resume": True, "options": replace(OPTIONS, runs=9)}, "with different options"),
        ({"resume": True, "manifest": '{"schema": 1}'}, r"cannot read .*audit\.json: it lacks the fields"),
    ],
)
def test_another_audits_folder_is_left_as_it_is(tmp_path: Path, change: dict, said: str) -> None:
    output = tmp_path / "out"
    audit(output, ["first"])
    before = (output / "audit.csv").read_bytes()
    if manifest := change.pop("manifest", ""):
        (output / "audit.json").write_text(manifest)

    with pytest.raises(HashbenchError, match=said):
        audit(output, ["second"], **change)

    assert (output / "audit.csv").read_bytes() == before


def test_a_sweeps_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{}")

    with pytest.raises(HashbenchError, match="holds a sweep"):
        audit(tmp_path, ["first"])

    assert not (tmp_path / "ops").exists()


FIRST, SECOND = (DeviceAssignment({"CUDA_VISIBLE_DEVICES": name}) for name in ("3", "GPU-1c5e9a02"))


@pytest.mark.parametrize(
    ("jobs", "ops", "devices", "seen"),
    [
        pytest.param(2, 2, (FIRST, SECOND), {"3": 1, "GPU-1c5e9a02": 1}, id="a device each"),
        pytest.param(4, 4, (FIRST, SECOND), {"3": 2, "GPU-1c5e9a02": 2}, id="two workers a device"),
        pytest.param(2, 2, (), {"": 2}, id="on the CPU"),
        pytest.param(1, 5, (SECOND, FIRST), {"GPU-1c5e9a02": 5}, id="one that became free is given again"),
    ],
)
def test_workers_that_run_at_once_see_a_device_each(
    tmp_path: Path, jobs: int, ops: int, devices: tuple, seen: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    options, names = replace(OPTIONS, device="cuda", seed=jobs), [str(number) for number in range(ops)]

    rows = audit(tmp_path, names, options=options, target="tell_devices", jobs=jobs, devices=devices)

    assert Counter(row.error for row in rows) == seen


# ------------------------------------------------------------------------------------------------- which ops

OPS = [("op_db", "put"), ("op_db", "index_put"), ("stress", "put"), ("op_db", "sum")]


def test_ops_are_chosen_by_name_and_by_expression() -> None:
    assert chosen_ops(OPS, only=[], filters=[]) == tuple(OPS)
    assert chosen_ops(OPS, only=["put"], filters=[]) == (OPS[0], OPS[2])
    assert chosen_ops(OPS, only=["sum"], filters=["^index"]) == (OPS[1], OPS[3])


@pytest.mark.parametrize(
    ("only", "filters", "said"),
    [
        (["putt"], [], "unknown op 'putt'.*Did you mean put"),
        ([], ["("], "not a regular expression"),
        ([], ["^zzz"], "no op matches"),
    ],
)
def test_a_choice_of_nothing_is_refused(only, filters, said) -> None:
    with pytest.raises(HashbenchError, match=said):
        chosen_ops(OPS, only=only, filters=filters)


def test_groups_hold_every_op_once_and_spread_neighbours() -> None:
    ops = [("op_db", str(number)) for number in range(95)]

    groups = groups_of(ops, size=40)

    assert [len(group) for group in groups] == [32, 32, 31]
    assert sorted(op for group in groups for op in group) == sorted(ops)
    assert [name for _, name in groups[0]][:3] == ["0", "3", "6"]


@pytest.mark.parametrize(
    ("kind", "device", "served"),
    [(INVARIANCE, "cpu", [fresh_process.TORCH_ALONE]), (INVARIANCE, "cuda", []), (DETERMINISM, "cpu", [])],
)
def test_repros_are_forks_of_one_python_where_there_are_any(kind, device, served, tmp_path, monkeypatch) -> None:
    asked = []

    @contextlib.contextmanager
    def noted(target: str, *, at_once: bool, **_: object):
        asked.append(target)
        assert not at_once, "an audit in which nothing depends on the batch has no repro"
        yield

    monkeypatch.setattr(fresh_process, "served", noted)
    (tmp_path / CATALOG_FILE).write_text(json.dumps([["op_db", "first"]]))
    request = AuditRequest(AuditOptions(device=device), only=("none",), kind=kind)
    with pytest.raises(HashbenchError, match="none"):
        driver.audit(request, output=tmp_path, environment={}, executor=LocalExecutor(jobs=1, preload=()))
    assert asked == served
