"""``invariance.csv``: its rows, and how it is told from the other audit."""

from __future__ import annotations

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.core.results.rows import read_table
from hashbench.extensions.invariance.ops.table import INVARIANCE, INVARIANCE_ROWS, InvarianceRow
from hashbench.tools.audit.audit_table import AUDIT_ROWS, DETERMINISM, audit_kind

ROW = InvarianceRow("cpu", "op_db", "mm", "float32", "1", "rows", "depends on the number", items=8, sizes="4 2 1")


def test_rows_round_trip(tmp_path):
    path = tmp_path / "invariance.csv"
    path.write_text(INVARIANCE_ROWS.text([ROW]))
    assert INVARIANCE_ROWS.rows(read_table(path)) == [ROW]


def test_sizes_that_are_no_numbers_are_refused(tmp_path):
    path = tmp_path / "invariance.csv"
    path.write_text(INVARIANCE_ROWS.text([ROW]).replace("4 2 1", "4;2"))
    with pytest.raises(HashbenchError, match="as sizes"):
        INVARIANCE_ROWS.rows(read_table(path))


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("invariance.csv", INVARIANCE_ROWS.header, INVARIANCE),
        ("audit.csv", AUDIT_ROWS.header, DETERMINISM),
        ("other.csv", "dev,name\n", None),
    ],
    ids=["of invariance", "of determinism", "of neither"],
)
def test_the_kind_of_an_audit_follows_from_its_columns(tmp_path, name, text, kind):
    (tmp_path / name).write_text(text)
    assert audit_kind(tmp_path / name) is kind
