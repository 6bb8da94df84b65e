"""``hashbench audit`` as a user types it, on a few of torch's ops, and what it leaves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hashbench import cli
from hashbench.core.records import Row
from hashbench.tools.audit import audit_table, driver
from hashbench.tools.audit.rows import measured_in_sweep
from tests.core.report.rows import write_sweep
from tests.experiment_texts import evidence

SMALL = ["--dtypes", "float32", "int64", "--samples", "2", "--runs", "3", "--budget", "0"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit")
    sweep = folder / "sweep"
    write_sweep(sweep, SWIN, REFUSED, CLEAN)
    ops = ["put", "kthvalue", "bmm", "nn.functional.dropout", "empty", "linalg.norm.subgradients_at_zero"]
    written = folder / "expected" / "audit_cpu.csv"
    written.parent.mkdir()
    code = cli.main(
        [
            *("audit", "--ops", *ops, *SMALL, "--threads", "2"),
            *("--results", str(sweep), "--output", str(folder / "out"), "--write", str(written)),
        ]
    )
    assert code == 0
    return folder


REFUSED = Row(
    *("cpu", "unpooled", 2, "pass"),
    suite="zoo",
    mode="inference",
    dtype="float32",
    runs=2,
    deterministic="warn",
    nondeterministic_op="aten.max_unpool2d.default",
)
SWIN = Row(
    *("cpu", "swin_t", 2, "eager_two_runs_differ"),
    suite="torchvision",
    mode="training",
    dtype="float32",
    runs=2,
    deterministic="off",
    origin="kernel",
    kernel="aten.index_put_.default",
    phase="backward",
    cause="accumulation_order",
    confidence="proven",
    because="20 of 20",
    evidence=evidence(
        *("call/repeat 20/20", "call/nondeterministic 20/20", "call/deterministic 0/20", "call/deterministic_fill 0/20")
    ),
    deterministic_doc="deterministic under the flag: torch.Tensor.index_put with accumulate=True",
)
CLEAN = Row("cpu", "resnet18", 2, "pass", suite="torchvision", mode="inference")


@pytest.mark.slow
def test_every_op_has_rows_for_its_dtypes_samples_and_passes(made: Path) -> None:
    rows = audit_table.read(made / "out").rows
    keys = {(row.source, row.op, row.dtype, row.phase) for row in rows}
    stressed = {(row.op, row.sample): row for row in rows if row.source == "stress"}

    assert {("op_db", "put", "int64", "forward"), ("stress", "kthvalue", "float32", "backward")} <= keys
    assert ("op_db", "linalg.norm.subgradients_at_zero", "float32", "backward") in keys
    assert ("op_db", "bmm", "int64", "backward") not in keys
    assert len({row.sample for row in rows if row.op == "put" and row.source == "op_db"}) == 2
    assert all(row.runs == 3 and row.threads and row.off for row in rows if row.source != "sweep")
    listed = "torch.kthvalue" in torch.use_deterministic_algorithms.__doc__  # for CUDA or MPS, by some releases
    assert stressed["kthvalue", "ties"].documented == ("not listed for cpu" if listed else "not listed")
    assert stressed["bmm", "sparse by dense"].documented == "not listed for cpu"
    assert stressed["bmm", "sparse by dense"].off == "identical"
    for op in ("nn.functional.dropout", "empty"):  # seeded, and filled under the flag: no findings
        assert {row.verdict for row in rows if row.op == op} == {"as documented"}
    assert {row.on for row in rows if row.op == "empty"} == {"identical"}


@pytest.mark.slow
def test_sweeps_add_the_kernels_of_real_models(made: Path) -> None:
    rows = [row for row in audit_table.read(made / "out").rows if row.source == "sweep"]

    assert [(row.op, row.sample, row.phase, row.verdict) for row in rows] == [
        ("aten.index_put_.default", "torchvision/swin_t training", "backward", "as documented"),
        ("aten.max_unpool2d.default", "zoo/unpooled inference", "forward", "as documented"),
    ]
    assert (rows[0].cause, rows[0].off, rows[0].on) == ("accumulation_order", "differs", "identical")


@pytest.mark.slow
def test_the_baseline_has_its_environment_beside_it(made: Path, capsys) -> None:
    written = made / "expected" / "audit_cpu.csv"

    assert written.read_bytes() == (made / "out" / "audit.csv").read_bytes()
    assert "torch" in json.loads(written.with_name("audit_cpu.environment.json").read_text())["packages"]
    assert cli.main(["compare", str(written), str(made / "out")]) == 0
    assert "unchanged" in capsys.readouterr().out


@pytest.mark.slow
def test_resuming_what_is_complete_runs_nothing(made: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (made / "out" / "ops").iterdir()}

    code = cli.main(["audit", "--ops", "put", *SMALL, "--threads", "2", "--resume", "--output", str(made / "out")])

    assert code == 0
    assert {path: path.stat().st_mtime_ns for path in (made / "out" / "ops").iterdir()} == before
    assert len({row.op for row in audit_table.read(made / "out").rows if row.source == "op_db"}) == 6


@pytest.mark.parametrize(
    ("device", "kind", "visible"),
    [("cuda", "cuda", ["0", "1"]), ("cuda:1", "cuda", ["1"]), ("mps", "mps", [])],
)
def test_workers_get_devices_and_rows_are_of_their_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, kind: str, visible: list[str]
) -> None:
    told = {"torch": {"hip_build": None}, "device": {"each": [{"name": "H200", "memory_mib": 1000}] * 2}}
    asked: dict[str, Any] = {}

    def audit(wanted: driver.AuditRequest, **arguments: Any) -> tuple[()]:
        asked.update(arguments, options=wanted.options)
        return ()

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("hashbench.core.run.environment.collect_in_child", lambda **_: dict(told))
    monkeypatch.setattr(driver, "audit", audit)

    assert cli.main(["audit", "-d", device, "--jobs", "3", "--output", str(tmp_path / "out")]) == 0

    assert asked["options"].device == kind
    assert asked["executor"].capacity == 3
    assert [share.variables["CUDA_VISIBLE_DEVICES"] for share in asked["executor"].resources.devices] == visible
    assert asked["environment"]["command_line"][0] == "hashbench"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dtypes", "float7"], "'float7' is not a dtype"),
        (["--samples", "0"], "must be >= 1, got 0"),
        (["--results", "nowhere"], "nowhere does not exist"),
        (["--device", "nonsense"], "'nonsense' is not a device"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(tmp_path: Path, monkeypatch, capsys, arguments, said) -> None:
    monkeypatch.chdir(tmp_path)

    try:
        code = cli.main(["audit", *arguments])
    except SystemExit as ended:
        code = ended.code

    assert code == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("level", "texts", "expected"),
    [
        ("off", (), ("differs", "not run", "not run")),
        ("on", (), ("not run", "differs", "not run")),
        ("on", ("call/deterministic 5/20", "call/nondeterministic 20/20"), ("differs", "differs", "differs")),
        ("warn", ("call/deterministic (raises: no)",), ("differs", "raises", "raises")),
        ("off", ("call/deterministic (budget)",), ("differs", "not run", "not run")),
    ],
)
def test_what_a_sweep_says_of_each_setting(level, texts, expected) -> None:
    refused = "x" if level == "warn" else ""
    row = replace(SWIN, deterministic=level, evidence=evidence(*texts), nondeterministic_op=refused)

    assert tuple(measured_in_sweep(row, setting) for setting in ("off", "on", "unfilled")) == expected
