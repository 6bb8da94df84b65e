"""The files of an audit: rows of an op, ``audit.json``, and which CSVs are audits."""

from __future__ import annotations

import json

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.tools.audit.audit_table import (
    AUDIT_ROWS,
    DETERMINISM,
    AuditManifest,
    AuditOptions,
    AuditRow,
    manifest_text,
    op_file,
    read,
    read_manifest,
    read_op,
    write_op,
)

OP = ("op_db", "add")
ROW = AuditRow("cpu", *OP, "float32", "1", "forward", "as documented", runs=20, off_distinct=1)


def test_rows_of_an_op_round_trip(tmp_path):
    op_file(tmp_path, OP).parent.mkdir()
    write_op(tmp_path, OP, [ROW])
    assert read_op(tmp_path, OP) == (ROW,)


@pytest.mark.parametrize("text", ["", "[]", '{"rows": 1}'])
def test_a_damaged_op_file_counts_as_none(tmp_path, text):
    op_file(tmp_path, OP).parent.mkdir()
    op_file(tmp_path, OP).write_text(text)
    assert read_op(tmp_path, OP) is None


def test_an_op_file_of_another_schema_is_refused(tmp_path):
    op_file(tmp_path, OP).parent.mkdir()
    op_file(tmp_path, OP).write_text(json.dumps({"schema": 99, "rows": []}))
    with pytest.raises(HashbenchError, match="schema 99"):
        read_op(tmp_path, OP)


def test_an_audit_is_read_with_its_manifest(tmp_path):
    manifest = AuditManifest(AuditOptions(dtypes=("float32",)), (OP,), sweeps=False)
    (tmp_path / "audit.csv").write_text(AUDIT_ROWS.text([ROW]))
    (tmp_path / "audit.json").write_text(manifest_text(manifest))
    audit = read(tmp_path)
    assert (audit.rows, audit.asked) == ((ROW,), manifest)
    assert read_manifest(tmp_path / "audit.json").covers(ROW)


def test_a_missing_audit_is_refused(tmp_path):
    with pytest.raises(HashbenchError, match=r"audit\.csv does not exist"):
        read(tmp_path)


def test_a_sweep_is_no_audit(tmp_path):
    (tmp_path / "audit.csv").write_text(AUDIT_ROWS.text([ROW]))
    assert DETERMINISM.lies_at(tmp_path)
    assert DETERMINISM.lies_at(tmp_path / "audit.csv")
    (tmp_path / "accuracy.csv").touch()
    assert not DETERMINISM.lies_at(tmp_path)
