"""Columns of an invariance, in files of today and of earlier versions."""

from __future__ import annotations

from hashbench.core.catalog import Status
from hashbench.core.records import Row
from hashbench.core.results.rows import read_rows, row_from_json, row_to_json
from hashbench.extensions.invariance.facts import BatchFacts

ROW = Row("cpu", "net", 8, Status.INVARIANCE_RUN_FAIL, facts=(BatchFacts(compared_with="8 items, reversed"),))


def test_older_files_are_read_in_the_words_of_today(tmp_path) -> None:
    path = tmp_path / "accuracy.csv"
    path.write_text('dev,name,batch_size,accuracy,company\ncpu,net,8,fail_to_run_in_company,"8 items, reversed"\n')
    assert read_rows(path) == [ROW]
    content = row_to_json(ROW)
    older = {**content, "company": content.pop("compared_with"), "accuracy": "fail_to_run_in_company"}
    assert row_from_json(older) == ROW
